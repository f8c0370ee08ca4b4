"""What each thread has read, and will read next, within the window that all threads share.

Always true:
- the order is learned from the last two reads of each thread; where it has branched before, it is followed only once it
  has been seen twice
- picked values, such as experts, are not part of the order, which goes on past them: they are ahead once an op says so
- what is ahead, and what streams and is in use, counts as `in_flight` until it is used, dropped or forgotten
- what a lease holds stays until the lease moves on; a part of the budget is reserved for it. A result that it keeps
  takes the place of the values that it was computed from
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from offload.prefetch.reader import Reader
from offload.prefetch.plan import AWAY, QUEUED, READ, SMALL, Pool, Stack, Turns, Value, books_of, let_go, log
from offload.storage.handle import Handle

_LEAST_AHEAD = 3  # values, if there is room: one in use, one here, one on its way
_MOST_STEPS = 256  # steps to follow the order at a time
_NEARLY = 0.75  # of the window: with more in flight, don't follow the order yet
_PATIENCE = 2  # unexpected reads in a row until what is ahead is given up
_OVERDUE = 8  # reads that may overtake a value that is ahead
_FORGET = 5.0  # seconds without a read after which a thread loses its part of the window


class Streams:
    """The streams of all threads. Methods here and in `Stream` are called under the reader's lock."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.live: list[Stream] = []
        self._local = threading.local()

    def own(self) -> Stream:
        """The stream of the running thread."""
        stream = self.of_thread()
        if stream not in self.live:
            self.reap()
            self.live.append(stream)
        return stream

    def of_thread(self) -> Stream:
        """Like `own`, for a thread that need not have a share of the window."""
        stream: Stream | None = getattr(self._local, "stream", None)
        if stream is None:
            stream = self._local.stream = Stream(self)
        return stream

    def join(self, stream: Stream | None) -> Stream | None:
        """Make the running thread read as one with others; None: by itself. Returns what it read as before."""
        before: Stream | None = getattr(self._local, "stream", None)
        self._local.stream = stream
        return before

    def lease(self) -> Lease | None:
        """The lease under which the running thread reads."""
        stream: Stream | None = getattr(self._local, "stream", None)
        return None if stream is None else stream.lease

    def give_up_own(self) -> None:
        """Drop everything that is ahead for the running thread."""
        stream: Stream | None = getattr(self._local, "stream", None)
        if stream is not None:
            stream.give_up()

    def reap(self) -> None:
        """Take the window share of threads that have ended or stopped reading."""
        for stream in [stream for stream in self.live if stream.is_idle()]:
            stream.give_up()
            self.live.remove(stream)

    def in_flight(self) -> int:
        """Bytes that are ahead, that stream and are in use, or that are still being dropped."""
        return sum(stream.in_flight for stream in self.live) + self.reader.leaving_bytes

    def share(self, window: int) -> int:
        """One thread's part of a window."""
        return window // max(len(self.live), 1)


