"""How many threads read a large range of a file: two, or more, or one, where its disk is faster with that.

Always true:
- that is measured once per file system and process, on reads that are needed anyway: twice as many threads, and then
  half as many, take turns with the usual number, and replace it if the median of the pairs is clear
- the threads take parts of the range in the order of the file
- when the call returns or raises, no thread reads any more (an interrupt may leave one the part that it reads); but a
  process that ends waits for none of them
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from statistics import median

from offload.storage import clock
from offload.storage.locks import fork_safe_lock
from offload.storage.threads import Worker

_USUAL = 2  # threads
_MOST = 8
_LEAST = 8 << 20  # bytes that are worth sharing out
_ALIGNED = 2 << 20  # parts begin at whole huge pages
_PAIRS = 5  # to compare
_CLEAR = 1.15  # ratio of rates
_COLD = 0.9  # share of a range that has to come from the disk for its rate to count

Read = Callable[[int, int], None]  # of a position in a file, and a number of bytes


class Disk:
    """A file system: how many threads read from it. Not thread-safe by itself.

    Args:
        most: threads.

    Attributes:
        readers: threads that are best so far.
        under_way: reads of large ranges.
        begun: their number so far.
    """

    def __init__(self, most: int = _MOST) -> None:
        self.readers = min(_USUAL, most)
        self.under_way = self.begun = 0
        self._most = most
        self._tried = {self.readers}
        self._before: float | None = None  # rate of the last read by `readers` threads, the first of a pair
        self._ratios: list[float] = []

    @property
    def other(self) -> int | None:
        """Threads to compare with; None if that is done."""
        others = (min(2 * self.readers, self._most), max(self.readers // 2, 1))
        return next((count for count in others if count not in self._tried), None)

    @property
    def due(self) -> int:
        """Threads for the next read."""
        return self.readers if self._before is None else self.other or self.readers

    def learn(self, count: int, rate: float) -> None:
        """So many threads have read so many bytes per second."""
        other = self.other
        if other is None:
            return
        if count == self.readers:
            self._before = rate
        elif count == other and self._before is not None:
            self._ratios.append(rate / self._before)
            self._before = None
        if len(self._ratios) == _PAIRS:
            self._tried.add(other)
            self.readers = other if median(self._ratios) > _CLEAR else self.readers
            self._ratios = []


def read_shared(device: int, start: int, nbytes: int, part: int, read: Read, missing: Callable[[], int]) -> None:
    """Read a range of a file, by several threads if it is large.

    Args:
        device: the number of its file system, as `os.stat` tells it.
        start: the position in the file.
        nbytes: the number of bytes.
        part: most bytes that a thread reads at a time.
        read: reads a part of the range; called by several threads at a time.
        missing: tells how many bytes are not in memory yet.

    Raises: as `read`.
    """
    if nbytes < _LEAST:
        read(start, nbytes)
        return
    with _LOCK:
        disk = _DISKS.setdefault(device, Disk())
    tells = disk.other is not None and missing() > _COLD * nbytes
    counted = mine = count = 0
    started = clock.now()
    try:
        with _LOCK:
            counted = 1
            disk.under_way += counted
            disk.begun = mine = disk.begun + 1
            tells = tells and disk.under_way == 1
            count = disk.due if tells else disk.readers
        _read_by(count, _parts(start, nbytes, part, count), read)
    finally:
        with _LOCK:
            disk.under_way -= counted
    seconds = clock.now() - started
    if tells and seconds > 0:
        with _LOCK:
            if disk.begun == mine:  # it was alone all the time
                disk.learn(count, nbytes / seconds)


def _read_by(count: int, parts: deque[tuple[int, int]], read: Read) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while (part := _taken(parts)) is not None:
                read(*part)
        finally:
            parts.clear()

    def help_out() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    helpers = min(count, len(parts)) - 1
    others = [Worker(help_out, "offload-part") for _ in range(helpers)]
    try:
        with suppress(RuntimeError):  # the system has no more threads, or the interpreter is shutting down
            for other in others:
                other.begin()
        work()
    finally:
        parts.clear()
        for other in others:
            other.join()
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # its traceback refers to this list


def _taken(parts: deque[tuple[int, int]]) -> tuple[int, int] | None:
    with suppress(IndexError):
        return parts.popleft()
    return None


def _parts(start: int, nbytes: int, part: int, count: int) -> deque[tuple[int, int]]:
    """Positions and lengths, in the order of the file."""
    if count == 1:
        return deque([(start, nbytes)])
    size = -(-min(part, -(-nbytes // count)) // _ALIGNED) * _ALIGNED
    edges = [start, *range(start // _ALIGNED * _ALIGNED + size, start + nbytes, size), start + nbytes]
    return deque((first, end - first) for first, end in pairwise(edges))


def _begin_anew() -> None:
    """In a forked child nothing is under way."""
    for disk in _DISKS.values():
        disk.under_way = 0


_LOCK = fork_safe_lock()
_DISKS: dict[int, Disk] = {}  # by device number
os.register_at_fork(after_in_child=_begin_anew)
