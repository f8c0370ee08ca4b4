"""Memory and reads while a block runs.

Always true:
- watching costs a few system calls every few hundredths of a second, and nothing in the ops
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from offload.memory import anonymous_bytes
from offload.prefetch.engine import counts
from offload.system.threads import Worker

_EVERY = 0.02  # seconds between samples
_MOST = 4000  # samples to keep; beyond that, every second one is dropped


@dataclass(frozen=True)
class Sample:
    """One sample: seconds since the start, bytes of memory, bytes read since the start, seconds waited."""

    second: float
    anonymous: int
    read: int
    waited: float


class Recording:
    """The samples so far. `mark` adds one for an event, such as a token."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.marks: list[Sample] = []
        self._started = time.perf_counter()
        self._before = counts()
        self._every = _EVERY
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._thread = Worker(self._watch, "offload-recording")

    @property
    def peak(self) -> int:
        """The largest anonymous memory seen, in bytes."""
        return max(one.anonymous for one in (*self.samples, *self.marks))

    def mark(self) -> None:
        self.marks.append(self._sample())

    def _sample(self) -> Sample:
        now = counts()
        return Sample(
            second=time.perf_counter() - self._started,
            anonymous=anonymous_bytes(),
            read=now.bytes_read - self._before.bytes_read,
            waited=now.waited - self._before.waited,
        )

    def _watch(self) -> None:
        while not self._has_ended():
            self.samples.append(self._sample())
            if len(self.samples) > _MOST:
                del self.samples[1::2]
                self._every *= 2

    def _has_ended(self) -> bool:
        with suppress(Empty):
            self._ended.get(timeout=self._every)
            return True
        return False

    @contextmanager
    def running(self) -> Iterator[Recording]:
        self.samples.append(self._sample())
        try:
            self._thread.begin()
            yield self
        finally:
            self._ended.put(None)
            self._thread.join()
            self.samples.append(self._sample())
