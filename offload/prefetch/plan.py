"""What may stay in memory between ops: values under a budget.

Always true:
- a value's stage changes in `Staged.move_to` alone, under the reader's lock; back to `AWAY`, which claims nothing,
  without it
- a value keeps neither its file nor the values that follow it alive
- what follows it is remembered for each value that came before it; where that has branched, only from the second time
- resident values are pages of the files themselves: there is no copy that could become stale
- if all values fit in the budget, all stay; if not, a fixed part stays: values larger than the window if they fit, and
  others, spread evenly over the order of reads; a pass then reads from the disk only what exceeds the budget
- if several threads use the values block by block, the streaming part of the largest block fits
- of values that are picked from many, such as experts, the most used stay, in what is left beside what each
  pass reads
- values of up to 64 KiB stay once they are read
- a budget never exceeds what the machine and its cgroups have

Functions that change a plan return the values to evict; the caller drops them after releasing the lock.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from offload.memory import available_bytes
from offload.prefetch.pages import Range, joined
from offload.prefetch.picked import Picked
from offload.storage.file import TensorFile
from offload.system import clock
from offload.system.locks import fork_safe_lock

WINDOW = 64 << 20  # least bytes in flight: read ahead, in use, or not yet dropped
_AHEAD = 0.25  # seconds of disk reads to have ahead
_PART = 0.1  # largest share of the budget that the window takes
_RATES = 0.25  # weight of a new measurement of the disk rate
_SHARE = 0.85  # share of the available memory without a set budget; the rest is for the window and activations
_LOOK_AGAIN = 2.0  # seconds between checks of available memory
_BESIDE = 32 << 20  # bytes of a block that may stream beside the budget
_TELLING = 4 << 20  # smallest read, in bytes, that says something about the disk rate
NEWS = 0.1  # relative change of the total or the budget that triggers a new plan
SMALL = 64 << 10  # bytes up to which a value stays once it is read
_MOST_CONTEXTS = 16  # contexts (previous reads) to distinguish per value


class Stage(Enum):
    """How far a value is on its way through memory; the package draws it."""

    AWAY = "nothing is known about its pages"
    QUEUED = "waits to be read ahead"
    READING = "is being read ahead"
    RESIDENT = "is read ahead, and not used yet"
    IN_USE = "was used, and not dropped since"
    LEAVING = "waits to be dropped, or is being dropped"


AWAY, QUEUED, READING, RESIDENT, IN_USE, LEAVING = Stage
_NEXT = {
    AWAY: (QUEUED, IN_USE, LEAVING, AWAY),  # the last: two threads have dropped it, as one that was evicted meanwhile
    QUEUED: (READING, IN_USE, AWAY),
    READING: (RESIDENT, LEAVING, AWAY),
    RESIDENT: (IN_USE, LEAVING, AWAY),
    IN_USE: (QUEUED, LEAVING, AWAY),
    LEAVING: (QUEUED, IN_USE, AWAY),
}


class Staged:
    """A value or a load, on its way through memory.

    Attributes:
        stage: how far it is; the reader's lock is held as it changes.
    """

    stage: Stage

    def move_to(self, stage: Stage) -> None:
        """It is at another stage now, one of those that follow its own."""
        assert stage in _NEXT[self.stage], f"a value that {self.stage.value} can't become one that {stage.value}"
        self.stage = stage


class Value(Range, Staged):
    """A value, or a part of one, that is read as a whole.

    Attributes:
        pool: its budget.
        kept: whether it stays in memory after a read.
        pinned: whether it stays regardless of the plan.
        is_picked: whether ops pick it from many, like an expert: it is not part of an order.
        uses: how much it is used, if it is picked.
        is_held: whether it stays for now because several threads use it.
        seeded: its announced successor.
    """

    def __init__(
        self,
        pool: Pool,
        file: TensorFile,
        start: int,
        nbytes: int,
        *,
        shared: bool,
        is_part: bool = False,
        is_picked: bool = False,
    ) -> None:
        super().__init__(file, start, nbytes, shared=shared, is_part=is_part)
        self.pool = pool
        self.kept = self.pinned = self.is_held = False
        self.is_picked = is_picked
        self.uses = 0.0
        self.stage = AWAY
        self.seeded: weakref.ref[Value] | None = None
        self._followers: dict[int, tuple[weakref.ref[Value], bool]] = {}  # by the id of the previous read
        self._branches = False

    @classmethod
    def nowhere(cls, until: float = float("inf")) -> Value:
        """A value about which nothing is known until then (`clock.now`), and that is never read in."""
        nothing = cls.__new__(cls)
        nothing.nbytes = 0
        nothing.is_picked = False
        nothing.checked_until = until
        return nothing

    @property
    def is_ahead(self) -> bool:
        return self.stage in (QUEUED, READING, RESIDENT)

    @property
    def stays(self) -> bool:
        """Whether it stays in memory once it is read: by the plan, or for now."""
        return self.kept or self.is_held

    def read(self) -> None:
        """Read it; unless everything fits, without its neighbours.

        Raises:
            ReadError: the disk failed.
        """
        self.bring_in(exactly=not self.pool.fits)

    def follower(self, before: Value | None) -> Value | None:
        """What is expected after `before` and then this value; None if that is open."""
        entry = self._followers.get(id(before))
        if entry is None and not self._branches:
            if self.seeded is not None:
                return self.seeded()
            entry = next(reversed(self._followers.values()), None)
        return entry[0]() if entry is not None and entry[1] else None

    @property
    def has_stayed(self) -> bool:
        """Whether it stays by the plan, and has been read since the plan was made."""
        return self.kept and self.checked_until > 0

    def let_go(self) -> None:
        """Drop it from memory; the next read brings it back. One that is being read ahead still arrives."""
        before = self.stage
        super().let_go()
        if self.stage is before and before in (RESIDENT, IN_USE, LEAVING):
            self.move_to(AWAY)

    def learn(self, before: Value | None, following: Value) -> None:
        """Record that `following` came after `before` and then this value."""
        if self.seeded is not None and self.seeded() is not following:
            self.seeded = None
        known = self._followers.pop(id(before), None)
        is_news = known is None or known[0]() is not following
        self._branches = self._branches or (known is not None and is_news)
        while len(self._followers) >= _MOST_CONTEXTS:
            del self._followers[next(iter(self._followers))]
        self._followers[id(before)] = weakref.ref(following), not (is_news and self._branches)


@dataclass(eq=False)
class Users:
    """Several threads that use values block by block; a block stays in memory until all of them have used it.

    Attributes:
        blocks: the tracked values of each block.
        others: the most bytes of larger results, and of other values, that were in memory with a block.
    """

    blocks: Callable[[], Iterable[list[Value]]]
    others: int = 0


class Pool:
    """Values under one budget. Not thread-safe: the caller holds the lock.

    Attributes:
        max_memory: how many bytes may stay resident; None for as much as the machine has.
        fixed_window: how many bytes may be read ahead, as set by the user, 0 for none; None for the automatic window.
        rate: the recent disk rate in bytes per second; 0 until known.
        users: the groups of threads that work block by block.
        at_a_time: the most bytes that stream of any block, per group of users, as far as is known.
        picked: which of the picked values stay.
        on_devices: the budgets for what stays on accelerators.
    """

    def __init__(self, max_memory: int | None = None, window: int | None = None) -> None:
        self.max_memory = max_memory
        self.fixed_window = window
        self.rate = 0.0
        self.users: list[Users] = []
        self.at_a_time = 0
        self.picked: Picked[Value] = Picked()
        self.on_devices: dict[torch.device, Pool] = {}
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
        with _LOCK:
            return list(_POOLS)

    @property
    def capacity(self) -> int:
        return max(0, self._limit - self.reserved)

    @property
    def reserved(self) -> int:
        return self._reserve(self.at_a_time)

    @property
    def _least_news(self) -> float:
        return NEWS

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
        return max(self.window, self._limit // 2)

    @property
    def fits(self) -> bool:
        return self._total <= self._limit

    @property
    def keeps_all(self) -> bool:
        """Whether there are values, and all of them fit in memory."""
        return 0 < self._total <= self._limit

    @property
    def nbytes(self) -> int:
        """Total size of values whose files are in use; may be a little high, as views can overlap."""
        return sum(value.nbytes for value in self.values() if value.has_file)

    def limit_now(self) -> int:
        """Bytes that may stay, according to what is available now."""
        available = available_bytes()
        if self.max_memory is None:
            return int(available * _SHARE)
        limit = min(self.max_memory, available)
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
            limit = self.limit_now()
        fits = self._total <= min(limit, self._limit)
        grown = self._total - self._planned
        news = self._is_news(limit) or grown > self._least_news * self._total
        if anew or (news and not fits):
            self._limit = limit
            return self._plan()
        return []

    def _is_news(self, limit: int) -> bool:
        return abs(limit - self._limit) > NEWS * self._limit

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

    def doubt(self) -> None:
        """A value that should have been in memory was not: don't assume it of any other."""
        for value in self.values():
            value.checked_until = 0.0

    def _plan(self) -> list[Value]:
        values = self.values()
        self._total = sum(extent.nbytes for extent in joined(values))  # views may overlap
        is_new = abs(self._total - self._planned) > NEWS * self._total
        self._planned = self._total
        self.at_a_time = 0
        kept = set(values) if self.fits else self._chosen(values, is_new=is_new)
        leaving = []
        for value in values:
            if value.kept and value not in kept:
                leaving.append(value)
            value.kept = value in kept
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
        left = self.capacity - size_of(kept)
        # In use, a value larger than the window takes memory beside all that stays; without a window, none is.
        wide = [value for value in values if value.nbytes > self.widest] if self.widest else []
        for tier in _stayed(due), due, wide, *self._first_of(values, is_new=is_new), values:
            others = [value for value in tier if value not in kept]
            chosen = others if size_of(others) <= left else self._some_of(others, left)
            kept.update(chosen)
            left -= size_of(chosen)
        kept.update(self.picked.choose(picked, max(left, 0)))
        return kept

    def _always(self, value: Value) -> bool:
        return value.pinned or value.nbytes <= SMALL

    def _first_of(self, values: Iterable[Value], *, is_new: bool) -> Sequence[list[Value]]:
        before = [] if is_new else [value for value in values if value.kept]
        return _stayed(before), before

    def _some_of(self, values: list[Value], free: int) -> set[Value]:
        return _spread(values, free)

    def _due_of_blocks(self, kept: set[Value]) -> list[Value]:
        """What has to stay so that no block streams more than fits."""
        blocks: list[list[Value]] = []
        for users in self.users:
            blocks.extend(self._streaming(block, kept) for block in users.blocks())
        others, free = max(users.others for users in self.users), self._limit - size_of(kept)
        most = min(max(map(size_of, blocks), default=0), self.most_at_a_time)
        too_small, due = 0, _due(blocks, most)
        while most - too_small > SMALL:
            size = (too_small + most) // 2
            of_blocks = _due(blocks, size)
            if size_of(of_blocks) + self._reserve(size + others) <= free:
                most, due = size, of_blocks
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


def size_of(values: Iterable[Value]) -> int:
    return sum(value.nbytes for value in values)


def _stayed(values: Iterable[Value]) -> list[Value]:
    return [value for value in values if value.has_stayed]


def _due(blocks: Iterable[list[Value]], most: int) -> list[Value]:
    """What has to stay so that no block streams more than `most` bytes: little more of each than that."""
    due: dict[Value, None] = {}
    for block in blocks:
        left = size_of(block) - most
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
    return kept | fitting((value for value in values if value not in kept), left)


def fitting(values: Iterable[Value], free: int) -> set[Value]:
    """The first ones, as long as they fit, and smaller ones after them."""
    kept: set[Value] = set()
    for value in values:
        if value.nbytes <= free:
            kept.add(value)
            free -= value.nbytes
    return kept


_POOLS: weakref.WeakSet[Pool] = weakref.WeakSet()
_LOCK = fork_safe_lock()  # of `_POOLS`
