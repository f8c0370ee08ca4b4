"""A background worker thread.

Always true:
- the thread ends after a while without work, and a new one starts when there is work again
- no process waits for it at exit
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Generic, TypeVar

from offload.system.locks import fork_safe_lock
from offload.system.threads import Worker

IDLE = 2.0  # seconds without work until the thread ends

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

        Raises `RuntimeError` if the interpreter is shutting down and starts no more threads.
        """
        if self.thread is None or not self.thread.is_running:
            self.thread = Worker(self._run, self._name)
            self.thread.begin()
        self._something.notify()

    def _run(self) -> None:
        while True:
            with self.lock:
                work = self.take()
                while work is None:
                    was_woken = self._something.wait(IDLE)
                    work = self.take()
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
