"""Which bytes of its file a tensor reads.

Always true:
- what is small, and not known to be read soon, is left to the mapping; so is a view of small pieces that lie far apart
- where what lies between the pieces of a view is so little that the system reads it along, it counts as read
- a view of most of a value counts as the value: one that grows by a row at a time is one range, not a new one each time
"""

from __future__ import annotations

import sys
from time import monotonic

import torch

from offload.prefetch.reads import UNTRACKED, arrive, tracked
from offload.prefetch.residency import SMALL
from offload.prefetch.tracked import Tracked
from offload.storage.handle import Handle
from offload.storage.pages import Range

_MOST_SCATTERED = 2  # times as many bytes as are read
_BETWEEN = 64 << 10  # bytes between two pieces that the system reads along: half of what it reads around a page
_LEAST_PIECE = 64 << 10  # bytes from which on a piece that lies apart is worth a look
_MOST = 2  # times a part is more than the value


def brought_in(handle: Handle, twin: torch.Tensor) -> Range:
    """What a view cut as `twin` reads, now in memory.

    Raises:
        ReadError: the disk did not give it.
    """
    if sys.is_finalizing():  # the reader may have stopped anywhere
        return UNTRACKED
    found = _range_of(handle, twin)
    if found is None:
        return _pieces_brought_in(handle, twin)
    if found.calm_until < monotonic() and isinstance(found, Tracked):
        arrive(found)
    return found


def _range_of(handle: Handle, twin: torch.Tensor) -> Range | None:
    """The bytes that are read as one; None for several pieces, each worth a look of its own."""
    nbytes = twin.numel() * twin.itemsize
    start, most = handle.extent
    whole: Range | None = handle.ranges.get(handle.extent)
    if handle.recipe is not None or nbytes == most:
        return whole or (tracked(handle, start, most) if most > SMALL else UNTRACKED)
    if whole is not None and whole.calm_until >= monotonic():
        return whole
    steps = sum((size - 1) * step for size, step in zip(twin.shape, twin.stride(), strict=True))
    span = (1 + int(steps)) * twin.itemsize
    if nbytes <= SMALL:
        return UNTRACKED
    if span > _MOST_SCATTERED * nbytes:
        piece, others = _piece_of(twin)
        if others:
            return None if piece >= _LEAST_PIECE else UNTRACKED
    if span * _MOST > most:
        return whole or tracked(handle, start, most)
    return tracked(handle, start + int(twin.storage_offset()) * twin.itemsize, span)


def _piece_of(twin: torch.Tensor) -> tuple[int, list[tuple[int, int]]]:
    """The bytes of a piece of a scattered view; and how often, and at which distances, there are others."""
    piece, others = twin.itemsize, []
    for step, size in sorted(zip(twin.stride(), twin.shape, strict=True)):
        distance = int(step) * twin.itemsize
        if distance - piece <= _BETWEEN:
            piece += (int(size) - 1) * distance
        else:
            others.append((int(size), distance))
    return piece, others


def _pieces_brought_in(handle: Handle, twin: torch.Tensor) -> Range:
    """The pieces of a scattered view, now in memory; the one that is to be looked at again first."""
    piece, others = _piece_of(twin)
    starts = [handle.extent[0] + int(twin.storage_offset()) * twin.itemsize]
    for size, distance in others:
        starts = [start + number * distance for start in starts for number in range(size)]
    found = [tracked(handle, start, piece) for start in starts]
    for one in found:
        if one.calm_until < monotonic() and isinstance(one, Tracked):
            arrive(one)
    return min(found, key=lambda one: one.calm_until)


def start_of_run(handle: Handle, twin: torch.Tensor) -> int | None:
    """The byte of the file at which a view begins whose elements lie there as they read; None for any other view."""
    if handle.recipe is not None or not twin.is_contiguous() or twin.is_conj() or twin.is_neg():
        return None
    return handle.extent[0] + int(twin.storage_offset()) * twin.itemsize
