"""What each thread has read, and will read next, within the window that all threads share; alone, or several as one.

Always true:
- the order is learned from the last two reads of each thread; where it has branched before, it is followed only once it
  has been seen twice
- picked values, such as experts, are not part of the order, which goes on past them: they are ahead once an op says so
- what is ahead, and what streams and is in use, counts as `in_flight` until it is used, dropped or forgotten
- what a lease holds stays until the lease moves on; a part of the budget is reserved for it, and a result that it keeps
  takes the place of the values that it was computed from
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from offload.prefetch.plan import AWAY, IN_USE, LEAVING, QUEUED, RESIDENT, SMALL, Pool, Users, Value
from offload.prefetch.reader import Reader
from offload.prefetch.value import dropping_after, page_state_of
from offload.storage.handle import Handle
from offload.system import clock

_LEAST_AHEAD = 3  # values, if they fit: one in use, one resident, one on its way
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
        """The stream of the running thread, which has a share of the window from now on."""
        stream = self.known()
        if stream is None:
            stream = self._local.stream = Stream(self)
        if stream not in self.live:
            self.reap()
            self.live.append(stream)
        return stream

    def join(self, stream: Stream | None) -> Stream | None:
        """Make the running thread read as one with others; None: by itself. Returns what it read as before."""
        before = self.known()
        self._local.stream = stream
        return before

    def known(self) -> Stream | None:
        """The stream of the running thread, if it has read anything, or reads as one with others."""
        stream: Stream | None = getattr(self._local, "stream", None)
        return stream

    def lease(self) -> Lease | None:
        stream = self.known()
        return None if stream is None else stream.lease

    def reap(self) -> None:
        """Take the window share of threads that have ended or stopped reading."""
        for stream in [stream for stream in self.live if stream.is_idle()]:
            stream.give_up()
            self.live.remove(stream)

    def in_flight(self) -> int:
        """Bytes that are ahead, that stream and are in use, or that are still being dropped."""
        return sum(stream.in_flight for stream in self.live) + self.reader.leaving_bytes

    def share(self, window: int) -> int:
        return window // max(len(self.live), 1)


class Stream:
    """What one thread has read, and will read next.

    Attributes:
        ahead: values that are read ahead for this thread, or will be, and the move at which each is due.
        in_flight: bytes that are ahead, or that stream and are in use or just used.
        lease: holds its values, if several threads read as one.
    """

    def __init__(self, streams: Streams, lease: Lease | None = None) -> None:
        self.in_flight = 0
        self.lease = lease
        self._streams = streams
        self._reader = streams.reader
        self._thread = weakref.ref(threading.current_thread())
        self._touched = 0.0
        self._before: Value | None = None
        self._last: Value | None = None
        self._walked: tuple[Value | None, Value | None] = (None, None)  # how far the order has been followed
        self.ahead: OrderedDict[Value, int] = OrderedDict()
        self._in_order = 0  # values ahead that are neither small nor picked
        self._moves = self._picks = 0  # values of the order, and picked ones
        self._surprises = 0  # in a row
        self._picked = 0  # bytes picked last; as much of the window stays free for them
        self._used: deque[Value] = deque()  # streaming values only

    def is_idle(self) -> bool:
        thread = self._thread()
        return thread is None or not thread.is_alive() or clock.now() - self._touched > _FORGET

    def move_to(self, value: Value) -> None:
        """The thread reads `value` now: learn from it, and read ahead from there."""
        self._touched = clock.now()
        if value is self._last:
            return
        self._moves += not value.is_picked
        self._picks += value.is_picked
        self._arrive(value)
        self._use(value)
        if not self.ahead:
            self._walked = (self._before, self._last) if value.is_picked else (self._last, value)
        if _is_in_order(value):
            if self._last is not None:
                self._last.learn(self._before, value)
            self._before, self._last = self._last, value
        if self._is_few() or self.in_flight < _NEARLY * self._streams.share(value.pool.window):
            self._read_ahead()

    def bring_soon(self, values: Sequence[Value]) -> None:
        """These are about to be read, in this order: before everything else that is ahead."""
        new = [value for value in dict.fromkeys(values) if not value.is_ahead and value not in self.ahead]
        self._picked = sum(value.nbytes for value in new) if new else self._picked
        self._reader.queue_first(list(itertools.takewhile(self._put_ahead, new)))

    def capacity_past(self, pool: Pool) -> int:
        """Bytes of the window for picked values that are read past the page cache."""
        return self._streams.share(pool.window) // 2

    def reserve(self, nbytes: int) -> None:
        """So much is about to be read past the page cache: what follows the order leaves room for it."""
        self._picked = nbytes

    def give_up(self) -> None:
        self._forget(list(self.ahead))
        while self._used:
            self._drop(self._used.popleft())
        self._before = self._last = None
        self._surprises = self.in_flight = self._in_order = 0

    def _arrive(self, value: Value) -> None:
        """Take a value out of those ahead, and forget those that are overdue."""
        if value in self.ahead:
            self._take(value)
            self.in_flight -= value.nbytes
            self._surprises = 0
        elif _is_in_order(value):
            self._surprises += 1
        if self.lease is not None:  # what one thread does not use, the next one may
            return
        if self._surprises > _PATIENCE:
            self._forget(list(self.ahead))
        now = self._picks if value.is_picked else self._moves
        alike: Iterable[tuple[Value, int]]  # how late they are
        alike = ((other, now - due) for other, due in self.ahead.items() if other.is_picked == value.is_picked)
        if not value.is_picked:  # they are due one after the other, and may be thousands
            alike = itertools.takewhile(lambda one: one[1] > _OVERDUE, alike)
        self._forget([other for other, late in alike if late > _OVERDUE])

    def _use(self, value: Value) -> None:
        """An op may use several values, so streaming ones are dropped slightly after their use."""
        if value.stage is LEAVING:
            value.move_to(IN_USE)
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
            self._take(value)
            if value.stage is QUEUED:
                value.move_to(AWAY)
            else:
                self._reader.counts.wasted += 1
            self._drop(value)

    def _take(self, value: Value) -> None:
        del self.ahead[value]
        self._in_order -= _is_in_order(value)

    def _drop(self, value: Value) -> None:
        self.in_flight -= value.nbytes
        if value in self.ahead:  # it will be needed again soon
            return
        if not value.kept:
            self._reader.drop(value)
        elif value.stage is RESIDENT:
            value.move_to(AWAY)

    def _read_ahead(self) -> None:
        """Follow the order as far as the window reaches."""
        now = clock.now()
        before, last = self._walked
        for _ in range(_MOST_STEPS):
            following = last.follower(before) if last is not None else None
            if following is None or following is self._last or following in self.ahead:
                break
            if following.checked_until < now:
                if not self._put_ahead(following):
                    break
                self._reader.queue(following)
            before, last = last, following
        self._walked = (before, last)

    def _put_ahead(self, value: Value) -> bool:
        """Count a value as ahead, if it fits in the window."""
        if not self._may_enter(value):
            return False
        self.ahead[value] = (self._picks if value.is_picked else self._moves) + len(self.ahead)
        self._in_order += _is_in_order(value)
        self.in_flight += value.nbytes
        return True

    def _may_enter(self, value: Value) -> bool:
        """Whether a value fits in the window.

        It may be wider for the next few values; if no thread has anything ahead, it takes even a larger one.
        """
        if value.pool.window == 0:
            return False
        if not self._fits(value) and len(self._streams.live) > 1:
            self._streams.reap()
        return self._fits(value) or not any(other.ahead for other in self._streams.live)

    def _fits(self, value: Value) -> bool:
        streams, pool = self._streams, value.pool
        window = pool.widest if self._is_few() else pool.window
        share = streams.share(window)
        if not value.is_picked:
            share -= min(self._picked, share // 2)
        return self.in_flight + value.nbytes <= share and streams.in_flight() + value.nbytes <= window

    def _is_few(self) -> bool:
        """Whether less is ahead than there should be: small and picked values don't count."""
        return self._in_order < _LEAST_AHEAD


