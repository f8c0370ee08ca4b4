"""What the threads of a process share: the lock, the reader, and what was counted.

Always true:
- one thread reads, and drops what is done with; it ends when there is nothing to do, and comes back
- whatever happens to it, nobody waits for ever
- what leaves counts until it has gone; where the window is full of that, who reads for himself drops it first
- the lock is not held while the disk is read, nor while an op waits for the reader
- an op that is interrupted gives up what was ahead for its thread, so that the books hold again
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from offload.prefetch.residency import SMALL, Pool
from offload.prefetch.stream import Stream
from offload.prefetch.tracked import AWAY, HERE, QUEUED, READ, Tracked
from offload.storage.locks import Waiters

_CALM = 2.0  # seconds for which, at most, a value that was in memory is taken to be there still
_FOREVER = float("inf")
_NEAR = 4  # values in the queue, of which one that follows in the file goes first
_BATCH = 4 << 20  # bytes of small values that are asked for at once
_IDLE = 2.0  # seconds after which the reader ends


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


class Engine:
    """What the threads of a process share: the lock, the reader, and what was counted."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._work = threading.Condition(self.lock)  # for the reader
        self._ops = Waiters()  # for the reader to do something
        self.counts = Counts()
        self._local = threading.local()
        self._streams: list[Stream] = []
        self._queue: deque[Tracked] = deque()
        self._leaving: list[Tracked] = []
        self._going: dict[int, int] = {}  # bytes that a thread is dropping
        self._taken: Tracked | None = None  # last, by the reader
        self._reader: threading.Thread | None = None
        self._chance = random.Random()  # of its own: that of the process is for its user

    def arrive(self, value: Tracked) -> None:
        """Bring `value` in, if it is not in memory, and see to what comes next.

        Raises:
            ReadError: the disk did not give it.
        """
        try:
            self._arrive(value)
        except BaseException:
            self._mend(value)
            raise

    def _arrive(self, value: Tracked) -> None:
        with self.lock:
            stream = self._stream()
            leaving = value.pool.reconsider()
            expected = stream.expects(value)
            if expected:
                stream.move_to(value)
        for left in leaving:
            left.let_go()
        found = False
        if not expected:
            found = value.is_cached()
            with self.lock:
                if not found and _should_be_here(value):  # something else needed the memory
                    value.pool.doubt()
                if not (found and value.kept):
                    stream.move_to(value)
        if not self._comes(value):
            self._make_sure(value, found=found)
        if value.kept:
            calm = _FOREVER if value.nbytes <= SMALL else _CALM * self._chance.uniform(0.1, 1)
            value.calm_until = time.monotonic() + calm

    def _comes(self, value: Tracked) -> bool:
        """Wait for the reader, if it is at work on `value`; whether it has brought it."""
        started = 0.0
        while True:
            with self.lock:
                if value.state != READ:
                    if started:
                        self._count_waited(value, started)
                    here = value.state == HERE
                    self.counts.ahead += here
                    value.state = AWAY  # if it was queued, the reader will pass over it
                    return here
                done = self._ops.add()
            started = started or time.monotonic()
            done.acquire()

    def _mend(self, value: Tracked) -> None:
        """After a read that did not end: what this thread has ahead is given up, and what was to leave leaves."""
        with self.lock:
            stream: Stream | None = getattr(self._local, "stream", None)
            if stream is not None:
                stream.give_up()
            value.is_leaving = not value.kept
            self._going.pop(threading.get_ident(), None)
            known = (known for pool in Pool.all() for known in pool.values())
            self._leaving = [value for value in known if isinstance(value, Tracked) and value.is_leaving]
            self._wake()

    def _make_sure(self, value: Tracked, *, found: bool) -> None:
        """Read what the reader has not."""
        if found or value.is_cached():
            with self.lock:
                self.counts.found += 1
            return
        started = time.monotonic()
        self._make_room(value.pool)
        missing = value.missing_bytes()
        value.read()
        with self.lock:
            self.counts.missed += 1
            self.counts.bytes_read += missing
            self._count_waited(value, started)

    def _count_waited(self, value: Tracked, started: float) -> None:
        waited = time.monotonic() - started
        value.waited += waited
        self.counts.waited += waited

    def _make_room(self, pool: Pool) -> None:
        """Drop what is to leave, if the reader is behind with it."""
        with self.lock:
            leaving = self._take_leaving() if self._in_flight() > pool.window else []
        self._let_go(leaving)

    def _let_go(self, leaving: list[Tracked]) -> None:
        try:
            for value in leaving:
                if value.is_leaving:
                    value.let_go()
        finally:
            with self.lock:
                self._going.pop(threading.get_ident(), None)

    # Under the lock

    def _take_leaving(self) -> list[Tracked]:
        leaving, self._leaving = self._leaving, []
        self._going[threading.get_ident()] = sum(value.nbytes for value in leaving)
        return leaving

    def _in_flight(self) -> int:
        """Bytes that are ahead, that stream and are in use, or that have not gone yet."""
        leaving = sum(value.nbytes for value in self._leaving)
        return sum(stream.in_flight for stream in self._streams) + leaving + sum(self._going.values())

    def queue(self, value: Tracked) -> None:
        """Have the reader bring `value` in."""
        value.is_leaving = False
        if value.state == AWAY:
            value.state = QUEUED
            self._queue.append(value)
            self._wake()

    def drop(self, value: Tracked) -> None:
        """Have the reader drop `value`, unless it is asked for before."""
        value.is_leaving = True
        self._leaving.append(value)
        self._wake()

    def has_room(self, value: Tracked, stream: Stream) -> bool:
        """Whether the window takes `value` for a thread; where nothing is ahead of any, it takes a larger one too."""
        if value.pool.window == 0:
            return False
        if not self._fits(value, stream) and len(self._streams) > 1:
            self._reap()
        return self._fits(value, stream) or not any(other.is_ahead for other in self._streams)

    def _fits(self, value: Tracked, stream: Stream) -> bool:
        window = value.pool.window
        return stream.in_flight + value.nbytes <= self.share(value) and self._in_flight() + value.nbytes <= window

    def share(self, value: Tracked) -> int:
        """The part of the window that is for one thread."""
        return value.pool.window // max(len(self._streams), 1)

    def _reap(self) -> None:
        """Take their part of the window from threads that have ended, or read no more."""
        for stream in [stream for stream in self._streams if stream.is_idle()]:
            stream.give_up()
            self._streams.remove(stream)

    def _stream(self) -> Stream:
        stream: Stream | None = getattr(self._local, "stream", None)
        if stream is None:
            stream = self._local.stream = Stream(self)
        if stream not in self._streams:
            self._reap()
            self._streams.append(stream)
        return stream

    # The reader

    def _wake(self) -> None:
        if self._reader is None or not self._reader.is_alive():
            reader = threading.Thread(target=self._read_on, name="offload-reader", daemon=True)
            self._reader = reader
            with suppress(RuntimeError):  # the interpreter is ending: who asks for a value will read it
                reader.start()
        self._work.notify()

    def _read_on(self) -> None:
        while True:
            with self.lock:
                while not self._queue and not self._leaving:
                    if not self._work.wait(_IDLE) and not self._queue and not self._leaving:
                        self._reader = None
                        return
                leaving = self._take_leaving()
                batch = self._take()
            try:
                self._let_go(leaving)
                self._read(batch)
            finally:
                self._end(batch)

    def _end(self, batch: list[Tracked]) -> None:
        """Whatever happened, nobody is to wait for ever."""
        with self.lock:
            for value in batch:
                if value.state == READ:
                    value.state = AWAY
            self._ops.wake()

    def _take(self) -> list[Tracked]:
        """One value, or several small ones."""
        batch: list[Tracked] = []
        size = 0
        while self._queue and (not batch or size + self._queue[0].nbytes <= _BATCH):
            value = self._next()
            if value.state == QUEUED:
                value.state = READ
                batch.append(value)
                size += value.nbytes
                self._taken = value
        return batch

    def _next(self) -> Tracked:
        """The next in turn; before it, one that follows in the file what was read last, if it is soon due too."""
        for value in islice(self._queue, _NEAR):
            if self._taken is not None and value.follows(self._taken):
                self._queue.remove(value)
                return value
        return self._queue.popleft()

    def _read(self, batch: list[Tracked]) -> None:
        runs = list(_runs(batch))
        joined = [run[0] if len(run) == 1 else run[0].through(run[-1]) for run in runs]
        with suppress(Exception):  # the op that asks for a value meets the same error, and tells
            for extent in joined if len(joined) > 1 else ():
                extent.announce()
        for run, extent in zip(runs, joined, strict=True):
            state, read = AWAY, 0
            with suppress(Exception):
                if not extent.is_cached():
                    missing = extent.missing_bytes()
                    extent.bring_in(exactly=not run[0].pool.fits)
                    read = missing
                state = HERE
            with self.lock:
                for value in run:
                    value.state = AWAY if value.is_leaving else state
                self.counts.bytes_read += read
                self._ops.wake()


def _should_be_here(value: Tracked) -> bool:
    return value.kept and value.calm_until > 0 and value.may_ask


def _runs(batch: Iterable[Tracked]) -> Iterator[list[Tracked]]:
    """Values that lie behind one another in a file are read in one go."""
    run: list[Tracked] = []
    for value in batch:
        if run and not value.follows(run[-1]):
            yield run
            run = []
        run.append(value)
    if run:
        yield run
