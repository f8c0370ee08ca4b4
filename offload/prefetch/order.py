"""What each thread has read, and will read next, within the window that all threads share.

Always true:
- the order is learned from the last two reads of each thread; where it has branched before, it is followed only once it
  has been seen twice
- picked values, such as experts, are not part of the order, which goes on past them: they are ahead once an op says so
- what is ahead, and what streams and is in use, counts as `in_flight` until it is used, dropped or forgotten
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from offload.prefetch.plan import Pool
from offload.prefetch.reader import Reader
from offload.prefetch.value import AWAY, IN_USE, LEAVING, QUEUED, RESIDENT, SMALL, Value
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
        """The stream of the running thread."""
        stream = self.of_thread()
        if stream not in self.live:
            self.reap()
            self.live.append(stream)
        return stream

    def of_thread(self) -> Stream:
        """Like `own`, for a thread that need not have a share of the window."""
        stream = self.known()
        if stream is None:
            stream = self._local.stream = Stream(self)
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

    def give_up_own(self) -> None:
        """Drop everything that is ahead for the running thread."""
        stream = self.known()
        if stream is not None:
            stream.give_up()

    def reap(self) -> None:
        """Take the window share of threads that have ended or stopped reading."""
        for stream in [stream for stream in self.live if stream.is_idle()]:
            stream.give_up()
            self.live.remove(stream)

    def part_with(self, stream: Stream) -> None:
        """No thread reads so any more: its part of the window is for others."""
        stream.give_up()
        self.live = [one for one in self.live if one is not stream]

    def in_flight(self) -> int:
        """Bytes that are ahead, that stream and are in use, or that are still being dropped."""
        return sum(stream.in_flight for stream in self.live) + self.reader.leaving_bytes

    def share(self, window: int) -> int:
        """One thread's part of a window."""
        return window // max(len(self.live), 1)


class Holder(Protocol):
    """What decides whether a value that several threads use stays for now: a `Lease`."""

    def holds(self, value: Value, /) -> bool: ...


class Stream:
    """What one thread has read, and will read next.

    Attributes:
        ahead: values that are read ahead for this thread, or will be, and the move at which each is due.
        in_flight: bytes that are ahead, or that stream and are in use or just used.
        lease: holds its values, if several threads read as one.
    """

    def __init__(self, streams: Streams, lease: Holder | None = None) -> None:
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
        """Whether its thread has ended or stopped reading."""
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
        """Drop everything."""
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
        if value.is_picked:
            ahead = ((other, self._picks - due) for other, due in self.ahead.items() if other.is_picked)
            self._forget([other for other, late in ahead if late > _OVERDUE])
            return
        while (first := next((one for one in self.ahead.items() if not one[0].is_picked), None)) is not None:
            if self._moves - first[1] <= _OVERDUE:
                break
            self._forget([first[0]])

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
                self._reader.count_wasted()
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
