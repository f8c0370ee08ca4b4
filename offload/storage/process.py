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
    """When a process began, in clock ticks since boot, which no clock correction moves.

    Empty if there is none, if it has ended and only its parent has not looked, or if it is hidden.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _is_hidden(pid: int) -> bool:
    """True for a living process of another user, where those can't be looked at (`/proc` mounted with `hidepid`)."""
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
