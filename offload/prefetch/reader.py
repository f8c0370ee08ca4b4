"""The threads that read ahead, and the one that drops used values, so that reads need not wait for that.

Values that may stay are read through the mappings of their files; loads, which will not, past the page cache.

Always true:
- the lock is not held while the disk is read
- whatever happens to a thread, no op waits forever
- an op that needs a load which no thread has begun reads it itself
- a value that is being dropped counts until it is gone
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from offload.prefetch.direct import Load
from offload.prefetch.plan import AWAY, IN_USE, LEAVING, QUEUED, READING, RESIDENT, Pool, Stage, Value
from offload.prefetch.scratch import release_scratch
from offload.system import clock
from offload.system.background import Background
from offload.system.locks import Waiters

_NEAR = 4  # entries at the front of the queue among which the next in the file goes first
_BATCH = 32 << 20  # bytes of values to request at once
LEAST = 2  # loads that are read or in use, however large: one each

ReadOn: TypeAlias = "Callable[[], bool]"  # reads the next part; returns whether there is more to do now


@dataclass
class Counts:
    """What was read since the process started.

    Attributes:
        bytes_read: how much was read from the disk, in whole pages of values larger than 64 KiB. Bytes that were in
            memory already, as part of another view, are not counted again.
        ahead: reads of values that were read ahead, or were on their way.
        found: reads of values that were in memory for another reason.
        missed: reads that had to wait from the start.
        wasted: values that were read ahead in vain.
        waited: seconds that ops waited for the disk.
    """

    bytes_read: int = 0
    ahead: int = 0
    found: int = 0
    missed: int = 0
    wasted: int = 0
    waited: float = 0.0


class Dropper(Background["list[Value]"]):
    def __init__(self, reader: Reader) -> None:
        super().__init__("offload-dropper", reader.lock)
        self._reader = reader

    def take(self) -> list[Value] | None:
        return self._reader.take_leaving() or None

    def carry_out(self, work: list[Value]) -> None:
        self._reader.let_go(work)


class DirectReader(Background[Load]):
    def __init__(self, reader: Reader) -> None:
        super().__init__("offload-direct", reader.lock)
        self._reader = reader

    def take(self) -> Load | None:
        return self._reader.take_load()

    def carry_out(self, work: Load) -> None:
        self._reader.read_load(work)

    def rest(self) -> None:
        release_scratch()


class Reader(Background["list[Value] | ReadOn"]):
    """Queues of what to read and what to drop. Methods that need the lock say so."""

    def __init__(self) -> None:
        super().__init__("offload-reader")
        self.dropper = Dropper(self)
        self.direct = [DirectReader(self) for _ in range(LEAST)]
        self.counts = Counts()
        self._queue: deque[Value] = deque()
        self._loads: deque[Load] = deque()
        self._leaving: list[Value] = []
        self._going: dict[int, int] = {}  # bytes being dropped, by thread
        self._taken: Value | None = None  # the last one read
        self._parts: list[ReadOn] = []
        self._ops = Waiters()  # ops that wait for the reader

    # Under the lock

    def queue(self, value: Value) -> None:
        """Queue `value` to be read, unless it is read ahead already."""
        if not value.is_ahead:
            value.move_to(QUEUED)
            self._queue.append(value)
            _begin(self)

    def fill(self, read_on: ReadOn) -> None:
        """Read something part by part, while nothing else has to be read, until it says that nothing is left."""
        if read_on not in self._parts:
            self._parts.append(read_on)
        _begin(self)

    def queue_first(self, values: list[Value]) -> None:
        for value in values:
            self.queue(value)
        self._queue.rotate(len(values))

    def drop(self, value: Value) -> None:
        """Queue `value` to be dropped, unless it is needed before; not if another thread is about to need it."""
        if value.stage is QUEUED:
            return
        if value.stage is not LEAVING:
            value.move_to(LEAVING)
        self._leaving.append(value)
        _begin(self.dropper)

    @property
    def leaving_bytes(self) -> int:
        """Bytes that will be dropped, or are being dropped."""
        return sum(value.nbytes for value in self._leaving) + sum(self._going.values())

    def take_load(self) -> Load | None:
        """Take over the next load that no thread has begun; this thread then calls `read_load`."""
        while self._loads:
            load = self._loads.popleft()
            if load.stage is QUEUED:
                load.move_to(READING)
                return load
        return None

    def take_leaving(self) -> list[Value]:
        """Take over what has to be dropped; this thread then calls `let_go`."""
        leaving, self._leaving = self._leaving, []
        if leaving:
            self._going[threading.get_ident()] = sum(value.nbytes for value in leaving)
        return leaving

    def mend(self) -> None:
        """After an unfinished op: queue again what was to be dropped."""
        self._going.pop(threading.get_ident(), None)
        known = (value for pool in Pool.all() for value in pool.values())
        self._leaving = [value for value in known if value.stage is LEAVING]
        _begin(self)
        _begin(self.dropper)

    # For ops that need a value

    def brings(self, value: Value, *, was_cached: bool) -> bool:
        """An op uses `value`: wait if the thread is reading it. Returns whether it is in memory.

        Args:
            found: whether it was in memory already.
        """
        started = 0.0
        while True:
            with self.lock:
                if value.stage is not READING:
                    if started:
                        self.counts.waited += clock.now() - started
                    was_ahead = value.stage is RESIDENT
                    self.counts.ahead += was_ahead
                    self.counts.found += was_cached and not was_ahead
                    if value.stage is not IN_USE:
                        value.move_to(IN_USE)
                    return was_ahead or was_cached
                done = self._ops.add()
            started = started or clock.now()
            done.acquire()

    def queue_load(self, load: Load) -> None:
        with self.lock:
            load.move_to(QUEUED)
            self._loads.append(load)
            for thread in self.direct[: len(self._loads)]:
                _begin(thread)

    def bring_load(self, load: Load) -> None:
        """An op needs a load: wait if a thread is reading it, and read it if none is.

        Raises: as `Load.read`.
        """
        started = clock.now()
        while True:
            with self.lock:
                if load.stage is RESIDENT:
                    break
                if load.stage is QUEUED:
                    load.move_to(READING)
                    done = None
                else:
                    done = self._ops.add()
            if done is None:
                self.read_load(load)
            else:
                done.acquire()
        error, load.error = load.error, None  # its traceback refers to the load
        if error is not None:
            raise error
        with self.lock:
            self.counts.ahead += load.count
            self.counts.bytes_read += load.nbytes
            self.counts.waited += clock.now() - started

    def release_soon(self) -> None:
        """Free unused memory once nothing was loaded for a while."""
        with self.lock:
            _begin(self.direct[0])

    def read_load(self, load: Load) -> None:
        """Read what this thread has set to `READING`; an error is for the op."""
        try:
            load.read()
        except BaseException as error:
            load.error = error
            if not isinstance(error, Exception):
                raise
        finally:
            with self.lock:
                load.move_to(RESIDENT)
                self._ops.wake()

    def let_go(self, leaving: list[Value]) -> None:
        try:
            for value in leaving:
                if value.stage is LEAVING:
                    value.let_go()
        finally:
            with self.lock:
                self._going.pop(threading.get_ident(), None)

    # The thread

    def take(self) -> list[Value] | ReadOn | None:
        """One value to read, or several smaller ones; otherwise a part of what can wait."""
        batch: list[Value] = []
        size = 0
        while self._queue and (not batch or size + self._queue[0].nbytes <= _BATCH):
            value = self._next()
            if value.stage is QUEUED:
                value.move_to(READING)
                batch.append(value)
                size += value.nbytes
                self._taken = value
        return batch or (self._parts[0] if self._parts else None)

    def _next(self) -> Value:
        """The next in the queue; before it, a value due soon that follows the last one read in its file."""
        for value in islice(self._queue, _NEAR):
            if self._taken is not None and value.follows(self._taken):
                self._queue.remove(value)
                return value
        return self._queue.popleft()

    def carry_out(self, work: list[Value] | ReadOn) -> None:
        if not isinstance(work, list):
            self._read_on(work)
            return
        try:
            self._read(work)
        finally:  # whatever happened, no op may wait forever
            with self.lock:
                for value in work:
                    if value.stage is READING:
                        value.move_to(AWAY)
                self._ops.wake()

    def _read_on(self, read_on: ReadOn) -> None:
        is_more = False
        try:
            with suppress(Exception):  # the code that wants the rows meets the same error, and reports it
                is_more = read_on()
        finally:
            with self.lock:
                if not is_more and read_on in self._parts:
                    self._parts.remove(read_on)

    def _read(self, batch: list[Value]) -> None:
        runs = list(_runs(batch))
        joined = [run[0] if len(run) == 1 else run[0].through(run[-1]) for run in runs]
        missing = [0 if extent.is_cached() else extent.missing_bytes() for extent in joined]
        pool, read, started = batch[0].pool, 0, clock.now()
        with suppress(Exception):  # the op that needs the value meets the same error, and reports it
            for run, extent in zip(runs, joined, strict=True):
                if len(runs) > 1:
                    extent.announce(exactly=not run[0].pool.fits)
        for run, extent, due in zip(runs, joined, missing, strict=True):
            stage = AWAY
            with suppress(Exception):
                if due:
                    extent.bring_in(exactly=not run[0].pool.fits)
                stage = RESIDENT
            with self.lock:
                self._has_read(run, stage)
                if stage is RESIDENT:
                    self.counts.bytes_read += due
                    read += due if extent.may_ask and run[0].pool is pool else 0  # else unknown whether from the disk
        with self.lock:
            pool.learn_rate(read, clock.now() - started)

    def _has_read(self, run: list[Value], stage: Stage) -> None:
        """Some values are `RESIDENT` now, or still `AWAY`; one that was dropped meanwhile has to go again."""
        for value in run:
            if value.stage is READING:
                value.move_to(stage)
            elif stage is RESIDENT and value.stage in (AWAY, LEAVING) and not value.kept and value not in self._leaving:
                self.drop(value)
        self._ops.wake()


def _begin(thread: Reader | Dropper | DirectReader) -> None:
    with suppress(RuntimeError):  # the interpreter is shutting down: ops will read by themselves
        thread.wake()


def _runs(batch: Iterable[Value]) -> Iterator[list[Value]]:
    """Adjacent values in a file, grouped so that each group is read in one go."""
    run: list[Value] = []
    for value in batch:
        if run and not value.follows(run[-1]):
            yield run
            run = []
        run.append(value)
    if run:
        yield run
