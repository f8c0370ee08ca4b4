"""Rows of a file, by their numbers, into memory.

Always true:
- what the disk has to be read for is announced as a whole before the first of it is waited for
- a mapping is used for what is in memory already: under a cap on memory one that is not collapses to a page at a time
- rows lie in what is given as they were asked for, in any order, also twice
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from offload.cache.indexing import Numbers, span_of
from offload.errors import CorruptFileError, ForeignFileError, MissingFileError
from offload.memory import available_bytes
from offload.storage.pages import PAGE, begin_to_write_out, cached_bytes
from offload.storage.write import write_all

_MOST_PARTS = 512  # that are read in one call, with what is between them: the system takes 1024
_CLOSE = 4096  # bytes between parts that are read with them: another call takes longer
_LOOKS, _LOOKS_IF_MAPPED = 16, 4  # at rows, to tell whether all are in memory
_STILL = 0.001  # seconds for which what is mapped is taken to be in memory after it was
_READ_AGAIN = 8  # a file that was not in memory is mapped when one in so many of its bytes has been read from there
_SAMPLES, _ABSENT = 256, 5  # pages of a mapped file that are looked at; so many of them need not be in memory
_WRITTEN_OUT = 8 << 20  # bytes behind each other that the disk is given while the next are made ready
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_UNRESERVED = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform.startswith("linux") else 0)
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_CAN_ADVISE = hasattr(os, "posix_fadvise")


class RowFile:
    """A file with rows of one size, from byte `start` on."""

    def __init__(self, path: Path, start: int, row_bytes: int, *, writes: bool) -> None:
        """
        Raises:
            MissingFileError, CorruptFileError
        """
        self.path = path
        self._start = start
        self._size = row_bytes
        self.fd = opened(path, os.O_RDWR if writes else os.O_RDONLY)
        self._random = opened(path, os.O_RDONLY)
        if _CAN_ADVISE:  # else the system reads on behind each row
            os.posix_fadvise(self._random, 0, 0, os.POSIX_FADV_RANDOM)
        self._word = _WORDS[math.gcd(start, row_bytes, 8)]
        self._mapped: torch.Tensor | None = None  # (rows that the file holds, words of a row)
        self._in_memory_until = 0.0
        self._behind = range(0)  # bytes behind each other that were written and not given to the disk
        self._until_mapped = 0  # bytes that are to be read from memory before

    def write(self, rows: Numbers, data: memoryview) -> None:
        """Write rows whose numbers ascend; `data` has them one behind the other.

        Raises:
            OSError
        """
        for begin, end in [(0, len(rows))] if span_of(rows) else runs(rows):
            at = self._at(rows[begin])
            self._give_to_disk(at, write_all(self.fd, data[begin * self._size : end * self._size], at))

    def read(self, rows: Numbers, into: torch.Tensor) -> None:
        """Read rows, in any order, to a plain (rows, bytes of a row) tensor of uint8.

        Raises:
            CorruptFileError: the file is cut, or the disk does not give it.
        """
        if not len(rows) or not self._size:
            return
        try:
            span = span_of(rows)
            is_cached = self._are_cached(rows, is_run=span is not None)
            mapped = self._hot_mapping(rows, is_cached)
            if mapped is not None and span is not None:
                into.view(self._word).copy_(mapped[span])
            elif mapped is not None:
                torch.index_select(mapped, 0, torch.from_numpy(rows), out=into.view(self._word))
            elif span is not None:
                read_run(self.fd, self.path, self._at(rows[0]), [into.numpy().data.cast("B")])
            else:
                self._read_scattered(rows, into, announce=not is_cached)
        except OSError as error:
            raise CorruptFileError(f"{self.path} can't be read: {error.strerror}. Is the disk all right?") from error

    def _give_to_disk(self, at: int, nbytes: int) -> None:
        """In large parts, whole pages; what is left waits for the next sync."""
        behind = range(self._behind.start if at == self._behind.stop else at, at + nbytes)
        if len(behind) >= _WRITTEN_OUT:
            end = behind.stop // PAGE * PAGE
            begin_to_write_out(self.fd, behind.start, end - behind.start)
            behind = range(end, behind.stop)
        self._behind = behind

    def close(self) -> None:
        self._mapped = None
        os.close(self.fd)
        os.close(self._random)

    def _at(self, row: int | np.int64) -> int:
        return self._start + int(row) * self._size

    def _read_scattered(self, rows: Numbers, into: torch.Tensor, *, announce: bool) -> None:
        starts, size = self._start + rows * self._size, np.int64(self._size)
        sizes, places = np.broadcast_to(size, len(rows)), np.arange(len(rows)) * size
        memory = into.numpy().data.cast("B")
        read_parts(self._random, self.path, starts, sizes, places, memory, announce=announce)

    def _are_cached(self, rows: Numbers, *, is_run: bool) -> bool:
        """Whether some of the rows, spread over all, are in memory; or some others were a moment ago.

        To look brings in a page, and the system reads on in small pieces where one is there already: a run may be in
        memory until it is mapped.
        """
        if not _NOWAIT:
            return False
        if self._mapped is None and is_run:
            return True
        if self._mapped is not None and time.monotonic() < self._in_memory_until:
            return True
        looks = _LOOKS if self._mapped is None else _LOOKS_IF_MAPPED
        byte = [bytearray(1)]
        try:
            for row in rows[:: -(-len(rows) // looks)].tolist():
                os.preadv(self._random, byte, self._start + row * self._size, _NOWAIT)
        except OSError:
            return False
        self._in_memory_until = time.monotonic() + _STILL
        return True

    def _hot_mapping(self, rows: Numbers, is_cached: bool) -> torch.Tensor | None:
        """(rows that the file holds, words of a row), if these rows, and the file but for a little, are in memory.

        To look all over the file takes time: it is done at the first batch that is in memory, and not soon again.
        """
        mapped, last = self._mapped, int(np.maximum.reduce(rows))  # another thread may be at it too
        self._until_mapped -= len(rows) * self._size
        is_due = is_cached and self._until_mapped < 0 and (mapped is None or len(mapped) <= last)
        if is_due or (mapped is not None and not is_cached and not _is_in_memory(mapped)):
            mapped = self._mapped = self._map() if is_due else None
            self._until_mapped = os.fstat(self.fd).st_size // _READ_AGAIN
        return mapped if is_cached and mapped is not None and len(mapped) > last else None

    def _map(self) -> torch.Tensor | None:
        size = os.fstat(self.fd).st_size
        if not self._start < size <= available_bytes() // 2:
            return None
        rights = mmap.PROT_READ | mmap.PROT_WRITE  # torch warns of other memory; nobody writes
        mapping = mmap.mmap(self.fd, size, flags=mmap.MAP_PRIVATE | _UNRESERVED, prot=rights)
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        count = (size - self._start) // self._size
        rows = whole[self._start : self._start + count * self._size].view(count, self._size).view(self._word)
        return rows if _is_in_memory(rows) else None


def _is_in_memory(mapped: torch.Tensor) -> bool:
    """Whether nearly all of it is, by pages spread over it."""
    address, step = mapped.data_ptr(), max(mapped.nbytes // _SAMPLES, PAGE)
    absent, most = 0, _ABSENT if step > PAGE else 0
    for at in range(address + step // 2, address + mapped.nbytes, step):
        absent += not cached_bytes(at, 1)
        if absent > most:
            return False
    return True


def runs(rows: Numbers) -> list[tuple[int, int]]:
    """Where numbers follow each other: the first place of each run, and that behind its last."""
    if not len(rows):
        return []
    ends = (np.flatnonzero(np.diff(rows) != 1) + 1).tolist()
    return list(zip([0, *ends], [*ends, len(rows)], strict=True))


def read_parts(
    fd: int, path: Path, starts: Numbers, sizes: Numbers, places: Numbers, memory: memoryview, *, announce: bool = True
) -> None:
    """Read parts of a file, of so many bytes each, to their places in memory: all are announced, then read in order.

    What lies between parts that are close to each other is read with them.

    Raises:
        CorruptFileError: the file ends before.
        OSError
    """
    order = np.flatnonzero(sizes)
    order = order[np.argsort(starts[order], kind="stable")]
    starts, sizes, places = starts[order], sizes[order], places[order]
    gaps = starts[1:] - starts[:-1] - sizes[:-1]
    breaks = (np.flatnonzero((gaps < 0) | (gaps > _CLOSE)) + 1).tolist()
    runs = list(zip([0, *breaks], [*breaks, len(order)], strict=True)) if len(order) else []
    first, behind = starts.tolist(), (starts + sizes).tolist()
    if announce and _CAN_ADVISE:
        for begin, end in runs:
            os.posix_fadvise(fd, first[begin], behind[end - 1] - first[begin], os.POSIX_FADV_WILLNEED)
    slices = [memory[place : place + size] for place, size in zip(places.tolist(), sizes.tolist(), strict=True)]
    for begin, end in runs:
        for at in range(begin, end, _MOST_PARTS):
            parts = slices[at : min(at + _MOST_PARTS, end)]
            if len(parts) > 1 and gaps[at : at + len(parts) - 1].any():
                parts = _with_gaps(parts, gaps[at : at + len(parts) - 1].tolist())
            read_run(fd, path, first[at], parts)


def _with_gaps(parts: Sequence[memoryview], gaps: Sequence[int]) -> list[memoryview]:
    """Parts, and memory for what is between them, which nobody reads."""
    nowhere = memoryview(bytearray(max(gaps)))
    both = zip(parts, [*gaps, 0], strict=True)
    return [memory for part, gap in both for memory in (part, nowhere[:gap]) if len(memory)]


def read_run(fd: int, path: Path, at: int, into: Sequence[memoryview]) -> None:
    """Read what follows each other in a file.

    Raises: as `read_parts`.
    """
    wanted = sum(map(len, into))
    done = os.preadv(fd, into, at) if wanted < 1 << 30 else 0
    if done == wanted:
        return
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


def opened(path: Path, flags: int) -> int:
    """A descriptor of a file of a cache; a link is followed to read, and never to write.

    Raises:
        MissingFileError, CorruptFileError, ForeignFileError
    """
    try:
        return os.open(path, flags | os.O_CLOEXEC | (_NO_LINK if flags & os.O_RDWR else 0))
    except FileNotFoundError as error:
        reason = "a file of the cache is missing: get the folder again, whole"
        raise MissingFileError(error.errno, reason, str(path)) from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ForeignFileError(
                f"{path} is a link that offload did not make, and is not written through: put the file itself there, "
                "or open the cache with mode='r'"
            ) from error
        raise CorruptFileError(f"{path} can't be opened: {error.strerror}") from error
