"""Locks between threads that survive a fork and an interrupt; and locks between processes, on files.

Always true:
- if another thread holds a lock during a fork, the child finds it free; a child does not hold its parent's file locks
- acquire and release are one C call each: Python raises `KeyboardInterrupt` before or after, never in between
- a process that dies releases its locks
- where the file system has no locks, threads still wait for each other, and processes are on their own
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

from offload.system.reasons import explained, writing
from offload.system.regular import Descriptor, owned

_UNKNOWN = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def fork_safe_lock() -> threading.RLock:
    """A re-entrant lock; free in a forked child, unless the forking thread holds it."""
    lock = threading.RLock()
    _LOCKS.add(lock)
    return lock


class Waiters:
    """Threads that wait for an event that another one signals. Call both methods under one common lock.

    `threading.Condition` is not safe under interrupts: one that arrives as the wait begins loses its lock.
    """

    def __init__(self) -> None:
        self._locks: list[threading.Lock] = []

    def add(self) -> threading.Lock:
        """A lock, already taken; release the common lock, then acquire this one again to wait for `wake`."""
        lock = threading.Lock()
        lock.acquire()
        self._locks.append(lock)
        return lock

    def wake(self) -> None:
        """Release all waiting threads."""
        while self._locks:
            self._locks.pop().release()


class FolderLock:
    """A lock on an existing file."""

    def __init__(self, path: Path, opened: Callable[[Path, int], Descriptor]) -> None:
        """`opened` opens the file, and its errors say what the file belongs to."""
        self._path = path
        self._opened = opened
        self._threads = fork_safe_lock()
        self._file: Descriptor | None = None
        self._pid = 0
        self._depth = 0

    @contextmanager
    def held(self, *, shared: bool = False) -> Iterator[None]:
        """Exclusive, or shared with others. May be nested in a thread; the outermost call decides which."""
        with self._threads:
            if self._pid != os.getpid():  # a descriptor inherited from the parent would share its lock
                self._file, self._pid, self._depth = self._opened(self._path, os.O_RDONLY), os.getpid(), 0
            assert self._file is not None
            fd, depth = self._file.fileno(), self._depth
            try:
                if not depth:
                    flock(fd, self._path, shared=shared)
                self._depth = depth + 1
                yield
            finally:
                self._depth = depth
                if not depth:
                    try:  # inline, not in a function: an interrupt at the start of a call would keep the lock
                        fcntl.flock(fd, fcntl.LOCK_UN)
                    except OSError as error:
                        if error.errno not in _UNKNOWN:
                            self.close()

    def close(self) -> None:
        """Close the file, which releases the lock; the next use opens it again."""
        with self._threads:
            self._pid = 0
            if self._file is not None:
                self._file.close()


def flock(fd: int, path: Path, *, shared: bool = False, wait: bool = True) -> bool:
    """Lock an open file, or change the kind of lock; False if that would block and `wait` is False.

    Raises `ReadError`.
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


@contextmanager
def locked_folder(folder: Path, *, wait: bool = True) -> Iterator[bool]:
    """Only one process at a time in a folder, where folders can be locked; yields False if another is in it.

    Raises `WriteError`.
    """
    with writing(folder):
        opened = owned(os.open, folder, os.O_RDONLY | os.O_CLOEXEC)
    with opened:
        yield flock(opened.fileno(), folder, wait=wait)


def unlock(fd: int) -> bool:
    """Unlock an open file; False if that fails: closing the descriptor then unlocks it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError as error:
        return error.errno in _UNKNOWN
    return True


def lock_range(fd: int, path: Path, start: int, count: int, *, wait: bool = False) -> bool:
    """Lock bytes of an open file for this descriptor; False if another holds some of them and `wait` is False.

    Raises `ReadError`.
    """
    return _set_range(fd, path, fcntl.F_WRLCK, start, count, wait=wait)


def unlock_range(fd: int, path: Path, start: int, count: int) -> None:
    """Unlock bytes; a count of 0 means all that follow."""
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
    for lock in list(_LOCKS):
        if not lock._is_owned():  # type: ignore[attr-defined]
            lock._at_fork_reinit()  # type: ignore[attr-defined]


_LOCKS: weakref.WeakSet[threading.RLock] = weakref.WeakSet()
os.register_at_fork(after_in_child=_renew)
