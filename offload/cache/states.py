"""Which rows are filled, and how many there are: `rows.state`.

Always true:
- one byte a row and column: 0 is empty, 1 is being written for the first time, an odd number is being written, an even
  one is filled
- who writes a row moves its byte on, so that two writers of it can tell; who fills it moves it on again
- a byte says filled only when what it stands for is on the disk
- numbers of rows and room move under the lock of the folder; the room is said to be there when it is
- between a byte that stops saying that its cell is filled and the data of that the count of changes moves: who has seen
  rows filled may take them for that until it does
- the file never gets shorter: who has it mapped would be killed by a look at what was cut off. One that did is an
  error before it is looked at, and is not made longer again

The file: a page of 4096 bytes (16 of `MAGIC`; then 64-bit counts: version, columns, rows, room, changes, and for each
column of rows of any length how many bytes its values take, 0 if that is not known), then the bytes, row by row. It may
be longer than that, with nothing there: a sync of its length waits for rows.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from offload.cache.indexing import Numbers, Rows
from offload.cache.rowfile import opened
from offload.errors import CacheError, ChangedFileError, CorruptFileError, ForeignFileError
from offload.storage.locks import flock, unlock
from offload.storage.reasons import explained as unread
from offload.storage.reasons import reading, writing
from offload.storage.regular import as_file, closed_on_error, is_there, open_regular
from offload.storage.replacing import put_file

FILE = "rows.state"
PAGE = 4096
MAGIC = b"offload rows".ljust(16, b"\0")
VERSION = 2  # in the first one changes were not counted
EMPTY, BEGUN, _LAST = 0, 1, 255
_LENGTHS = 16 + 5 * 8  # where the lengths of values begin
_MOST_LENGTHS = (PAGE - _LENGTHS) // 8  # of columns beyond that none is known
_CHUNK = 1 << 16  # bytes that are reserved at a time: a store into a hole of a full disk would end the process
_AHEAD = 16  # times the room that is needed
_SCANNED = 1 << 24  # rows that are looked at at a time
_PART = 1 << 16  # rows that are looked at at a time, where one may end it
_QUICKER = 16  # cells in order that are looked at in the time of one here and there
_LOOK = 4096  # cells here and there that could be looked at in the time that a call takes
Bytes: TypeAlias = "npt.NDArray[np.uint8]"
_SAYS_FILLED = np.array([number % 2 == 0 and number != EMPTY for number in range(256)])
_FILLED = bytes(np.flatnonzero(_SAYS_FILLED).tolist())


class States:
    """The opened file."""

    def __init__(self, folder: Path, columns: int, rows: int, *, writes: bool) -> None:
        """
        Args:
            rows: that there are at least.

        Raises:
            MissingFileError, CorruptFileError, ForeignFileError, ReadError
            CacheError: it is of another version.
        """
        self.path = folder / FILE
        self._columns = columns
        self._least_rows = rows
        self._writes = writes
        self._pid = os.getpid()
        self._reserved: set[int] = set()
        self._durable = 0  # bytes that the file has, also after a power cut
        self._known_filled = (-1, 0)  # at so many changes, so many rows from the first on
        self._looked_at = 0  # rows here and there, since all were
        what = "the file that says which rows are filled"
        self.fd = opened(self.path, os.O_RDWR if writes else os.O_RDONLY, what)
        with closed_on_error(self.fd):
            self._map()

    @staticmethod
    def create(folder: Path, columns: int, rows: int) -> None:
        """A file in which every row is empty; takes the disk space of one page.

        Raises:
            ForeignFileError: something that offload did not write stands there.
            WriteError
        """
        path = folder / FILE
        if is_there(path) and not _is_ours(path):
            raise ForeignFileError(f"{path} exists: it is left as it is. Take another folder for the cache.")
        counts = np.array([VERSION, columns, rows, rows, 0], dtype="<u8").tobytes()
        put_file(path, MAGIC + counts, PAGE + rows * columns)

    @property
    def num_rows(self) -> int:
        self.refuse_cut()
        return int(self._counts[2])

    @num_rows.setter
    def num_rows(self, value: int) -> None:
        self._counts[2] = value

    @property
    def room(self) -> int:
        """Rows that there is room for."""
        self.refuse_cut()
        return int(self._counts[3])

    @property
    def changes(self) -> int:
        """How often rows began to be written: what is known of them holds until it moves."""
        return int(self._counts[4])

    def seen(self) -> tuple[int, int]:
        """As `changes` and `num_rows`, for those who have just seen that the file is whole."""
        return int(self._counts[4]), int(self._counts[2])

    def length(self, number: int) -> Length:
        """Of the values of a column: among those with rows of any length, the one of this number."""
        return Length(self, number)

    def known_filled(self, changes: int) -> int:
        """How many rows, from the first on, are known to have been filled in every column at so many changes."""
        known_at, rows = self._known_filled
        return rows if known_at == changes else 0

    def grow(self, room: int) -> None:
        """Say that there is room for so many rows: the columns have it. Under the lock.

        Raises:
            WriteError
            CorruptFileError: the file was cut.
        """
        self.refuse_cut()
        needed = room * self._columns
        if PAGE + needed > self._durable:
            with writing(self.path, needed):
                size = max(PAGE + needed * _AHEAD, os.fstat(self.fd).st_size)
                os.ftruncate(self.fd, size)
                os.fsync(self.fd)
            self._durable = size
        self._counts[3] = room
        self._map()

    def of(self, rows: Rows, columns: list[int]) -> Bytes:
        """The bytes of these cells, (rows, columns): a copy."""
        known = self._all()
        self._look_at_all(len(rows))
        index = self._cells(rows, columns)
        cells: Bytes = known.take(index, 0) if isinstance(index, np.ndarray) else known[index]
        return cells.copy() if cells.base is not None else cells

    def _look_at_all(self, count: int) -> None:
        """When some have been looked at for as long as it takes: if all are filled none need be, until one changes."""
        self._looked_at += _LOOK + count
        changes, rows = self.seen()
        if self._looked_at * _QUICKER >= rows * self._columns:
            self._looked_at = 0
            parts = (self._part(at, min(_PART, rows - at)) for at in range(0, rows, _PART))
            if int(self._counts[0]) == VERSION and all(map(_is_filled, parts)):
                self._known_filled = (changes, rows)

    def _part(self, first: int, count: int) -> bytes:
        """The bytes of rows behind each other. A look at a hole through a mapping may take room on the disk."""
        with reading(self.path):
            part = os.pread(self.fd, count * self._columns, PAGE + first * self._columns)
        if len(part) < count * self._columns:
            self.refuse_cut()
        return part.ljust(count * self._columns, b"\0")

    def begin(self, rows: Rows, columns: list[int]) -> Bytes:
        """Say that these cells are being written; gives what to `fill` them with. They may be filled no more.

        Under the lock.

        Raises:
            WriteError: the disk is full.
            CorruptFileError: the file was cut.
        """
        self.refuse_cut()
        self._reserve(rows.numbers)
        cells = self._cells(rows, columns)
        before: Bytes = self._all()[cells]
        rewrites = before.any()
        now: Bytes = before + 1 + (before & 1)
        now[before == _LAST] = BEGUN + 2
        self._all()[cells] = now
        self._counts[4] += 1
        if rewrites:  # the disk may say that they are filled
            self.sync()
        return now

    def fill(self, rows: Rows, columns: list[int], begun: Bytes) -> None:
        """Say of what is on the disk that it is filled, but for cells that somebody has begun to write again.

        Under the lock.
        """
        cells = self._cells(rows, columns)
        now = self._all()[cells]
        done: Bytes = begun + 1
        done[done == EMPTY] = 2
        self._all()[cells] = np.where(now == begun, done, now)

    def forget(self, first: int) -> None:
        """The rows from `first` on are no rows any more. Under the lock."""
        self.num_rows = first
        for start in range(first, self.room, _SCANNED):
            part = self._all()[start : start + _SCANNED]
            if part.any():
                part[part != EMPTY] = EMPTY

    def shrink(self) -> None:
        """Give back the room behind the last row. Under the lock, by the only writer.

        Raises:
            WriteError
        """
        self._counts[3] = self.num_rows
        self.sync()
        self._map()

    def sync(self) -> None:
        """Wait until what the file says is on the disk.

        Raises:
            WriteError
        """
        with writing(self.path):
            os.fdatasync(self.fd)

    def missing(self, columns: list[int]) -> Numbers:
        """Rows of which one of these cells is not filled, in order."""
        found = [np.empty(0, dtype=np.int64)]
        for at in range(0, self.num_rows, _SCANNED):
            part = self._all()[at : min(at + _SCANNED, self.num_rows)]
            found.append(np.flatnonzero(~cells_filled(part[:, columns]).all(axis=1)) + at)
        return np.concatenate(found)

    def count(self, columns: list[int]) -> int:
        """How many rows are filled in all of these columns."""
        parts = range(0, self.num_rows, _SCANNED)
        rows = (self._all()[at : min(at + _SCANNED, self.num_rows)] for at in parts)
        return sum(int(np.count_nonzero(cells_filled(part[:, columns]).all(axis=1))) for part in rows)

    def filled(self, column: int) -> Iterator[Rows]:
        """The rows that are filled in a column, in order, some at a time."""
        for at in range(0, self.num_rows, _PART):
            numbers = np.flatnonzero(cells_filled(self._all()[at : min(at + _PART, self.num_rows), column])) + at
            if len(numbers):
                yield Rows(numbers)

    def used(self) -> int:
        """The number of rows up to the last one that is filled, in some column."""
        return self._up_to_last(cells_filled)

    def known(self) -> int:
        """The number of rows up to the last one that was ever filled: a row that was written again is missing now."""
        return self._up_to_last(lambda cells: cells > BEGUN)

    def _up_to_last(self, holds: Callable[[Bytes], npt.NDArray[np.bool_]]) -> int:
        for end in range(self.num_rows, 0, -_SCANNED):
            start = max(end - _SCANNED, 0)
            part = self._all()[start:end]
            found = np.flatnonzero(holds(part).any(axis=1))
            if len(found):
                return start + int(found[-1]) + 1
        return 0

    def count_in(self) -> None:
        """Be a writer of its own, in a forked child: it may outlive the parent, whose lock it shares."""
        own = opened(self.path, os.O_RDWR)
        with closed_on_error(own):
            if not os.path.sameopenfile(own, self.fd):
                raise ChangedFileError(f"{self.path} was replaced since the cache was opened: open it again")
        inherited, self.fd = self.fd, own
        os.close(inherited)
        self._pid = os.getpid()
        flock(self.fd, self.path, shared=True)

    def close(self) -> None:
        if self._pid == os.getpid():
            unlock(self.fd)
        os.close(self.fd)
        del self._counts, self._lengths, self._bytes  # the mapping has a descriptor of its own

    def refuse_cut(self) -> None:
        """
        Raises:
            CorruptFileError: the file is shorter than it was.
            ReadError
        """
        try:
            size = os.lseek(self.fd, 0, os.SEEK_END)  # in a third of the time of `fstat`; nothing is read at the offset
        except OSError as error:
            raise unread(self.path, error) from error
        if size < self._mapped_bytes:
            raise CorruptFileError(
                f"{self.path}, which says which rows are filled, has {size} bytes and had {self._mapped_bytes}: it was "
                "cut, and which rows are valid is no longer known. Copy the complete folder again."
            )

    def _all(self) -> Bytes:
        self.refuse_cut()
        if len(self._bytes) < int(self._counts[2]):  # another process has made room
            self._map()
        return self._bytes

    def _cells(self, rows: Rows, columns: list[int]) -> Any:
        """An index, as cheap a one as there is."""
        numbers = rows.numbers if rows.span is None else rows.span
        if len(columns) == self._columns and columns == list(range(self._columns)):
            return numbers
        return (numbers[:, None], columns) if isinstance(numbers, np.ndarray) else (numbers, columns)

    def _map(self) -> None:
        with reading(self.path):
            size = os.fstat(self.fd).st_size
            if size < PAGE or os.pread(self.fd, 16, 0) != MAGIC:
                raise CorruptFileError(
                    f"{self.path} does not say which rows are filled: it is not whole, or another file"
                )
            mapped = mmap.mmap(self.fd, size, access=mmap.ACCESS_WRITE if self._writes else mmap.ACCESS_READ)
        self._mapped_bytes = size
        self._counts: npt.NDArray[np.uint64] = np.frombuffer(mapped, dtype="<u8", count=5, offset=16)
        self._lengths: npt.NDArray[np.uint64] = np.frombuffer(mapped, dtype="<u8", count=_MOST_LENGTHS, offset=_LENGTHS)
        version, columns, rows, room = said = self._counts[:4].tolist()
        with reading(self.path):
            is_still = os.fstat(self.fd).st_size == size
        if not is_still or self._counts[:4].tolist() != said:
            self._map()  # another process is making room
            return
        self._check(size, version, columns, rows, room)
        if self._writes:
            self._counts[0] = VERSION
        flat: Bytes = np.frombuffer(mapped, dtype=np.uint8, offset=PAGE, count=room * columns)
        self._bytes = flat.reshape(room, columns)
        self._durable = max(self._durable, PAGE + flat.nbytes)

    def _check(self, size: int, version: int, columns: int, rows: int, room: int) -> None:
        if version not in (1, VERSION):
            raise CacheError(
                f"{self.path} is of version {version}, and this release of offload reads version {VERSION}"
            )
        expected = PAGE + room * columns
        if columns != self._columns or rows > room or size < expected:
            raise CorruptFileError(
                f"{self.path}, which says which rows are filled, has {size} bytes and {columns} columns, where "
                f"{rows} rows of {self._columns} columns, with room for {room}, take {expected}: it was cut, or is of "
                "another cache. Copy the complete folder again."
            )
        if rows < self._least_rows:
            raise CorruptFileError(
                f"{self.path} speaks of {rows} rows, and the manifest beside it of {self._least_rows}: one of them is "
                "older, or of another cache. Copy the complete folder again."
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
                os.posix_fallocate(self.fd, start, min(_CHUNK, PAGE + self.room * self._columns - start))
            self._reserved.add(chunk)


class Length:
    """How many bytes the values of a column take, as all know who write them; 0 if that is not known."""

    __slots__ = ("_number", "_states")

    def __init__(self, states: States, number: int) -> None:
        self._states = states
        self._number = number

    def get(self) -> int:
        return int(self._states._lengths[self._number]) if self._number < _MOST_LENGTHS else 0

    def set(self, nbytes: int) -> None:
        if self._number < _MOST_LENGTHS:
            self._states._lengths[self._number] = nbytes


def _is_ours(path: Path) -> bool:
    """Whether a cache that was not made to its end may have left it."""
    with suppress(CorruptFileError, ForeignFileError):
        fd = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
        with as_file(fd) as file, reading(path):
            return file.read(len(MAGIC)) == MAGIC
    return False


def _is_filled(cells: bytes) -> bool:
    """As `all_filled`, for many."""
    each: Bytes = np.frombuffer(cells, dtype=np.uint8)
    return not cells or bool(each.min() != EMPTY and not np.bitwise_or.reduce(each) & 1)


def all_filled(cells: bytes) -> bool:
    """Whether all of these bytes say that they stand for something filled."""
    return not cells.translate(None, _FILLED)


def cells_filled(cells: Bytes) -> npt.NDArray[np.bool_]:
    """Which of these bytes say that they stand for something filled."""
    filled: npt.NDArray[np.bool_] = _SAYS_FILLED[cells]
    return filled
