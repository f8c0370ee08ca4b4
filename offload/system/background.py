"""A background worker thread.

Always true:
- the thread ends after a while without work, and a new one starts when there is work again
- at exit, a process waits for the work that is under way, some seconds at most: the interpreter ends a thread that asks
  for its lock then, and where that happens inside torch's C++, the thread ends the process by SIGABRT
"""

from __future__ import annotations

import atexit
import threading
import weakref
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, Generic, TypeVar

from offload.system.locks import fork_safe_lock
from offload.system.threads import Worker

IDLE = 2.0  # seconds without work until the thread ends
_AT_EXIT = 5.0  # seconds to wait for it

Work = TypeVar("Work")


class Background(ABC, Generic[Work]):
    """Work for one thread. A forked child has no thread, and the lock may be held there: create a new object.

    Attributes:
        lock: guards the pending work.
        thread: the running thread; None if there is none.
    """

    def __init__(self, name: str, lock: threading.RLock | None = None) -> None:
        self.lock = lock or fork_safe_lock()
        self.thread: Worker | None = None
        self._name = name
        self._something = threading.Condition(self.lock)
        self._is_at_exit = False
        atexit.register(_end, weakref.ref(self))

    @abstractmethod
    def take(self) -> Work | None:
        """Take the next piece of work, or None if there is none. Called under the lock."""

    @abstractmethod
    def carry_out(self, work: Work) -> None:
        """Do it. Called by the thread, without the lock. An error ends the thread; another does what is left."""

    def rest(self) -> None:
        """There was no work for a while. Called under the lock, as the thread ends."""

    def wake(self) -> None:
        """Announce new work. Called under the lock.

        Raises:
            RuntimeError: the interpreter is shutting down and starts no more threads.
        """
        if self._is_at_exit:
            raise RuntimeError(f"{self._name}: the interpreter is shutting down")
        if self.thread is None or not self.thread.is_running:
            self.thread = Worker(self._run, self._name)
            self.thread.begin()
        self._something.notify()

    def end(self) -> None:
        """Begin nothing more, and wait for the work that is under way. Called at exit."""
        thread = self.thread
        if thread is not None and thread.is_running:  # not in a forked child, where the lock may be held
            with self.lock:
                self._is_at_exit = True
                self._something.notify_all()
            thread.join(_AT_EXIT)

    def _run(self) -> None:
        while True:
            with self.lock:
                work = self._pending_work()
                while work is None:
                    was_woken = self._something.wait(IDLE) and not self._is_at_exit
                    work = self._pending_work()
                    if work is None and not was_woken:
                        self.thread = None
                        self.rest()
                        return
            try:
                self.carry_out(work)
            except BaseException:
                with self.lock, suppress(RuntimeError):
                    self.thread = None
                    self.wake()
                raise

    def _pending_work(self) -> Work | None:
        return None if self._is_at_exit else self.take()


def _end(background: weakref.ref[Background[Any]]) -> None:
    known = background()
    if known is not None:
        known.end()
