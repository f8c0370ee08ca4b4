"""Candidate ways of reading values from a disk: how fast, at what cost, and how precisely.

Always true:
- every way reads the same values, in the order of a model's reads, from a cold cache, in turn with the others
- meanwhile the other cores multiply matrices; how much longer that takes is reported, too

    python -m bench.candidates [--rounds 3] [--every 2]
"""

from __future__ import annotations

import argparse
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from bench.models import llama
from bench.page_cache import make_cold
from offload.checkpoints.checkpoint import StoredValue, open_checkpoint
from offload.prefetch import pages
from offload.prefetch.pages import Range

GIB = 1 << 30
_BLOCK = 4 << 20
_MATRIX = (5632, 2048)
Read = Callable[[Range, StoredValue], None]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--every", type=int, default=1, help="read only every so many-th value")
    chosen = options.parse_args()
    folder = llama()
    results: dict[str, list[tuple[float, ...]]] = {name: [] for name in WAYS}
    for _ in range(chosen.rounds):
        for name, read in WAYS.items():
            results[name].append(trial(folder, read, chosen.every))
    table = Table("", "GB/s", "CPU s/GiB", "read / asked for", "delays others, s/GiB", box=box.SIMPLE)
    for name, trials in results.items():
        table.add_row(name, *(f"{median(column):.2f}" for column in zip(*trials, strict=True)))
    Console().print(table)


def trial(folder: Path, read: Read, every: int) -> tuple[float, float, float, float]:
    """Rate in GB/s, CPU seconds per GiB, bytes read per requested byte, and delay of others in seconds per GiB."""
    make_cold(sorted(folder.glob("*.safetensors")))
    values = list(open_checkpoint(folder).values())[::every]
    ranges = [_range(value) for value in values]
    size = sum(extent.nbytes for extent in ranges)
    before, cpu, start = _bytes_read(), time.thread_time(), time.perf_counter()
    for extent, value in zip(ranges, values, strict=True):
        read(extent, value)
    seconds, cpu = time.perf_counter() - start, time.thread_time() - cpu
    exactness = (_bytes_read() - before) / size
    make_cold(sorted(folder.glob("*.safetensors")))
    return size / seconds / 1e9, cpu / size * GIB, exactness, _delay(ranges, values, read) / size * GIB


def _delay(ranges: list[Range], values: list[StoredValue], read: Read) -> float:
    """Seconds by which a matrix multiplication slows down while everything is read."""
    alone = _multiply(40) / 40
    with _beside(lambda: [read(extent, value) for extent, value in zip(ranges, values, strict=True)]) as reader:
        took, count = 0.0, 0
        while reader.is_alive():
            took += _multiply(4)
            count += 4
    return took - count * alone


def _multiply(times: int) -> float:
    weight, x = torch.ones(_MATRIX, dtype=torch.bfloat16), torch.ones(256, _MATRIX[1], dtype=torch.bfloat16)
    start = time.perf_counter()
    for _ in range(times):
        torch.nn.functional.linear(x, weight)
    return time.perf_counter() - start


@contextmanager
def _beside(act: Callable[[], object]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=act)
    thread.start()
    yield thread
    thread.join()


def _range(value: StoredValue) -> Range:
    entry = value.file.entry(value.key)
    value.file.mapped(shared=False)
    return Range(value.file, entry.start, entry.layout.nbytes, shared=False)


def _bytes_read() -> int:
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def _address(value: StoredValue) -> int:
    return value.file.mapped(shared=False).data_ptr() + value.file.entry(value.key).start


def _past_the_cache(_: Range, value: StoredValue) -> None:
    """O_DIRECT into our own buffer."""
    entry = value.file.entry(value.key)
    fd = os.open(value.file.path, os.O_RDONLY | os.O_DIRECT)
    try:
        end = -(-(entry.start + entry.layout.nbytes) // 4096) * 4096
        for start in range(entry.start // 4096 * 4096, end, _BLOCK):
            os.preadv(fd, [memoryview(_BUFFER)[: end - start]], start)
    finally:
        os.close(fd)


_BUFFER = mmap.mmap(-1, _BLOCK)
WAYS: dict[str, Read] = {
    "O_DIRECT, 4 MiB at a time": _past_the_cache,
    "mapped, touched by an op": lambda extent, value: pages.touch(_address(value), extent.nbytes),
    "mapped, populated": lambda extent, value: pages.bring_in(_address(value), extent.nbytes),
    "mapped, announced exactly": lambda extent, value: pages.bring_in_exactly(_address(value), extent.nbytes),
    "mapped, huge pages": lambda extent, _: extent.bring_in(),
    "mapped, huge pages exactly": lambda extent, _: extent.bring_in(exactly=True),
}

if __name__ == "__main__":
    main()
