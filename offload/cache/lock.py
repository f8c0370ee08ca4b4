"""One at a time, among all the threads and processes that use a folder.

Always true:
- a process that dies lets go of what it holds
- a forked child does not hold what its parent holds: it opens the file of the lock itself
- where the file system knows no locks, threads still wait for each other, and processes are on their own
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offload.cache.rowfile import opened
from offload.storage.locks import fork_safe_lock
from offload.storage.reasons import explained

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

FILE = "rows.lock"
_UNKNOWN = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class FolderLock:
    """A lock with a file, which is there already."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._threads = fork_safe_lock()
        self._fd = -1
        self._pid = 0
        self._depth = 0

    @contextmanager
    def held(self, *, shared: bool = False) -> Iterator[None]:
        """Alone, or with others that share it. May be nested in a thread, the outermost says how."""
        with self._threads:
            if self._pid != os.getpid():  # a descriptor of the parent's would share its lock
                self._fd, self._pid, self._depth = opened(self._path, os.O_RDONLY), os.getpid(), 0
            depth = self._depth
            try:
                if not depth:
                    lock(self._fd, self._path, shared=shared)
                self._depth = depth + 1
                yield
            finally:
                self._depth = depth
                if not depth and fcntl is not None:
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


def lock(fd: int, path: Path, *, shared: bool = False, wait: bool = True) -> bool:
    """Take the lock of an open file, or change how it is held; False if that would mean to wait, and `wait` is not.

    Raises:
        ReadError
    """
    if fcntl is None:
        return True
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
    if fcntl is not None:
        try:
            fcntl.flock(fd, fcntl.LOCK_UN)
        except OSError as error:
            return error.errno in _UNKNOWN
    return True
