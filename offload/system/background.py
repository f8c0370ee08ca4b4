"""Threads in the background, which an interrupt can't lose.

Always true:
- a thread is begun in one call of C: an interrupt comes before it, and there is none, or after it, and there is one
- its owner has it before it begins, and can wait for its end from then on
- one that works for a `Background` ends after a while without work, and a new one starts when there is work again
- at exit, a process waits for the work of a `Background` that is under way, some seconds at most: a thread that asks
  for the interpreter's lock then is ended, and inside C++ of torch that ends the process (SIGABRT)
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from _thread import start_new_thread
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from offload.system.locks import fork_safe_lock

IDLE = 2.0  # seconds without work until the thread ends
_AT_EXIT = 5.0  # seconds to wait for it

Work = TypeVar("Work")


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

        Raises `RuntimeError` if the interpreter is shutting down and starts no more threads.
        """
        if self._is_at_exit:
            raise RuntimeError(f"{self._name}: the interpreter is shutting down")
        if self.thread is None or not self.thread.is_running:
            self.thread = Worker(self._run, self._name)
            self.thread.begin()
        self._something.notify()

    def end(self) -> None:
        """Begin nothing more, and wait for the work that is under way. Called at exit."""
        self._is_at_exit, thread = True, self.thread
        if thread is None or not thread.is_running:  # as in a forked child, where the lock may be held
            return
        if self.lock.acquire(timeout=_AT_EXIT):
            self._something.notify_all()
            self.lock.release()
            thread.join(_AT_EXIT)

    def _run(self) -> None:
        while True:
            with self.lock:
                work = self._pending_work()
                while work is None:
                    was_woken = not self._is_at_exit and self._something.wait(IDLE) and not self._is_at_exit
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
