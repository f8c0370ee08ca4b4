"""The cost of loading: CPU time per tensor for a model of many tiny ones; and a large mixture of experts in FP8.

Always true:
- for the tiny ones, creating the empty model is not counted, and the limit is the model in memory: safetensors maps the
  file, and the values are assigned
- the files of the mixture have headers, and holes for values, which loading does not read; no peer loads it packed
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from safetensors.torch import save_file
from torch import nn

import offload
from bench.apart import run_apart
from bench.models import toy_fp8_experts
from bench.peers import IN_MEMORY, OURS, PACKAGES, WAYS, absent
from bench.process import MemoryTrace, written_bytes
from bench.rounds import Figure, in_turn
from bench.scale import Scale

_FILE = "model.safetensors"


def figures(scale: Scale, scratch: Path) -> list[Figure]:
    """CPU time per tensor."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        save_file(many(scale.load_tensors).state_dict(), Path(folder) / _FILE, metadata={"format": "pt"})
        arms = {arm: partial(run_apart, cost, arm, Path(folder), scale.load_tensors) for arm in WAYS}
        done = in_turn(arms, scale.rounds, absent(PACKAGES))
    limit = done.take(IN_MEMORY)
    case = f"load: CPU time a tensor, {scale.load_tensors} tensors"
    return [Figure(case, "µs", done.results, limit, IN_MEMORY, done.missing), *_of_experts(scale, scratch)]


def many(tensors: int) -> nn.Module:
    return nn.ModuleList([nn.Linear(16, 16) for _ in range(tensors // 2)])


def cost(arm: str, folder: Path, tensors: int) -> float:
    """Microseconds per tensor, after a warm-up."""
    save_file(many(4).state_dict(), folder / f"{arm}.safetensors", metadata={"format": "pt"})
    _seconds(arm, folder / f"{arm}.safetensors", 4)
    return _seconds(arm, folder / _FILE, tensors) / tensors * 1e6


def _seconds(arm: str, file: Path, tensors: int) -> float:
    with offload.init_empty_weights():
        model = many(tensors)
    with tempfile.TemporaryDirectory(dir=file.parent) as own:
        start = time.process_time()
        WAYS[arm].fill(model, file, Path(own))
        return time.process_time() - start


@dataclass(frozen=True)
class Loading:
    """CPU and wall-clock seconds, and bytes of anonymous memory and of writes."""

    cpu_seconds: float
    seconds: float
    peak_bytes: int
    bytes_written: int


def _of_experts(scale: Scale, scratch: Path) -> list[Figure]:
    with tempfile.TemporaryDirectory(dir=scratch) as made:
        folder, small = Path(made) / "large", Path(made) / "small"
        scale.packed_experts(folder, scale.load_gigabytes, is_hollow=True)
        toy_fp8_experts(small, 0, is_hollow=True)
        done = in_turn({OURS: partial(run_apart, loading, folder, small)}, scale.rounds, {})
    case = f"load, {scale.load_gigabytes:g} GB of experts in FP8"

    def figure(what: str, unit: str, value: Callable[[Loading], float]) -> Figure:
        return Figure(f"{case}: {what}", unit, done.values(value), [], "", done.missing)

    return [
        figure("CPU time", "s", lambda one: one.cpu_seconds),
        figure("time", "s", lambda one: one.seconds),
        figure("peak anonymous memory", "B", lambda one: one.peak_bytes),
        figure("bytes written", "B", lambda one: one.bytes_written),
    ]


def loading(folder: Path, small: Path) -> Loading:
    """Load a model after a warm-up."""
    WAYS[OURS].load(small, small)
    with MemoryTrace(period=0.05) as memory:
        written, start, clock = written_bytes(), time.process_time(), time.perf_counter()
        model = WAYS[OURS].load(folder, folder)
        done = Loading(time.process_time() - start, time.perf_counter() - clock, 0, written_bytes() - written)
        loaded = memory.now()
    del model
    return replace(done, peak_bytes=max(loaded, memory.peak))