class Stream:
    """What one thread has read, and will read next.

    Attributes:
        in_flight: bytes that are ahead, or that stream and are in use or just used.
        lease: holds its values, if several threads read as one.
    """

    def __init__(self, streams: Streams) -> None:
        self.in_flight = 0
        self.lease: Lease | None = None
        self._streams = streams
        self._reader = streams.reader
        self._thread = weakref.ref(threading.current_thread())
        self._touched = 0.0
        self._before: Value | None = None
        self._last: Value | None = None
        self._walked: tuple[Value | None, Value | None] = (None, None)  # how far the order has been followed
        self._ahead: OrderedDict[Value, int] = OrderedDict()  # and the move at which each is due
        self._moves = self._picks = 0  # values of the order, and picked ones
        self._surprises = 0  # in a row
        self._picked = 0  # bytes picked last; the window keeps room for as much
        self._stack: Callable[[], Handle | None] = lambda: None  # the last one that was picked from
        self._numbers: Sequence[int] = ()  # which of its matrices
        self._used: deque[Value] = deque()  # streaming values only

    def expects(self, value: Value) -> bool:
        """Whether a value was read ahead for this thread."""
        return value in self._ahead

    def is_idle(self) -> bool:
        """Whether its thread has ended or stopped reading."""
        thread = self._thread()
        return thread is None or not thread.is_alive() or time.monotonic() - self._touched > _FORGET

    def move_to(self, value: Value) -> None:
        """The thread reads `value` now: learn from it, and read ahead from there."""
        self._touched = time.monotonic()
        if value is self._last:
            return
        self._moves += not value.is_picked
        self._picks += value.is_picked
        self._arrive(value)
        self._use(value)
        if not self._ahead:
            self._walked = (self._before, self._last) if value.is_picked else (self._last, value)
        if value.nbytes > SMALL and not value.is_picked:  # small values are read once, and are not part of it either
            if self._last is not None:
                self._last.learn(self._before, value)
            self._before, self._last = self._last, value
        if self._is_few() or self.in_flight < _NEARLY * self._streams.share(value.pool.window):
            self._read_ahead()

    def bring_soon(self, values: Sequence[Value]) -> None:
        """These are about to be read, in this order: before everything else that is ahead."""
        new = [value for value in dict.fromkeys(values) if value.state == AWAY and value not in self._ahead]
        self._picked = sum(value.nbytes for value in new) if new else self._picked
        self._reader.queue_first(list(itertools.takewhile(self._put_ahead, new)))

    def stack_after(
        self, handle: Handle, view_spec: torch.Tensor, numbers: Sequence[int]
    ) -> tuple[Handle, torch.Tensor] | None:
        """Some matrices of a stack are picked; tells from which stack the same were picked next, the last two times.

        Once may be chance; and where all are picked, as by long prompts, it says nothing.
        """
        last, has_all = self._stack(), len(numbers) == len(view_spec)
        if last is not None and last is not handle and not has_all:
            before = books_of(last).next_stack
            is_known = before is not None and before.handle() is handle
            books_of(last).next_stack = (
                Stack.of(handle, view_spec, is_sure=is_known) if self._numbers == numbers else None
            )
        self._stack, self._numbers = (lambda: None) if has_all else weakref.ref(handle), numbers
        following = books_of(handle).next_stack
        return None if has_all or following is None or not following.is_sure else following.found()

    def give_up(self) -> None:
        """Drop everything."""
        self._forget(list(self._ahead))
        while self._used:
            self._drop(self._used.popleft())
        self._before = self._last = None
        self._surprises = self.in_flight = 0

    def _arrive(self, value: Value) -> None:
        """Take a value out of those ahead, and forget those that are overdue."""
        if self._ahead.pop(value, None) is not None:
            self.in_flight -= value.nbytes
            self._surprises = 0
        elif value.nbytes > SMALL and not value.is_picked:
            self._surprises += 1
        if self.lease is not None:  # what one thread does not use, the next one may
            return
        if self._surprises > _PATIENCE:
            self._forget(list(self._ahead))
        if value.is_picked:
            ahead = ((other, self._picks - due) for other, due in self._ahead.items() if other.is_picked)
            self._forget([other for other, late in ahead if late > _OVERDUE])
            return
        while (first := next((one for one in self._ahead.items() if not one[0].is_picked), None)) is not None:
            if self._moves - first[1] <= _OVERDUE:
                break
            self._forget([first[0]])

    def _use(self, value: Value) -> None:
        """An op may use several values, so streaming ones are dropped slightly after their use."""
        value.is_leaving = False
        if value.kept or (self.lease is not None and self.lease.holds(value)):
            return
        if value in self._used:
            self._used.remove(value)
        else:
            self.in_flight += value.nbytes
        self._used.append(value)
        most = self._streams.share(value.pool.window) // 4
        while len(self._used) > 1 and sum(value.nbytes for value in self._used) > most:
            self._drop(self._used.popleft())

    def _forget(self, values: Iterable[Value]) -> None:
        """These values, which are ahead, were not needed after all."""
        for value in values:
            del self._ahead[value]
            if value.state != QUEUED:
                self._reader.counts.wasted += 1
            self._drop(value)

    def _drop(self, value: Value) -> None:
        self.in_flight -= value.nbytes
        if value in self._ahead:  # it will be needed again soon
            return
        if value.state != READ:
            value.state = AWAY
        if not value.kept:
            self._reader.drop(value)

    def _read_ahead(self) -> None:
        """Follow the order as far as the window reaches."""
        now = time.monotonic()
        before, last = self._walked
        for _ in range(_MOST_STEPS):
            following = last.follower(before) if last is not None else None
            if following is None or following is self._last or following in self._ahead:
                break
            if following.calm_until < now:
                if not self._put_ahead(following):
                    break
                self._reader.queue(following)
            before, last = last, following
        self._walked = (before, last)

    def _put_ahead(self, value: Value) -> bool:
        """Count a value as ahead, if it fits in the window."""
        if not self._has_room(value):
            return False
        self._ahead[value] = (self._picks if value.is_picked else self._moves) + len(self._ahead)
        self.in_flight += value.nbytes
        return True

    def _has_room(self, value: Value) -> bool:
        """Whether the window has room for a value.

        It may be wider for the next few values; if no thread has anything ahead, it takes even a larger one.
        """
        if value.pool.window == 0:
            return False
        if not self._fits(value) and len(self._streams.live) > 1:
            self._streams.reap()
        return self._fits(value) or not any(other._ahead for other in self._streams.live)

    def _fits(self, value: Value) -> bool:
        streams, pool = self._streams, value.pool
        window = pool.widest if self._is_few() else pool.window
        share = streams.share(window)
        if not value.is_picked:
            share -= min(self._picked, share // 2)
        return self.in_flight + value.nbytes <= share and streams.in_flight() + value.nbytes <= window

    def _is_few(self) -> bool:
        """Whether less is ahead than there should be: small and picked values don't count."""
        return sum(value.nbytes > SMALL and not value.is_picked for value in self._ahead) < _LEAST_AHEAD


class Lease:
    """Values that several threads use one after the other, and that stay until all of them have.

    The threads read as one, in the order of the first of them: the others find everything in memory.

    Attributes:
        keeps_results: whether what the first thread computes from values is kept for the others, too.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._stream = Stream(streams)
        self._stream.lease = self
        self._lots: Sequence[Sequence[Handle]] = ()
        self._held: dict[Value, None] = {}
        self._bytes: dict[Pool, int] = {}  # held, per pool
        self._turns: dict[Pool, Turns] = {}
        self._results: dict[Hashable, torch.Tensor] = {}
        self._made: dict[Pool, int] = {}  # bytes of results, per pool
        self._shared: dict[Hashable, dict[Any, Any]] = {}
        self._is_again = False  # whether something is computed that was computed before
        self._has_told = self._has_ended = False
        self.keeps_results = False

    def expect(self, lots: Sequence[Sequence[Handle]]) -> None:
        """Reserve room for these lots, each used until the lease moves on. Other values may be used, too."""
        leaving: list[Value] = []
        try:
            with self._streams.reader.lock:
                self._lots = lots
                known = [value for lot in lots for handle in lot for value in books_of(handle).ranges.values()]
                for pool in dict.fromkeys(value.pool for value in known):
                    leaving.extend(self._take_part(pool))
        finally:
            let_go(leaving)

    def join(self) -> None:
        """Make the running thread read as one with the others."""
        with self._streams.reader.lock:
            self._streams.join(self._stream)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """In this context, the running thread reads as one with the others."""
        streams = self._streams
        with streams.reader.lock:
            own = streams.join(self._stream)
        try:
            yield
        finally:
            with streams.reader.lock:
                streams.join(own)

    def move_on(self) -> None:
        """All threads have used what is held. From now on the budget has room for as much."""
        leaving: list[Value] = []
        try:
            with self._streams.reader.lock:
                self._results, self._shared = {}, {}
                held, self._held = self._held, {}
                made, self._made = self._made, {}
                sizes, self._bytes = self._bytes, {}
                for turns in self._turns.values():
                    turns.replaced.difference_update(held)  # there was no room for the result this time
                for value in held:
                    value.is_held = False
                    value.calm_until = 0.0
                    if not value.kept and not self._stream.expects(value):
                        self._streams.reader.drop(value)
                is_again, self._is_again = self._is_again, False
                for pool, size in sizes.items():
                    if size > pool.at_a_time or (is_again and pool in self._turns and self._turns[pool].has_news):
                        leaving.extend(self._take_part(pool, held, made.get(pool, 0)))
        finally:
            let_go(leaving)

    def end(self) -> None:
        """Release everything, and the reserved room."""
        self._has_ended = True
        self.move_on()
        leaving: list[Value] = []
        try:
            with self._streams.reader.lock:
                self._stream.give_up()
                for pool, turns in self._turns.items():
                    pool.turns.remove(turns)
                    leaving.extend(pool.reconsider(anew=True))
                self._turns = {}
        finally:
            let_go(leaving)

    def result(self, key: Hashable) -> torch.Tensor | None:
        """A result that is kept."""
        return self._results.get(key)

    def shared(self, key: Hashable) -> dict[Any, Any]:
        """What the threads note for one another under this key; empty once the lease moves on."""
        return self._shared.setdefault(key, {})

    # Under the lock

    def keep(self, key: Hashable, result: torch.Tensor, pool: Pool, sources: Iterable[Value]) -> None:
        """Keep a result until the lease moves on, if there is room, instead of the values that it was computed from."""
        sources = list(dict.fromkeys(sources))  # several pieces may be cuts of one value
        held = [value for value in sources if value in self._held]
        nbytes = result.untyped_storage().nbytes()
        size = self._bytes.get(pool, 0) + nbytes - sum(value.nbytes for value in held)
        if size > pool.most_at_a_time or self._has_ended:
            return
        if pool in self._turns:
            replaced = self._turns[pool].replaced
            self._is_again = self._is_again or not replaced.isdisjoint(sources)
            replaced.update(sources)
        for value in held:
            value.is_held = False
            value.calm_until = 0.0
            del self._held[value]
            if not value.kept and not self._stream.expects(value):
                self._streams.reader.drop(value)
        self._results[key] = result
        self._bytes[pool] = size
        self._made[pool] = self._made.get(pool, 0) + nbytes

    def holds(self, value: Value) -> bool:
        """Whether a value used now stays: it does if there is room for it."""
        if value.is_held or self._has_ended:
            return value.is_held
        pool = value.pool
        size = self._bytes.get(pool, 0) + value.nbytes
        if size > pool.most_at_a_time:
            self._tell(size)
            return False
        value.is_held = True
        self._held[value] = None
        self._bytes[pool] = size
        return True

    def _take_part(self, pool: Pool, held: Iterable[Value] = (), made: int = 0) -> list[Value]:
        """Reserve room in a budget for the lots, and for what was held beside them and the bytes of results.

        Returns what has to be dropped.
        """
        turns = self._turns.get(pool)
        if turns is None:
            turns = self._turns[pool] = Turns(self._lots)
            pool.turns.append(turns)
        others = {value for value in held if value.pool is pool}.difference(*turns)
        turns.planned = len(turns.replaced)
        turns.others = max(turns.others, made + sum(value.nbytes for value in others))
        return pool.reconsider(anew=True)

    def _tell(self, size: int) -> None:
        if not self._has_told:
            self._has_told = True
            log.info("what is used at once takes %d bytes, for which there is no room: it is read each time", size)
