"""Parts of a file, into memory.

Always true:
- what the disk has to be read for is announced as a whole before the first of it is waited for
- parts lie in what is given as they were asked for, in any order, also twice
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from offload.cache.indexing import Numbers
from offload.errors import CorruptFileError, ForeignFileError, MissingFileError
from offload.storage.regular import explained, open_regular

_MOST_PARTS = 512  # that are read in one call, with what is between them: the system takes 1024
_CLOSE = 4096  # bytes between parts that are read with them: another call takes longer
CAN_ADVISE = hasattr(os, "posix_fadvise")


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
        ReadError
    """
    order = np.flatnonzero(sizes)
    order = order[np.argsort(starts[order], kind="stable")]
    starts, sizes, places = starts[order], sizes[order], places[order]
    gaps = starts[1:] - starts[:-1] - sizes[:-1]
    breaks = (np.flatnonzero((gaps < 0) | (gaps > _CLOSE)) + 1).tolist()
    runs = list(zip([0, *breaks], [*breaks, len(order)], strict=True)) if len(order) else []
    first, behind = starts.tolist(), (starts + sizes).tolist()
    if announce and CAN_ADVISE:
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
    """Parts, and memory for what is between them, which nobody reads."""
    nowhere = memoryview(bytearray(max(gaps)))
    both = zip(parts, [*gaps, 0], strict=True)
    return [memory for part, gap in both for memory in (part, nowhere[:gap]) if len(memory)]


def read_run(fd: int, path: Path, at: int, into: Sequence[memoryview]) -> None:
    """Read what follows each other in a file.

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
    """Tell the system how a file will be read; that it does not listen changes no value."""
    with suppress(OSError):
        os.posix_fadvise(fd, start, nbytes, advice)


def size_of(fd: int, path: Path) -> int:
    """Bytes of an open file.

    Raises:
        ReadError
    """
    try:
        return os.fstat(fd).st_size
    except OSError as error:
        raise explained(path, error) from error


def opened(path: Path, flags: int, what: str = "a file of the cache") -> int:
    """A descriptor of a regular file of a cache; a link is followed to read, and never to write.

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
