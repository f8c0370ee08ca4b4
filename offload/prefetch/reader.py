"""The thread that reads ahead, and the one that drops what is done with, so that the disk need not wait for that.

Always true:
- the lock is not held while the disk is read
- whatever happens to the thread, nobody waits for ever
- what leaves counts until it has gone
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from offload.prefetch.residency import AWAY, HERE, QUEUED, READ, Pool, Value, log
from offload.storage.background import Background
from offload.storage.locks import Waiters

_NEAR = 4  # values in the queue, of which one that follows in the file goes first
_BATCH = 4 << 20  # bytes of small values that are asked for at once


@dataclass
class Counts:
    """What was read since the process began.

    Attributes:
        bytes_read: brought in from the disk, in whole pages of values that are larger than 64 KiB. What was in memory
            already, as a part of another view, does not count again.
        ahead: reads of what was here, or on its way, when it was asked for.
        found: reads of what was in memory for another reason.
        missed: reads that had to be waited for from their beginning.
        wasted: values that were read ahead for nothing.
        waited: seconds that ops waited for the disk.
    """

    bytes_read: int = 0
    ahead: int = 0
    found: int = 0
    missed: int = 0
    wasted: int = 0
    waited: float = 0.0


class ReadInParts(Protocol):
    """What is read when nothing else is to be."""

    def read_on(self) -> bool:
        """Read the next part; whether there is more to do now. Called without the lock."""


@dataclass(frozen=True)
class Work:
    """What is read at a time.

    Attributes:
        batch: values.
        part: a part of this.
    """

    batch: list[Value]
    part: ReadInParts | None = None


class Dropper(Background["list[Value]"]):
    """What is to leave, under the lock of the reader."""

    def __init__(self, reader: Reader) -> None:
        super().__init__("offload-dropper", reader.lock)
        self._reader = reader

    def take(self) -> list[Value] | None:
        """All of it."""
        return self._reader.take_leaving() or None

    def carry_out(self, work: list[Value]) -> None:
        """Drop it."""
        log.debug("dropping %d values", len(work))
        self._reader.let_go(work)


class Reader(Background[Work]):
    """What is to be read, and what is to leave. What needs the lock says so."""

    def __init__(self) -> None:
        super().__init__("offload-reader")
        self.dropper = Dropper(self)
        self.counts = Counts()
        self._queue: deque[Value] = deque()
        self._leaving: list[Value] = []
        self._going: dict[int, int] = {}  # bytes that a thread is dropping
        self._taken: Value | None = None  # last, by the reader
        self._parts: list[ReadInParts] = []
        self._ops = Waiters()  # for the reader to do something

    # Under the lock

    def queue(self, value: Value) -> None:
        """Have `value` brought in."""
        value.is_leaving = False
        if value.state == AWAY:
            value.state = QUEUED
            self._queue.append(value)
            _begin(self)

    def fill(self, whole: ReadInParts) -> None:
        """Have something read part by part, until it says that there is nothing to do."""
        if whole not in self._parts:
            self._parts.append(whole)
        _begin(self)

    def queue_first(self, values: list[Value]) -> None:
        """Have values brought in before all others, in their order."""
        for value in values:
            self.queue(value)
        self._queue.rotate(len(values))

    def drop(self, value: Value) -> None:
        """Have `value` dropped, unless it is asked for before."""
        value.is_leaving = True
        self._leaving.append(value)
        _begin(self.dropper)

    @property
    def leaving_bytes(self) -> int:
        """Of what is to leave, and has not gone yet."""
        return sum(value.nbytes for value in self._leaving) + sum(self._going.values())

    def take_leaving(self) -> list[Value]:
        """What is to leave, for this thread to `let_go`."""
        leaving, self._leaving = self._leaving, []
        if leaving:
            self._going[threading.get_ident()] = sum(value.nbytes for value in leaving)
        return leaving

    def mend(self) -> None:
        """After an op that did not end: what was to leave leaves."""
        self._going.pop(threading.get_ident(), None)
        known = (value for pool in Pool.all() for value in pool.values())
        self._leaving = [value for value in known if value.is_leaving]
        _begin(self)
        _begin(self.dropper)

    def count_waited(self, value: Value, started: float) -> None:
        """An op has waited for `value` since `started`."""
        waited = time.monotonic() - started
        value.waited += waited
        self.counts.waited += waited

    # For those who ask for a value

    def brings(self, value: Value) -> bool:
        """Wait for the thread, if it is at work on `value`; whether it has brought it."""
        started = 0.0
        while True:
            with self.lock:
                if value.state != READ:
                    if started:
                        self.count_waited(value, started)
                    here = value.state == HERE
                    self.counts.ahead += here
                    value.state = AWAY  # if it was queued, the reader will pass over it
                    return here
                done = self._ops.add()
            started = started or time.monotonic()
            done.acquire()

    def let_go(self, leaving: list[Value]) -> None:
        """Drop what `take_leaving` gave."""
        try:
            for value in leaving:
                if value.is_leaving:
                    value.let_go()
        finally:
            with self.lock:
                self._going.pop(threading.get_ident(), None)

    # The thread

    def take(self) -> Work | None:
        """What is to be read: one value, or several small ones; or a part of what can wait."""
        batch: list[Value] = []
        size = 0
        while self._queue and (not batch or size + self._queue[0].nbytes <= _BATCH):
            value = self._next()
            if value.state == QUEUED:
                value.state = READ
                batch.append(value)
                size += value.nbytes
                self._taken = value
        if batch:
            return Work(batch)
        return Work([], self._parts[0]) if self._parts else None

    def _next(self) -> Value:
        """The next in turn; before it, one that follows in the file what was read last, if it is soon due too."""
        for value in islice(self._queue, _NEAR):
            if self._taken is not None and value.follows(self._taken):
                self._queue.remove(value)
                return value
        return self._queue.popleft()

    def carry_out(self, work: Work) -> None:
        """Read it."""
        if work.part is not None:
            self._read_on(work.part)
            return
        log.debug("reading %d values ahead", len(work.batch))
        try:
            self._read(work.batch)
        finally:  # whatever happened, nobody is to wait for ever
            with self.lock:
                for value in work.batch:
                    if value.state == READ:
                        value.state = AWAY
                self._ops.wake()

    def _read_on(self, whole: ReadInParts) -> None:
        is_more = False
        try:
            with suppress(Exception):  # who asks for rows meets the same error, and tells
                is_more = whole.read_on()
        finally:
            with self.lock:
                if not is_more and whole in self._parts:
                    self._parts.remove(whole)

    def _read(self, batch: list[Value]) -> None:
        runs = list(_runs(batch))
        joined = [run[0] if len(run) == 1 else run[0].through(run[-1]) for run in runs]
        with suppress(Exception):  # the op that asks for a value meets the same error, and tells
            for extent in joined if len(joined) > 1 else ():
                extent.announce()
        for run, extent in zip(runs, joined, strict=True):
            state, read, seconds = AWAY, 0, 0.0
            with suppress(Exception):
                if not extent.is_cached():
                    missing = extent.missing_bytes()
                    started = time.monotonic()
                    extent.bring_in(exactly=not run[0].pool.fits, spare=run[0].spare)
                    read, seconds = missing, time.monotonic() - started
                state = HERE
            with self.lock:
                for value in run:
                    value.state = AWAY if value.is_leaving else state
                self.counts.bytes_read += read
                if extent.may_ask:  # else nobody knows whether the disk gave it
                    run[0].pool.learn_rate(read, seconds)
                self._ops.wake()


def _begin(thread: Reader | Dropper) -> None:
    """Under the lock."""
    with suppress(RuntimeError):  # the interpreter is ending: who asks for a value will read it
        thread.wake()


def _runs(batch: Iterable[Value]) -> Iterator[list[Value]]:
    """Values that lie behind one another in a file are read in one go."""
    run: list[Value] = []
    for value in batch:
        if run and not value.follows(run[-1]):
            yield run
            run = []
        run.append(value)
    if run:
        yield run
