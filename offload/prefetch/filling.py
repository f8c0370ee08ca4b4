"""Rows of a file, or of a table in one, that are picked here and there: all are brought in, where they have room.

Always true:
- nothing is brought in before 256 rows, and one in 64 of the bytes, had to be read from the disk row by row
- nothing that has no room beside the values that stay, which is looked at again for each part
- the reader does it while nothing else is to be read, and stops soon after the last row that had to be read
- what was brought in, and is gone again, is brought in the less readily: most of what is read so is not in vain
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch

from offload.prefetch.engine import POOL, fill, lock
from offload.prefetch.residency import Pool, log
from offload.storage.pages import announce, populated, read_in_huge_pages

_LEAST_ROWS = 256
_ONE_IN = 64  # bytes that were read row by row, until all are
_LESS_READILY = 4  # times as many the next time
_PART = 16 << 20  # bytes that are waited for at a time, while the next are on their way
_GOES_ON = 2.0  # seconds after a row that had to be read


class Filling:
    """What of one file was read row by row, and how far all of it has been brought in.

    Args:
        pool: the budget that it is to have room in.
        in_huge_pages: whether it may be read in them; not what is written to where it is mapped.
    """

    def __init__(self, pool: Pool | None = None, *, in_huge_pages: bool = True) -> None:
        self._pool = pool or POOL
        self._in_huge_pages = in_huge_pages
        self._rows = self._bytes = 0
        self._one_in = _ONE_IN
        self._until = 0.0
        self._coming: torch.Tensor | None = None
        self._done = 0
        self._here: torch.Tensor | None = None
        self._filled = 0  # bytes that were brought in

    @property
    def is_under_way(self) -> bool:
        """Whether it has been begun and not ended."""
        return self._coming is not None

    def missed(self, rows: int, nbytes: int, size: int, mapped: Callable[[], torch.Tensor | None]) -> None:
        """Rows here and there are not in memory, and are to be read from the disk.

        Args:
            rows: how many.
            nbytes: of the pages that they lie on, or about so many.
            size: bytes of all rows.
            mapped: maps them; gives None if they are not to be brought in.

        Raises: as `mapped`.
        """
        with lock():
            if self.is_under_way or self._begins(rows, nbytes, size, mapped):
                self._until = time.monotonic() + _GOES_ON
                fill(self)

    def _begins(self, rows: int, nbytes: int, size: int, mapped: Callable[[], torch.Tensor | None]) -> bool:
        self._rows += rows
        self._bytes += nbytes
        if self._rows < _LEAST_ROWS or self._bytes * self._one_in < size:
            return False
        self._rows = self._bytes = self._done = 0
        coming = mapped()
        if coming is None or not self._has_room(coming.nbytes):
            return False
        if self._in_huge_pages:
            read_in_huge_pages(coming.data_ptr(), coming.nbytes)
        announce(coming.data_ptr(), min(_PART, coming.nbytes))
        self._coming, self._here = coming, None
        _FILLINGS.add(self)
        log.debug("%d bytes, of which rows are picked, have room: all are brought in", coming.nbytes)
        return True

    def end(self) -> None:
        """Bring nothing more in; what was is nobody's any more."""
        self._coming = self._here = None
        self._filled = 0

    def take(self) -> torch.Tensor | None:
        """All rows, mapped, if they have been brought in; once."""
        here, self._here = self._here, None
        return here

    def read_on(self) -> bool:
        """Bring the next part in; whether there is more to do now. Called by the reader."""
        coming, done = self._coming, self._done
        if coming is None or time.monotonic() > self._until:
            return False
        if not self._has_room(coming.nbytes):
            self.end()
            return False
        address, behind = coming.data_ptr(), min(done + _PART, coming.nbytes)
        announce(address + behind, min(_PART, coming.nbytes - behind))
        is_here = False
        with suppress(OSError):  # who asks for the rows meets it too, and tells
            is_here = populated(address + done, behind - done)
        if not is_here:  # nor are they touched: if another cuts the file, that would end the process
            self.end()
            return False
        with lock():
            self._done = behind
            if self._coming is not None and behind == coming.nbytes:
                self._one_in = max(self._one_in // _LESS_READILY, 1)
                self._coming, self._here, self._filled = None, coming, coming.nbytes
            return self.is_under_way

    def _has_room(self, nbytes: int) -> bool:
        """Whether so many bytes may be in memory beside the values of all models, and what else was brought in."""
        with lock():
            pools = Pool.all()
            elsewhere = {on_device for pool in pools for on_device in pool.on_devices.values()}
            values = sum(pool.nbytes for pool in pools if pool is not POOL and pool not in elsewhere)
            filled = sum(other._filled for other in _FILLINGS if other is not self)
            has_own = self._pool is POOL or nbytes <= self._pool.spare()
            return has_own and nbytes + values + filled <= POOL.spare()


_FILLINGS: weakref.WeakSet[Filling] = weakref.WeakSet()  # that were begun; under the lock
