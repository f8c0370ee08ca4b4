"""Which process left something on disk, and whether it is still alive.

Always true:
- a tag names one process of one machine (and one pid namespace), also after its number is used again
- only a process of this machine can be called dead
"""

from __future__ import annotations

import hashlib
import os
import socket
from functools import lru_cache
from pathlib import Path

import psutil


def process_tag() -> str:
    """`machine-pid-start` of the running process, in letters and digits."""
    return _tag(os.getpid())


def is_dead(tag: str) -> bool:
    """True if the process of this tag ran on this machine and has ended; False where that can't be told."""
    machine, _, rest = tag.partition("-")
    pid, _, start = rest.partition("-")
    if machine != _machine() or not pid.isdigit() or not start:
        return False
    return _start(int(pid)) != start


@lru_cache(maxsize=4)
def _tag(pid: int) -> str:
    return f"{_machine()}-{pid}-{_start(pid)}"


def _start(pid: int) -> str:
    """When a process began; empty if there is none.

    Linux: in clock ticks since boot, which, unlike a wall-clock time, no clock correction moves.
    """
    try:
        if os.path.exists("/proc/self/stat"):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return str(int(psutil.Process(pid).create_time()))
    except (OSError, psutil.NoSuchProcess):
        return ""


@lru_cache(maxsize=1)
def _machine() -> str:
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{socket.gethostname()} {namespace}".encode()).hexdigest()[:8]
