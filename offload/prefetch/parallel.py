"""A large range of a file, read by two threads: most disks are faster so, and hardly any with more.

Always true:
- the threads take parts of the range in the order of the file
- when the call returns or raises, no thread reads any more (an interrupt may leave one the part that it reads); but a
  process that ends waits for none of them
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise

from offload.system.background import Worker

_LEAST = 8 << 20  # bytes that are worth sharing out
_ALIGNED = 2 << 20  # parts begin at whole huge pages

Read = Callable[[int, int], None]  # of a position in a file, and a number of bytes


def read_in_parallel(start: int, nbytes: int, part: int, read: Read) -> None:
    """Read a range of a file, by this thread and another one if it is large.

    Args:
        start: the position in the file.
        nbytes: the number of bytes.
        part: most bytes that a thread reads at a time.
        read: reads a part of the range; called by both threads at a time.

    Raises: as `read`.
    """
    if nbytes < _LEAST:
        read(start, nbytes)
        return
    parts, errors = _parts(start, nbytes, part), list[BaseException]()

    def help_out() -> None:
        try:
            _read_all(parts, read)
        except BaseException as error:
            errors.append(error)

    helper = Worker(help_out, "offload-part")
    try:
        with suppress(RuntimeError):  # the system has no more threads, or the interpreter is shutting down
            helper.begin()
        _read_all(parts, read)
    finally:
        parts.clear()
        helper.join()
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # its traceback refers to this list


def _read_all(parts: deque[tuple[int, int]], read: Read) -> None:
    """Read what the other thread has not taken; after an error, it takes nothing more either."""
    try:
        while (part := _taken(parts)) is not None:
            read(*part)
    finally:
        parts.clear()


def _taken(parts: deque[tuple[int, int]]) -> tuple[int, int] | None:
    with suppress(IndexError):
        return parts.popleft()
    return None


def _parts(start: int, nbytes: int, part: int) -> deque[tuple[int, int]]:
    """Positions and lengths, in the order of the file: two at least."""
    size = -(-min(part, -(-nbytes // 2)) // _ALIGNED) * _ALIGNED
    edges = [start, *range(start // _ALIGNED * _ALIGNED + size, start + nbytes, size), start + nbytes]
    return deque((first, end - first) for first, end in pairwise(edges))
