"""Which process left something on disk, and whether it is still alive.

Always true:
- a tag names one process of one machine (and one pid namespace), also after its number is used again
- only a process of this machine can be called dead, and only if the system says so: one that can't be looked at lives
"""

from __future__ import annotations

import hashlib
import os
import socket
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import psutil


def process_tag() -> str:
    """`machine-pid-start` of the running process, in letters and digits.

    Raises:
        OSError: the system does not tell, as too many files are open.
    """
    return _tag(os.getpid())


def is_dead(tag: str) -> bool:
    """True if the process of this tag ran on this machine and has ended; False where that can't be told."""
    machine, _, rest = tag.partition("-")
    pid, _, start = rest.partition("-")
    try:
        if machine != _machine() or not pid.isdecimal() or not start:
            return False
        now = _start(int(pid))
        return now != start if now else not _is_hidden(int(pid))
    except OSError:
        return False


@lru_cache(maxsize=4)
def _tag(pid: int) -> str:
    return f"{_machine()}-{pid}-{_start(pid)}"


def _start(pid: int) -> str:
    """When a process began; empty if there is none, if it has ended and only its parent has not looked, or is hidden.

    Linux: in clock ticks since boot, which, unlike a wall-clock time, no clock correction moves.
    """
    try:
        if _has_proc():
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            return "" if fields[0] in "ZX" else fields[19]
        return str(int(psutil.Process(pid).create_time()))
    except (FileNotFoundError, ProcessLookupError, OverflowError, psutil.Error):
        return ""


def _has_proc() -> bool:
    """Whether the system tells of processes in files."""
    try:
        os.stat("/proc/self/stat")
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _is_hidden(pid: int) -> bool:
    """True for a living process of another user, where those can't be looked at (`/proc` mounted with `hidepid`)."""
    if not _has_proc():
        return bool(psutil.pid_exists(pid))
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return False


@lru_cache(maxsize=1)
def _machine() -> str:
    """Host name, machine id and pid namespace: containers, and machines that share a folder, differ in one of them."""
    marks = [socket.gethostname()]
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        marks.append(Path("/etc/machine-id").read_text(encoding="utf-8", errors="replace").strip())
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        marks.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256(" ".join(marks).encode()).hexdigest()[:8]
