"""What may stay in memory between ops: values under a budget.

Always true:
- what is resident are the pages of the files themselves: there is no copy that could be stale
- values that fit in the budget all stay; of those that do not, a fixed part stays, spread evenly over the order in
  which they are read, and the rest streams: a pass then reads from the disk only what is over the budget
- values of up to 64 KiB stay once they are read
- a budget is never more than what the machine and its cgroups have room for

The functions that change a plan return the values that have to leave; dropping them is for the caller, who holds no
lock then.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterable

import torch

from offload.memory import available_bytes
from offload.storage.file import TensorFile
from offload.storage.pages import Range, joined

SMALL = 64 << 10  # bytes up to which a value stays once it is read
WINDOW = 64 << 20  # bytes that stream: read ahead, in use, and not yet dropped
_SHARE = 0.85  # of the memory that is available, where no budget is set; the rest is for activations
_LOOK_AGAIN = 2.0  # seconds after which available memory is looked at again
_NEWS = 0.1  # by how much of itself a total or a room has to change for a new plan


class Value(Range):
    """A value, or a part of one, that is read as a whole.

    Attributes:
        pool: the budget that it is under.
        kept: whether it stays in memory once it is read.
        pinned: whether it stays whatever the plan.
    """

    __slots__ = ("kept", "pinned", "pool")

    def __init__(self, pool: Pool, file: TensorFile, start: int, nbytes: int, *, shared: bool) -> None:
        super().__init__(file, start, nbytes, shared=shared)
        self.pool = pool
        self.kept = False
        self.pinned = False

    def read(self) -> None:
        """Bring it in; where not everything stays, without its neighbours.

        Raises:
            ReadError: the disk did not give it.
        """
        self.bring_in(exactly=not self.pool.fits)


class Pool:
    """Values under one budget. Not thread-safe: the caller holds a lock.

    Attributes:
        max_memory: bytes that may stay resident; None for what there is room for.
        window: bytes that may be read ahead; 0 for none.
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
                room = max(0, min(self.max_memory, available - self.window))
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
        self._total = self._planned = sum(extent.nbytes for extent in joined(values))  # views may overlap
        kept = set(values) if self.fits else _spread(values, self._room)
        leaving = []
        for value in values:
            if value.kept and value not in kept:
                leaving.append(value)
            value.kept = value in kept
        return leaving


def _spread(values: list[Value], room: int) -> set[Value]:
    """Those that stay: the pinned and the small ones, and of the others as many as have room, evenly spread."""
    kept = {value for value in values if value.pinned or value.nbytes <= SMALL}
    others = [value for value in values if value not in kept]
    left = room - sum(value.nbytes for value in kept)
    share = left / max(sum(value.nbytes for value in others), 1)
    due = 0.0
    for value in others:
        due += share * value.nbytes
        if value.nbytes <= min(due, left):
            kept.add(value)
            due -= value.nbytes
            left -= value.nbytes
    for value in others:
        if value.nbytes <= left and value not in kept:
            kept.add(value)
            left -= value.nbytes
    return kept


_TURNS = itertools.count()
_POOLS: weakref.WeakSet[Pool] = weakref.WeakSet()
