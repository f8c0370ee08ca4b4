"""Reading ahead: what will be asked for next is brought in while the present op computes.

Always true:
- only speed depends on it: a wrong guess, a failed read or a dropped page never changes what a read gives
- the order is learned from the last two reads of each thread; where it has branched before, it is followed only after
  it has been seen twice
- what streams through memory is bounded by the window of its pool, over all threads
- nothing is read ahead while nobody reads, nor where everything is in memory

One thread reads, and drops what is done with. A value is `AWAY` (nothing is known of it), `QUEUED`, being `READ`, or
`HERE`: read ahead, and not asked for yet.
"""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice, pairwise

from offload.residency import SMALL, Pool, Value
from offload.storage.file import TensorFile
from offload.storage.handle import Handle
from offload.storage.pages import Range

AWAY, QUEUED, READ, HERE = range(4)
_CALM = 2.0  # seconds for which, at most, a value that was in memory is taken to be there still
_FOREVER = float("inf")
_MOST_STEPS = 256  # that the order is followed at a time
_MOST_PARTS = 4096  # of a value that are tracked
_MOST_CONTEXTS = 16  # reads before a value that are told apart
_BATCH = 4 << 20  # bytes of small values that are asked for at once
_PATIENCE = 2  # reads in a row that were not expected, until what is ahead is given up
_OVERDUE = 8  # reads that may overtake a value that is ahead
_NEARLY = 0.75  # of the window: with more in flight, the order is not followed on yet
_NEAR = 4  # values in the queue, of which one that follows in the file goes first
_IDLE = 2.0  # seconds after which the reader ends
_FORGET = 5.0  # seconds after which a thread that reads no more loses its part of the window


@dataclass
class Counts:
    """What was read since the process began.

    Attributes:
        bytes_read: brought in from the disk, in whole values.
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


class Tracked(Value):
    """A value whose place in the order is known."""

    __slots__ = ("branches", "followers", "is_leaving", "seeded", "state")

    def __init__(self, pool: Pool, file: TensorFile, start: int, nbytes: int, *, shared: bool) -> None:
        super().__init__(pool, file, start, nbytes, shared=shared)
        self.state = AWAY
        self.is_leaving = False
        self.branches = False
        self.seeded: weakref.ref[Tracked] | None = None
        self.followers: dict[int, tuple[weakref.ref[Tracked], bool]] = {}  # by the id of the read before

    def follower(self, before: Tracked | None) -> Tracked | None:
        """What is expected after `before`, then this one; None if that is anybody's guess."""
        found = self.followers.get(id(before))
        if found is None and not self.branches:
            if self.seeded is not None:
                return self.seeded()
            found = next(reversed(self.followers.values()), None)
        return found[0]() if found is not None and found[1] else None

    def learn(self, before: Tracked | None, following: Tracked) -> None:
        """After `before`, then this one, came `following`."""
        if self.seeded is not None and self.seeded() is not following:
            self.seeded = None
        known = self.followers.pop(id(before), None)
        is_news = known is None or known[0]() is not following
        self.branches = self.branches or (known is not None and is_news)
        while len(self.followers) >= _MOST_CONTEXTS:
            del self.followers[next(iter(self.followers))]
        self.followers[id(before)] = weakref.ref(following), not (is_news and self.branches)


