"""The limits of the machine: reading, copying and writing without any of our code in between.

Always true:
- reads bypass the page cache, and go into buffers that have been touched before
- written data is on the disk before the clock stops
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

MIB = 1 << 20
_ENOUGH = 256 * MIB  # bytes read while searching for the fastest way


@dataclass(frozen=True)
class DirectReader:
    """Sequential reading with O_DIRECT by several threads, in blocks."""

    threads: int
    block: int

    def seconds(self, files: Sequence[Path], most: int | None = None) -> float:
        """The time to read files, or their first `most` bytes.

        Raises:
            OSError: the file system does not support O_DIRECT.
        """
        descriptors = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in files]
        try:
            return self._timed(_blocks(descriptors, self.block, most))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _timed(self, blocks: Iterator[tuple[int, int]]) -> float:
        buffers = [mmap.mmap(-1, self.block) for _ in range(self.threads)]
        for buffer in buffers:
            buffer.write(bytes(self.block))
        taking, failed = threading.Lock(), []

        def read(buffer: mmap.mmap) -> None:
            try:
                while block := _next(blocks, taking):
                    os.preadv(block[0], [buffer], block[1])
            except OSError as error:
                failed.append(error)

        threads = [threading.Thread(target=read, args=(buffer,)) for buffer in buffers]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        return time.perf_counter() - start


def _blocks(descriptors: Sequence[int], size: int, most: int | None) -> Iterator[tuple[int, int]]:
    left = most
    for descriptor in descriptors:
        for offset in range(0, os.fstat(descriptor).st_size, size):
            if left is not None:
                if left <= 0:
                    return
                left -= size
            yield descriptor, offset


def _next(blocks: Iterator[tuple[int, int]], taking: threading.Lock) -> tuple[int, int] | None:
    with taking:
        return next(blocks, None)


def reading_rates(files: Sequence[Path]) -> dict[DirectReader, float]:
    """Bytes per second with 1 to 4 threads and blocks of 1 to 4 MiB."""
    size = min(_ENOUGH, sum(path.stat().st_size for path in files))
    readers = [DirectReader(threads, block * MIB) for threads, block in product((1, 2, 3, 4), (1, 2, 4))]
    return {reader: size / reader.seconds(files, size) for reader in readers}


def fastest_reader(files: Sequence[Path]) -> DirectReader:
    """The fastest one."""
    rates = reading_rates(files)
    return max(rates, key=lambda reader: rates[reader])


def copying_rate(size: int = 256 * MIB, times: int = 5) -> float:
    """Bytes per second from memory to memory."""
    source, target = torch.zeros(2, size, dtype=torch.uint8)
    return size / min(_seconds_to_copy(source, target) for _ in range(times))


def _seconds_to_copy(source: torch.Tensor, target: torch.Tensor) -> float:
    start = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - start


def write_durably(data: memoryview, path: Path) -> None:
    """Written beside, synced, and renamed over the old file."""
    beside = path.with_name(f"{path.name}.new")
    with beside.open("wb", buffering=0) as file:
        while data:
            data = data[file.write(data) :]
        os.fsync(file.fileno())
    beside.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
