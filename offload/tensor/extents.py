"""Which bytes of its file a tensor reads.

Always true:
- what is small, and not known to be read soon, is left to the mapping; so is a view that is scattered over much more
  than it reads
- a view of most of a value counts as the value: one that grows by a row at a time is one range, not a new one each time
"""

from __future__ import annotations

import sys
from time import monotonic

import torch

from offload.prefetch.reads import UNTRACKED, arrive, tracked
from offload.prefetch.tracked import Tracked
from offload.residency import SMALL
from offload.storage.handle import Handle
from offload.storage.pages import Range

_MOST_SCATTERED = 2  # times as many bytes as are read
_MOST = 2  # times a part is more than the value


def brought_in(handle: Handle, twin: torch.Tensor) -> Range:
    """What a view cut as `twin` reads, now in memory.

    Raises:
        ReadError: the disk did not give it.
    """
    if sys.is_finalizing():  # the reader may have stopped anywhere
        return UNTRACKED
    found = _range_of(handle, twin)
    if found.calm_until < monotonic() and isinstance(found, Tracked):
        arrive(found)
    return found


def _range_of(handle: Handle, twin: torch.Tensor) -> Range:
    nbytes = twin.numel() * twin.itemsize
    start, most = handle.extent
    whole: Range | None = handle.ranges.get(handle.extent)
    if handle.recipe is not None or nbytes == most:
        return whole or (tracked(handle, start, most) if most > SMALL else UNTRACKED)
    if whole is not None and whole.calm_until >= monotonic():
        return whole
    steps = sum((size - 1) * step for size, step in zip(twin.shape, twin.stride(), strict=True))
    span = (1 + int(steps)) * twin.itemsize
    if nbytes <= SMALL or span > _MOST_SCATTERED * nbytes:
        return UNTRACKED
    if span * _MOST > most:
        return whole or tracked(handle, start, most)
    return tracked(handle, start + int(twin.storage_offset()) * twin.itemsize, span)


def start_of_run(handle: Handle, twin: torch.Tensor) -> int | None:
    """The byte of the file at which a view begins whose elements lie there as they read; None for any other view."""
    if handle.recipe is not None or not twin.is_contiguous() or twin.is_conj() or twin.is_neg():
        return None
    return handle.extent[0] + int(twin.storage_offset()) * twin.itemsize
