"""Locks among threads that survive a fork, and an interrupt; and among processes, with a file.

Always true:
- a child that was forked while another thread held a lock finds it free; it does not hold what its parent holds
- taking and giving back are one call into C each: Python raises `KeyboardInterrupt` before or after, and not between
- a process that dies lets go of what it holds
- where the file system knows no locks, threads still wait for each other, and processes are on their own
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offload.storage.reasons import explained

_UNKNOWN = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def fork_safe_lock() -> threading.RLock:
    """A re-entrant lock; in a forked child it starts anew, unless the thread that forked holds it."""
    lock = threading.RLock()
    _LOCKS.add(lock)
    return lock


class Waiters:
    """Threads that wait for another to say that something has happened. Both methods are called under one lock.

    `threading.Condition` is for threads that nobody interrupts: an interrupt as it begins to wait loses its lock.
    """

    def __init__(self) -> None:
        self._locks: list[threading.Lock] = []

    def add(self) -> threading.Lock:
        """A lock that is taken; without the common lock, take it once more to wait for `wake`."""
        lock = threading.Lock()
        lock.acquire()
        self._locks.append(lock)
        return lock

    def wake(self) -> None:
        """All that wait go on."""
        while self._locks:
            self._locks.pop().release()


class FolderLock:
    """A lock with a file, which is there already."""

    def __init__(self, path: Path, opened: Callable[[Path, int], int]) -> None:
        """`opened` opens it, and says in its errors what it is of."""
        self._path = path
        self._opened = opened
        self._threads = fork_safe_lock()
        self._fd = -1
        self._pid = 0
        self._depth = 0

    @contextmanager
    def held(self, *, shared: bool = False) -> Iterator[None]:
        """Alone, or with others that share it. May be nested in a thread, the outermost says how."""
        with self._threads:
            if self._pid != os.getpid():  # a descriptor of the parent's would share its lock
                self._fd, self._pid, self._depth = self._opened(self._path, os.O_RDONLY), os.getpid(), 0
            depth = self._depth
            try:
                if not depth:
                    flock(self._fd, self._path, shared=shared)
                self._depth = depth + 1
                yield
            finally:
                self._depth = depth
                if not depth:
                    try:  # here, and not in a function: an interrupt as that begins would keep the lock
                        fcntl.flock(self._fd, fcntl.LOCK_UN)
                    except OSError as error:
                        if error.errno not in _UNKNOWN:
                            self.close()

    def close(self) -> None:
        """Let go of the file, and of the lock with it; whoever wants that again opens it again."""
        with self._threads:
            is_ours, self._pid = self._pid == os.getpid(), 0  # first: after an interrupt it is not closed again
            if is_ours:
                os.close(self._fd)


def flock(fd: int, path: Path, *, shared: bool = False, wait: bool = True) -> bool:
    """Take the lock of an open file, or change how it is held; False if that would mean to wait, and `wait` is not.

    Raises:
        ReadError
    """
    how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    try:
        fcntl.flock(fd, how)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise explained(path, error) from error
    return True


def unlock(fd: int) -> bool:
    """Let go of the lock of an open file; False if that fails: it goes with the descriptor then."""
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError as error:
        return error.errno in _UNKNOWN
    return True


def lock_range(fd: int, path: Path, start: int, count: int, *, wait: bool = False) -> bool:
    """Take bytes of an open file for this descriptor; False if another one has some of them, and `wait` is not.

    Raises:
        ReadError
    """
    return _set_range(fd, path, fcntl.F_WRLCK, start, count, wait=wait)


def unlock_range(fd: int, path: Path, start: int, count: int) -> None:
    """Give bytes back; 0 are all that follow."""
    _set_range(fd, path, fcntl.F_UNLCK, start, count, wait=False)


def _set_range(fd: int, path: Path, how: int, start: int, count: int, *, wait: bool) -> bool:
    asked = struct.pack("hhqqi4x", how, os.SEEK_SET, start, count, 0)  # struct flock
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, asked)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise explained(path, error) from error
    return True


def _renew() -> None:
    lock: Any
    for lock in list(_LOCKS):
        if not lock._is_owned():
            lock._at_fork_reinit()


_LOCKS: weakref.WeakSet[threading.RLock] = weakref.WeakSet()
os.register_at_fork(after_in_child=_renew)
