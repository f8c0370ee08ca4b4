"""A table of rows in a model, such as per-layer embeddings or n-grams, from which each token picks a few.

Always true:
- the table is larger than the memory that the process may use, and all rows are on the disk at the start
- each token picks other rows: none is found because an earlier token has read it
- the limit is the same model with all the rows that are picked in memory
"""

from __future__ import annotations

import tempfile
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from safetensors import safe_open

from bench.apart import run_apart
from bench.limits import MIB
from bench.memory_cap import Group, memory_cap
from bench.models import write_slices
from bench.page_cache import make_cold
from bench.peers import OURS
from bench.process import MemoryTrace, read_bytes
from bench.rounds import Figure, in_turn
from bench.scale import Scale
from offload import OffloadedTensor

_MAPPED, _IN_MEMORY = "a plain mapping", "rows in memory"
_WIDTH, _HIDDEN, _LAYERS = 7680, 2048, 24  # numbers in a row, of 30 layers with 256 each, and of the model that uses it
_CAP = 1024 * MIB  # for the pages of the table, and 220 MB of weights
_SHAPES = {"a token, 1 row": (1, 40), "a token, 8 rows": (8, 40), "a prompt of 256 tokens": (256, 5)}  # rows, passes
_WARM_UP = 5


class TablesTrial(NamedTuple):
    """Median seconds and bytes read of a pass, and anonymous memory above the start."""

    seconds: float
    bytes_read: float
    peak_bytes: int


_MEASURED = tuple(zip(("", ", bytes read", ", peak anonymous memory"), "sBB", map(itemgetter, range(3)), strict=True))


def figures(scale: Scale, scratch: Path) -> list[Figure]:
    """Figures for a pass that picks 1, 8 or 256 rows."""
    rows = round(scale.table_gigabytes * 1e9 / 2 / _WIDTH)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        path = Path(folder) / "table.safetensors"
        block = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        table = torch.empty(rows, _WIDTH, dtype=torch.bfloat16, device="meta")
        write_slices(path, {"table": table}, {block.dtype: block})
        return [figure for what, sizes in _SHAPES.items() for figure in _figures(what, *sizes, path, scale)]


def _figures(what: str, picks: int, times: int, path: Path, scale: Scale) -> list[Figure]:
    def arm(name: str) -> TablesTrial:
        make_cold([path])
        with memory_cap(_CAP) as group:
            return run_apart(trial, name, path, picks, times, group)

    done = in_turn({name: partial(arm, name) for name in (OURS, _MAPPED, _IN_MEMORY)}, scale.rounds, {})
    limits = done.take(_IN_MEMORY)
    case = f"tables, {path.stat().st_size / 1e9:.1f} GB: {what}"
    return [
        Figure(f"{case}{of}", unit, done.values(value), list(map(value, limits)), _IN_MEMORY, done.missing)
        for of, unit, value in _MEASURED
    ]


@torch.inference_mode()
def trial(arm: str, path: Path, picks: int, times: int, group: Group) -> TablesTrial:
    """Passes of a small model in memory, each with rows that no other pass picks."""
    with safe_open(path, framework="pt") as file:
        mapped = file.get_tensor("table")
    numbers = torch.randperm(len(mapped), generator=torch.Generator().manual_seed(0))
    chosen = numbers.repeat(-(-picks * (times + _WARM_UP) // len(numbers)))[: picks * (times + _WARM_UP)]
    weights = [torch.randn(_HIDDEN, _WIDTH).div_(90).bfloat16()]
    weights += [torch.randn(_HIDDEN, _HIDDEN).div_(45).bfloat16() for _ in range(_LAYERS)]
    table = OffloadedTensor.from_file(path, "table") if arm == OURS else mapped
    if arm == _IN_MEMORY:
        table, chosen = mapped[chosen], torch.arange(len(chosen))
    group.join()
    seconds, read = [], []
    with MemoryTrace() as memory:
        for ids in chosen.split(picks):
            before, start = read_bytes(), perf_counter()
            hidden = torch.nn.functional.embedding(ids, table)
            for weight in weights:
                hidden = torch.nn.functional.linear(hidden, weight).tanh()
            seconds.append(perf_counter() - start)
            read.append(read_bytes() - before)
    return TablesTrial(median(seconds[_WARM_UP:]), median(read[_WARM_UP:]), memory.peak)
