"""Which rows are filled, and how many there are: `rows.state`, one sequence counter per cell.

Always true:
- one byte per row and column: 0 is empty, 1 is being written for the first time, any other odd number is being
  rewritten, any other even number is filled
- starting to write a cell increments its byte, so that concurrent writers can tell; filling it increments it again
- a byte says filled only once the data is on the disk
- the number of rows changes under the folder's lock; it is raised once the files have room for them
- between a byte ceasing to say filled and its data changing, the change counter is incremented: rows that were seen as
  filled may be assumed so as long as it stays the same
- the file never shrinks: processes that map it would be killed when they read past its end. If it was truncated, that
  is an error before it is read, and it is not extended again

The file: a page of 4096 bytes (16 of `MAGIC`; then 64-bit numbers: version, columns, rows, changes, and for
each column of varying-size rows the size of its values in bytes, 0 if unknown), then the bytes, row by row. The file
may be longer than needed: syncing a changed length would delay rows.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from offload.cache.indexing import Numbers, Rows
from offload.cache.rowfile import opened
from offload.errors import CacheError, ChangedFileError, CorruptFileError
from offload.storage.replacing import put_file
from offload.storage.write import refuse_foreign
from offload.system.locks import flock, unlock
from offload.system.reasons import explained as unread
from offload.system.reasons import reading, writing
from offload.system.regular import closed_on_error, read_all

FILE = "rows.state"
PAGE = 4096
MAGIC = b"offload rows".ljust(16, b"\0")
VERSION = 3
EMPTY, BEGUN, _LAST = 0, 1, 255
_LENGTHS = 16 + 4 * 8  # offset of the sizes of values
_MOST_LENGTHS = (PAGE - _LENGTHS) // 8  # further columns have no known size
_CHUNK = 1 << 16  # bytes reserved at a time: a store into a hole on a full disk would kill the process
_AHEAD = 16  # factor by which the file is longer than needed
_SCANNED = 1 << 24  # rows checked at a time
_PART = 1 << 16  # rows checked at a time, if the caller may stop early
_QUICKER = 16  # sequential cells that are checked in the time of one random cell
_LOOK = 4096  # random cells that could be checked in the time of a call
Bytes: TypeAlias = "npt.NDArray[np.uint8]"
_SAYS_FILLED = np.array([number % 2 == 0 and number != EMPTY for number in range(256)])
_FILLED = bytes(np.flatnonzero(_SAYS_FILLED).tolist())


class States:
    """The open file.

    Attributes:
        counts: of the file's first page, mapped: version, columns, rows, changes.
    """

    def __init__(self, folder: Path, columns: int, rows: int, *, writes: bool) -> None:
        """With this many rows, or more."""
        self.path = folder / FILE
        self._columns = columns
        self._least_rows = rows
        self._writes = writes
        self._pid = os.getpid()
        self._reserved: set[int] = set()
        self._durable = 0  # size of the file that would survive a power cut
        self._known_filled = (-1, 0)  # at this change count, this many rows from the start
        self._looked_at = 0  # random rows checked since all were
        what = "the file that says which rows are filled"
        self._file = opened(self.path, os.O_RDWR if writes else os.O_RDONLY, what)
        with closed_on_error(self._file):
            self.fd = self._file.fileno()
            self._map()

    @staticmethod
    def create(folder: Path, columns: int, rows: int) -> None:
        """A file in which every row is empty; takes one page of disk space. Raises: ForeignFileError, WriteError."""
        path = folder / FILE
        refuse_foreign(path, MAGIC, "exists, and is left as it is: choose another folder for the cache")
        counts = np.array([VERSION, columns, rows, 0], dtype="<u8").tobytes()
        put_file(path, MAGIC + counts, PAGE + rows * columns)

    @property
    def num_rows(self) -> int:
        self.refuse_cut()
        return int(self.counts[2])

    @property
    def changes(self) -> int:
        """How often rows began to be written: what is known about rows stays valid while this does not change."""
        return int(self.counts[3])

    def length(self, number: int) -> int:
        """The size of a column's values in bytes, known to all its writers; 0 if unknown. They are numbered."""
        return int(self._lengths[number]) if number < _MOST_LENGTHS else 0

    def set_length(self, number: int, nbytes: int) -> None:
        """Tell all writers the size of a column's values."""
        if number < _MOST_LENGTHS:
            self._lengths[number] = nbytes

    def known_filled(self, changes: int) -> int:
        """How many rows, from the start, are known to be filled in every column at this change count."""
        known_at, rows = self._known_filled
        return rows if known_at == changes else 0

    def grow(self, rows: int) -> None:
        """Publish a larger number of rows, once the columns have room for them. Under the lock.

        Raises: WriteError; CorruptFileError (the file was truncated).
        """
        self.refuse_cut()
        needed = rows * self._columns
        if PAGE + needed > self._durable:
            with writing(self.path, needed):
                size = max(PAGE + needed * _AHEAD, os.fstat(self.fd).st_size)
                os.ftruncate(self.fd, size)
                os.fsync(self.fd)
            self._durable = size
            self._map()
        self.counts[2] = rows

    def of(self, rows: Rows, columns: list[int]) -> Bytes:
        """A copy of the bytes of these cells, (rows, columns)."""
        known = self._all()
        self._look_at_all(rows.count)
        index = self._cells(rows, columns)
        cells: Bytes = known.take(index, 0) if isinstance(index, np.ndarray) else known[index]
        return cells.copy() if cells.base is not None else cells

    def _look_at_all(self, count: int) -> None:
        """When random checks have cost as much as a full one, do that: if all are filled, it holds until a change."""
        self._looked_at += _LOOK + count
        changes, rows = self.changes, int(self.counts[2])
        if self._looked_at * _QUICKER >= rows * self._columns:
            self._looked_at = 0
            parts = (self._part(at, min(_PART, rows - at)) for at in range(0, rows, _PART))
            if all(map(_is_filled, parts)):
                self._known_filled = (changes, rows)

    def _part(self, first: int, count: int) -> bytes:
        """The bytes of consecutive rows. Reading a hole through a mapping could allocate disk space."""
        try:
            part = read_all(self.fd, count * self._columns, PAGE + first * self._columns)
        except OSError as error:
            raise unread(self.path, error) from error
        if len(part) < count * self._columns:
            self.refuse_cut()
        return part.ljust(count * self._columns, b"\0")

    def begin(self, rows: Rows, columns: list[int]) -> Bytes:
        """Mark these cells as being written; returns what to pass to `fill`. They no longer count as filled.

        Under the lock. Raises: WriteError (the disk is full); CorruptFileError (the file was truncated).
        """
        self._all()  # of a file that another process may have made longer
        self._reserve(rows.numbers)
        cells = self._cells(rows, columns)
        before: Bytes = self._all()[cells]
        rewrites = before.any()
        now: Bytes = before + 1 + (before & 1)
        now[before == _LAST] = BEGUN + 2
        self._all()[cells] = now
        self.counts[3] += 1
        if rewrites:  # on the disk they may still say filled
            self.sync()
        return now

    def fill(self, rows: Rows, columns: list[int], begun: Bytes) -> None:
        """Mark cells as filled, once on the disk, but those that another writer rewrites by now. Under the lock."""
        cells = self._cells(rows, columns)
        now = self._all()[cells]
        done: Bytes = begun + 1
        done[done == EMPTY] = 2
        self._all()[cells] = np.where(now == begun, done, now)

    def forget(self, first: int) -> None:
        """Drop the rows from `first` on. Under the lock."""
        end = self.num_rows
        self.counts[2] = first
        for start in range(first, end, _SCANNED):
            part = self._all()[start : min(start + _SCANNED, end)]
            if part.any():
                part[part != EMPTY] = EMPTY

    def sync(self) -> None:
        """Wait until the file's contents are on the disk. Raises: WriteError."""
        with writing(self.path):
            os.fdatasync(self.fd)

    def missing(self, columns: list[int]) -> Numbers:
        """The rows in which one of these cells is not filled, in order."""
        parts = [np.flatnonzero(~cells_filled(part[:, columns]).all(axis=1)) + at for at, part in self._parts()]
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])

    def count(self, columns: list[int]) -> int:
        """How many rows are filled in all of these columns."""
        return sum(int(np.count_nonzero(cells_filled(part[:, columns]).all(axis=1))) for _, part in self._parts())

    def filled(self, column: int) -> Iterator[Rows]:
        """The rows that are filled in a column, in order, in chunks."""
        for at, part in self._parts(_PART):
            numbers = np.flatnonzero(cells_filled(part[:, column])) + at
            if len(numbers):
                yield Rows(numbers)

    def used(self, *, ever: bool = False) -> int:
        """The number of rows up to the last one that is filled in any column, or that ever was: and is rewritten."""
        for at in reversed(range(0, self.num_rows, _SCANNED)):
            cells = self._some(at, _SCANNED)
            filled = np.flatnonzero((cells > BEGUN if ever else cells_filled(cells)).any(axis=1))
            if len(filled):
                return at + int(filled[-1]) + 1
        return 0

    def _parts(self, count: int = _SCANNED) -> Iterator[tuple[int, Bytes]]:
        """All rows, so many at a time: the first row of each part, and its cells."""
        return ((at, self._some(at, count)) for at in range(0, self.num_rows, count))

    def _some(self, first: int, count: int) -> Bytes:
        return self._all()[first : min(first + count, self.num_rows)]

    def count_in(self) -> None:
        """Register as a separate writer in a forked child, which shares the parent's lock and may outlive it."""
        own = opened(self.path, os.O_RDWR)
        with closed_on_error(own):
            fd = own.fileno()
            if not os.path.sameopenfile(fd, self.fd):
                raise ChangedFileError(f"{self.path} was replaced since the cache was opened: open it again")
        inherited, self._file, self.fd = self._file, own, fd
        inherited.close()
        self._pid = os.getpid()
        flock(self.fd, self.path, shared=True)

    def close(self) -> None:
        try:
            if self._pid == os.getpid():
                unlock(self.fd)
        finally:  # an interrupt would leave the lock held, and the next writer waiting
            self._file.close()
            del self.counts, self._lengths, self._bytes  # the mapping has its own descriptor

    def refuse_cut(self) -> None:
        """Raises: CorruptFileError (the file is shorter than before); ReadError."""
        try:
            size = os.lseek(self.fd, 0, os.SEEK_END)  # three times as fast as `fstat`; the offset is not used
        except OSError as error:
            raise unread(self.path, error) from error
        if size < self._mapped_bytes:
            raise CorruptFileError(
                f"{self.path}, which says which rows are filled, has {size} bytes and had {self._mapped_bytes}: it was "
                "truncated, and which rows are valid is no longer known. Copy the complete folder again."
            )

    def _all(self) -> Bytes:
        self.refuse_cut()
        if len(self._bytes) < int(self.counts[2]):  # another process has made the file longer
            self._map()
        return self._bytes

    def _cells(self, rows: Rows, columns: list[int]) -> Any:
        """The cheapest index for these cells."""
        numbers = rows.numbers if rows.span is None else rows.span
        if len(columns) == self._columns and columns == list(range(self._columns)):
            return numbers
        return (numbers[:, None], columns) if isinstance(numbers, np.ndarray) else (numbers, columns)

    def _map(self) -> None:
        with reading(self.path):
            size = os.fstat(self.fd).st_size
            if size < PAGE or read_all(self.fd, len(MAGIC), 0) != MAGIC:
                raise CorruptFileError(f"{self.path} is incomplete, or is not a file of row states")
            mapped = mmap.mmap(self.fd, size, access=mmap.ACCESS_WRITE if self._writes else mmap.ACCESS_READ)
        self._mapped_bytes = size
        self._reserved.clear()  # the last chunk only up to the end of the file
        self.counts: npt.NDArray[np.uint64] = np.frombuffer(mapped, dtype="<u8", count=4, offset=16)
        self._lengths: npt.NDArray[np.uint64] = np.frombuffer(mapped, dtype="<u8", count=_MOST_LENGTHS, offset=_LENGTHS)
        version, columns, rows = head = self.counts[:3].tolist()
        with reading(self.path):
            is_still = os.fstat(self.fd).st_size == size
        if not is_still or self.counts[:3].tolist() != head:
            self._map()  # another process is adding rows
            return
        self._check(size, version, columns, rows)
        room = (size - PAGE) // columns
        flat: Bytes = np.frombuffer(mapped, dtype=np.uint8, offset=PAGE, count=room * columns)
        self._bytes = flat.reshape(room, columns)
        self._durable = max(self._durable, PAGE + rows * columns)

    def _check(self, size: int, version: int, columns: int, rows: int) -> None:
        if version != VERSION:
            raise CacheError(
                f"{self.path} is of version {version}, and this release of offload reads version {VERSION}"
            )
        expected = PAGE + rows * columns
        if columns != self._columns or size < expected:
            raise CorruptFileError(
                f"{self.path}, which says which rows are filled, has {size} bytes and {columns} columns, where "
                f"{rows} rows of {self._columns} columns take {expected}: it was "
                "truncated, or belongs to another cache. Copy the complete folder again."
            )
        if rows < self._least_rows:
            raise CorruptFileError(
                f"{self.path} has {rows} rows, but the manifest has {self._least_rows}: one of them is older, "
                "or belongs to another cache. Copy the complete folder again."
            )

    def _reserve(self, rows: Numbers) -> None:
        if not len(rows):
            return
        first, last = ((PAGE + (int(rows[end]) - end) * self._columns - (end < 0)) // _CHUNK for end in (0, -1))
        if last - first > 1:
            chunks = np.concatenate([(PAGE + (rows + end) * self._columns - end) // _CHUNK for end in (0, 1)])
            wanted = set(np.unique(chunks).tolist())
        else:
            wanted = {first, last}
        for chunk in wanted - self._reserved:
            start = chunk * _CHUNK
            with writing(self.path, _CHUNK):
                os.posix_fallocate(self.fd, start, min(_CHUNK, self._mapped_bytes - start))
            self._reserved.add(chunk)


def _is_filled(cells: bytes) -> bool:
    """Like `all_filled`, faster for many."""
    each: Bytes = np.frombuffer(cells, dtype=np.uint8)
    return not cells or bool(each.min() != EMPTY and not np.bitwise_or.reduce(each) & 1)


def all_filled(cells: bytes) -> bool:
    """Whether all of these bytes say filled."""
    return not cells.translate(None, _FILLED)


def cells_filled(cells: Bytes) -> npt.NDArray[np.bool_]:
    """Which of these bytes say filled."""
    filled: npt.NDArray[np.bool_] = _SAYS_FILLED[cells]
    return filled
