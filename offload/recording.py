"""Memory and reads while a block runs.

Always true:
- watching costs a system call every few hundredths of a second, and nothing in the ops
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

from offload.memory import anonymous_bytes
from offload.prefetch.engine import counts
from offload.system.background import Worker

_EVERY = 0.02  # seconds between looks


class Sample(NamedTuple):
    """Since the start: seconds, bytes read, and seconds waited for them."""

    second: float
    read: int
    waited: float


class Recording:
    """Samples at marks, such as tokens, and at the end; and the most anonymous memory seen, in bytes."""

    def __init__(self) -> None:
        self.marks: list[Sample] = []
        self.peak = 0
        self._started, self._before = time.perf_counter(), counts()
        self.end = self.sample()
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._thread = Worker(self._watch, "offload-recording")

    def sample(self) -> Sample:
        now = counts()
        self.peak = max(self.peak, anonymous_bytes())
        read, waited = now.bytes_read - self._before.bytes_read, now.waited - self._before.waited
        return Sample(time.perf_counter() - self._started, read, waited)

    def mark(self) -> None:
        self.marks.append(self.sample())

    def _watch(self) -> None:
        while True:
            with suppress(Empty):
                return self._ended.get(timeout=_EVERY)
            self.peak = max(self.peak, anonymous_bytes())

    @contextmanager
    def running(self) -> Iterator[Recording]:
        try:
            self._thread.begin()
            yield self
        finally:
            self._ended.put(None)
            self._thread.join()
            self.end = self.sample()