class Stream:
    """What one thread has read, and will read. Its methods are called under the engine's lock.

    Attributes:
        in_flight: bytes that are ahead, and bytes that stream and are in use or just used.
    """

    def __init__(self, engine: Engine) -> None:
        self.in_flight = 0
        self._engine = engine
        self._thread = weakref.ref(threading.current_thread())
        self._touched = 0.0
        self._before: Tracked | None = None
        self._last: Tracked | None = None
        self._walked: tuple[Tracked | None, Tracked | None] = (None, None)  # how far the order has been followed
        self._ahead: OrderedDict[Tracked, int] = OrderedDict()  # and at which move each is due
        self._moves = 0
        self._surprises = 0  # in a row
        self._used: deque[Tracked] = deque()  # of those that stream

    @property
    def is_ahead(self) -> bool:
        """Whether something was read ahead that has not been asked for."""
        return bool(self._ahead)

    def expects(self, value: Tracked) -> bool:
        """Whether a value was read ahead for this thread."""
        return value in self._ahead

    def is_idle(self) -> bool:
        """Whether its thread has ended, or reads no more."""
        thread = self._thread()
        return thread is None or not thread.is_alive() or time.monotonic() - self._touched > _FORGET

    def move_to(self, value: Tracked) -> None:
        """The thread reads `value` now: learn that, and read ahead from there."""
        self._touched = time.monotonic()
        if value is self._last:
            return
        self._moves += 1
        self._arrive(value)
        self._use(value)
        if not self._ahead:
            self._walked = (self._last, value)
        if value.nbytes > SMALL:  # small values are read once, and then are no part of the order
            if self._last is not None:
                self._last.learn(self._before, value)
            self._before, self._last = self._last, value
        if not self._ahead or self.in_flight < _NEARLY * self._engine.share(value):
            self._read_ahead()

    def give_up(self) -> None:
        """Let everything go."""
        self._forget(len(self._ahead))
        while self._used:
            self._drop(self._used.popleft())
        self._before = self._last = None
        self._surprises = 0

    def _arrive(self, value: Tracked) -> None:
        """Take a value out of those ahead, and forget those that do not come, though they are due."""
        if self._ahead.pop(value, None) is not None:
            self.in_flight -= value.nbytes
            self._surprises = 0
        elif value.nbytes > SMALL:
            self._surprises += 1
        if self._surprises > _PATIENCE:
            self._forget(len(self._ahead))
        while self._ahead and self._moves - next(iter(self._ahead.values())) > _OVERDUE:
            self._forget(1)

    def _use(self, value: Tracked) -> None:
        """One op may use several values, so those that stream are dropped a little after their use."""
        value.is_leaving = False
        if value.kept:
            return
        if value in self._used:
            self._used.remove(value)
        else:
            self.in_flight += value.nbytes
        self._used.append(value)
        while len(self._used) > 1 and self._used_bytes() > self._engine.share(value) // 4:
            self._drop(self._used.popleft())

    def _used_bytes(self) -> int:
        return sum(value.nbytes for value in self._used)

    def _forget(self, count: int) -> None:
        """The next `count` values were not asked for after all."""
        for _ in range(count):
            value, _ = self._ahead.popitem(last=False)
            if value.state != QUEUED:
                self._engine.counts.wasted += 1
            self._drop(value)

    def _drop(self, value: Tracked) -> None:
        self.in_flight -= value.nbytes
        if value.state != READ:
            value.state = AWAY
        if not value.kept:
            self._engine.drop(value)

    def _read_ahead(self) -> None:
        """Follow the order as far as the window reaches."""
        now = time.monotonic()
        before, last = self._walked
        for _ in range(_MOST_STEPS):
            following = last.follower(before) if last is not None else None
            if following is None or following is self._last or following in self._ahead:
                break
            if following.calm_until < now:
                if not self._engine.has_room(following, self):
                    break
                self._ahead[following] = self._moves + len(self._ahead)
                self.in_flight += following.nbytes
                self._engine.queue(following)
            before, last = last, following
        self._walked = (before, last)


