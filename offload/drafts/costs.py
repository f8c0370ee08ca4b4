"""What a pass and a draft of some length take, what of a draft is accepted, and the length that follows.

Always true:
- a pass over n tokens takes as long as the slower of the two: reading what is not in memory, and computing n tokens
- what was measured lately counts most; what was measured long ago, or never, is estimated from other lengths
- no draft is one of the lengths; if it is the best one, a draft is tried from time to time, for a fiftieth of the time
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter, mul

MOST = 63  # tokens of a draft: with the one before it, as many rows as the kernels multiply at once
_COMPARED = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, MOST)  # lengths
FIRST = 5  # tokens of a draft about which nothing is known
_WEIGHT = 0.3  # of a new measurement
_STALE = 64  # passes after which a length counts as not measured
_FADE = 0.97  # what an accepted or rejected token counts when the next one is seen
_DOUBT = 3.0  # tokens that have to be seen at a position to outweigh what is known of all positions
_OF_A_PASS = 4.0  # tokens whose computing takes as long as what a pass takes for any number of them, until measured
_TRIED = 0.02  # share of the time that may be lost by trying a draft
_WAITS = 0.1  # share of a pass that ops wait for the disk, from which on the pass took as long as the reading
_USUAL_RATE = 1e9  # bytes per second, until measured


class Curve:
    """A quantity by the number of tokens: measured at some, and at others estimated.

    Lengths of the same binary magnitude are one point. Between points, and beyond them, it changes as `shape` does.
    """

    def __init__(self, shape: Callable[[int], float]) -> None:
        self._shape = shape
        self._points: dict[int, tuple[float, float, int]] = {}  # by magnitude: tokens, ratio to the shape, when
        self._line: list[tuple[float, float]] = []  # tokens and ratio, in order

    def learn(self, tokens: int, amount: float, now: int) -> None:
        """It was this much for this many tokens, at measurement number `now`."""
        place, ratio = tokens.bit_length(), amount / self._shape(tokens)
        known = self._points.get(place)
        if known is None or now - known[2] > _STALE:
            self._points[place] = float(tokens), ratio, now
        else:
            at, before, _ = known
            self._points[place] = at + _WEIGHT * (tokens - at), before + _WEIGHT * (ratio - before), now
        if len(self._points) > 1:
            self._points = {one: point for one, point in self._points.items() if now - point[2] <= _STALE}
        self._line = sorted((at, ratio) for at, ratio, _ in self._points.values())

    def is_known(self, tokens: int, now: int) -> bool:
        """Whether it was measured lately for about this many tokens."""
        point = self._points.get(tokens.bit_length())
        return point is not None and now - point[2] <= _STALE

    def at(self, tokens: int) -> float | None:
        """How much it is for this many tokens; None if it was never measured."""
        line = self._line
        if not line:
            return None
        place = bisect(line, tokens, key=itemgetter(0))
        ratio = line[min(place, len(line) - 1)][1]
        if 0 < place < len(line):
            (low, first), (high, second) = line[place - 1 : place + 1]
            ratio = first + (second - first) * (tokens - low) / (high - low)
        return ratio * self._shape(tokens)


class Acceptance:
    """How likely a drafted token is accepted if those before it are, by its position in the draft.

    Args:
        rate: what is assumed until something was seen.
    """

    def __init__(self, rate: float) -> None:
        self._assumed = rate
        self._all = [2 * rate, 2.0]  # accepted, seen
        self._by_position: list[list[float]] = []

    def learn(self, accepted: int, drafted: int) -> None:
        """Of a draft, so many tokens were accepted."""
        for position in range(min(accepted + 1, drafted)):
            if position == len(self._by_position):
                self._by_position.append([0.0, 0.0])
            for sums in (self._all, self._by_position[position]):
                sums[0] = sums[0] * _FADE + (position < accepted)
                sums[1] = sums[1] * _FADE + 1

    def expected(self, most: int) -> list[float]:
        """The expected tokens of a pass with drafts of 0, 1... `most` tokens: one, and those that are accepted."""
        overall = self._all[0] / self._all[1]
        known = [(sums[0] + _DOUBT * overall) / (sums[1] + _DOUBT) for sums in self._by_position[:most]]
        likely = accumulate([*known, *[overall] * (most - len(known))], mul)
        return list(accumulate(likely, initial=1.0))


@dataclass(frozen=True)
class Pass:
    """What one pass took.

    Attributes:
        tokens: that it computed.
        seconds: in all.
        waited: of these, for the disk.
        bytes_read: from the disk.
        is_first: whether it is that of the prompt, which finds less in memory than later ones.
    """

    tokens: int
    seconds: float
    waited: float
    bytes_read: int
    is_first: bool


class PassCosts:
    """What passes of a model take.

    Args:
        streams: bytes that every pass reads.
        picked: bytes of which a pass reads those that its tokens pick: experts.
        rate: of the disk, in bytes per second; 0 if it is not known.
    """

    def __init__(self, streams: int, picked: int, rate: float) -> None:
        self.number = 0
        self.is_mixture = picked > 0
        self.streams = streams
        self._rate = rate
        # Tokens pick an eighth each, at random, until measured. The whole is a ratio, so the sizes give just the shape.
        self._bytes = Curve(lambda tokens: max(1.0, streams + picked * (1 - 0.875**tokens)))
        self._computing = Curve(lambda tokens: tokens + _OF_A_PASS)

    def learn(self, done: Pass) -> None:
        """A pass has ended."""
        self.number += 1
        waited = min(done.waited, done.seconds)
        self._computing.learn(done.tokens, done.seconds - waited, self.number)
        if not done.is_first:
            self._bytes.learn(done.tokens, done.bytes_read, self.number)
        rate = done.bytes_read / max(done.seconds, 1e-9)
        if waited > _WAITS * done.seconds and done.bytes_read:
            self._rate += (rate - self._rate) * (_WEIGHT if self._rate else 1)
        else:  # it is at least that
            self._rate = max(self._rate, rate)

    def reading(self, tokens: int) -> float:
        """Seconds of reading for a pass over so many tokens."""
        found = self._bytes.at(tokens)
        return (self.streams if found is None else found) / (self._rate or _USUAL_RATE)

    def seconds(self, tokens: int) -> float:
        """Of a pass over so many tokens."""
        return max(self.reading(tokens), self._computing.at(tokens) or 0.0)

    def has_to_try_plain(self, tokens: int) -> bool:
        """Whether only a pass without a draft tells if one over so many tokens is worth it.

        Not if that one takes as long as its reading, which is the same without a draft.
        """
        is_read_bound = not self.is_mixture and self.reading(tokens) >= (self._computing.at(tokens) or 0.0)
        return not is_read_bound and not self._computing.is_known(1, self.number)


@dataclass
class Source:
    """Where drafts come from: what of them is accepted, and what they take.

    Attributes:
        acceptance: of its tokens.
        drafting: seconds by the number of tokens; None if it takes none.
    """

    acceptance: Acceptance
    drafting: Curve | None = None

    def seconds(self, tokens: int) -> float:
        """Of a draft of so many tokens."""
        return (self.drafting.at(tokens) or 0.0) if self.drafting is not None and tokens else 0.0

    def most(self) -> int:
        """How long a draft may be: not very, until it is known what one takes."""
        return MOST if self.drafting is None or self.drafting.at(1) is not None else FIRST


def of_assistant() -> Source:
    """A source of drafts of which nothing is known but that each token takes a pass of its own."""
    return Source(Acceptance(0.7), Curve(lambda tokens: float(tokens)))


@dataclass(frozen=True)
class Length:
    """A length of draft.

    Attributes:
        tokens: of the draft.
        source: of it, as its place among those that were given; None for no draft.
        rate: expected tokens per second of the model.
        seconds: of the draft and the pass.
    """

    tokens: int
    source: int | None
    rate: float
    seconds: float


def lengths(costs: PassCosts, sources: Sequence[tuple[Source, int]]) -> Iterable[Length]:
    """Possible drafts, no draft first.

    Args:
        costs: of the model's passes.
        sources: with how many tokens each could give.
    """
    plain = costs.seconds(1)
    yield Length(0, None, 1 / max(plain, 1e-9), plain)
    for place, (source, most) in enumerate(sources):
        most = min(most, source.most())
        expected = source.acceptance.expected(most)
        for tokens in dict.fromkeys(min(most, one) for one in _COMPARED if most):
            seconds = source.seconds(tokens) + costs.seconds(tokens + 1)
            yield Length(tokens, place, expected[tokens] / max(seconds, 1e-9), seconds)


@dataclass
class Trials:
    """How much time may be lost by trying drafts that are not expected to be worth it.

    Attributes:
        saved: seconds.
    """

    saved: float = field(default=0.0)

    def earn(self, seconds: float) -> None:
        """So much time has passed."""
        self.saved += _TRIED * seconds

    def best(self, costs: PassCosts, sources: Sequence[tuple[Source, int]]) -> Length:
        """The draft with the most expected tokens per second, or one that is tried."""
        plain, *drafts = lengths(costs, sources)
        found = max(drafts, key=lambda one: one.rate, default=plain)
        if found.tokens and costs.has_to_try_plain(found.tokens + 1):
            return plain
        if found.rate > plain.rate:
            return found
        loss = found.seconds * (1 - found.rate / plain.rate)
        if not found.tokens or loss > self.saved:
            return plain
        self.saved = 0.0
        return found
