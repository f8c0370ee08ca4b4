"""Parts of a file: opening it, and reading any of its bytes.

Always true:
- all parts are announced before the first one is waited for
- parts are returned in the requested order; they may come in any order and repeat
- a file that ends too early is an error
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from offload.cache.indexing import Numbers
from offload.errors import CorruptFileError, ForeignFileError, MissingFileError
from offload.system.reasons import explained, reading
from offload.system.regular import Descriptor, closed_on_error, open_regular, owned

_MOST_PARTS = 512  # parts per call, with the gaps between them: the system allows 1024
_CLOSE = 4096  # gap in bytes that is read along: another call would take longer


class Descriptors:
    """Two descriptors of one file: for consecutive rows, and for random access. Closed with the last reference."""

    def __init__(self, *files: Descriptor) -> None:
        self._files = files
        self.fd, self.random = (file.fileno() for file in files)
        advise(self.random, 0, 0, os.POSIX_FADV_RANDOM)  # otherwise the system reads ahead after each row

    @classmethod
    def opened(cls, path: Path, *, writes: bool) -> Descriptors:
        """Raises: MissingFileError, CorruptFileError, ForeignFileError, ReadError."""
        file = opened(path, os.O_RDWR if writes else os.O_RDONLY)
        with closed_on_error(file):
            return cls(file, opened(path, os.O_RDONLY))

    @classmethod
    def reopened(cls, file: Descriptor, path: Path) -> Descriptors:
        """For a file that is open already, whatever is at its path by now. Raises: ReadError."""
        with closed_on_error(file), reading(path):
            return cls(file, owned(os.open, f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        self.fd = self.random = -1  # first: the numbers may soon be other files'
        for file in self._files:
            file.close()


def read_parts(
    fd: int, path: Path, starts: Numbers, sizes: Numbers, places: Numbers, memory: memoryview, *, announce: bool = True
) -> None:
    """Read parts of a file to places in memory: all are announced, then read in order, with small gaps between them.

    Raises: CorruptFileError (the file ends too early); ReadError.
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
    nowhere = memoryview(bytearray(_CLOSE))  # gaps are read to it
    for begin, end in runs:
        for at in range(begin, end, _MOST_PARTS):
            parts = slices[at : min(at + _MOST_PARTS, end)]
            between = gaps[at : at + len(parts) - 1]
            if between.any():
                both = zip(parts, [*between.tolist(), 0], strict=True)
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


def advise(fd: int, start: int, nbytes: int, advice: int) -> None:
    """Tell the system how a file will be read; failing to do so changes no value."""
    with suppress(OSError):
        os.posix_fadvise(fd, start, nbytes, advice)


def size_of(fd: int, path: Path) -> int:
    """The size of an open file in bytes. Raises: ReadError."""
    try:
        return os.fstat(fd).st_size
    except OSError as error:
        raise explained(path, error) from error


def opened(path: Path, flags: int, what: str = "a file of the cache") -> Descriptor:
    """A regular file of a cache, opened; a symlink is followed to read, never to write.

    Raises: MissingFileError, CorruptFileError, ForeignFileError, ReadError.
    """
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
