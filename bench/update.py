"""Replacing a value on disk, and writing some of its rows in place.

Always true:
- the clock stops when the files are synced, even for peers that don't sync by themselves
- after every write the value is read back, and a wrong one is an error
- the limit is writing the same bytes without anything else: beside, synced, renamed; or row by row, synced
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

import offload
from bench.apart import run_apart
from bench.limits import sync, write_durably
from bench.page_cache import files_in
from bench.peers import OURS, absent
from bench.rounds import Figure, in_turn
from bench.scale import Scale

LIMIT = "raw write"
_COLUMNS = 4096  # rows of 16 KiB
_ROUNDS = 5


@dataclass(frozen=True)
class Store:
    """A value on disk: replace it, write rows of it, read it."""

    replace: Callable[[torch.Tensor], object]
    write_rows: Callable[[torch.Tensor, torch.Tensor], object]
    read: Callable[[], torch.Tensor]


def figures(scale: Scale, scratch: Path) -> list[Figure]:
    """The whole value, and some rows."""
    rounds = min(_ROUNDS, scale.rounds + 2)
    return run_apart(_figures, scratch, scale.value_rows, scale.written_rows, rounds)


def _figures(scratch: Path, rows: int, written: int, rounds: int) -> list[Figure]:
    missing = absent(_PACKAGES)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        stores = {arm: _opened(arm, Path(folder) / arm, rows) for arm in _STORES if arm not in missing}
        whole = {arm: partial(_replaced, store, Path(folder) / arm, rows, count()) for arm, store in stores.items()}
        some = {arm: partial(_wrote, store, Path(folder) / arm, written, count()) for arm, store in stores.items()}
        size = rows * _COLUMNS * 4 / 1e6
        return [
            _figure(f"update: a value of {size:.3g} MB", whole, rounds, missing),
            _figure(f"update: {written} rows of 16 KiB in place", some, rounds, missing),
        ]


def _figure(case: str, arms: dict[str, Callable[[], float]], rounds: int, missing: dict[str, str]) -> Figure:
    done = in_turn(arms, rounds, missing)
    limit = done.take(LIMIT)
    return Figure(case, "s", done.results, limit, LIMIT, done.missing)


def _opened(arm: str, folder: Path, rows: int) -> Store:
    folder.mkdir()
    return _STORES[arm](folder, torch.zeros(rows, _COLUMNS))


def _replaced(store: Store, folder: Path, rows: int, numbers: Any) -> float:
    values = torch.full((rows, _COLUMNS), float(next(numbers) + 1))
    seconds = _seconds(lambda: store.replace(values), folder)
    _require(store.read(), values)
    return seconds


def _wrote(store: Store, folder: Path, written: int, numbers: Any) -> float:
    expected = store.read().clone()
    generator = torch.Generator().manual_seed(number := next(numbers))
    rows = torch.randperm(len(expected), generator=generator)[:written]
    values = expected[rows] = torch.full((written, _COLUMNS), -float(number + 1))
    seconds = _seconds(lambda: store.write_rows(rows, values), folder)
    _require(store.read(), expected)
    return seconds


def _seconds(write: Callable[[], object], folder: Path) -> float:
    start = time.perf_counter()
    write()
    for file in files_in(folder):
        sync(file)
    return time.perf_counter() - start


def _require(found: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(found, expected):
        raise ValueError("the value on disk is not what was written")


# The stores


def _raw(folder: Path, first: torch.Tensor) -> Store:
    path = folder / "w.bin"

    def replace(values: torch.Tensor) -> None:
        write_durably(memoryview(values.numpy()).cast("B"), path)

    def write_rows(rows: torch.Tensor, values: torch.Tensor) -> None:
        with path.open("r+b", buffering=0) as file:
            for row, value in zip(rows.tolist(), values.numpy(), strict=True):
                os.pwrite(file.fileno(), value, row * value.nbytes)

    replace(first)
    return Store(replace, write_rows, lambda: torch.from_numpy(np.fromfile(path, np.float32)).view(first.shape))


def _offload(folder: Path, first: torch.Tensor) -> Store:
    tensor = offload.OffloadedTensor.from_original_tensor(first, "w", offload_dir=folder)

    def write_rows(rows: torch.Tensor, values: torch.Tensor) -> None:
        tensor[rows] = values

    return Store(tensor.update_values, write_rows, tensor.materialize)


def _torch_to_nnef(folder: Path, first: torch.Tensor) -> Store:
    from torch_to_nnef.tensor.offload import OffloadedTensor

    tensor = OffloadedTensor.from_original_tensor(first, "w", folder)
    return _rewritten(tensor.update_values, tensor.reload)


def _compressed_tensors(folder: Path, first: torch.Tensor) -> Store:
    from compressed_tensors.offload import offload_module, update_offload_parameter

    module = torch.nn.Module()
    module.register_parameter("w", torch.nn.Parameter(first, requires_grad=False))
    module.forward = torch.nn.Identity.forward.__get__(module)
    offload_module(module, "cpu", "disk", offload_dir=str(folder))
    return _rewritten(partial(update_offload_parameter, module, "w"), lambda: module.w.data)


def _accelerate(folder: Path, first: torch.Tensor) -> Store:
    from accelerate.utils import load_offloaded_weight, offload_weight

    index = offload_weight(first, "w", str(folder), {})
    return _rewritten(
        lambda values: offload_weight(values, "w", str(folder), {}),
        lambda: load_offloaded_weight(str(folder / "w.dat"), index["w"]),
    )


def _tensordict(folder: Path, first: torch.Tensor) -> Store:
    """Replaces in place: a crash leaves a mix of both values."""
    from tensordict import MemoryMappedTensor

    tensor = MemoryMappedTensor.from_tensor(first, filename=folder / "w.memmap")

    def write_rows(rows: torch.Tensor, values: torch.Tensor) -> None:
        tensor[rows] = values

    return Store(tensor.copy_, write_rows, lambda: tensor.clone())


def _rewritten(replace: Callable[[torch.Tensor], object], read: Callable[[], torch.Tensor]) -> Store:
    """For stores that can't write a part: the whole value is read, changed, and replaced."""

    def write_rows(rows: torch.Tensor, values: torch.Tensor) -> None:
        whole = read().clone()
        whole[rows] = values
        replace(whole)

    return Store(replace, write_rows, read)


_STORES: dict[str, Callable[[Path, torch.Tensor], Store]] = {
    LIMIT: _raw,
    OURS: _offload,
    "torch_to_nnef": _torch_to_nnef,
    "compressed-tensors": _compressed_tensors,
    "accelerate": _accelerate,
    "tensordict": _tensordict,
}
_PACKAGES = {arm: arm.replace("-", "_") for arm in _STORES if arm != LIMIT}