def _is_in_order(value: Value) -> bool:
    """Whether a value is part of the order: small ones are read once, and picked ones in no order."""
    return value.nbytes > SMALL and not value.is_picked


class Lease:
    """Values that several threads use one after the other, and that stay until all of them have.

    The threads read as one, in the order of the first of them: the others find everything in memory.

    Attributes:
        keeps_results: whether what the first thread computes from values is kept for the others, too.
        results: what is kept of these.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._stream = Stream(streams, lease=self)
        self._blocks: Sequence[Sequence[Handle]] = ()
        self._held: dict[Value, None] = {}
        self._bytes: dict[Pool, int] = {}  # held, per pool
        self._users: dict[Pool, Users] = {}
        self.results: dict[Hashable, torch.Tensor] = {}
        self._made: dict[Pool, int] = {}  # bytes of results beyond those of the values that they replace, per pool
        self._has_ended = False
        self.keeps_results = False

    def expect(self, blocks: Sequence[Sequence[Handle]]) -> None:
        """Reserve memory for these blocks, each used until the lease moves on. Other values may be used, too."""
        with dropping_after(self._streams.reader.lock) as leaving:
            self._blocks = blocks
            for pool in dict.fromkeys(value.pool for block in self._tracked() for value in block):
                leaving.extend(self._take_part(pool))

    def compute(self, act: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `act` returns; of what that is computed from, nothing is kept."""
        self.keeps_results = False
        try:
            return act()
        finally:
            self.keeps_results = True

    def join(self) -> None:
        with self._streams.reader.lock:
            self._streams.join(self._stream)

    @contextmanager
    def joined(self) -> Iterator[None]:
        streams = self._streams
        with streams.reader.lock:
            own = streams.join(self._stream)
        try:
            yield
        finally:
            with streams.reader.lock:
                streams.join(own)

    def move_on(self) -> None:
        """All threads have used what is held. From now on, as much is reserved in the budget."""
        with dropping_after(self._streams.reader.lock) as leaving:
            self.results = {}
            held, self._held = self._held, {}
            results, self._made = self._made, {}
            sizes, self._bytes = self._bytes, {}
            for value in held:
                self._release(value)
            for pool, size in sizes.items():
                if size > pool.at_a_time:
                    leaving.extend(self._take_part(pool, held, results.get(pool, 0)))

    def end(self) -> None:
        self._has_ended = True
        self.move_on()
        with dropping_after(self._streams.reader.lock) as leaving:
            self._stream.give_up()
            self._streams.live = [one for one in self._streams.live if one is not self._stream]
            while self._users:
                pool, users = next(iter(self._users.items()))
                pool.users = [one for one in pool.users if one is not users]
                leaving.extend(pool.reconsider(anew=True))
                del self._users[pool]
            self._blocks = ()

    # Under the lock

    def keep(self, key: Hashable, result: torch.Tensor, pool: Pool, sources: Iterable[Value]) -> None:
        """Keep a result until the lease moves on, if it fits, instead of the values that it was computed from."""
        held = [value for value in dict.fromkeys(sources) if value in self._held]  # several pieces may be of one value
        more = result.untyped_storage().nbytes() - sum(value.nbytes for value in held)
        size = self._bytes.get(pool, 0) + more
        if size > pool.most_at_a_time or self._has_ended:
            return
        for value in held:
            del self._held[value]
            self._release(value)
        self.results[key] = result
        self._bytes[pool] = size
        self._made[pool] = self._made.get(pool, 0) + more

    def holds(self, value: Value) -> bool:
        """Whether a value used now stays: it does if it fits."""
        if value.is_held or self._has_ended:
            return value.is_held
        pool = value.pool
        size = self._bytes.get(pool, 0) + value.nbytes
        if size > pool.most_at_a_time:
            return False
        value.is_held = True
        self._held[value] = None
        self._bytes[pool] = size
        return True

    def _release(self, value: Value) -> None:
        value.is_held = False
        value.checked_until = 0.0
        if not value.kept and value not in self._stream.ahead:
            self._streams.reader.drop(value)

    def _take_part(self, pool: Pool, held: Iterable[Value] = (), results: int = 0) -> list[Value]:
        """Reserve memory in a budget for the blocks, and for what was held beside them and the bytes of results.

        Returns what has to be dropped.
        """
        users = self._users.get(pool)
        if users is None:
            users = self._users[pool] = Users(self._tracked)
            pool.users.append(users)
        others = {value for value in held if value.pool is pool}.difference(*users.blocks())
        users.others = max(users.others, results + sum(value.nbytes for value in others))
        return pool.reconsider(anew=True)

    def _tracked(self) -> list[list[Value]]:
        states = ([page_state_of(handle) for handle in block] for block in self._blocks)
        return [list(dict.fromkeys(value for state in block for value in state.ranges.values())) for block in states]
