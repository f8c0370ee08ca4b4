"""Rows of a file, by their numbers, into memory.

Always true:
- what the disk has to be read for is announced as a whole before the first of it is waited for
- a mapping is used for what is in memory already: under a cap on memory one that is not collapses to a page at a time
- rows lie in what is given as they were asked for, in any order, also twice
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from offload.cache.indexing import Numbers
from offload.errors import CorruptFileError, MissingFileError
from offload.storage.write import write_all

_MOST_PARTS = 1024  # that the system takes in one call
_LOOKS = 16  # at rows, to tell whether all are in memory
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
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
        self.fd = _opened(path, os.O_RDWR if writes else os.O_RDONLY)
        self._random = _opened(path, os.O_RDONLY)
        if _CAN_ADVISE:  # else the system reads on behind each row
            os.posix_fadvise(self._random, 0, 0, os.POSIX_FADV_RANDOM)
        self._mapped: torch.Tensor | None = None

    def write(self, rows: Numbers, data: memoryview) -> None:
        """Write rows whose numbers ascend; `data` has them one behind the other.

        Raises:
            OSError
        """
        for begin, end in runs(rows):
            write_all(self.fd, data[begin * self._size : end * self._size], self._at(rows[begin]))

    def read(self, rows: Numbers, into: torch.Tensor) -> None:
        """Read rows, in any order, to a plain (rows, bytes of a row) tensor of uint8.

        Raises:
            CorruptFileError: the file is cut, or the disk does not give it.
        """
        if not len(rows) or not self._size:
            return
        try:
            if rows[-1] - rows[0] == len(rows) - 1 and (len(rows) == 1 or bool((np.diff(rows) == 1).all())):
                self._read_run(rows[0], [into.numpy().data.cast("B")], self.fd)
            elif self._are_cached(rows):
                torch.index_select(self._mapping(rows), 0, torch.from_numpy(rows), out=into)
            else:
                self._read_scattered(rows, into)
        except OSError as error:
            raise CorruptFileError(f"{self.path} can't be read: {error.strerror}. Is the disk all right?") from error

    def close(self) -> None:
        self._mapped = None
        os.close(self.fd)
        os.close(self._random)

    def _at(self, row: int | np.int64) -> int:
        return self._start + int(row) * self._size

    def _read_scattered(self, rows: Numbers, into: torch.Tensor) -> None:
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        first = np.flatnonzero(np.diff(ordered, prepend=-1))  # of each number
        numbers, parts = ordered[first], list(runs(ordered[first]))
        if _CAN_ADVISE:
            for begin, end in parts:
                os.posix_fadvise(
                    self._random, self._at(numbers[begin]), (end - begin) * self._size, os.POSIX_FADV_WILLNEED
                )
        memory, size = into.numpy().data.cast("B"), self._size
        places = (order[first] * size).tolist()
        for begin, end in parts:
            for at in range(begin, end, _MOST_PARTS):
                to = [memory[place : place + size] for place in places[at : min(at + _MOST_PARTS, end)]]
                self._read_run(numbers[at], to, self._random)
        if len(first) < len(rows):
            into[torch.from_numpy(order)] = into[torch.from_numpy(order[first[np.cumsum(_begins(ordered)) - 1]])]

    def _read_run(self, row: int | np.int64, into: Sequence[memoryview], fd: int) -> None:
        """Rows that follow each other in the file."""
        at, wanted = self._at(row), sum(map(len, into))
        done = os.preadv(fd, into, at) if wanted < 1 << 30 else 0
        if done < wanted:
            self._read_rest(at, into, done, fd)

    def _read_rest(self, at: int, into: Sequence[memoryview], done: int, fd: int) -> None:
        for part in into:
            skipped = min(done, len(part))
            done -= skipped
            at += skipped
            while skipped < len(part):
                got = os.preadv(fd, [part[skipped : skipped + (1 << 30)]], at)
                if not got:
                    raise CorruptFileError(f"{self.path} ends at byte {at}, in the middle of its rows: it was cut")
                skipped += got
                at += got

    def _are_cached(self, rows: Numbers) -> bool:
        """Whether some of the rows, spread over all, are in memory."""
        if not _NOWAIT:
            return False
        byte = [bytearray(1)]
        try:
            for row in rows[:: -(-len(rows) // _LOOKS)].tolist():
                os.preadv(self.fd, byte, self._at(row), _NOWAIT)
        except OSError:
            return False
        return True

    def _mapping(self, rows: Numbers) -> torch.Tensor:
        """(rows that the file holds, bytes of a row)"""
        mapped = self._mapped
        if mapped is None or len(mapped) <= rows.max():
            size = os.fstat(self.fd).st_size
            memory = mmap.mmap(self.fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            memory.madvise(mmap.MADV_RANDOM)
            flat = torch.frombuffer(memory, dtype=torch.uint8, offset=self._start)
            mapped = flat[: len(flat) // self._size * self._size].view(-1, self._size)
            if len(mapped) <= rows.max():
                raise CorruptFileError(f"{self.path} ends before row {rows.max()}: it was cut")
            self._mapped = mapped
        return mapped


def runs(rows: Numbers) -> list[tuple[int, int]]:
    """Where numbers follow each other: the first place of each run, and that behind its last."""
    if not len(rows):
        return []
    ends = (np.flatnonzero(np.diff(rows) != 1) + 1).tolist()
    return list(zip([0, *ends], [*ends, len(rows)], strict=True))


def _begins(ordered: Numbers) -> npt.NDArray[np.bool_]:
    """Where another number begins."""
    begins: npt.NDArray[np.bool_] = np.diff(ordered, prepend=-1) != 0
    return begins


def _opened(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except FileNotFoundError as error:
        reason = "a file of the cache is missing: get the folder again, whole"
        raise MissingFileError(error.errno, reason, str(path)) from error
    except OSError as error:
        raise CorruptFileError(f"{path} can't be opened: {error.strerror}") from error
