"""What may stay in memory between ops: values under a budget.

Always true:
- what is resident are the pages of the files themselves: there is no copy that could be stale
- values that fit in the budget all stay; of those that do not, a fixed part stays, spread evenly over the order in
  which they are read, and the rest streams: a pass then reads from the disk only what is over the budget
- values of up to 64 KiB stay once they are read
- a value is `AWAY` (nothing is known of it), `QUEUED`, being `READ`, or `HERE`: read ahead, and not asked for yet
- a budget is never more than what the machine and its cgroups have room for

The functions that change a plan return the values that have to leave; dropping them is for the caller, who holds no
lock then.
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterable

import torch

from offload.memory import available_bytes
from offload.storage.file import TensorFile
from offload.storage.handle import Handle
from offload.storage.locks import fork_safe_lock
from offload.storage.pages import Range, joined

log = logging.getLogger("offload.prefetch")

SMALL = 64 << 10  # bytes up to which a value stays once it is read
WINDOW = 64 << 20  # bytes that stream: read ahead, in use, and not yet dropped
_SHARE = 0.85  # of the memory that is available, where no budget is set; the rest is for activations
_LOOK_AGAIN = 2.0  # seconds after which available memory is looked at again
_MOST_CONTEXTS = 16  # reads before a value that are told apart
AWAY, QUEUED, READ, HERE = range(4)
_NEWS = 0.1  # by how much of itself a total or a room has to change for a new plan


class Value(Range):
    """A value, or a part of one, that is read as a whole.

    Attributes:
        pool: the budget that it is under.
        kept: whether it stays in memory once it is read.
        pinned: whether it stays whatever the plan.
        state: where it is on its way, as far as the reader has to do with it.
        is_leaving: whether it is to be dropped.
        is_held: whether it stays for the moment, as several threads use it.
        seeded: what was said to follow.
        waited: seconds that ops have waited for it, in all.
    """

    __slots__ = (
        "_branches",
        "_followers",
        "is_held",
        "is_leaving",
        "kept",
        "pinned",
        "pool",
        "seeded",
        "state",
        "waited",
    )

    def __init__(self, pool: Pool, file: TensorFile, start: int, nbytes: int, *, shared: bool) -> None:
        super().__init__(file, start, nbytes, shared=shared)
        self.pool = pool
        self.kept = self.pinned = self.is_leaving = self.is_held = False
        self.state = AWAY
        self.waited = 0.0
        self.seeded: weakref.ref[Value] | None = None
        self._followers: dict[int, tuple[weakref.ref[Value], bool]] = {}  # by the id of the read before
        self._branches = False

    @classmethod
    def nowhere(cls) -> Value:
        """One that nothing is known of, and that is not to be brought in."""
        nothing = cls.__new__(cls)
        nothing.nbytes = 0
        nothing.calm_until = float("inf")
        return nothing

    def read(self) -> None:
        """Bring it in; where not everything stays, without its neighbours.

        Raises:
            ReadError: the disk did not give it.
        """
        self.bring_in(exactly=not self.pool.fits)

    def follower(self, before: Value | None) -> Value | None:
        """What is expected after `before`, then this one; None if that is anybody's guess."""
        found = self._followers.get(id(before))
        if found is None and not self._branches:
            if self.seeded is not None:
                return self.seeded()
            found = next(reversed(self._followers.values()), None)
        return found[0]() if found is not None and found[1] else None

    def let_go(self) -> None:
        """Drop it from memory; the next read brings it back."""
        if self.state == HERE:
            self.state = AWAY
        super().let_go()

    def learn(self, before: Value | None, following: Value) -> None:
        """After `before`, then this one, came `following`."""
        if self.seeded is not None and self.seeded() is not following:
            self.seeded = None
        known = self._followers.pop(id(before), None)
        is_news = known is None or known[0]() is not following
        self._branches = self._branches or (known is not None and is_news)
        while len(self._followers) >= _MOST_CONTEXTS:
            del self._followers[next(iter(self._followers))]
        self._followers[id(before)] = weakref.ref(following), not (is_news and self._branches)


class Books:
    """What is known of the bytes of one stored value.

    Attributes:
        pool: the budget that it is under; None for that of the process.
        ranges: in memory, by start and length.
        copies: what stays on accelerators, by device.
    """

    __slots__ = ("copies", "pool", "ranges")

    def __init__(self) -> None:
        self.pool: Pool | None = None
        self.ranges: dict[tuple[int, int], Value] = {}
        self.copies: dict[torch.device, Value] = {}

    def begin_anew(self) -> None:
        """The value is in another file now."""
        known, self.ranges = self.ranges, {}
        for value in list(known.values()):
            value.calm_until = 0.0  # who holds on to one asks again
        self.copies = {}


