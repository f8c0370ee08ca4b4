"""A lock that survives a fork.

Always true:
- a child that was forked while another thread held the lock finds it free
- threads of such a child renew it once
"""

from __future__ import annotations

import os
import threading
from types import TracebackType


class ForkSafeLock:
    """A re-entrant lock; in a forked child it starts anew."""

    __slots__ = ("_lock", "_pid")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            with _RENEWING:
                if self._pid != os.getpid():
                    self._lock = threading.RLock()
                    self._pid = os.getpid()
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


def _renew() -> None:
    global _RENEWING
    _RENEWING = threading.Lock()


_RENEWING = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
