"""Locks that survive a fork, and an interrupt.

Always true:
- a child that was forked while another thread held a lock finds it free
- taking and giving back are one call into C each: Python raises `KeyboardInterrupt` before or after, and not between
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any


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


def _renew() -> None:
    lock: Any
    for lock in list(_LOCKS):
        if not lock._is_owned():
            lock._at_fork_reinit()


_LOCKS: weakref.WeakSet[threading.RLock] = weakref.WeakSet()
os.register_at_fork(after_in_child=_renew)
