"""Rows of a file by index, and any of its bytes.

Always true:
- a mapping is used only for what is in memory: under a memory cap, faulting in the rest goes page by page
- what is not in memory is read with system calls, all of which are announced before the first one is waited for;
  parts are returned in the requested order, and may come in any order and repeat
- a file that ends too early is an error
- only whole rows are written, never through a mapping

A file, as one process sees it (`RowFile`):

    COLD, read by system calls ── 1/8 of it was read from memory, and nearly all is there ──> MAPPED, rows are copied
      │  ^                                                                                    out of the mapping
      │  └── a sample of rows, and then of pages, is not in memory; or the file was cut ────────┘
      │
      └─ many random rows were missed ──> FILLING, read by a thread ── all is in memory ──> COLD, and mapped next time
                                             └── no room ──> COLD

At most every 10 ms, with system calls: that the file of a mapping is not cut, and that sampled rows are in memory.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from offload.cache.indexing import Numbers, Rows
from offload.errors import (
    ChangedFileError,
    CorruptFileError,
    ForeignFileError,
    MissingFileError,
    OffloadError,
    ReadError,
)
from offload.memory import available_bytes
from offload.prefetch.pages import PAGE, begin_to_write_out, cached_bytes
from offload.prefetch.tables import Filling
from offload.storage.mapping import map_bytes
from offload.storage.replacing import write_all
from offload.system.reasons import explained, reading
from offload.system.regular import Descriptor, closed_on_error, open_regular

_MOST_PARTS = 512  # parts per call, with the gaps between them: the system allows 1024
_CLOSE = 4096  # gap in bytes that is read along: another call would take longer
_LOOKS, _LOOKS_IF_MAPPED = 16, 4  # rows to check for being in memory
_STILL = 0.01  # seconds for which a mapping is assumed to be in memory after a check: one batch, or a few
_READ_AGAIN = 8  # an uncached file is mapped once 1/8 of its bytes have been read from memory
_SAMPLES, _ABSENT = 256, 5  # pages of a mapped file to check, and how many of them may be absent
_WRITTEN_OUT = 8 << 20  # consecutive bytes to hand to the disk while the next ones are prepared
_WORDS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}  # dtype names common to NumPy and torch
_HUGE = 32 << 20  # bytes: smaller allocations reuse memory of the C library that has been touched
_LONG = 1 << 20  # bytes of a run that a system call copies faster than the processor does out of small pages


class Descriptors:
    """Two descriptors of one file: for consecutive rows, and for random access. Closed with the last reference."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        """Raises: MissingFileError, CorruptFileError, ForeignFileError, ReadError."""
        file = opened(path, os.O_RDWR if writes else os.O_RDONLY)
        with closed_on_error(file):
            self._files = file, opened(path, os.O_RDONLY)
        self.fd, self.random = (file.fileno() for file in self._files)
        with suppress(OSError):  # otherwise the system reads ahead after each row
            os.posix_fadvise(self.random, 0, 0, os.POSIX_FADV_RANDOM)

    def close(self) -> None:
        self.fd = self.random = -1  # first: the numbers may soon be other files'
        for file in self._files:
            file.close()


class RowFile:
    """A file with rows of one dtype and shape, beginning at byte `start`."""

    def __init__(
        self,
        path: Path,
        start: int,
        dtype: torch.dtype,
        row_shape: tuple[int, ...],
        *,
        writes: bool = False,
        files: Descriptors | None = None,
    ) -> None:
        """Raises: MissingFileError, CorruptFileError, ForeignFileError, ReadError."""
        files = files or Descriptors(path, writes=writes)
        self.path = path
        self._start = start
        self._dtype = dtype
        self._row_shape = row_shape
        self._size = math.prod(row_shape) * dtype.itemsize
        word = math.gcd(start, dtype.itemsize)  # rows of any dtype and alignment can be copied as such words
        self._word_name = _WORDS[word]
        self._word: torch.dtype = getattr(torch, self._word_name)
        self._words = row_shape if word == dtype.itemsize else (*row_shape, dtype.itemsize // word)  # of one row
        self._files = files
        self.fd = files.fd
        self._random = files.random
        self.mapped: torch.Tensor | None = None  # (rows in the file, *words of a row)
        self.in_memory_until = 0.0  # as far as is known
        self._behind = range(0)  # consecutive bytes that were written but not handed to the disk
        self._until_mapped = 0  # bytes to be read from memory before it is mapped
        self._filling = Filling()

    def write(self, rows: Rows, data: memoryview) -> None:
        """Write rows in ascending order; `data` has them one after the other. Raises: OSError."""
        runs = [(rows.span.start, 0, rows.count)] if rows.span else runs_of(rows.numbers)
        for first, begin, end in runs:
            at = self._at(first)
            self._give_to_disk(at, write_all(self.fd, data[begin * self._size : end * self._size], at))

    def read(self, rows: Rows) -> torch.Tensor:
        """Rows in any order: (rows, *row_shape), plain, on the CPU."""
        mapped = self.mapped  # another thread may change it meanwhile
        if mapped is not None and rows.last < mapped.size(0) and time.monotonic() < self.in_memory_until:
            return self._taken(mapped, rows)
        if not self._size or not rows.count:
            return self._values(self._fresh(rows.count))
        try:
            is_cached = self._are_cached(rows)
            mapped = self._mapped_if_warm(rows, is_cached)
            if mapped is not None:
                return self._taken(mapped, rows)
            if not is_cached and not rows.span:
                pages = rows.count * -(-self._size // PAGE) * PAGE
                self._filling.missed(rows.count, pages, self.size, self._all_mapped)
            words = self._fresh(rows.count)
            self._read(rows, words, announce=not is_cached)
        except OffloadError:
            raise
        except OSError as error:
            raise explained(self.path, error) from error
        return self._values(words)

    def read_runs(self, starts: Numbers, sizes: Numbers, into: torch.Tensor, *, are_picked: bool) -> None:
        """Rows of one byte: runs of them, given by their first rows and sizes, one after the other into bytes.

        `are_picked`: runs from anywhere, and not all that there are between two of them. Raises: as `read`.
        """
        is_cached = self._are_cached(Rows(starts[sizes > 0]))
        if is_cached:
            self._filling.take()  # runs are copied by system calls, which need no mapping
        elif are_picked:
            pages = int((-(-sizes // PAGE) * PAGE).sum())
            self._filling.missed(len(sizes), pages, self.size, self._all_mapped)
        places, fd = np.cumsum(sizes) - sizes, self._random if are_picked else self.fd
        read_parts(fd, self.path, starts, sizes, places, into.numpy().data, announce=not is_cached)

    @property
    def size(self) -> int:
        """In bytes. Raises: ReadError."""
        return size_of(self.fd, self.path)

    def taken(self, rows: int | slice | torch.Tensor, count: int, now: float) -> torch.Tensor:
        """Some of the first `count` rows, out of the mapping: what `read` gives, for plain forms of an index.

        Raises: IndexError; OSError (they are not mapped, or not in memory).
        """
        mapped = self.mapped
        if mapped is None or mapped.size(0) < count:
            raise OSError(errno.ENODATA, "there is no mapping")
        if now > self.in_memory_until:
            self.look(_some(rows))
        words = mapped if mapped.size(0) == count else mapped[:count]
        if isinstance(rows, slice) and (rows.stop - rows.start) * self._size >= _LONG:
            return self.read(Rows.run(rows.start, rows.stop))
        return self._values(words.index_select(0, rows) if isinstance(rows, torch.Tensor) else words[rows].clone())

    def look(self, rows: Iterable[int]) -> None:
        """Check that these rows are in memory; for a moment, all others are assumed to be, too. Raises: OSError."""
        mapped = self.mapped
        if mapped is not None and os.fstat(self._random).st_size < self._at(len(mapped)):
            self.mapped = None  # touching the truncated part would kill the process
            raise OSError(errno.ENODATA, "the file ends before its rows")
        look_at(self._random, map(self._at, rows))
        self.in_memory_until = time.monotonic() + _STILL

    def _taken(self, mapped: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Rows that are in memory, out of the mapping; a long run by a system call."""
        if rows.span is None:
            return self._values(mapped.index_select(0, torch.from_numpy(rows.numbers)))
        words = self._fresh(rows.count)
        if words.nbytes < _LONG:
            words.copy_(mapped[rows.span])
        else:
            self._read(rows, words, announce=False)
        return self._values(words)

    def _values(self, words: torch.Tensor) -> torch.Tensor:
        """(rows, *row_shape), over the same memory."""
        values = words.view(self._dtype)
        return values if self._words is self._row_shape else values.squeeze(-1)

    def _read(self, rows: Rows, into: torch.Tensor, *, announce: bool) -> None:
        memory = into.view(torch.uint8).view(rows.count, self._size).numpy().data.cast("B")
        if rows.span:
            read_run(self.fd, self.path, self._at(rows.span.start), [memory])
            return
        size = np.int64(self._size)
        starts, places = self._start + rows.numbers * size, np.arange(rows.count) * size
        sizes = np.broadcast_to(size, rows.count)
        read_parts(self._random, self.path, starts, sizes, places, memory, announce=announce)

    def _fresh(self, count: int) -> torch.Tensor:
        """Memory for (rows, *words of a row). NumPy requests huge pages, which are faster to fault in."""
        shape = (count, *self._words)
        if count * self._size < _HUGE:
            return torch.empty(shape, dtype=self._word, device="cpu")
        return torch.from_numpy(np.empty(shape, dtype=self._word_name))

    def _give_to_disk(self, at: int, nbytes: int) -> None:
        """Hand written data to the disk in large pieces of whole pages; the rest waits for the next sync."""
        behind = range(self._behind.start if at == self._behind.stop else at, at + nbytes)
        if len(behind) >= _WRITTEN_OUT:
            end = behind.stop // PAGE * PAGE
            begin_to_write_out(self.fd, behind.start, end - behind.start)
            behind = range(end, behind.stop)
        self._behind = behind

    def close(self) -> None:
        self.mapped = None
        self._filling.end()
        self._files.close()

    def _at(self, row: int) -> int:
        return self._start + row * self._size

    def _are_cached(self, rows: Rows) -> bool:
        """Whether some of the rows, spread over all, are in memory; or some others were a moment ago.

        Checking a row loads its page, and the system then reads ahead in small steps: a run is taken to be in memory.
        """
        if rows.span if self.mapped is None else time.monotonic() < self.in_memory_until:
            return True
        try:
            self.look(rows.some(_LOOKS if self.mapped is None else _LOOKS_IF_MAPPED))
        except OSError:
            return False
        return True

    def _mapped_if_warm(self, rows: Rows, is_cached: bool) -> torch.Tensor | None:
        """The mapped rows, if these and nearly all are in memory: a check that is not repeated soon."""
        mapped = self.mapped
        self._until_mapped -= rows.count * self._size
        is_due = is_cached and self._until_mapped < 0 and (mapped is None or len(mapped) <= rows.last)
        is_due = is_due and not self._filling.is_under_way  # until then it is not all in memory
        if is_due or (mapped is not None and not is_cached and not _is_in_memory(mapped)):
            mapped = self.mapped = self._map() if is_due else None
            self._until_mapped = os.fstat(self.fd).st_size // _READ_AGAIN
        return mapped if is_cached and mapped is not None and len(mapped) > rows.last else None

    def _map(self) -> torch.Tensor | None:
        """The mapped rows of the file, if nearly all are in memory."""
        size = os.fstat(self.fd).st_size
        rows = self._filling.take()
        if rows is None or len(rows) != (size - self._start) // self._size:
            rows = self._all_mapped()
        is_mapped = rows is not None and _is_in_memory(rows) and size <= available_bytes() // 2
        return rows if is_mapped else None

    def _all_mapped(self) -> torch.Tensor | None:
        size = os.fstat(self.fd).st_size
        if size <= self._start:
            return None
        try:
            mapping = map_bytes(self.fd, self.path, 0, size, shared=False)
        except ReadError:  # there are too many mappings
            return None
        if os.fstat(self.fd).st_size < size:  # a writer has just cut off rows that were never filled
            return None
        count = (size - self._start) // self._size
        whole = torch.empty(0, dtype=torch.uint8).set_(mapping, self._start, (count * self._size,), (1,))
        return whole.view(self._word).view(count, *self._words)


