"""Separate processes for tests: limited, killed, or forked.

Always true:
- a script that fails fails the test, with its output
- a forked child never returns into the test: it ends with `os._exit`
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run_script(
    code: str,
    *args: object,
    shell: str = "",
    expected: int = 0,
    env: dict[str, str] | None = None,
    limit: float = 120,
) -> str:
    """The output of a Python script.

    Args:
        code: the script; may be indented.
        args: become `sys.argv[1:]`.
        shell: runs before it in the same shell, for example `ulimit -n 256`.
        expected: the exit code, or minus the signal that killed it.
        env: added to the environment.
        limit: seconds until it is killed, and the test fails.
    """
    python = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    command = ["sh", "-c", f'{shell} && exec "$@"', "sh", *python] if shell else python
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(env or {})}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=limit, cwd=ROOT, env=environment, check=False
    )
    assert expected == done.returncode, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


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
    """Whether `act` succeeds in a forked child."""
    return ended(forked(act)) == 0
