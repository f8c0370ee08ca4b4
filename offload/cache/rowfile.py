"""Rows of a file by index, and arbitrary parts of a file.

Always true:
- a mapping is used only for what is in memory: under a memory cap, faulting in the rest goes page by page
- what is not in memory is read with system calls, all of which are announced before the first one is waited for
- parts are returned in the requested order; they may come in any order and repeat
- only whole rows are written, never through a mapping
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from offload.cache.indexing import Numbers, Rows
from offload.errors import CorruptFileError, ForeignFileError, MissingFileError, ReadError
from offload.memory import available_bytes
from offload.prefetch.filling import Filling
from offload.storage.layout import contiguous
from offload.storage.mapping import mapped
from offload.storage.pages import PAGE, begin_to_write_out, cached_bytes, has_holes
from offload.storage.reasons import explained, reading
from offload.storage.regular import closed_on_error, open_regular
from offload.storage.replacing import write_all

_LOOKS, _LOOKS_IF_MAPPED = 16, 4  # rows to check for being in memory
_STILL = 0.01  # seconds for which a mapping is assumed to be in memory after a check: one batch, or a few
_READ_AGAIN = 8  # an uncached file is mapped once 1/8 of its bytes have been read from memory
_SAMPLES, _ABSENT = 256, 5  # pages of a mapped file to check, and how many of them may be absent
_WRITTEN_OUT = 8 << 20  # consecutive bytes to hand to the disk while the next ones are prepared
_WORDS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}  # dtype names common to NumPy and torch
_MOST_PARTS = 512  # parts per call, with the gaps between them: the system allows 1024
_CLOSE = 4096  # gap in bytes that is read along: another call would take longer
_HUGE = 32 << 20  # bytes: smaller allocations reuse memory of the C library that has been touched


class Descriptors:
    """Two descriptors of one file: for consecutive rows, and for random access. Closed with the last reference."""

    def __init__(self, fd: int, random: int) -> None:
        self.fd = fd
        self.random = random
        advise(random, 0, 0, os.POSIX_FADV_RANDOM)  # otherwise the system reads ahead after each row

    @classmethod
    def opened(cls, path: Path, *, writes: bool) -> Descriptors:
        """
        Raises:
            MissingFileError, CorruptFileError, ForeignFileError, ReadError
        """
        fd = opened(path, os.O_RDWR if writes else os.O_RDONLY)
        with closed_on_error(fd):
            return cls(fd, opened(path, os.O_RDONLY))

    @classmethod
    def kept(cls, fd: int, path: Path) -> Descriptors:
        """For a file that is open already, whatever is at its path by now.

        Raises:
            ReadError
        """
        with closed_on_error(fd), reading(path):
            return cls(fd, os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        left = {self.fd, self.random} - {-1}
        self.fd = self.random = -1  # first: after an interrupt, nothing is closed twice
        for fd in left:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "random", -1) != -1:
            self.close()


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
        """
        Args:
            files: the descriptors, if it is open already.

        Raises:
            MissingFileError, CorruptFileError, ForeignFileError, ReadError
        """
        files = files or Descriptors.opened(path, writes=writes)
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
        self._mapped: torch.Tensor | None = None  # (rows in the file, *words of a row)
        self.in_memory_until = 0.0  # as far as is known
        self._behind = range(0)  # consecutive bytes that were written but not handed to the disk
        self._until_mapped = 0  # bytes to be read from memory before it is mapped
        self._filling = Filling()

    def write(self, rows: Rows, data: memoryview) -> None:
        """Write rows in ascending order; `data` has them one after the other.

        Raises:
            OSError
        """
        runs = [(rows.span.start, 0, len(rows))] if rows.span else runs_of(rows.numbers)
        for first, begin, end in runs:
            at = self._at(first)
            self._give_to_disk(at, write_all(self.fd, data[begin * self._size : end * self._size], at))

    def read(self, rows: Rows, out: torch.Tensor | None = None, *, pinned: bool = False) -> torch.Tensor:
        """Rows in any order: (rows, *row_shape), plain, on the CPU; `out`, if given, must be contiguous.

        Raises:
            CorruptFileError: the file is truncated.
            ReadError: the disk failed.
        """
        mapped = self._mapped  # another thread may change it meanwhile
        if mapped is not None and rows.last < len(mapped) and time.monotonic() < self.in_memory_until:
            return self._taken(mapped, rows, out, pinned=pinned)
        if not self._size or not len(rows):
            return self._values(self._fresh(len(rows), pinned=pinned)) if out is None else out
        with reading(self.path):
            is_cached = self._are_cached(rows)
            mapped = self._hot_mapping(rows, is_cached)
            if mapped is not None:
                return self._taken(mapped, rows, out, pinned=pinned)
            if not is_cached and not rows.span:
                pages = len(rows) * -(-self._size // PAGE) * PAGE
                self._filling.missed(len(rows), pages, size_of(self.fd, self.path), self._to_be_filled)
            words = self._fresh(len(rows), pinned=pinned) if out is None else self._words_of(out)
            self._read(rows, words, announce=not is_cached)
            return self._values(words) if out is None else out

    def whole(self, count: int) -> torch.Tensor:
        """The first rows, (count, *row_shape), over a mapping of their own, for code that goes through them once.

        Raises:
            CorruptFileError: the file is truncated.
            ReadError
        """
        shape, nbytes = (count, *self._row_shape), count * self._size
        if not nbytes:
            return torch.empty(shape, dtype=self._dtype, device="cpu")
        if size_of(self.fd, self.path) < self._at(count):
            raise CorruptFileError(f"{self.path} ends before its {count} rows: it was cut")
        storage = mapped(self.fd, self.path, self._start, nbytes, shared=False)
        empty = torch.empty(0, dtype=self._dtype, device="cpu")
        return empty.set_(storage, 0, shape, contiguous(self._dtype, shape).stride)

    def table(self, count: int) -> torch.Tensor | None:
        """The first `count` rows, mapped, for `picked`; None if there is no mapping."""
        mapped = self._mapped
        return None if mapped is None or len(mapped) < count else mapped[:count]

    def picked(self, words: torch.Tensor, rows: int | slice | torch.Tensor) -> torch.Tensor:
        """Rows of a table, copied.

        Raises:
            IndexError
        """
        if isinstance(rows, slice):
            found = words[rows]
            return self._values(self._fresh(len(found), pinned=False).copy_(found))
        if isinstance(rows, int):
            return self._values(words[rows].clone())
        return self._values(torch.index_select(words, 0, rows))

    def look(self, rows: Iterable[int]) -> None:
        """Check that these rows are in memory; for a moment, all others are assumed to be, too.

        Raises:
            OSError: one of them is not in memory or not in the file; or the file has become shorter than its mapping.
        """
        mapped = self._mapped
        if mapped is not None and os.fstat(self._random).st_size < self._at(len(mapped)):
            self._mapped = None  # touching the truncated part would kill the process
            raise OSError(errno.ENODATA, "the file ends before its rows")
        look_at(self._random, map(self._at, rows))
        self.in_memory_until = time.monotonic() + _STILL

    def _taken(self, mapped: torch.Tensor, rows: Rows, out: torch.Tensor | None, *, pinned: bool) -> torch.Tensor:
        if out is None and not pinned:
            return self.picked(mapped, rows.span or torch.from_numpy(rows.numbers))
        into = self._fresh(len(rows), pinned=pinned) if out is None else self._words_of(out)
        if rows.span:
            into.copy_(mapped[rows.span])
        else:
            torch.index_select(mapped, 0, torch.from_numpy(rows.numbers), out=into)
        return self._values(into) if out is None else out

    def _words_of(self, out: torch.Tensor) -> torch.Tensor:
        """(rows, *words of a row), over the same memory; without gradients."""
        return out.view(self._word).view(len(out), *self._words)

    def _values(self, words: torch.Tensor) -> torch.Tensor:
        """(rows, *row_shape), over the same memory."""
        values = words.view(self._dtype)
        return values if self._words is self._row_shape else values.squeeze(-1)

    def _read(self, rows: Rows, into: torch.Tensor, *, announce: bool) -> None:
        memory = into.view(torch.uint8).view(len(rows), self._size).numpy().data.cast("B")
        if rows.span:
            read_run(self.fd, self.path, self._at(rows.span.start), [memory])
            return
        size = np.int64(self._size)
        starts, places = self._start + rows.numbers * size, np.arange(len(rows)) * size
        sizes = np.broadcast_to(size, len(rows))
        read_parts(self._random, self.path, starts, sizes, places, memory, announce=announce)

    def _fresh(self, count: int, *, pinned: bool) -> torch.Tensor:
        """Memory for (rows, *words of a row). NumPy requests huge pages, which are faster to fault in."""
        shape = (count, *self._words)
        if pinned or count * self._size < _HUGE:
            return torch.empty(shape, dtype=self._word, device="cpu", pin_memory=pinned)
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
        self._mapped = None
        self._filling.end()
        self._files.close()

    def _at(self, row: int) -> int:
        return self._start + row * self._size

    def _are_cached(self, rows: Rows) -> bool:
        """Whether some of the rows, spread over all, are in memory; or some others were a moment ago.

        Checking a row loads its page, and the system then reads ahead in small steps; a run of rows is therefore taken
        to be in memory until the file is mapped.
        """
        if self._mapped is None and rows.span:
            return True
        if self._mapped is not None and time.monotonic() < self.in_memory_until:
            return True
        try:
            self.look(rows.some(_LOOKS if self._mapped is None else _LOOKS_IF_MAPPED))
        except OSError:
            return False
        return True

    def _hot_mapping(self, rows: Rows, is_cached: bool) -> torch.Tensor | None:
        """The mapped rows of the file, if these rows and nearly all of the file are in memory.

        Checking the whole file takes time: it is done at the first batch that is in memory, and not again soon.
        """
        mapped = self._mapped
        self._until_mapped -= len(rows) * self._size
        is_due = is_cached and self._until_mapped < 0 and (mapped is None or len(mapped) <= rows.last)
        is_due = is_due and not self._filling.is_under_way  # until then it is not all in memory
        if is_due or (mapped is not None and not is_cached and not _is_in_memory(mapped)):
            mapped = self._mapped = self._map() if is_due else None
            self._until_mapped = os.fstat(self.fd).st_size // _READ_AGAIN
        return mapped if is_cached and mapped is not None and len(mapped) > rows.last else None

    def _map(self) -> torch.Tensor | None:
        """The mapped rows of the file, if nearly all are in memory."""
        size = os.fstat(self.fd).st_size
        if size > available_bytes() // 2:
            return None
        rows = self._filling.take()
        if rows is None or len(rows) != (size - self._start) // self._size:
            rows = self._all_mapped()
        return rows if rows is not None and _is_in_memory(rows) else None

    def _to_be_filled(self) -> torch.Tensor | None:
        return None if has_holes(os.fstat(self.fd)) else self._all_mapped()

    def _all_mapped(self) -> torch.Tensor | None:
        size = os.fstat(self.fd).st_size
        if size <= self._start:
            return None
        try:
            mapping = mapped(self.fd, self.path, 0, size, shared=False)
        except ReadError:  # there are too many mappings
            return None
        if os.fstat(self.fd).st_size < size:  # a writer has just cut off capacity
            return None
        count = (size - self._start) // self._size
        whole = torch.empty(0, dtype=torch.uint8).set_(mapping, self._start, (count * self._size,), (1,))
        return whole.view(self._word).view(count, *self._words)


def _is_in_memory(mapped: torch.Tensor) -> bool:
    """Whether nearly all of it is in memory, by a sample of pages."""
    address, step = mapped.data_ptr(), max(mapped.nbytes // _SAMPLES, PAGE)
    absent, most = 0, _ABSENT if step > PAGE else 0
    for at in range(address + min(step, mapped.nbytes) // 2, address + mapped.nbytes, step):
        absent += not cached_bytes(at, 1)
        if absent > most:
            return False
    return True


# Parts of a file


def look_at(fd: int, places: Iterable[int]) -> None:
    """Check that these bytes of a file are in memory.

    Raises:
        OSError: one of them is not in memory, or not in the file.
    """
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
    """Read parts of a file, with the given sizes, to their places in memory: all are announced, then read in order.

    Small gaps between parts are read along.

    Raises:
        CorruptFileError: the file ends too early.
        ReadError
    """
    order = np.flatnonzero(sizes)
    order = order[np.argsort(starts[order], kind="stable")]
    starts, sizes, places = starts[order], sizes[order], places[order]
    gaps = starts[1:] - starts[:-1] - sizes[:-1]
    breaks = (np.flatnonzero((gaps < 0) | (gaps > _CLOSE)) + 1).tolist()
    runs = list(zip([0, *breaks], [*breaks, len(order)], strict=True)) if len(order) else []
    first, behind = starts.tolist(), (starts + sizes).tolist()
    if announce:
        for begin, end in runs:
            advise(fd, first[begin], behind[end - 1] - first[begin], os.POSIX_FADV_WILLNEED)
    slices = [memory[place : place + size] for place, size in zip(places.tolist(), sizes.tolist(), strict=True)]
    for begin, end in runs:
        for at in range(begin, end, _MOST_PARTS):
            parts = slices[at : min(at + _MOST_PARTS, end)]
            if len(parts) > 1 and gaps[at : at + len(parts) - 1].any():
                parts = _with_gaps(parts, gaps[at : at + len(parts) - 1].tolist())
            read_run(fd, path, first[at], parts)


def _with_gaps(parts: Sequence[memoryview], gaps: Sequence[int]) -> list[memoryview]:
    """The parts, and between them scratch memory for the gaps."""
    nowhere = memoryview(bytearray(max(gaps)))
    both = zip(parts, [*gaps, 0], strict=True)
    return [memory for part, gap in both for memory in (part, nowhere[:gap]) if len(memory)]


def read_run(fd: int, path: Path, at: int, into: Sequence[memoryview]) -> None:
    """Read consecutive bytes of a file into several buffers.

    Raises: as `read_parts`.
    """
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
                raise CorruptFileError(f"{path} ends at byte {at}, in the middle of its rows: it was cut")
            skipped += got
            at += got


def advise(fd: int, start: int, nbytes: int, advice: int) -> None:
    """Tell the system how a file will be read; failing to do so changes no value."""
    with suppress(OSError):
        os.posix_fadvise(fd, start, nbytes, advice)


def size_of(fd: int, path: Path) -> int:
    """The size of an open file in bytes.

    Raises:
        ReadError
    """
    try:
        return os.fstat(fd).st_size
    except OSError as error:
        raise explained(path, error) from error


def opened(path: Path, flags: int, what: str = "a file of the cache") -> int:
    """A descriptor of a regular file of a cache; a symlink is followed to read, never to write.

    Raises:
        MissingFileError, CorruptFileError, ForeignFileError, ReadError
    """
    try:
        return open_regular(path, flags)
    except MissingFileError as error:
        reason = f"{what} is missing: get the folder again, whole"
        raise MissingFileError(error.errno, reason, str(path)) from error
    except ForeignFileError as error:
        raise ForeignFileError(
            f"{path} is a link that offload did not make, and is not written through: put the file itself there, "
            "or open the cache with mode='r'"
        ) from error
