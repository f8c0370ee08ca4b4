"""What may stay in memory between ops: values under a budget.

Always true:
- resident values are pages of the files themselves: there is no copy that could become stale
- if all values fit in the budget, all stay; if not, a fixed part stays, spread evenly over the order of reads, and the
  rest streams: a pass then reads from the disk only what exceeds the budget
- if several threads use the values block by block, the streaming part of the largest block fits
- of values that are picked from many, such as experts, the most used stay, in what is left beside what each
  pass reads
- values of up to 64 KiB stay once they are read
- a budget never exceeds what the machine and its cgroups have

Functions that change a plan return the values to evict; the caller drops them after releasing the lock.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from offload.memory import available_bytes
from offload.prefetch.pages import joined
from offload.prefetch.picked import Picked
from offload.prefetch.room import free_on, ooms_on, room_on, spare_of
from offload.prefetch.value import AWAY, SMALL, Value, log, page_state_of
from offload.storage.handle import Handle
from offload.system import clock
from offload.system.locks import fork_safe_lock

WINDOW = 64 << 20  # least bytes in flight: read ahead, in use, or not yet dropped
_AHEAD = 0.25  # seconds of disk reads to have ahead
_PART = 0.1  # largest share of the budget that the window takes
_RATES = 0.25  # weight of a new measurement of the disk rate
_SHARE = 0.85  # share of the available memory without a set budget; the rest is for the window and activations
_LOOK_AGAIN = 2.0  # seconds between checks of available memory
_GLANCE = 0.1  # seconds between looks whether others need what is spared on a device
_BESIDE = 32 << 20  # bytes of a block that may stream beside the budget
_TELLING = 4 << 20  # smallest read, in bytes, that says something about the disk rate
_NEWS = 0.1  # relative change of the total or the budget that triggers a new plan
_GOLDEN = (5**0.5 - 1) / 2  # fractions of its multiples are spread evenly, however many there are
_CALM = 30.0  # seconds without an out-of-memory error after which more may stay on a device again
_FEW = 2048  # values of a device for which each new one triggers a plan, in a millisecond or two


@dataclass(eq=False)
class Users:
    """Several threads that use values block by block; a block stays in memory until all of them have used it.

    Attributes:
        blocks: the handles expected to be used together.
        others: most bytes that were in memory with a block, without being in any: of results, and of other values.
        replaced: values of which only results stay.
        planned: the number of them when the plan was made.
    """

    blocks: Sequence[Sequence[Handle]] = ()
    others: int = 0
    replaced: weakref.WeakSet[Value] = field(default_factory=weakref.WeakSet)
    planned: int = 0

    @property
    def has_news(self) -> bool:
        """Whether many more values are replaced than was planned with."""
        return len(self.replaced) - self.planned > _NEWS * len(self.replaced)

    def __iter__(self) -> Iterator[list[Value]]:
        """The tracked values of each block."""
        for block in self.blocks:
            yield list(dict.fromkeys(value for handle in block for value in page_state_of(handle).ranges.values()))


class Pool:
    """Values under one budget. Not thread-safe: the caller holds the lock.

    Attributes:
        max_memory: bytes that may stay resident; None for as much as the machine has.
        fixed_window: bytes that may be read ahead, as set by the user, 0 for none; None for the automatic window.
        rate: recent disk rate in bytes per second; 0 until known.
        users: those that work block by block.
        at_a_time: most bytes that stream of any block, per group of users, as far as is known.
        picked: which of the picked values stay.
        on_devices: budgets for what stays on accelerators.
        beside: models that count in this budget, and bytes of them that are under no plan of it: of an assistant in
            memory; on an accelerator, of keys and values, while it does not generate.
        contexts: of each `generate` that runs, the model, and the bytes of its keys and values on an accelerator.
    """

    def __init__(
        self,
        max_memory: int | None = None,
        window: int | None = None,
        *,
        available: Callable[[], int] | None = None,
    ) -> None:
        self.max_memory = max_memory
        self.fixed_window = window
        self.rate = 0.0
        self.users: list[Users] = []
        self.at_a_time = 0
        self.picked = Picked()
        self.on_devices: dict[torch.device, OnDevice] = {}
        self.beside: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self.contexts: dict[object, tuple[nn.Module, int]] = {}
        self._available = available
        with _LOCK:
            _POOLS.add(self)
        self._arrivals = itertools.count()
        self._values: weakref.WeakValueDictionary[int, Value] = weakref.WeakValueDictionary()  # in order of arrival
        self._total = 0
        self._planned = 0  # the total when the plan was made
        self._limit = 0
        self._looked = float("-inf")

    @staticmethod
    def all() -> list[Pool]:
        """All live pools."""
        with _LOCK:
            return list(_POOLS)

    @property
    def capacity(self) -> int:
        """Bytes that may stay resident now."""
        return max(0, self._limit - self.reserved)

    @property
    def reserved(self) -> int:
        """Bytes of the budget reserved for streaming blocks."""
        return self._reserve(self.at_a_time)

    @property
    def _least_news(self) -> float:
        """Relative growth of the total that triggers a new plan."""
        return _NEWS

    @property
    def window(self) -> int:
        """Bytes that may be read ahead, in use, or not yet dropped: what the disk delivers in a quarter second.

        One value may be ahead whatever waits to be dropped: the disk does not wait for the thread that drops.
        """
        return self._window_beside(self._limit)

    @property
    def widest(self) -> int:
        """Bytes that the window may grow to for the next few values, if these are large."""
        return self._widest_beside(self._limit)

    @property
    def most_at_a_time(self) -> int:
        """Bytes of a block that may stream."""
        return max(self.window, self._limit // 2)

    @property
    def fits(self) -> bool:
        """Whether all values fit in memory."""
        return self._total <= self._limit

    @property
    def keeps_all(self) -> bool:
        """Whether there are values, and all of them fit in memory."""
        return 0 < self._total <= self._limit

    @property
    def nbytes(self) -> int:
        """Total size of values whose files are in use; may be a little high, as views can overlap."""
        return sum(value.nbytes for value in self.values() if value.has_file)

    def free(self) -> int:
        """Bytes that may stay beside all values."""
        return max(0, self._limit_now() - self.nbytes)

    def _limit_now(self) -> int:
        available, beside = (self._available or available_bytes)(), sum(self.beside.values())
        if self.max_memory is None:  # those in anonymous memory are not available already; mapped ones seem to be
            return max(0, min(int(available * _SHARE), available - beside))
        limit = min(max(0, self.max_memory - beside), available)
        return max(0, min(limit, available - self._window_beside(limit)))  # beside the new budget, not the one before

    def _window_beside(self, limit: int) -> int:
        if self.fixed_window is not None:
            return self.fixed_window
        return min(max(WINDOW, int(self.rate * _AHEAD)), self._widest_beside(limit))

    def _widest_beside(self, limit: int) -> int:
        return max(WINDOW, int(limit * _PART)) if self.fixed_window is None else self.fixed_window

    def values(self) -> list[Value]:
        """The live ones, in order of arrival."""
        return list(self._values.values())

    def add(self, values: Iterable[Value]) -> list[Value]:
        """Add values, preferably in the order in which they will be read. Returns those to drop."""
        for value in values:
            self._values[next(self._arrivals)] = value
            self._total += value.nbytes
            value.kept = self._always(value) or self._total <= self.capacity
        return self.reconsider()

    def reconsider(self, *, anew: bool = False) -> list[Value]:
        """Check how much memory there is, and plan again if it or the values have changed. Returns those to drop.

        Args:
            anew: check and plan in any case.
        """
        now = clock.now()
        limit = self._limit
        if anew or self.is_due():
            self._looked = now
            limit = self._limit_now()
        fits = self._total <= min(limit, self._limit)
        grown = self._total - self._planned
        news = self._is_news(limit) or grown > self._least_news * self._total
        if anew or (news and not fits):
            self._limit = limit
            return self._plan()
        return []

    def _is_news(self, limit: int) -> bool:
        """Whether a new budget triggers a new plan."""
        return abs(limit - self._limit) > _NEWS * self._limit

    def is_due(self) -> bool:
        """Whether it is time to look again how much memory there is."""
        return clock.now() - self._looked > _LOOK_AGAIN

    def learn_rate(self, nbytes: int, seconds: float) -> None:
        """The disk delivered so many bytes in one go."""
        if nbytes >= _TELLING and seconds > 0:
            self.rate += (nbytes / seconds - self.rate) * (_RATES if self.rate else 1)

    def admit(self, value: Value) -> list[Value]:
        """`value`, a picked one, is read: it may stay instead of less used ones, which are returned."""
        self.picked.rescale(self._values.values())
        if value.kept or self.users:  # all values that several threads use are used equally often
            return []
        replaced = self.picked.admit(value)
        if replaced is None:
            return []
        value.kept = True
        for one in replaced:
            one.kept = False
        return replaced

    def would_admit(self, value: Value) -> bool:
        """Whether `admit` would let `value` stay, if it were used now."""
        return not self.users and self.picked.would_admit(value)

    def begin_anew(self) -> None:
        """In a forked child, nothing is read, and no other thread uses its values."""
        self.users = []
        for value in self.values():
            if value.stage is not AWAY:
                value.move_to(AWAY)

    def part_with(self, users: Users) -> list[Value]:
        """They use no values any more. Returns those to drop."""
        self.users = [one for one in self.users if one is not users]
        return self.reconsider(anew=True)

    def doubt(self) -> None:
        """A value that should have been in memory was not: don't assume it of any other."""
        for value in self.values():
            value.assume_until(0.0)

    def _plan(self) -> list[Value]:
        """Choose what stays."""
        values = self.values()
        self._total = sum(extent.nbytes for extent in joined(values))  # views may overlap
        is_new = abs(self._total - self._planned) > _NEWS * self._total
        self._planned = self._total
        self.at_a_time = 0
        kept = set(values) if self.fits else self._chosen(values, is_new=is_new)
        leaving = []
        for value in values:
            if value.kept and value not in kept:
                leaving.append(value)
            value.kept = value in kept
        log.debug(
            "%d bytes may stay: %d of %d values, %d bytes in all", self.capacity, len(kept), len(values), self._total
        )
        return leaving

    def _chosen(self, values: list[Value], *, is_new: bool) -> set[Value]:
        """What stays: pinned and small values, what blocks require, and as many of the others as fit.

        Picked values come last: none of them is used more often than those that every pass reads.

        If most values were in the previous plan, few are exchanged: what is evicted has to be read again.
        """
        kept = {value for value in values if self._always(value)}
        picked = [] if self.users else [value for value in values if value.is_picked and value not in kept]
        values = values if self.users else [value for value in values if not value.is_picked]
        due = self._due_of_blocks(kept) if self.users else ()
        left = self.capacity - _size(kept)
        for tier in _stayed(due), due, *self._first_of(values, is_new=is_new), values:
            others = [value for value in tier if value not in kept]
            chosen = others if _size(others) <= left else self._some_of(others, left)
            kept.update(chosen)
            left -= _size(chosen)
        kept.update(self.picked.choose(picked, max(left, 0)))
        return kept

    def _always(self, value: Value) -> bool:
        """Whether a value stays whatever the budget."""
        return value.pinned or value.nbytes <= SMALL

    def _first_of(self, values: Iterable[Value], *, is_new: bool) -> Sequence[list[Value]]:
        """What stays rather than others."""
        before = [] if is_new else [value for value in values if value.kept]
        return _stayed(before), before

    def _some_of(self, values: list[Value], free: int) -> set[Value]:
        """As many as fit, evenly spread."""
        return _spread(values, free)

    def _due_of_blocks(self, kept: set[Value]) -> list[Value]:
        """What has to stay so that no block streams more than fits."""
        blocks: list[list[Value]] = []
        for users in self.users:
            apart = kept.union(users.replaced)
            blocks.extend(self._streaming(block, apart) for block in users)
        others, free = max(users.others for users in self.users), self._limit - _size(kept)
        most = min(max(map(_size, blocks), default=0), self.most_at_a_time)
        too_small, due = 0, _due(blocks, most)
        while most - too_small > SMALL:
            size = (too_small + most) // 2
            found = _due(blocks, size)
            if _size(found) + self._reserve(size + others) <= free:
                most, due = size, found
            else:
                too_small = size
        self.at_a_time = most + others
        return due

    def _streaming(self, block: Iterable[Value], kept: set[Value]) -> list[Value]:
        """The part of a block that may stream: what has stayed so far first, then larger ones first."""
        own = [value for value in block if value.pool is self and value not in kept]
        return sorted(own, key=lambda value: (not value.has_stayed, -value.nbytes))

    def _reserve(self, at_a_time: int) -> int:
        return max(0, len(self.users) * at_a_time - min(self.window // 2, _BESIDE))


class OnDevice(Pool):
    """Values that are copied to an accelerator.

    Its values become known one by one, each as it is sent for the first time. A new one may stay instead of another,
    so that those that stay are spread evenly; but one that has left is not sent again for that.

    Without a set budget they fill the device: `grant` says how far, and holds until the next one. If others then take
    what was spared for them, less stays.

    Args:
        max_memory: bytes that may stay there; None for what there is room for.
        device: whose memory it is.

    Attributes:
        told: what was last logged of it.
        ooms: failed allocations there that are taken into account.
    """

    def __init__(self, max_memory: int | None, device: torch.device) -> None:
        super().__init__(max_memory, window=0)
        self.told = ""
        self.ooms = ooms_on(device)
        self._device = device
        self._granted: int | None = None
        self._spared = 0
        self._glanced = 0.0
        self._most = sys.maxsize  # since an out-of-memory error
        self._calm_from = 0.0
        self._new: set[Value] = set()

    def add(self, values: Iterable[Value]) -> list[Value]:
        """As in all pools."""
        values = list(values)
        self._new = {value for value in values if not value.is_picked}
        if self._new:
            self._looked = float("-inf")  # a device is full within less than the usual time between two looks
        try:
            return super().add(values)
        finally:
            self._new = set()

    @property
    def keeps_nothing(self) -> bool:
        """Whether there is no budget to keep anything there, however small. Under the engine's lock."""
        return not (self.room() if self._granted is None or self.max_memory is not None else self._granted)

    def room(self) -> int:
        """Bytes that there is room for now, with those that are there. Under the engine's lock."""
        if self.max_memory is not None:
            return self.max_memory
        generating = {model for model, _ in self.contexts.values()}
        beside = sum(nbytes for model, nbytes in self.beside.items() if model not in generating)
        beside += sum(nbytes for _, nbytes in self.contexts.values())
        return room_on(self._device, held=self._held(), beside=beside)

    def _held(self) -> int:
        return sum(value.cached_bytes() for value in self.values())

    def is_due(self) -> bool:
        """As in all pools, and soon after others have taken half of what was spared, or an allocation has failed."""
        if clock.now() - self._glanced > _GLANCE:
            self._glanced = clock.now()
            is_short = self.max_memory is None and free_on(self._device) < self._spared // 2
            if is_short or ooms_on(self._device) > self.ooms:
                self._looked = float("-inf")
        return super().is_due()

    def grant(self) -> list[Value]:
        """Let as much stay as there is room for now, if no budget is set. Returns those to drop."""
        self._granted = None
        return self.reconsider(anew=True)

    def keep_less(self) -> list[Value]:
        """Let half as much stay as does, until there was no out-of-memory error for a while. Returns those to drop."""
        stay = [value for value in self.values() if value.cached_bytes()]
        self._halve(_size(stay))
        self.reconsider(anew=True)
        return [value for value in stay if not value.kept]

    def _halve(self, nbytes: int) -> None:
        self._most = nbytes // 2 if nbytes > SMALL else 0
        self._calm_from, self.ooms = clock.now() + _CALM, ooms_on(self._device)

    def _limit_now(self) -> int:
        held = self._held()
        if ooms_on(self._device) > self.ooms:  # somebody else's
            self._halve(held)
        is_calm = clock.now() >= self._calm_from
        if is_calm and self._most < sys.maxsize:
            self._most = self._most * 2 if 0 < self._most // 2 < held else sys.maxsize
            self._calm_from = clock.now() + _CALM
        return min(self._most, self._granted_now(held, is_calm=is_calm) if self.max_memory is None else self.max_memory)

    def _granted_now(self, held: int, *, is_calm: bool) -> int:
        """What there was room for when this was last asked, or what is left of it."""
        free = free_on(self._device) + held
        self._spared = spare_of(free)
        if self._granted is None:
            self._granted = self.room()
        elif free - held < self._spared // 2:
            self._granted = max(0, min(self._granted, free - self._spared))
            self._calm_from = clock.now() + _CALM
        elif is_calm:
            self._granted = max(self._granted, self.room())
        return self._granted

    def _always(self, value: Value) -> bool:
        return value.nbytes <= SMALL and not self.keeps_nothing

    def _is_news(self, limit: int) -> bool:
        return limit < self._limit or super()._is_news(limit)

    @property
    def _least_news(self) -> float:
        return 0.0 if self._new and self.max_memory != 0 and len(self._values) <= _FEW else _NEWS

    def _first_of(self, values: Iterable[Value], **_: bool) -> Sequence[list[Value]]:
        return ([value for value in values if value.has_stayed or value in self._new],)

    def _some_of(self, values: list[Value], free: int) -> set[Value]:
        """As many as fit, those with the lowest fractions of their number times the golden ratio.

        These are evenly spread over as many values as have come so far, and each of them was so before.
        """
        order = {value: number * _GOLDEN % 1 for number, value in self._values.items()}
        return _fitting(sorted(values, key=order.__getitem__), free)


def _size(values: Iterable[Value]) -> int:
    return sum(value.nbytes for value in values)


def _stayed(values: Iterable[Value]) -> list[Value]:
    return [value for value in values if value.has_stayed]


def _due(blocks: Iterable[list[Value]], most: int) -> list[Value]:
    """What has to stay so that no block streams more than `most` bytes: little more of each than that."""
    due: dict[Value, None] = {}
    for block in blocks:
        left = _size(block) - most
        others = []
        for value in block:
            if value.nbytes <= left:
                due[value] = None
                left -= value.nbytes
            else:
                others.append(value)
        if left > 0:
            due[min(others, key=lambda value: value.nbytes)] = None
    return list(due)


def _spread(values: list[Value], free: int) -> set[Value]:
    """As many as fit, evenly spread."""
    kept: set[Value] = set()
    left = free
    share = left / max(sum(value.nbytes for value in values), 1)
    due = 0.0
    for value in values:
        due += share * value.nbytes
        if value.nbytes <= min(due, left):
            kept.add(value)
            due -= value.nbytes
            left -= value.nbytes
    return kept | _fitting((value for value in values if value not in kept), left)


def _fitting(values: Iterable[Value], free: int) -> set[Value]:
    """The first ones, as long as they fit, and smaller ones after them."""
    kept: set[Value] = set()
    for value in values:
        if value.nbytes <= free:
            kept.add(value)
            free -= value.nbytes
    return kept


_POOLS: weakref.WeakSet[Pool] = weakref.WeakSet()
_LOCK = fork_safe_lock()  # of `_POOLS`