def _is_in_memory(mapped: torch.Tensor) -> bool:
    """Whether nearly all of it is in memory, by a sample of pages: from the end, which a cold scan reaches last."""
    address, step = mapped.data_ptr(), max(mapped.nbytes // _SAMPLES, PAGE)
    absent, most = 0, _ABSENT if step > PAGE else 0
    for at in reversed(range(address + min(step, mapped.nbytes) // 2, address + mapped.nbytes, step)):
        absent += not cached_bytes(at, 1)
        if absent > most:
            return False
    return True


class Watch:
    """The open files of a cache: whether they are still those at their paths, and the states not cut."""

    def __init__(self, files: Iterable[Mapping[Path, int]], refuse_cut: Callable[[], None]) -> None:
        """`files`: descriptors by path; `refuse_cut`: checks the states. Raises: ReadError."""
        self._refuse_cut = refuse_cut
        self._opened: dict[Path, os.stat_result] = {}
        for path, fd in (file for each in files for file in each.items()):
            with reading(path):
                self._opened[path] = os.fstat(fd)
        self._until = 0.0

    def look(self, now: float) -> None:
        """Check now and then (`now`: the time, in seconds): system calls take as long as a small batch.

        Raises: CorruptFileError, MissingFileError, ChangedFileError.
        """
        if now > self._until:
            self._refuse_cut()  # touching a truncated part would kill the process
            self.refuse_replaced()
            self._until = now + _STILL

    def refuse_replaced(self) -> None:
        """Raises: MissingFileError (nothing is at one of the paths); ChangedFileError (another is); ReadError."""
        lost = "what was written to this cache and not flushed is lost. Open the one that is there now"
        for path, opened in self._opened.items():
            try:
                now = os.stat(path)
            except (FileNotFoundError, NotADirectoryError) as error:
                reason = f"it was removed, or moved, while the cache was open; {lost}, if any"
                raise MissingFileError(error.errno, reason, str(path)) from error
            except OSError as error:
                raise explained(path, error) from error
            if not os.path.samestat(now, opened):
                raise ChangedFileError(f"{path} was replaced while the cache was open; {lost}")


def _some(rows: int | slice | torch.Tensor) -> Iterable[int]:
    if isinstance(rows, int):
        return (rows,)
    if isinstance(rows, slice):
        return {rows.start, rows.stop - 1} if rows.start < rows.stop else ()
    some: list[int] = rows[:: -(-len(rows) // _LOOKS_IF_MAPPED) or 1].tolist()
    return some


# Parts of a file


def look_at(fd: int, places: Iterable[int]) -> None:
    """Check that these bytes of a file are in memory. Raises: OSError."""
    for place in places:
        if not os.preadv(fd, [bytearray(1)], place, os.RWF_NOWAIT):
            raise OSError(errno.ENODATA, "the file ends before its rows")


def runs_of(rows: Numbers) -> Iterable[tuple[int, int, int]]:
    """Runs of consecutive numbers: the first number of each, and its start and end positions."""
    if not len(rows):
        return ()
    ends = (np.flatnonzero(np.diff(rows) != 1) + 1).tolist()
    return zip(rows[[0, *ends]].tolist(), [0, *ends], [*ends, len(rows)], strict=True)


def read_parts(
    fd: int, path: Path, starts: Numbers, sizes: Numbers, places: Numbers, memory: memoryview, *, announce: bool = True
) -> None:
    """Read parts of a file to places in memory: all are announced, then read in order, with small gaps between them."""
    order = np.flatnonzero(sizes)
    order = order[np.argsort(starts[order], kind="stable")]
    starts, sizes, places = starts[order], sizes[order], places[order]
    gaps = starts[1:] - starts[:-1] - sizes[:-1]
    breaks = (np.flatnonzero((gaps < 0) | (gaps > _CLOSE)) + 1).tolist()
    runs = list(zip([0, *breaks], [*breaks, len(order)], strict=True)) if len(order) else []
    first, behind, apart = starts.tolist(), (starts + sizes).tolist(), gaps.tolist()
    if announce:
        with suppress(OSError):  # they are read all the same
            for begin, end in runs:
                os.posix_fadvise(fd, first[begin], behind[end - 1] - first[begin], os.POSIX_FADV_WILLNEED)
    slices = [memory[place : place + size] for place, size in zip(places.tolist(), sizes.tolist(), strict=True)]
    nowhere = memoryview(bytearray(_CLOSE))  # gaps are read to it
    for begin, end in runs:
        for at in range(begin, end, _MOST_PARTS):
            parts = slices[at : min(at + _MOST_PARTS, end)]
            between = apart[at : at + len(parts) - 1]
            if any(between):
                both = zip(parts, [*between, 0], strict=True)
                parts = [each for part, gap in both for each in (part, nowhere[:gap]) if len(each)]
            read_run(fd, path, first[at], parts)


def read_run(fd: int, path: Path, at: int, into: Sequence[memoryview]) -> None:
    """Read consecutive bytes of a file into several buffers. Raises: as `read_parts`."""
    wanted = sum(map(len, into))
    try:
        done = os.preadv(fd, into, at) if wanted < 1 << 30 else 0
        if done < wanted:
            _read_on(fd, path, at, into, done)
    except OSError as error:
        raise explained(path, error) from error


def _read_on(fd: int, path: Path, at: int, into: Sequence[memoryview], done: int) -> None:
    for part in into:
        skipped = min(done, len(part))
        done -= skipped
        at += skipped
        while skipped < len(part):
            got = os.preadv(fd, [part[skipped : skipped + (1 << 30)]], at)
            if not got:
                raise CorruptFileError(f"{path} ends at byte {at}, in the middle of its rows: it was truncated")
            skipped += got
            at += got


def size_of(fd: int, path: Path) -> int:
    """The size of an open file in bytes. Raises: ReadError."""
    try:
        return os.fstat(fd).st_size
    except OSError as error:
        raise explained(path, error) from error


def opened(path: Path, flags: int, what: str = "a file of the cache") -> Descriptor:
    """A regular file of a cache, opened; a symlink is followed to read, never to write."""
    try:
        return open_regular(path, flags)
    except MissingFileError as error:
        reason = f"{what} is missing: copy the complete folder again"
        raise MissingFileError(error.errno, reason, str(path)) from error
    except ForeignFileError as error:
        raise ForeignFileError(
            f"{path} is a symlink, and offload does not write through it: put the file itself there, or "
            "open the cache with mode='r'"
        ) from error
