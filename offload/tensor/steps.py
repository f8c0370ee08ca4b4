"""Which rows of a decoded value are computed at a time, and from which rows of its pieces.

Always true:
- the steps give the rows that are wanted in order, each once
- a step has at most as many rows as asked for; if rows can only be computed by whole granules, it has at least one
- nothing but numbers is needed: no tensor is touched
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from offload.tensor.runs import Decoder


class Step(NamedTuple):
    """Some rows, computed by one call of a decoder.

    Attributes:
        low, high: the rows, counted from the first row that is wanted.
        taken: for each piece, the range of its rows that is decoded, counted from its first row for the granule of the
            first row that is wanted; None for all of the piece.
        skipped: how many rows the decoder gives before `low`.
    """

    low: int
    high: int
    taken: tuple[tuple[int, int] | None, ...]
    skipped: int


def steps(start: int, count: int, most: int, decoder: Decoder) -> Iterator[Step]:
    """The steps that compute `count` rows from row `start` on, of one element if the value is a stack.

    Args:
        start, count: the rows that are wanted.
        most: number of rows to compute at a time.
        decoder: says what can be computed alone.
    """
    granule, per, is_divisible = decoder.granule, decoder.per, decoder.is_divisible
    end, first, is_inside = start + count, start // granule, is_divisible and most < granule
    span = granule if is_inside else max(1, most // granule) * granule
    low = start
    while low < end:
        begin = low // granule
        high = min(end, begin * granule + span, low + most) if is_inside else min(end, begin * granule + span)
        stop = -(-high // granule)
        is_part = is_divisible and stop - begin == 1
        before = low - begin * granule  # rows of the granule
        taken: list[tuple[int, int] | None] = []
        for rows in per:
            if rows is None:
                taken.append(None)
            elif is_part and rows >= granule:
                at, each = (begin - first) * rows, rows // granule
                taken.append((at + before * each, at + (before + high - low) * each))
            else:
                taken.append(((begin - first) * rows, (stop - first) * rows))
        yield Step(low - start, high - start, tuple(taken), 0 if is_part else before)
        low = high
