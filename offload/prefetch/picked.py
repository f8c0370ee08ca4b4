"""Of values that ops pick some of, such as experts, which ones stay: those that are used most.

Always true:
- a use loses weight as others follow: it counts half once each value has been used a few more times
- a value that is read replaces another only if it was used more before: values read in a circle, where the last one
  used is always the newest, would otherwise evict each other just before they are needed
- counting a use is one addition, a replacement is a few heap steps; only a new plan looks at all values
"""

from __future__ import annotations

import heapq
import itertools
import weakref
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

_HALF = 8  # average further uses of each value after which a use counts half
_RESCALE = 1e100  # weight of a use at which all counts are rescaled


class Candidate(Protocol):
    """What may stay: its bytes, how much it is used, and whether it stays now."""

    nbytes: int
    uses: float
    kept: bool


V = TypeVar("V", bound=Candidate)
_Place = tuple[float, int, weakref.ref[V], int]  # uses, tie-breaker, value, bytes


class Picked(Generic[V]):
    """The values that stay. Not thread-safe except for `count`.

    Attributes:
        worth: the weight of a use, which grows, instead of all earlier counts shrinking.
    """

    def __init__(self) -> None:
        self._free = 0  # bytes
        self._places: list[_Place[V]] = []  # a heap, least used first; entries are checked when popped
        self._numbers = itertools.count()
        self.worth = 1.0
        self._growth = 1.0

    def count(self, value: V) -> None:
        """`value` is used. Called without a lock: a lost count changes little."""
        value.uses += self.worth
        self.worth *= self._growth

    def choose(self, values: Iterable[V], free: int) -> list[V]:
        """A new plan: the most used of `values` that fit, preferring those that stay now among equals.

        Values whose uses differ by up to a round are equal.
        """
        ranked = sorted(values, key=lambda value: -value.uses * (2 ** (1 / _HALF) if value.kept else 1))
        self._growth = 2.0 ** (1 / (_HALF * max(len(ranked), 1)))
        self._free, self._places, chosen = free, [], []
        for value in ranked:
            if value.nbytes <= self._free:
                self._take_in(value)
                chosen.append(value)
        return chosen

    def rescale(self, values: Iterable[V]) -> None:
        if self.worth > _RESCALE:
            for value in values:
                value.uses /= self.worth
            self._places = [(uses / self.worth, *others) for uses, *others in self._places]  # type: ignore[misc]
            self.worth = 1.0

    def would_admit(self, value: V) -> bool:
        """Whether `value`, which does not stay so far, does once it is used."""
        leaving = self._replaced(value, value.uses)
        for one in leaving or ():
            heapq.heappush(self._places, one)
        return leaving is not None

    def admit(self, value: V) -> list[V] | None:
        """What `value`, which does not stay so far and is used, replaces if it does now; None if it does not."""
        leaving = self._replaced(value, value.uses - self.worth)
        if leaving is None:
            return None
        self._free += sum(place[3] for place in leaving)
        self._take_in(value)
        return [old for _, _, known, _ in leaving if (old := known()) is not None]

    def _replaced(self, value: V, before: float) -> list[_Place[V]] | None:
        """Take out as many entries, used less than `before`, as `value` needs; None if there are not enough."""
        leaving: list[_Place[V]] = []
        free = self._free
        while free < value.nbytes:
            place = self._least()
            if place is not None:
                leaving.append(place)
                free += place[3]
            if place is None or place[0] >= before:
                for one in leaving:
                    heapq.heappush(self._places, one)
                return None
        return leaving

    def _take_in(self, value: V) -> None:
        heapq.heappush(self._places, (value.uses, next(self._numbers), weakref.ref(value), value.nbytes))
        self._free -= value.nbytes

    def _least(self) -> _Place[V] | None:
        """Remove and return the entry of the least used value."""
        while self._places:
            uses, number, known, nbytes = heapq.heappop(self._places)
            value = known()
            if value is None:
                return float("-inf"), number, known, nbytes
            if value.uses <= uses:
                return uses, number, known, nbytes
            heapq.heappush(self._places, (value.uses, number, known, nbytes))
        return None
