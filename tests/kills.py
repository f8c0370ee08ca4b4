"""Kill a process that replaces values, again and again: each value must be complete, afterwards and for readers.

Always true:
- a value is one number repeated, so that a mix of two updates is recognised
- a fork is killed, which has torch already; it notes what it is about to write, and has written, in shared memory
- another process reads the value all the time, alternating between its own handle and the safetensors library
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from bench.models import cache_folder
from offload.storage.file import TensorFile
from offload.storage.handle import Handle
from offload.storage.replacing import TEMPORARY, sweep
from offload.tensor.wrapper import OffloadedTensor
from tests.processes import ended, forked, in_fork, kill

SIZES = tuple(4096 << shift for shift in range(0, 15, 2))  # bytes: 4 KiB to 64 MiB
_LARGE = 8 << 20  # bytes: larger values are written less often between kills, and leftovers are removed at once
_BOARD = struct.Struct("qqqq")  # being written, written, whether readers should stop, reads


def campaign(folder: Path, sizes: Sequence[int], kills: int, seed: int = 0) -> dict[str, int]:
    """Kill this many writers in all, equally many per size in bytes, and check what they leave.

    Returns:
        How many were killed, left the old value, left a new one that was not noted yet; the numbers of updates and of
        reads; and how many temporary files were left, also after the folder's next use.

    Raises:
        AssertionError: a value is a mix, or neither the old nor the new one.
    """
    torch.set_num_threads(1)
    chance = random.Random(seed)
    found = dict.fromkeys(("kills", "old", "new", "updates", "reads", "left", "left after use"), 0)
    for size in sizes:
        _kill_writers(folder, size, kills // len(sizes), chance, found)
    found["left"] += _temporary_files(folder)
    assert in_fork(lambda: OffloadedTensor.from_original_tensor(torch.ones(2), "later", folder)), "it failed: see above"
    found["left after use"] = _temporary_files(folder)
    return found


def _kill_writers(folder: Path, size: int, kills: int, chance: random.Random, found: dict[str, int]) -> None:
    board = mmap.mmap(-1, _BOARD.size)
    name, count = f"w{size}", size // 4
    weight = OffloadedTensor.from_original_tensor(torch.zeros(count), name, folder)
    took = sorted(_seconds(weight, count) for _ in range(3))[1]
    longest = took * (2 if size > _LARGE else 4)
    reader = forked(lambda: _read_for_ever(weight.offload_path, name, board))
    try:
        for _ in range(kills):
            pid = forked(lambda: _update_for_ever(weight, count, board))
            time.sleep(chance.uniform(0, longest) + 0.003)
            kill(pid)
            tried, done, *_ = _BOARD.unpack(board[:])
            value = _the_number(load_file(weight.offload_path)[name])
            assert value in (tried, done), f"{value} was found; {done} was written, and {tried} was on its way"
            assert value == _the_number(weight.materialize()), "the parent sees another value than the file holds"
            found["kills"] += 1
            found["new" if value == tried != done else "old"] += 1
            _note(board, 0, value)
            _note(board, 1, value)
            if size > _LARGE:
                found["left"] += _temporary_files(folder)
                sweep(folder)
    finally:
        _note(board, 2, 1)
        assert ended(reader) == 0, "the reader failed: see above"
    _, updates, _, reads = _BOARD.unpack(board[:])
    found["updates"] += updates
    found["reads"] += reads


def _update_for_ever(weight: OffloadedTensor, count: int, board: mmap.mmap) -> None:
    number = _BOARD.unpack(board[:])[1]
    while True:
        number += 1
        _note(board, 0, number)
        weight.update_values(torch.full((count,), float(number)))
        _note(board, 1, number)


def _read_for_ever(path: Path, name: str, board: mmap.mmap) -> None:
    handle = Handle.shared(TensorFile.open(path), name, None)
    last = reads = 0
    while not _BOARD.unpack(board[:])[2]:
        value = _the_number(handle.base() if reads % 2 else load_file(path)[name])
        assert value >= last, f"{value} was read after {last}"
        last, reads = value, reads + 1
        _note(board, 3, reads)
        time.sleep(0.001)


def _note(board: mmap.mmap, place: int, number: int) -> None:
    board[8 * place : 8 * place + 8] = struct.pack("q", number)


def _seconds(weight: OffloadedTensor, count: int) -> float:
    start = time.perf_counter()
    weight.update_values(torch.zeros(count))
    return time.perf_counter() - start


def _the_number(values: torch.Tensor) -> int:
    low, high = values.aminmax()
    assert low == high, f"a mix of {low} and {high}"
    return int(low)


def _temporary_files(folder: Path) -> int:
    return sum(name.startswith(TEMPORARY) for name in os.listdir(folder))


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests.kills", description=__doc__.splitlines()[0])
    options.add_argument("--kills", type=int, default=1000, help="of all sizes together")
    options.add_argument("--largest", type=int, default=SIZES[-1], help="size in bytes")
    chosen = options.parse_args()
    sizes = [size for size in SIZES if size <= chosen.largest]
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        print(json.dumps({"sizes": sizes, **campaign(Path(folder), sizes, chosen.kills)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
