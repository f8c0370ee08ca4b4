"""What passes and drafts of some length take, what of a draft is accepted, and the length that follows.

Always true:
- no draft is one of the lengths: the one with the most expected tokens per second is taken
- a length that was not measured lately is estimated from others, and tried once a fiftieth of the time pays for it
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MOST = 63  # tokens of a draft: with the one before it, as many rows as the kernels multiply at once
_COMPARED = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, MOST)  # lengths
FIRST = 5  # tokens of a draft about which nothing is known
_WEIGHT = 0.3  # of a new measurement
_STALE = 64  # passes after which a measurement says little
_FADE = 0.98  # what an accepted or rejected token counts when the next one is seen
_TRIED = 0.02  # share of the time that may be lost by trying a length


class Source:
    """Where drafts come from: `rate` is a token's likelihood at first, `seconds` what it takes, None until measured."""

    def __init__(self, rate: float, seconds: float | None = 0.0) -> None:
        self.seconds = seconds
        self._accepted, self._seen = 2 * rate, 2.0

    def learn(self, accepted: int, drafted: int) -> None:
        """Of a draft, so many tokens were accepted."""
        for position in range(min(accepted + 1, drafted)):
            self._accepted = self._accepted * _FADE + (position < accepted)
            self._seen = self._seen * _FADE + 1

    def learn_seconds(self, per_token: float) -> None:
        """A draft took so long per token."""
        self.seconds = per_token if self.seconds is None else self.seconds + _WEIGHT * (per_token - self.seconds)

    def expected(self, drafted: int) -> float:
        """The expected tokens of a pass with such a draft: one, and those that are accepted."""
        return sum((self._accepted / self._seen) ** position for position in range(drafted + 1))


@dataclass(frozen=True)
class Draft:
    """A draft that could be made."""

    tokens: int  # 0 for none
    source: Source | None = None
    seconds: float = 0.0  # of the draft and the pass
    rate: float = 0.0  # expected tokens per second


class PassCosts:
    """What passes take, by tokens: numbers of one binary magnitude are one point, and lines go between points."""

    def __init__(self) -> None:
        self._passes = 0
        self._points: dict[int, tuple[float, float, int]] = {}  # by magnitude: tokens, seconds, at which pass
        self._saved = 0.0  # seconds that may be lost by trying a length

    def learn(self, tokens: int, seconds: float) -> None:
        place, was_measured = tokens.bit_length(), self._is_measured(tokens)
        self._passes += 1
        self._saved += _TRIED * seconds
        at, before, _ = self._points.get(place, (0.0, 0.0, 0))
        weight = _WEIGHT if was_measured else 1.0
        self._points[place] = at + weight * (tokens - at), before + weight * (seconds - before), self._passes

    def _is_measured(self, tokens: int) -> bool:
        point = self._points.get(tokens.bit_length())
        return point is not None and self._passes - point[2] <= _STALE

    def seconds(self, tokens: int) -> float:
        """What a pass over so many tokens takes; there is a measurement, of any number."""
        points = sorted(self._points.values())
        after = min(max(bisect(points, (tokens,)), 1), len(points) - 1)
        (low, first, _), (high, second, _) = points[after - 1], points[after]
        if tokens > high:  # it does not take less beyond
            first = min(first, second)
        return second + (second - first) * (tokens - high) / ((high - low) or 1)

    def best(self, sources: Sequence[tuple[Source, int]]) -> Draft:
        """The draft with the most expected tokens per second, or one to try; sources come with their most tokens."""
        if not self._points:
            return next((Draft(min(FIRST, most), source) for source, most in reversed(sources)), Draft(0))
        drafts = list(self._drafts(sources))
        if 1 not in self._points:
            return drafts[0]
        best = max(drafts, key=lambda one: one.rate)
        others = [one for one in drafts if not self._is_measured(one.tokens + 1)]
        tried = max(others, key=lambda one: one.rate, default=best)
        loss = tried.seconds * (1 - tried.rate / best.rate)
        if loss > self._saved:
            return best
        self._saved -= loss
        return tried

    def _drafts(self, sources: Sequence[tuple[Source, int]]) -> Iterator[Draft]:
        """No draft first."""
        plain = max(self.seconds(1), 1e-9)
        yield Draft(0, None, plain, 1 / plain)
        for source, most in sources:
            most = min(most, MOST if source.seconds is not None else FIRST)
            for tokens in dict.fromkeys(min(most, one) for one in _COMPARED if most):
                seconds = max(self.seconds(tokens + 1), 1e-9) + tokens * (source.seconds or 0.0)
                yield Draft(tokens, source, seconds, source.expected(tokens) / seconds)
