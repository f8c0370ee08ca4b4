"""Tables that rows are picked from, such as embeddings: which rows are in memory, and which will be needed.

Always true:
- picked rows are read without what is around them, and all reads are started before waiting for the first
- a table that fits beside the values that stay is read in as a whole once much of it has been read row by row
- while all of a table is assumed to be in memory, a pick has almost no extra cost
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from offload.prefetch.engine import CHECKED_FOR, POOL, span_of
from offload.prefetch.filling import Filling
from offload.prefetch.pages import PAGE, announce, are_cached, has_holes
from offload.prefetch.value import PageState, page_state_of
from offload.storage.handle import Handle
from offload.system import clock

_LOOKED_AT = 8  # rows to check for being in memory


def has_rows_here(handle: Handle) -> bool:
    """Whether all rows of a table are assumed to be in memory; called for each pick, so it has to be cheap."""
    page_state = handle.page_state
    if type(page_state) is not PageState:
        return False
    now = clock.now()
    if page_state.checked_until >= now:
        return True
    whole = page_state.ranges.get(handle.extent)
    return whole is not None and whole.checked_until >= now


def prefetch_rows(handle: Handle, view_spec: torch.Tensor, rows: torch.Tensor) -> None:
    """Start reading rows of a view that are about to be picked, each without what is around it.

    Args:
        rows: their indices, from 0, on the CPU; out-of-range ones are ignored.
    """
    mapped = handle.file.mapping(shared=handle.owned)
    if mapped is None or not rows.numel():
        return
    start, length = handle.extent
    first = mapped.data_ptr() + start + int(view_spec.storage_offset()) * view_spec.itemsize
    step, nbytes = view_spec.stride(0) * view_spec.itemsize, span_of(view_spec[0])
    numbers = rows.flatten()
    some = [one for one in numbers[:: max(1, len(numbers) // _LOOKED_AT)].tolist() if 0 <= one < len(view_spec)]
    missing = sum(not are_cached(first + number * step, nbytes) for number in some)
    page_state = page_state_of(handle)
    if not missing:
        if type(page_state.filling) is Filling:
            page_state.filling.take()  # its mapping is the file's
        if are_cached(mapped.data_ptr() + start, length):
            page_state.assume_rows_until(clock.now() + CHECKED_FOR)
        return
    each = torch.unique(numbers).tolist()
    for begin, end in runs_of(each, len(view_spec), PAGE // max(step, 1)):
        announce(first + begin * step, (end - begin - 1) * step + nbytes)
    _missed(handle, page_state, mapped, len(each) * missing // len(some), -(-nbytes // PAGE) * PAGE)


def _missed(handle: Handle, page_state: PageState, mapped: torch.UntypedStorage, rows: int, nbytes: int) -> None:
    """So many rows, each on pages of so many bytes, have to be read one by one: it may be time to read all."""
    filling = page_state.filling
    if type(filling) is not Filling:
        filling = Filling(page_state.pool or POOL, in_huge_pages=not handle.owned)
        page_state.fill_by(filling)
    filling.missed(rows, rows * nbytes, handle.extent[1], lambda: _whole(handle, mapped))


def _whole(handle: Handle, mapped: torch.UntypedStorage) -> torch.Tensor | None:
    """The bytes of the table, unless there is little to read."""
    try:
        if has_holes(os.stat(handle.file.path)):
            return None
    except OSError:  # it was deleted; only the mapping is left
        return None
    start, length = handle.extent
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(mapped, start, (length,), (1,))


def runs_of(numbers: list[int], count: int, between: int = 0) -> Iterator[tuple[int, int]]:
    """Runs (first, end) of sorted numbers from 0 to `count`; gaps of up to `between` don't split a run."""
    begin = end = -1
    for number in numbers:
        if not 0 <= number < count:
            continue
        if begin >= 0 and number - end > between:
            yield begin, end
            begin = -1
        begin, end = number if begin < 0 else begin, number + 1
    if begin >= 0:
        yield begin, end
