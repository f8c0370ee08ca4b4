"""A draft from the text itself: what followed the same tokens before.

Always true:
- of the places where the last tokens stand before, the one that agrees on the most tokens is taken, the latest of them

Source: prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_MATCHED = 16  # tokens beyond which a longer match says no more


def looked_up(tokens: Sequence[int], most: int) -> tuple[list[int], int]:
    """What followed the last tokens before, and how many of them stood there.

    Args:
        tokens: of the text so far.
        most: tokens to return.

    Returns:
        Up to `most` tokens, and the length of the match; nothing, and 0, without a match.

    Example:
        >>> looked_up([1, 2, 3, 4, 2, 3], 2)
        ([4, 2], 2)
    """
    end = len(tokens)
    places = [place for place in range(end - 1) if tokens[place] == tokens[-1]] if end else []
    matched = 1
    while matched < min(MOST_MATCHED, end):
        longer = [place for place in places if place >= matched and tokens[place - matched] == tokens[-1 - matched]]
        if not longer:
            break
        places, matched = longer, matched + 1
    if not places or not most:
        return [], 0
    start = places[-1] + 1
    found = list(tokens[start : start + most])
    while len(found) < most:  # it goes on as it repeats itself
        found.append(found[len(found) - (end - start)])
    return found, matched
