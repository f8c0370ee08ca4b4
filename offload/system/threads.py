"""Threads that an interrupt can't lose.

Always true:
- a thread is begun in one call of C: an interrupt comes before it, and there is none, or after it, and there is one
- its owner has it before it begins, and can wait for its end from then on
"""

from __future__ import annotations

import os
import threading
from _thread import start_new_thread
from collections.abc import Callable
from queue import Empty, SimpleQueue


class Worker(threading.Thread):
    """A thread that runs a function; no process waits for it at exit.

    `Thread.start` waits in Python for the new thread's first step: one interrupt in a hundred there leaves a lock
    taken that the new thread needs, for ever (Python 3.11). So another thread calls it, where no interrupt arrives.

    Attributes:
        is_running: whether it was begun and has not ended; False in a forked child.
    """

    def __init__(self, act: Callable[[], object], name: str) -> None:
        super().__init__(target=act, name=name, daemon=True)
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._is_running, self._pid = False, os.getpid()

    @property
    def is_running(self) -> bool:
        return self._is_running and self._pid == os.getpid()

    def begin(self) -> None:
        """Begin it, without waiting until it runs.

        Raises `RuntimeError` if the system has no more threads, or the interpreter is shutting down.
        """
        try:
            self._is_running = True
            start_new_thread(self._start, ())
        except RuntimeError:
            self._is_running = False
            raise

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._is_running = False
            self._ended.put(None)

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, if it was begun: at most `timeout` seconds."""
        while self.is_running:
            try:
                self._ended.get(timeout=timeout)
            except Empty:
                return
        if self.ident is not None:
            super().join(timeout)

    def _start(self) -> None:
        try:
            self.start()
        except RuntimeError:  # the system has no second thread: this one does the work
            self.run()
