"""Parts of files, read past the page cache into memory that is used again.

What is used once and dropped costs the page cache half a second of CPU time per gigabyte: its pages are allocated,
counted, listed, mapped and taken back. A direct read takes a tenth of that.

Always true:
- the bytes are those of the very file whose header was read, or it is an error
- memory serves again once nothing refers to it: neither a tensor, nor a thread that still reads into it
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import groupby

import torch

from offload.errors import CorruptFileError, OffloadError
from offload.prefetch.plan import AWAY, Staged
from offload.prefetch.scratch import take_scratch
from offload.storage.file import TensorFile
from offload.storage.mapping import view_memory
from offload.system.reasons import reading

_BLOCK = 4096  # to which positions, sizes and memory are aligned; no disk asks for more
_FLAGS = os.O_RDONLY | os.O_DIRECT
_BETWEEN = 64 << 10  # largest gap in bytes that is read along
_SIZES = 256 << 10  # sizes of memory are multiples of this, so that more of it fits again


@dataclass(frozen=True, slots=True)
class FilePart:
    file: TensorFile
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _ReadTogether:
    """Parts of one file that are read in one go, with what is between them.

    Attributes:
        first: the position in the file, aligned.
        at: the position in memory, aligned.
        size: the number of bytes, aligned; a file may end before.
        needed: bytes up to the end of the last part.
    """

    file: TensorFile
    first: int
    at: int
    size: int
    needed: int


class Load(Staged):
    """Parts that are read together.

    Attributes:
        count: the number of parts.
        nbytes: the number of bytes that are read.
        error: what the read raised.
    """

    def __init__(self, parts: Sequence[FilePart]) -> None:
        self.count = len(parts)
        self.nbytes = 0
        self.stage = AWAY
        self.error: BaseException | None = None
        self._memory: torch.Tensor | None = None
        self._runs: list[_ReadTogether] = []
        in_order = sorted(parts, key=lambda part: (str(part.file.path), part.start))
        for _, group in groupby(in_order, key=lambda part: part.file):
            run: list[FilePart] = []
            for part in group:
                if run and part.start > run[-1].start + run[-1].nbytes + _BETWEEN:
                    self._add(run)
                    run = []
                run.append(part)
            self._add(run)

    @property
    def memory_bytes(self) -> int:
        return -(-self.nbytes // _SIZES) * _SIZES

    def _add(self, parts: Sequence[FilePart]) -> None:
        first = parts[0].start // _BLOCK * _BLOCK
        needed = max(part.start + part.nbytes for part in parts) - first
        size = -(-needed // _BLOCK) * _BLOCK
        self._runs.append(_ReadTogether(parts[0].file, first, self.nbytes, size, needed))
        self.nbytes += size

    def make_room(self, nbytes: int) -> None:
        """Take memory of so many bytes for it, which may be a little more than it needs: all loads are alike then."""
        self._memory = take_scratch(nbytes)

    def release(self) -> None:
        """It is not needed any more, or not at all; a thread that reads it keeps its memory until it has."""
        self._memory = None

    def tensor(self, part: FilePart, like: torch.Tensor) -> torch.Tensor | None:
        """A part, with the dtype, shape and strides of `like`, which spans it; None if it was not read."""
        assert self._memory is not None
        end = part.start + part.nbytes
        inside = (run for run in self._runs if run.file is part.file and run.first <= part.start)
        run = next((run for run in inside if end <= run.first + run.needed), None)
        if run is None:
            return None
        place, beside = divmod(run.at + part.start - run.first, like.itemsize)
        assert not beside, "a value that is not aligned to its dtype"
        empty = torch.empty(0, dtype=like.dtype, device="cpu")
        return empty.set_(self._memory.untyped_storage(), place, like.shape, like.stride())

    def read(self) -> None:
        """Read it, unless it was released.

        Raises:
            ReadError: the disk failed.
            MissingFileError, ChangedFileError, CorruptFileError: a file has changed.
        """
        whole = self._memory
        if whole is None:
            return
        memory = view_memory(whole.data_ptr(), whole.numel())
        for file, runs in groupby(self._runs, key=lambda run: run.file):
            with file.descriptor(_FLAGS) as opened, reading(file.path):
                for run in runs:
                    read = _read_into(memory[run.at : run.at + run.size], opened.fileno(), run.first)
                    if read < run.needed:
                        raise CorruptFileError(
                            f"{file.path} was truncated after it had been opened: download or copy the file again"
                        )


def _read_into(memory: memoryview, fd: int, first: int) -> int:
    """How many bytes were read: fewer at the end of the file."""
    done = 0
    while done < len(memory):
        read = os.preadv(fd, [memory[done:]], first + done)
        done += read
        if read % _BLOCK or not read:
            break
    return done


def can_be_read(file: TensorFile) -> bool:
    """Whether its file system reads past its cache."""
    answer = _CAN_BE_READ.get(file)
    if answer is None:
        answer = False
        with suppress(OSError, OffloadError), file.descriptor(_FLAGS) as opened, closing(mmap.mmap(-1, _BLOCK)) as page:
            answer = os.preadv(opened.fileno(), [page], 0) > 0
        _CAN_BE_READ[file] = answer
    return answer


_CAN_BE_READ: weakref.WeakKeyDictionary[TensorFile, bool] = weakref.WeakKeyDictionary()