def books_of(handle: Handle) -> Books:
    """Those that are kept of the value of `handle`."""
    if handle.books is None:
        with _LOCK:
            if handle.books is None:
                handle.books = Books()
    assert type(handle.books) is Books
    return handle.books


class Pool:
    """Values under one budget. Not thread-safe: the caller holds a lock.

    Attributes:
        max_memory: bytes that may stay resident; None for what there is room for.
        window: bytes that may be read ahead; 0 for none.
        reserved: bytes of the budget that are kept free for what several threads use at a time.
        on_devices: budgets for what stays on accelerators.
    """

    def __init__(
        self,
        max_memory: int | None = None,
        window: int = WINDOW,
        *,
        available: Callable[[], int] | None = None,
    ) -> None:
        self.max_memory = max_memory
        self.window = window
        self.reserved = 0
        self.on_devices: dict[torch.device, Pool] = {}
        self._available = available
        _POOLS.add(self)
        self._values: weakref.WeakValueDictionary[int, Value] = weakref.WeakValueDictionary()  # by their turn
        self._total = 0
        self._planned = 0  # the total that the plan knows of
        self._room = 0
        self._looked = float("-inf")

    @staticmethod
    def all() -> list[Pool]:
        """Every pool that is alive."""
        return list(_POOLS)

    @property
    def room(self) -> int:
        """Bytes that may stay resident now."""
        return self._room

    @property
    def fits(self) -> bool:
        """Whether all values may stay."""
        return self._total <= self._room

    def values(self) -> list[Value]:
        """The live ones, in the order in which they came."""
        return list(self._values.values())

    def add(self, values: Iterable[Value]) -> list[Value]:
        """Take values in; those that come in the order in which they will be read are best. Gives those to drop."""
        for value in values:
            self._values[next(_TURNS)] = value
            self._total += value.nbytes
            value.kept = value.nbytes <= SMALL or self._total <= self._room
        return self.reconsider()

    def reconsider(self, *, anew: bool = False) -> list[Value]:
        """Look at how much room there is, and plan again if that or the values have changed. Gives those to drop.

        Args:
            anew: look and plan in any case.
        """
        now = time.monotonic()
        room = self._room
        if anew or now - self._looked > _LOOK_AGAIN:
            self._looked = now
            available = (self._available or available_bytes)()
            room = int(available * _SHARE)
            if self.max_memory is not None:
                room = min(self.max_memory, available - self.window)
            room = max(0, room - self.reserved)
        fits = self._total <= min(room, self._room)
        news = abs(room - self._room) > _NEWS * self._room or self._total - self._planned > _NEWS * self._total
        if anew or (news and not fits):
            self._room = room
            return self._plan()
        return []

    def doubt(self) -> None:
        """A value that should be in memory was not: for none of the others it is taken for granted any more."""
        for value in self.values():
            value.calm_until = 0.0

    def _plan(self) -> list[Value]:
        """Choose what stays."""
        values = self.values()
        is_new = self._total != self._planned
        self._total = self._planned = sum(extent.nbytes for extent in joined(values))  # views may overlap
        kept = set(values) if self.fits else _stable(values, self._room, is_new=is_new)
        leaving = []
        for value in values:
            if value.kept and value not in kept:
                leaving.append(value)
            value.kept = value in kept
        log.debug(
            "%d bytes may stay: %d of %d values, %d bytes in all", self._room, len(kept), len(values), self._total
        )
        return leaving


def let_go(values: Iterable[Value]) -> None:
    """Drop values from memory."""
    for value in values:
        value.let_go()


def _stable(values: list[Value], room: int, *, is_new: bool) -> set[Value]:
    """Those that stay: the pinned and the small ones, and of the others as many as have room.

    Where the values are those of the plan before, as few as can be change: what leaves has to be read again.
    """
    kept = {value for value in values if value.pinned or value.nbytes <= SMALL}
    left = room - sum(value.nbytes for value in kept)
    others = [value for value in values if value not in kept]
    before = [] if is_new else [value for value in others if value.kept]
    size = sum(value.nbytes for value in before)
    if size > left:
        return kept | _spread(before, left)
    return kept.union(before, _spread([value for value in others if is_new or not value.kept], left - size))


def _spread(values: list[Value], room: int) -> set[Value]:
    """As many as have room, evenly spread."""
    kept: set[Value] = set()
    left = room
    share = left / max(sum(value.nbytes for value in values), 1)
    due = 0.0
    for value in values:
        due += share * value.nbytes
        if value.nbytes <= min(due, left):
            kept.add(value)
            due -= value.nbytes
            left -= value.nbytes
    for value in values:
        if value.nbytes <= left and value not in kept:
            kept.add(value)
            left -= value.nbytes
    return kept


_LOCK = fork_safe_lock()
_TURNS = itertools.count()
_POOLS: weakref.WeakSet[Pool] = weakref.WeakSet()
