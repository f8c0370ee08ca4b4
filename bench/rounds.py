"""Measuring arms in turn, and the resulting figures.

Always true:
- in every round each arm runs once, in an order of its own: what an arm leaves in memory helps or hinders the next one
- an arm that fails, or gives a wrong answer, has a reason instead of figures
- in a figure, less is better; a ratio is the median over rounds, of two values from the same round
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Generic, TypeVar

from bench.peers import OURS

T = TypeVar("T")
Trace = list[tuple[float, int]]


@dataclass
class Rounds(Generic[T]):
    """The results of each arm, one per round; and why others have none."""

    results: dict[str, list[T]]
    missing: dict[str, str]

    def values(self, value: Callable[[T], float]) -> dict[str, list[float]]:
        """One number from each result."""
        return {arm: list(map(value, results)) for arm, results in self.results.items()}

    def take(self, arm: str) -> list[T]:
        """Remove and return the results of an arm that is not a peer, but needed for comparison.

        Raises:
            RuntimeError: it failed.
        """
        if arm not in self.results:
            raise RuntimeError(f"{arm}: {self.missing[arm]}")
        return self.results.pop(arm)

    def strike(self, answer: Callable[[T], object], expected: object, what: str) -> None:
        """Remove the arms that did not give the expected answer."""
        for arm in [arm for arm, results in self.results.items() if any(answer(one) != expected for one in results)]:
            del self.results[arm]
            self.missing[arm] = f"{what} differ from those of the model in memory"


def in_turn(arms: Mapping[str, Callable[[], T]], rounds: int, missing: Mapping[str, str]) -> Rounds[T]:
    """Run the arms, except those listed as missing: first in the given order, then in orders that are drawn."""
    done: Rounds[T] = Rounds({arm: [] for arm in arms if arm not in missing}, dict(missing))
    for number in range(rounds):
        order = list(done.results)
        if number:
            random.Random(number).shuffle(order)  # the same in each run
        for arm in order:
            try:
                done.results[arm].append(arms[arm]())
            except Exception as error:  # a peer's failure is reported, and does not stop the others
                done.missing[arm] = _reason(error)
        done.results = {arm: results for arm, results in done.results.items() if arm not in done.missing}
    return done


def _reason(error: Exception) -> str:
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first[:200]}"


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes:
        case: the measured case.
        unit: "s", "µs", "B" or "reads".
        values: by arm, a value per round.
        limit: the best possible value per round; empty if there is none.
        limit_name: what the limit is.
        missing: arms without values, and why.
        facts: other numbers, by arm.
        traces: memory in bytes over seconds, by arm.
    """

    case: str
    unit: str
    values: dict[str, list[float]]
    limit: list[float]
    limit_name: str
    missing: dict[str, str]
    facts: dict[str, dict[str, int]] = field(default_factory=dict)
    traces: dict[str, Trace] = field(default_factory=dict, repr=False)

    @property
    def best_peer(self) -> str | None:
        """The fastest peer."""
        peers = [arm for arm in self.values if arm != OURS]
        return min(peers, key=lambda arm: median(self.values[arm])) if peers else None

    @property
    def ratio_to_peer(self) -> float | None:
        """How many times as good as the best peer; None if either is missing or zero."""
        return self._times(self.values[self.best_peer]) if self.best_peer else None

    @property
    def ratio_to_limit(self) -> float | None:
        """The fraction of what is possible; 1 is the limit."""
        return self._times(self.limit)

    def _times(self, others: list[float]) -> float | None:
        pairs = list(zip(others, self.values.get(OURS, []), strict=False))
        return median(other / own for other, own in pairs) if pairs and all(min(pair) > 0 for pair in pairs) else None
