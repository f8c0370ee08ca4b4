"""Which values stay of those that ops pick some of, such as experts: the ones that are used most.

Always true:
- a use counts less as others follow it: half, once each value has been used some times since
- who is read takes a place only if he was used more, before that, than who has it: values in a circle, whose last use
  is always the newest, do not take turns in being dropped just before they are asked for
- a use costs an addition, a change of places some steps in a heap; nothing looks at all values but a new plan
"""

from __future__ import annotations

import heapq
import itertools
import weakref
from collections.abc import Iterable
from typing import Protocol, TypeAlias

_HALF = 8  # uses of each value, on average, after which a use counts half
_RESCALE = 1e100  # worth of a use from which on all are counted in larger units


class Pick(Protocol):
    """What is picked: a `Value`."""

    nbytes: int
    kept: bool
    uses: float


_Place: TypeAlias = "tuple[float, int, weakref.ref[Pick], int]"  # uses once, a number, who stays, and its bytes


class Picked:
    """The places of those that stay, and what a use is worth. Not thread-safe, but for `count`."""

    def __init__(self) -> None:
        self._free = 0  # bytes
        self._places: list[_Place] = []  # a heap, the least used first; who has been used since is looked up
        self._numbers = itertools.count()
        self._worth = 1.0  # of a use: it grows, in place of all that was counted before getting less
        self._growth = 1.0

    def count(self, value: Pick) -> None:
        """`value` is used. Called without a lock: a use that gets lost changes little."""
        value.uses += self._worth
        self._worth *= self._growth

    def choose(self, values: Iterable[Pick], room: int) -> list[Pick]:
        """Plan anew: the most used of `values` for which there is room, those that stay now first among equals.

        Those are equals of whom one was used a round before the other.
        """
        ranked = sorted(values, key=lambda value: -value.uses * (2 ** (1 / _HALF) if value.kept else 1))
        self._growth = 2.0 ** (1 / (_HALF * max(len(ranked), 1)))
        self._free, self._places, chosen = room, [], []
        for value in ranked:
            if value.nbytes <= self._free:
                self._take_in(value)
                chosen.append(value)
        return chosen

    def rescale(self, values: Iterable[Pick]) -> None:
        """Count in larger units, before numbers get too large."""
        if self._worth > _RESCALE:
            for value in values:
                value.uses /= self._worth
            self._places = [(uses / self._worth, *others) for uses, *others in self._places]  # type: ignore[misc]
            self._worth = 1.0

    def admit(self, value: Pick) -> list[Pick]:
        """`value`, which does not stay, is used: does it from now on? Gives those that leave for it."""
        before = value.uses - self._worth
        leaving: list[_Place] = []
        free = self._free
        while free < value.nbytes:
            place = self._least()
            if place is not None:
                leaving.append(place)
                free += place[3]
            if place is None or place[0] >= before:
                for one in leaving:
                    heapq.heappush(self._places, one)
                return []
        self._free = free
        self._take_in(value)
        left = [old for _, _, known, _ in leaving if (old := known()) is not None]
        for old in left:
            old.kept = False
        value.kept = True
        return left

    def _take_in(self, value: Pick) -> None:
        heapq.heappush(self._places, (value.uses, next(self._numbers), weakref.ref(value), value.nbytes))
        self._free -= value.nbytes

    def _least(self) -> _Place | None:
        """The place of the one that is used least, taken out."""
        while self._places:
            uses, number, known, nbytes = heapq.heappop(self._places)
            value = known()
            if value is None:
                return float("-inf"), number, known, nbytes
            if value.uses <= uses:
                return uses, number, known, nbytes
            heapq.heappush(self._places, (value.uses, number, known, nbytes))
        return None
