"""Rows that are picked from a table, or from a file of a cache: which are in memory, and which will be needed.

Always true:
- picked rows are read without what is around them, and all reads are started before waiting for the first
- while all of a table is assumed to be in memory, a pick has almost no extra cost
- once 256 rows of a file, and 1/64 of its bytes, had to be read from the disk row by row, all are read in, if they fit
  beside the values that stay, which is checked again for each part
- the reader does that while it has nothing else to read
- each time that what was read in has been evicted, the threshold rises: most of such reading must not be in vain
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch

from offload.prefetch.engine import CHECKED_FOR, POOL, lock, reader, span_of
from offload.prefetch.pages import PAGE, announce, are_cached, bring_in, read_in_huge_pages
from offload.prefetch.plan import Pool
from offload.prefetch.room import OnDevice
from offload.prefetch.value import PageState, page_state_of
from offload.storage.handle import Handle
from offload.system import clock

_LOOKED_AT = 8  # rows to check for being in memory
_LEAST_ROWS = 256
_ONE_IN = 64  # all is read once 1/64 of the bytes was read row by row
_LESS_READILY = 4  # factor by which the threshold rises
_PART = 16 << 20  # bytes read before each check, while the next part is being read


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
    if all(are_cached(first + number * step, nbytes) for number in some):
        if are_cached(mapped.data_ptr() + start, length):
            page_state_of(handle).checked_until = clock.now() + CHECKED_FOR
        return
    for begin, end in runs_of(torch.unique(numbers).tolist(), len(view_spec), PAGE // max(step, 1)):
        announce(first + begin * step, (end - begin - 1) * step + nbytes)


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


class Filling:
    """What was read of one file row by row, and how much of it has been read in as a whole."""

    def __init__(self) -> None:
        self._rows = self._bytes = 0
        self._one_in = _ONE_IN
        self._coming: torch.Tensor | None = None
        self._done = 0
        self._filled_rows: torch.Tensor | None = None
        self._filled = 0  # bytes read in so far

    @property
    def is_under_way(self) -> bool:
        return self._coming is not None

    def missed(self, rows: int, nbytes: int, size: int, mapped: Callable[[], torch.Tensor | None]) -> None:
        """Some rows are not in memory, and are about to be read from the disk.

        Args:
            rows: their number.
            nbytes: size of the pages they are on, approximately.
            size: bytes of all rows.
            mapped: maps all rows; returns None if that is not possible.

        Raises: as `mapped`.
        """
        with lock():
            if self.is_under_way or self._begins(rows, nbytes, size, mapped):
                reader().fill(self.read_on)

    def _begins(self, rows: int, nbytes: int, size: int, mapped: Callable[[], torch.Tensor | None]) -> bool:
        self._rows += rows
        self._bytes += nbytes
        if self._rows < _LEAST_ROWS or self._bytes * self._one_in < size:
            return False
        self._rows = self._bytes = self._done = 0
        coming = mapped()
        if coming is None or not self._fits(coming.nbytes):
            return False
        read_in_huge_pages(coming.data_ptr(), coming.nbytes, again=True)
        announce(coming.data_ptr(), min(_PART, coming.nbytes))
        self._coming, self._filled_rows = coming, None
        _FILLINGS.add(self)
        return True

    def end(self) -> None:
        """Read in nothing more, and forget what was."""
        self._coming = self._filled_rows = None
        self._filled = 0

    def take(self) -> torch.Tensor | None:
        """All rows, mapped, if they have just been read in; returned once."""
        rows, self._filled_rows = self._filled_rows, None
        return rows

    def read_on(self) -> bool:
        """Read the next part; returns whether there is more to do now. Called by the reader."""
        coming, done = self._coming, self._done
        if coming is None:
            return False
        if not self._fits(coming.nbytes):
            self.end()
            return False
        address, behind = coming.data_ptr(), min(done + _PART, coming.nbytes)
        announce(address + behind, min(_PART, coming.nbytes - behind))
        is_read = False
        with suppress(OSError):  # the code that wants the rows meets the same error, and reports it
            is_read = bring_in(address + done, behind - done)
        if not is_read:
            self.end()
            return False
        with lock():
            self._done = behind
            if self._coming is not None and behind == coming.nbytes:
                self._one_in = max(self._one_in // _LESS_READILY, 1)
                self._coming, self._filled_rows, self._filled = None, coming, coming.nbytes
            return self.is_under_way

    def _fits(self, nbytes: int) -> bool:
        """Whether so many bytes fit in memory beside the values of all models and everything else that was read in."""
        with lock():
            values = sum(pool.nbytes for pool in Pool.all() if not isinstance(pool, OnDevice))
            filled = sum(other._filled for other in _FILLINGS if other is not self)
            return nbytes + values + filled <= POOL.limit_now()


_FILLINGS: weakref.WeakSet[Filling] = weakref.WeakSet()  # those that have begun; under the lock
