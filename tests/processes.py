"""Separate processes for tests: limited, killed, or forked.

Always true:
- a script that fails fails the test, with its output
- a script runs in a fork of the server (`tests/fork_server.py`), unless it asks for an interpreter of its own
- a forked child never returns into the test: it ends with `os._exit`
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import ROOT, ForkServer

_OWN = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
OF_THIS_PROCESS = {  # what libraries set in it as they are imported: torch._inductor, sentence-transformers
    *("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")
}
_SERVERS: dict[int, ForkServer] = {}  # by the process that uses it


def run_script(
    code: str,
    *args: object,
    shell: str = "",
    expected: int = 0,
    env: dict[str, str] | None = None,
    limit: float = 280,
    fresh: bool = False,
) -> str:
    """The output of a Python script, which may be indented; `args` become `sys.argv[1:]`.

    Torch, transformers and offload are imported already, unless it is `fresh`, has a `shell`, or an environment that
    imports may look at.

    Args:
        shell: runs before it in the same shell, for example `ulimit -n 256`.
        expected: the exit code, or minus the signal that killed it.
        env: added to the environment.
        limit: seconds until it is killed, and the test fails.
        fresh: with an interpreter of its own: for tests of imports, and in a memory cgroup, to which pages count that
            a fork copies.
    """
    words, code = [*map(str, args)], textwrap.dedent(code)
    environment = {**_environment(), **(env or {})}
    if fresh or shell or not fork_server().fits(environment):
        python = [sys.executable, "-c", code, *words]
        command = ["sh", "-c", f'{shell} && exec "$@"', "sh", *python] if shell else python
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, cwd=ROOT, env=environment, check=False
        )
    else:
        job = {"code": code, "argv": ["-c", *words], "cwd": str(ROOT), "env": environment}
        done = fork_server().run(job, limit)
    assert expected == done.returncode, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_module(
    name: str,
    *args: object,
    cwd: Path = ROOT,
    env: dict[str, str] | None = None,
    given: bytes = b"",
    limit: float = 280,
) -> subprocess.CompletedProcess[str]:
    """`python -m name args...`, with `given` as its standard input; see `run_script`."""
    words = [*map(str, args)]
    environment = {**_environment(), **(env or {})}
    if fork_server().fits(environment):
        job: dict[str, Any] = {"module": name, "argv": [name, *words], "cwd": str(cwd), "env": environment}
        return fork_server().run(job, limit, given)
    command = [sys.executable, "-m", name, *words]
    done = subprocess.run(command, input=given, capture_output=True, timeout=limit, cwd=cwd, env=environment)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


def run_on_a_small_disk(code: str, place: Path, size: str, *args: object) -> Any:
    """What a script prints as JSON, with a file system of its own, of this size, at `place`.

    It may mount that again; `sys.argv[1:]` are the place and `args`. The test is skipped where no disk can be mounted.
    """
    place.mkdir(exist_ok=True)
    mount = f'mount -t tmpfs -o size={size} none "$0" && exec "$@"'
    space = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, str(place)]
    if shutil.which("unshare") is None or subprocess.run([*space, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system lets no test mount a small disk")
    command = [*space, sys.executable, "-c", textwrap.dedent(code), str(place), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert 0 == done.returncode, done.stderr
    return json.loads(done.stdout)


def fork_server() -> ForkServer:
    """The server of this process, which begins when it is first needed."""
    server = _SERVERS.get(os.getpid())
    if server is None or not server.runs:
        server = _SERVERS[os.getpid()] = ForkServer(_environment())
        atexit.register(server.close)
    return server


def _environment() -> dict[str, str]:
    """That of new processes."""
    inherited = {name: value for name, value in os.environ.items() if name not in OF_THIS_PROCESS}
    return {**inherited, **_OWN}


def forked(act: Callable[[], object]) -> int:
    """The pid of a forked child that runs `act`, and exits with 0, or 1 if that failed, without any cleanup."""
    pid = os.fork()
    if pid:
        return pid
    try:
        act()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def ended(pid: int) -> int:
    """The exit code of a child once it has ended, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill(pid: int) -> None:
    """Kill a child, which must not have ended on its own."""
    os.kill(pid, signal.SIGKILL)
    code = ended(pid)
    assert code == -signal.SIGKILL, f"it ended with {code} before it was killed: see above"


def in_fork(act: Callable[[], object]) -> bool:
    """Whether `act` succeeds in a forked child: it does not fail, and does not return False."""

    def checked() -> None:
        assert act() is not False

    return ended(forked(checked)) == 0
