"""What one thread has read, and will read.

Always true:
- what is ahead, and what streams and is in use, is counted in `in_flight` until it is used, dropped or forgotten
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from offload.prefetch.residency import SMALL
from offload.prefetch.tracked import AWAY, QUEUED, READ, Tracked

if TYPE_CHECKING:
    from offload.prefetch.engine import Engine

_MOST_STEPS = 256  # that the order is followed at a time
_NEARLY = 0.75  # of the window: with more in flight, the order is not followed on yet
_PATIENCE = 2  # reads in a row that were not expected, until what is ahead is given up
_OVERDUE = 8  # reads that may overtake a value that is ahead
_FORGET = 5.0  # seconds after which a thread that reads no more loses its part of the window


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
        self._surprises = self.in_flight = 0

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
        if value in self._ahead:  # it comes again soon
            return
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
