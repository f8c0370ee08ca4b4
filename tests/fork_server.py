"""A process that has imported torch, transformers and offload once, and forks for each script.

Importing them takes four seconds, forking takes milliseconds.

Always true:
- the server has one thread and has computed nothing: threads that an op starts would be missing in its children
- a child has a `__main__`, arguments, a folder, an environment and standard files of its own, and ends as any Python
  process does, with its exit code, up to the functions of `atexit`; that the interpreter then takes all modules apart
  (a second) is left out
- a child that is killed or hangs does not harm the server; when the connection ends, the server ends with its child
- what a library reads from the environment at its import is as it was when the server began (see `fits`)
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent
IMPORTED = ("torch", "accelerate", "transformers.modeling_utils", "transformers.models.llama.modeling_llama", "offload")
# Up to transformers 5.20, importing a model imports scikit-learn and with it pyarrow, whose allocator has a thread.
_WITHOUT_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
_READ_LATE = {"TMPDIR", "PYTEST_CURRENT_TEST", "PYTHONIOENCODING"}  # not at an import, or done again by `_begin`


class ForkServer:
    """Runs scripts and modules, one at a time."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._environment = _read_early(environment)
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env={**environment, **_WITHOUT_THREADS},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for pytest
            )

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether its imports would have been the same in this environment."""
        return self._environment == _read_early(environment)

    def run(self, job: dict[str, Any], limit: float, given: bytes = b"") -> subprocess.CompletedProcess[str]:
        """Run a job in a child: `argv`, `cwd`, `env`, and `code` or `module`; `given` is its standard input.

        Raises:
            TimeoutError: it took longer than `limit` seconds: it is killed, and the server with it.
        """
        asked = json.dumps(job).encode()
        with self._lock, _file(asked) as request, _file(given) as stdin, _file() as out, _file() as err:
            files = [request.fileno(), stdin.fileno(), out.fileno(), err.fileno()]
            try:
                self._connection.settimeout(limit)
                socket.send_fds(self._connection, [b"!"], files)
                status = self._connection.recv(4, socket.MSG_WAITALL)
            except BaseException:
                self.close()
                raise
            if not status:
                raise RuntimeError("the fork server has ended: see its errors")
            code = os.waitstatus_to_exitcode(int.from_bytes(status))
            return subprocess.CompletedProcess(job["argv"], code, _text(out), _text(err))

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """The server ends, and the child that runs is killed."""
        self._connection.close()
        self._process.wait(10)


def _read_early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in _READ_LATE}


def _file(content: bytes = b"") -> io.FileIO:
    """A file in memory, at its beginning."""
    file = io.FileIO(os.memfd_create("script"), "r+")
    file.write(content)
    file.seek(0)
    return file


def _text(file: io.FileIO) -> str:
    file.seek(0)
    return file.readall().decode()


# The server


def _next_job(connection: socket.socket) -> dict[str, Any]:
    """Forks a child for each job; returns in the children only."""
    while True:
        asked, files, _, _ = socket.recv_fds(connection, 1, 4)
        if not asked:
            os._exit(0)
        pid = os.fork()
        if not pid:
            os.setpgid(0, 0)
            connection.close()
            for standard, fd in enumerate(files[1:]):
                os.dup2(fd, standard)
            with open(files[0], "rb") as file:
                job = json.load(file)
            for fd in files[1:]:
                os.close(fd)
            return job
        with suppress(OSError):  # the child does it, too: whoever is first
            os.setpgid(pid, pid)
        for fd in files:
            os.close(fd)
        connection.sendall(_ended(pid, connection).to_bytes(4))


def _ended(pid: int, connection: socket.socket) -> int:
    """The status of a child that has ended; if the connection ends before, so do the child and this process."""
    watched = os.pidfd_open(pid)
    try:
        ready, _, _ = select.select([watched, connection], [], [])
        if watched not in ready:
            os.killpg(pid, signal.SIGKILL)  # it has not been waited for, so it is there
            os.waitpid(pid, 0)
            os._exit(0)
        return os.waitpid(pid, 0)[1]
    finally:
        os.close(watched)


def _begin(job: dict[str, Any], before: set[str]) -> None:
    """Make this process that of the job; `before` the imports, these variables were set."""
    os.chdir(job["cwd"])
    for name in before - job["env"].keys():
        del os.environ[name]
    os.environ.update(job["env"])  # what imports have set stays
    tempfile.tempdir = None  # an import has looked for it
    if encoding := os.environ.get("PYTHONIOENCODING"):
        name, _, errors = encoding.partition(":")
        sys.stdin.reconfigure(encoding=name, errors=errors or "strict")
        sys.stdout.reconfigure(encoding=name, errors=errors or "strict")
        sys.stderr.reconfigure(encoding=name, errors="backslashreplace")
    sys.argv[:] = job["argv"]
    sys.path[0] = "" if "code" in job else os.getcwd()


def _run(job: dict[str, Any]) -> None:
    try:
        if "module" in job:
            runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
        else:
            main = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(job["code"], "<string>", "exec", dont_inherit=True), main.__dict__)
        _exit_codes.append(0)
    except SystemExit as error:
        _exit_codes.append(error.code if isinstance(error.code, int) else int(error.code is not None))
        raise
    except KeyboardInterrupt:
        _exit_codes.append(-signal.SIGINT)
        raise
    except Exception:
        _exit_codes.append(1)
        raise


_exit_codes: list[int] = []  # of this process, once it is known, or minus the signal to end by


def _leave() -> None:
    """The last function of `atexit`."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # the script has closed it
            stream.flush()
    if _exit_codes == [-signal.SIGINT]:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    if _exit_codes:
        os._exit(_exit_codes[0] & 0xFF)


def _import_once() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would copy all of their pages
    ctypes.CDLL(None).malloc_trim(0)  # memory that a script takes shows as such
    assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread"


if __name__ == "__main__":
    atexit.register(_leave)
    _before = set(os.environ)
    _import_once()
    _job = _next_job(socket.socket(fileno=int(sys.argv[1])))
    _begin(_job, _before)
    _run(_job)
