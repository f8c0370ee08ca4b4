"""A packed mixture of experts that exceeds the machine's memory: loading it, and single tokens.

Always true:
- no budget is set, and the page cache holds nothing of the checkpoint when it is loaded
- only `offload` runs it: the others dequantize it into memory, where it does not fit
- before a cold token all of its files are dropped from the page cache; the limit is reading what the token needs, at
  the disk's rate
- consecutive tokens are routed to different experts; experts that fit stay in memory. Memory that no process has used
  for a while is slow at first in a virtual machine, so that tokens are measured once more after some others
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, sleep

import torch

from bench.apart import run_apart
from bench.cold import next_token
from bench.larger import NEW, made_larger
from bench.models import toy_fp8_experts
from bench.packed import needed_by_a_token
from bench.page_cache import files_in, make_cold
from bench.peers import OURS, WAYS
from bench.process import MemoryTrace, read_bytes, written_bytes
from bench.rounds import Figure, in_turn
from bench.routed import NOTICED
from bench.scale import Scale

_TOKENS = 3
_COLD, _NEXT, _LATER = _KINDS = (", cold", " after another", f" after {NEW}")


@dataclass(frozen=True)
class Trial:
    """Seconds and bytes: of loading, and of single tokens by their kind."""

    load_seconds: float
    loaded_bytes: int
    bytes_written: int
    seconds: dict[str, list[float]]
    read: dict[str, list[float]]
    needed: int
    peak_bytes: int


def figures(scale: Scale, scratch: Path) -> list[Figure]:
    """Figures of a mixture of experts in FP8.

    Raises:
        OSError: the disk has no room for it.
    """
    with made_larger(scale.packed_experts, scale, scratch) as (folder, rate), tempfile.TemporaryDirectory() as small:
        toy_fp8_experts(Path(small), 0)
        size = sum(path.stat().st_size for path in files_in(folder))
        done = in_turn({OURS: partial(run_apart, trial, folder, Path(small))}, scale.rounds, {})
    case = f"larger-packed, {size / 1e9:.1f} GB of experts in FP8"
    return _figures_of(case, done.results.get(OURS, []), rate, done.missing)


def _figures_of(case: str, done: list[Trial], rate: float, missing: dict[str, str]) -> list[Figure]:
    def figure(
        what: str, unit: str, value: Callable[[Trial], list[float]], limit: float = 0.0, name: str = ""
    ) -> Figure:
        found = [number for one in done for number in value(one)]
        limits = [limit] * len(found) if limit else []
        return Figure(f"{case}: {what}", unit, {OURS: found} if done else {}, limits, name, missing)

    needed = float(done[0].needed) if done else 0.0
    at_the_rate, all_of_it = (needed / rate, "what it needs, at the disk's rate"), (needed, "what it needs")
    return [
        figure("load", "s", lambda one: [one.load_seconds]),
        figure("bytes written by loading", "B", lambda one: [one.bytes_written]),
        figure("anonymous memory, loaded", "B", lambda one: [one.loaded_bytes]),
        *(
            one
            for kind in _KINDS
            for one in (
                figure(f"a token{kind}", "s", lambda one, kind=kind: one.seconds[kind], *at_the_rate),
                figure(f"bytes read, a token{kind}", "B", lambda one, kind=kind: one.read[kind], *all_of_it),
            )
        ),
        figure("peak anonymous memory", "B", lambda one: [one.peak_bytes]),
    ]


@torch.inference_mode()
def trial(folder: Path, small: Path) -> Trial:
    """Load, then make cold and consecutive tokens; a small model is run before, so that imports do not count."""
    next_token(WAYS[OURS].load(small, small), torch.tensor([[1]]))
    make_cold(files_in(folder))
    with MemoryTrace() as memory:
        written, start = written_bytes(), perf_counter()
        model = WAYS[OURS].load(folder, folder)
        load_seconds, bytes_written, loaded = perf_counter() - start, written_bytes() - written, memory.now()
        needed = needed_by_a_token(model)
        next_token(model, torch.tensor([[1]]))
        seconds: dict[str, list[float]] = {kind: [] for kind in _KINDS}
        read: dict[str, list[float]] = {kind: [] for kind in _KINDS}
        kinds = [_COLD] * _TOKENS + [_NEXT] * NEW + [_LATER] * _TOKENS
        for number, kind in enumerate(kinds):
            if kind == _COLD:
                make_cold(files_in(folder))
                sleep(NOTICED)
            before, start = read_bytes(), perf_counter()
            next_token(model, torch.tensor([[number + 2]]))
            seconds[kind].append(perf_counter() - start)
            read[kind].append(float(read_bytes() - before))
    for figures_of in (seconds, read):
        figures_of[_NEXT] = figures_of[_NEXT][:_TOKENS]
    return Trial(load_seconds, loaded, bytes_written, seconds, read, needed, memory.peak)
