"""A teacher's log-probabilities, and epochs in a shuffled order.

Always true:
- positions are functions of their numbers, and each batch is checked, off the clock: ids exactly
- peers keep ids in int32 and log-probabilities in bfloat16, and give both as training needs them: int64 and float32
- an epoch is all rows once, warm, in an order that is drawn anew; what a loader prepares in threads or processes counts
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import offload
from bench.limits import sync
from bench.page_cache import files_in, make_cold, warm
from bench.peers import OURS, absent
from bench.rounds import Figure, in_turn

K, VOCAB, BITS = 64, 151_936, 10
_BATCH, _PART, _READS = 256, 8192, 8  # positions of a batch, and of a part; batches
_PLAIN, _TENSORDICT = "offload, two columns", "tensordict"


def pair_of(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and log-probabilities of positions, each (rows, K)."""
    return (rows[:, None] * 7919 + torch.arange(K) * 104_729) % VOCAB, -torch.arange(K) / 64.0 - rows[:, None] % 13


def _offload(schema: dict[str, Any], folder: Path, rows: int) -> offload.TensorCache:
    return offload.TensorCache.create(folder / "cache", schema, rows, exist_ok=True)


def _tensordict(folder: Path, rows: int) -> Any:
    from tensordict import TensorDict

    if (folder / "table").exists():
        return TensorDict.load_memmap(folder / "table")
    both = {name: torch.zeros(1, *shape, dtype=dtype) for name, (dtype, shape) in _COLUMNS.items()}
    return TensorDict({name: one.expand(rows, K) for name, one in both.items()}, [rows]).memmap_like(folder / "table")


_COLUMNS: dict[str, Any] = {"ids": (torch.int32, (K,)), "logps": (torch.bfloat16, (K,))}
_OPENED: dict[str, Callable[[Path, int], Any]] = {
    OURS: partial(_offload, {"t": offload.topk(K, VOCAB, BITS)}),
    _PLAIN: partial(_offload, _COLUMNS),
    _TENSORDICT: _tensordict,
}


def figures(nbytes: int, rounds: int, scratch: Path) -> list[Figure]:
    """Positions written and read at random, and an epoch."""
    missing, rows = absent({_TENSORDICT: _TENSORDICT}), max(nbytes // (6 * K) // _PART, 1) * _PART
    with tempfile.TemporaryDirectory(dir=scratch) as place:
        folders = {arm: Path(place, str(at)) for at, arm in enumerate(_OPENED)}
        writes = {arm: partial(_written, arm, folder, rows) for arm, folder in folders.items()}
        found = [_figure(f"cache, top-k: {rows} positions of {K} in {VOCAB} written", writes, rounds, missing)]
        for state in ("warm", "cold"):
            reads = {arm: partial(_read, arm, folder, rows, state, count()) for arm, folder in folders.items()}
            found.append(_figure(f"cache, top-k, {state}: {_BATCH} random positions", reads, rounds, missing))
        tables = {arm: _OPENED[arm](folder, rows) for arm, folder in folders.items() if arm not in missing}
        epochs = {arm: partial(_epoch, load, tables, rows, count()) for arm, load in _LOADERS.items()}
        found.append(_figure(f"cache, warm: a shuffled epoch in batches of {_BATCH}", epochs, rounds, missing))
    return found


def _figure(case: str, arms: Mapping[str, Callable[[], float]], rounds: int, missing: dict[str, str]) -> Figure:
    return Figure(case, "s", (done := in_turn(arms, rounds, missing)).results, [], "", done.missing)


def _written(arm: str, folder: Path, rows: int) -> float:
    """The last folder that is written stays."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    table, seconds = _OPENED[arm](folder, rows), 0.0
    for first in range(0, rows, _PART):
        pair = pair_of(torch.arange(first, first + _PART))
        start = time.perf_counter()
        part = slice(first, first + _PART)
        table[part] = {"t": pair} if arm == OURS else {"ids": pair[0].int(), "logps": pair[1].bfloat16()}
        seconds += time.perf_counter() - start
    start = time.perf_counter()
    if arm != _TENSORDICT:
        table.close()
    for file in files_in(folder):
        sync(file)
    return seconds + time.perf_counter() - start


def _read(arm: str, folder: Path, rows: int, state: str, seeds: Iterator[int]) -> float:
    """The mean of a batch: of a table that was just opened, and is cold; or after some others, all in memory."""
    generator, table, seconds = torch.Generator().manual_seed(next(seeds)), _OPENED[arm](folder, rows), 0.0
    warm(files_in(folder))
    for at in range(-_READS, _READS):
        if state == "cold":
            table = _OPENED[arm](folder, rows)
            make_cold(files_in(folder))
        numbers = torch.randint(rows, (_BATCH,), generator=generator)
        start = time.perf_counter()
        batch = table[numbers]
        ids, _ = batch["t"] if arm == OURS else (batch["ids"].long(), batch["logps"].float())
        seconds += (time.perf_counter() - start) * (at >= 0)
        if not torch.equal(ids, pair_of(numbers)[0]):
            raise ValueError("these are not the ids of the positions that were asked for")
    return seconds / _READS


def _sampler(rows: int, seed: int) -> BatchSampler:
    return BatchSampler(RandomSampler(range(rows), generator=torch.Generator().manual_seed(seed)), _BATCH, False)


_LOADERS: dict[str, Callable[[dict[str, Any], int, int], Any]] = {
    OURS: lambda tables, _, seed: tables[_PLAIN].batches(_BATCH, shuffle=seed),
    "offload, rows": lambda tables, rows, seed: (tables[_PLAIN][numbers] for numbers in _sampler(rows, seed)),
    "offload, DataLoader": lambda tables, rows, seed: DataLoader(
        tables[_PLAIN].as_dataset(), batch_size=None, sampler=_sampler(rows, seed)
    ),
    _TENSORDICT: lambda tables, _, seed: DataLoader(
        tables[_TENSORDICT], _BATCH, True, generator=torch.Generator().manual_seed(seed), collate_fn=lambda batch: batch
    ),
}


def _epoch(load: Callable[..., Any], tables: dict[str, Any], rows: int, seeds: Iterator[int]) -> float:
    start, seen = time.perf_counter(), 0
    for batch in load(tables, rows, next(seeds)):
        seen += len(batch["ids"])
    if seen != rows:
        raise ValueError(f"{seen} of {rows} rows came")
    return time.perf_counter() - start
