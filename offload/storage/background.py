"""A thread that works in the background.

Always true:
- it ends when it has had nothing to do for a while, and another begins when there is something
- no process waits for it to end
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

IDLE = 2.0  # seconds without work, after which the thread ends

Work = TypeVar("Work")


class Background(ABC, Generic[Work]):
    """Work for one thread. In a forked child there is no thread, and the lock may be held: make another one there.

    Attributes:
        lock: of what there is to do.
        thread: the one that is at work; None if there is none.
    """

    def __init__(self, name: str, lock: threading.RLock | None = None) -> None:
        self.lock = lock or threading.RLock()
        self.thread: threading.Thread | None = None
        self._name = name
        self._something = threading.Condition(self.lock)

    @abstractmethod
    def take(self) -> Work | None:
        """What is to be done next, which is then in hand; None for nothing. Called under the lock."""

    @abstractmethod
    def carry_out(self, work: Work) -> None:
        """Do it. Called by the thread, without the lock. An error ends the thread; the next `wake` makes another."""

    def wake(self) -> None:
        """There is something to do. Called under the lock.

        Raises:
            RuntimeError: the interpreter is ending, and makes no threads.
        """
        if self.thread is None or not self.thread.is_alive():
            self.thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self.thread.start()
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
                        return
            self.carry_out(work)