class Engine:
    """What the threads of a process share: the lock, the reader, and what was counted."""

    def __init__(self) -> None:
        self.lock = threading.Condition(threading.RLock())
        self.counts = Counts()
        self._local = threading.local()
        self._streams: list[Stream] = []
        self._queue: deque[Tracked] = deque()
        self._leaving: list[Tracked] = []
        self._taken: Tracked | None = None  # last, by the reader
        self._reader: threading.Thread | None = None

    def arrive(self, value: Tracked) -> None:
        """Bring `value` in, if it is not in memory, and see to what comes next.

        Raises:
            CorruptFileError: the disk did not give it.
        """
        with self.lock:
            stream = self._stream()
            leaving = value.pool.reconsider()
            expected = stream.expects(value)
            here = expected and self._go_on(stream, value)
        for left in leaving:
            left.let_go()
        found = False
        if not expected:
            found = value.is_cached()
            with self.lock:
                if not found and value.kept and value.calm_until > 0:  # something else needed the memory
                    value.pool.doubt()
                here = self._wait_for(value) if found and value.kept else self._go_on(stream, value)
        if not here:
            self._make_sure(value, found=found)
        if value.kept:
            calm = _FOREVER if value.nbytes <= SMALL else _CALM * random.uniform(0.1, 1)
            value.calm_until = time.monotonic() + calm

    def _go_on(self, stream: Stream, value: Tracked) -> bool:
        stream.move_to(value)
        return self._wait_for(value)

    def _wait_for(self, value: Tracked) -> bool:
        """Wait for the reader, if it is at work on `value`; whether it has brought it."""
        if value.state == READ:
            started = time.monotonic()
            while value.state == READ:
                self.lock.wait()
            self.counts.waited += time.monotonic() - started
        here = value.state == HERE
        self.counts.ahead += here
        value.state = AWAY  # if it was queued, the reader will pass over it
        return here

    def _make_sure(self, value: Tracked, *, found: bool) -> None:
        """Read what the reader has not."""
        if found or value.is_cached():
            with self.lock:
                self.counts.found += 1
            return
        started = time.monotonic()
        value.read()
        with self.lock:
            self.counts.missed += 1
            self.counts.bytes_read += value.nbytes
            self.counts.waited += time.monotonic() - started

    # Under the lock

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
        in_flight = sum(stream.in_flight for stream in self._streams) + sum(value.nbytes for value in self._leaving)
        return stream.in_flight + value.nbytes <= self.share(value) and in_flight + value.nbytes <= value.pool.window

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
            self._streams.append(stream)
        return stream

    # The reader

    def _wake(self) -> None:
        if self._reader is None or not self._reader.is_alive():
            reader = threading.Thread(target=self._read_on, name="offload-reader", daemon=True)
            with suppress(RuntimeError):  # the interpreter is ending: who asks for a value will read it
                reader.start()
                self._reader = reader
        self.lock.notify_all()

    def _read_on(self) -> None:
        while True:
            with self.lock:
                while not self._queue and not self._leaving:
                    if not self.lock.wait(_IDLE) and not self._queue and not self._leaving:
                        self._reader = None
                        return
                leaving, self._leaving = self._leaving, []
                batch = self._take()
            try:
                for value in leaving:
                    if value.is_leaving:
                        value.let_go()
                self._read(batch)
            finally:
                self._end(batch)

    def _end(self, batch: list[Tracked]) -> None:
        """Whatever happened, nobody is to wait for ever."""
        with self.lock:
            for value in batch:
                if value.state == READ:
                    value.state = AWAY
            self.lock.notify_all()

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
                    extent.bring_in(exactly=not run[0].pool.fits)
                    read = extent.nbytes
                state = HERE
            with self.lock:
                for value in run:
                    value.state = state
                self.counts.bytes_read += read
                self.lock.notify_all()


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


# One engine a process


def arrive(value: Tracked) -> None:
    """To be called before a read of a value that is not `calm`; comes back when it is in memory.

    Raises:
        CorruptFileError: the disk did not give it.
    """
    _ENGINE.arrive(value)


def tracked(handle: Handle, start: int, nbytes: int) -> Range:
    """What is read at these bytes of the file of `handle`; `UNTRACKED` if too many parts of that are known already."""
    key = (start, nbytes)
    with changing() as leaving:
        value: Tracked | None = handle.ranges.get(key)
        if value is None:
            if len(handle.ranges) >= _MOST_PARTS:
                return UNTRACKED
            value = _track(handle, key)
            leaving.extend(value.pool.add([value]))
    return value


def expect(handles: Iterable[Handle], pool: Pool | None = None) -> None:
    """Say that these values, as wholes, will be read in this order.

    Args:
        handles: of the values.
        pool: the budget that they are to be under; None for that of the process.
    """
    with changing() as leaving:
        values, new = [], []
        for handle in handles:
            handle.pool = pool or handle.pool
            value = handle.ranges.get(handle.extent)
            if value is None:
                value = _track(handle, handle.extent)
                new.append(value)
            values.append(value)
        for value, following in pairwise(values):
            value.seeded = weakref.ref(following)
        leaving.extend((pool or POOL).add(new))


@contextmanager
def changing() -> Iterator[list[Value]]:
    """Under the engine's lock; the values that are put in the list are dropped after it."""
    leaving: list[Value] = []
    with _ENGINE.lock:
        yield leaving
    for value in leaving:
        value.let_go()


def counts() -> Counts:
    """A copy of what was counted so far."""
    with _ENGINE.lock:
        return replace(_ENGINE.counts)


def _track(handle: Handle, key: tuple[int, int]) -> Tracked:
    value = Tracked(handle.pool or POOL, handle.file, *key, shared=handle.owned)
    handle.ranges[key] = value
    return value


def _begin_anew() -> None:
    """In a forked child there is no reader, and nothing is on its way."""
    global _ENGINE
    _ENGINE = Engine()
    for pool in Pool.all():
        for value in pool.values():
            value.state = AWAY  # type: ignore[attr-defined]


POOL = Pool()  # of the process
UNTRACKED = Range.nowhere()
_ENGINE = Engine()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
