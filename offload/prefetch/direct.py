"""Parts of files, read past the page cache: ahead of their use, into memory that is used again.

What is used once and dropped costs the page cache half a second of CPU time per gigabyte: its pages are allocated,
counted, listed, mapped and taken back. A direct read takes a tenth of that.

Always true:
- the bytes are those of the very file whose header was read, or it is an error
- at most a given number of bytes is read, or being read, and not released; but two loads always are
- memory is handed out again once it is released, and freed when nothing has been read or released for a while
- whoever needs a load that no thread has begun reads it itself
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import groupby

import torch

from offload.errors import CorruptFileError, OffloadError
from offload.storage.background import Background
from offload.storage.file import TensorFile
from offload.storage.layout import contiguous
from offload.storage.locks import Waiters, fork_safe_lock
from offload.storage.mapping import scratch, view_memory
from offload.storage.reasons import reading
from offload.storage.regular import Descriptor

_BLOCK = 4096  # to which positions, sizes and memory are aligned; no disk asks for more
_THREADS = 2
_BETWEEN = 64 << 10  # largest gap in bytes that is read along
_SIZES = 256 << 10  # sizes of memory are multiples of this, so that more of it fits again
LEAST = 2  # loads that always are read or in use: one each


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a file."""

    file: TensorFile
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Parts of one file that are read in one go, with what is between them: `size` bytes, of which `most` may be there.

    Attributes:
        first: the position in the file, aligned.
        at: the position in memory, aligned.
        needed: bytes up to the end of the last part.
    """

    file: TensorFile
    first: int
    at: int
    size: int
    needed: int


class Load:
    """Parts that are read together.

    Attributes:
        count: of the parts.
        nbytes: that are read.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.count = len(parts)
        self._runs: list[_Run] = []
        self.nbytes = 0
        for _, group in groupby(sorted(parts, key=_place), key=lambda part: part.file):
            run: list[Part] = []
            for part in group:
                if run and part.start > run[-1].start + run[-1].nbytes + _BETWEEN:
                    self._add(run)
                    run = []
                run.append(part)
            self._add(run)
        self._memory: torch.Tensor | None = None
        self._error: BaseException | None = None
        self._is_taken = self._is_read = False

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that it takes."""
        return -(-self.nbytes // _SIZES) * _SIZES

    def _add(self, parts: Sequence[Part]) -> None:
        first = parts[0].start // _BLOCK * _BLOCK
        needed = max(part.start + part.nbytes for part in parts) - first
        size = -(-needed // _BLOCK) * _BLOCK
        self._runs.append(_Run(parts[0].file, first, self.nbytes, size, needed))
        self.nbytes += size

    def tensor(self, part: Part, like: torch.Tensor) -> torch.Tensor | None:
        """A part, with the dtype, shape and strides of `like`, which spans it; None if it was not read.

        Valid until it is released.
        """
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

    def _read(self) -> None:
        whole = self._memory
        if whole is None:  # nobody needs it any more
            return
        memory = view_memory(whole.data_ptr(), whole.numel())
        for file, runs in groupby(self._runs, key=lambda run: run.file):
            with _opened(file) as opened, reading(file.path):
                for run in runs:
                    read = _read_run(memory[run.at : run.at + run.size], opened.fileno(), run)
                    if read < run.needed:
                        raise CorruptFileError(
                            f"{file.path} was truncated after it had been opened: download or copy the file again"
                        )


def _place(part: Part) -> tuple[str, int]:
    return str(part.file.path), part.start


def _opened(file: TensorFile) -> Descriptor:
    return file.descriptor(os.O_RDONLY | os.O_DIRECT)


def _read_run(memory: memoryview, fd: int, run: _Run) -> int:
    """How many bytes were read; if the file system refuses these, through its cache, as all others from now on."""
    try:
        return _read_into(memory, fd, run.first)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    _CAN_BE_READ[run.file] = False
    with run.file.descriptor() as opened:
        return _read_into(memory, opened.fileno(), run.first)


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
    found = _CAN_BE_READ.get(file)
    if found is None:
        found = False
        with suppress(OSError, OffloadError), _opened(file) as opened, closing(mmap.mmap(-1, _BLOCK)) as memory:
            found = os.preadv(opened.fileno(), [memory], 0) > 0
        _CAN_BE_READ[file] = found
    return found


class Ahead:
    """Loads that are read ahead of their use. Close it when done; another thread may still be reading then.

    Args:
        loads: in the order in which they will be needed.
        capacity: bytes of memory that they may take at a time.
    """

    def __init__(self, loads: Iterable[Load], capacity: int) -> None:
        self._coming = deque(loads)
        self._size_of_each = max((load.memory_bytes for load in self._coming), default=0)  # so that it fits again
        self._most = max(LEAST, capacity // max(self._size_of_each, 1))  # loads
        self._capacity = capacity
        self._held: list[Load] = []
        self._begin_more()

    def get(self, load: Load) -> None:
        """Wait until the next load is there, or read it.

        Raises:
            ReadError: the disk failed.
            MissingFileError, ChangedFileError, CorruptFileError: the file has changed.
        """
        while True:
            with _STATE.lock:
                is_mine = not load._is_taken
                if load._is_read:
                    break
                load._is_taken = True
                done = None if is_mine else _STATE.waiting.add()
            if done is None:
                _carry_out(load)
            else:
                done.acquire()
        error, load._error = load._error, None  # its traceback refers to the load
        if error is not None:
            raise error

    def release(self, load: Load) -> None:
        """Its memory is for others."""
        with _STATE.lock:
            self._held.remove(load)
            if load._memory is not None:
                _STATE.give(load._memory, self._capacity)
                load._memory = None
        self._begin_more()

    def close(self) -> None:
        """Nothing more is begun; memory that is still being written to is freed once that has ended."""
        with _STATE.lock:
            self._coming.clear()
            for load in self._held:
                if load._memory is not None and (load._is_read or not load._is_taken):
                    _STATE.give(load._memory, self._capacity)
                load._memory, load._is_taken = None, True
            self._held.clear()

    def _begin_more(self) -> None:
        with _STATE.lock:
            while self._coming and len(self._held) < self._most:
                load = self._coming[0]
                load._memory = _STATE.take(self._size_of_each)
                self._held.append(load)
                _STATE.queue.append(self._coming.popleft())
            with suppress(RuntimeError):  # no more threads: whoever needs them reads them
                for reader in _STATE.readers[: len(_STATE.queue)]:
                    reader.wake()


def _carry_out(load: Load) -> None:
    try:
        load._read()
    except BaseException as error:
        load._error = error
        if not isinstance(error, Exception):
            raise
    finally:
        with _STATE.lock:
            load._is_read = True
            _STATE.waiting.wake()


class _Reader(Background[Load]):
    """Reads loads in their order."""

    def __init__(self, state: _State) -> None:
        super().__init__("offload-direct", state.lock)
        self._state = state

    def take(self) -> Load | None:
        """The next one that nobody has begun."""
        queue = self._state.queue
        while queue:
            load = queue.popleft()
            if not load._is_taken:
                load._is_taken = True
                return load
        return None

    def carry_out(self, work: Load) -> None:
        """Read it."""
        _carry_out(work)

    def rest(self) -> None:
        """Nothing has been read, or released, for a while."""
        self._state.unused.clear()


class _State:
    """Of a process: what waits to be read, and memory that is not used now."""

    def __init__(self) -> None:
        self.lock = fork_safe_lock()
        self.waiting = Waiters()
        self.queue: deque[Load] = deque()
        self.readers = [_Reader(self) for _ in range(_THREADS)]
        self.unused: list[torch.Tensor] = []  # the oldest first
        self._all: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()  # by address

    def take(self, nbytes: int) -> torch.Tensor:
        """Memory of so many bytes, or up to twice as many."""
        fitting = [one for one in self.unused if nbytes <= one.numel() <= 2 * nbytes]
        if fitting:
            found = min(fitting, key=torch.Tensor.numel)
            self.unused = [one for one in self.unused if one is not found]
        else:
            found = scratch(contiguous(torch.uint8, (nbytes,)))
            self._all[found.data_ptr()] = found
        return found

    def give(self, memory: torch.Tensor, most: int) -> None:
        """It is used again, if there are no more than `most` bytes in all; a reader frees it after a while."""
        self.unused.append(memory)
        while self.unused and self.nbytes > most:
            del self.unused[0]
        with suppress(RuntimeError):  # no more threads: it stays
            self.readers[0].wake()

    @property
    def nbytes(self) -> int:
        """Of all memory: in use, and not."""
        return sum(one.numel() for one in self._all.values())


def _begin_anew() -> None:
    """A forked child has no thread that reads."""
    global _STATE
    _STATE = _State()


_CAN_BE_READ: weakref.WeakKeyDictionary[TensorFile, bool] = weakref.WeakKeyDictionary()
_STATE = _State()
os.register_at_fork(after_in_child=_begin_anew)
