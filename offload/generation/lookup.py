"""A draft from the text itself: what followed the same tokens before.

Always true:
- of the places where the last tokens stand before, the one that agrees on the most tokens is taken, the latest of them

Source: prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import cycle, islice, takewhile

MOST_MATCHED = 16  # tokens beyond which a longer match says no more


def looked_up(tokens: Sequence[int], most: int, ends: Collection[int] = ()) -> tuple[list[int], int]:
    """What followed the last tokens before, and how many of them stood there.

    Args:
        tokens: of the text so far.
        most: tokens to return.
        ends: tokens after which nothing follows: they are not drafted.

    Returns:
        Up to `most` tokens, and the length of the match; nothing, and 0, without a match.

    Example:
        >>> looked_up([1, 2, 3, 4, 2, 3], 2)
        ([4, 2], 2)
    """
    end, matched = len(tokens), 1
    places = [place for place in range(end - 1) if tokens[place] == tokens[-1]] if most else []
    if not places:
        return [], 0
    while matched < min(MOST_MATCHED, end):
        longer = [place for place in places if place >= matched and tokens[place - matched] == tokens[-1 - matched]]
        if not longer:
            break
        places, matched = longer, matched + 1
    repeated = cycle(tokens[places[-1] + 1 :])  # it goes on as it repeats itself
    return list(takewhile(lambda token: token not in ends, islice(repeated, most))), matched
