"""Batches through a model that exceeds the machine's memory, in lockstep and one by one.

Always true:
- no budget is set; the checkpoint is created for these figures, and removed afterwards
- the first batches, which find nothing in memory, are not measured
- the limit is reading what exceeds the budget once per sweep; computing can't be measured alone, and is not in it
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import offload
from bench.apart import run_apart
from bench.batches import ONE_BY_ONE, Work, mapped
from bench.generate import rehearse
from bench.larger import made_larger
from bench.models import bytes_of_a_pass
from bench.page_cache import files_in, make_cold
from bench.peers import OURS, WAYS
from bench.process import MemoryTrace, read_bytes
from bench.rounds import Figure, Rounds, in_turn
from bench.scale import Scale

_IN_FLIGHT = 8
_WORKS = (Work(16), Work(16, 4))


@dataclass(frozen=True)
class Done:
    """Seconds and bytes read per batch. Memory in bytes above the start."""

    seconds: float
    bytes_read: float
    peak_bytes: int
    budget: int
    results: list[list[int]]


def figures(scale: Scale, scratch: Path) -> list[Figure]:
    """Scoring prompts, and generating, with a dense model.

    Raises:
        OSError: the disk has no room for it.
    """
    with made_larger(scale.larger["dense"], scale, scratch) as (folder, rate):
        arms = {
            ONE_BY_ONE: partial(run_apart, trial, folder, scratch, 0),
            OURS: partial(run_apart, trial, folder, scratch, _IN_FLIGHT),
        }
        done = in_turn(arms, scale.rounds, {})
        size = bytes_of_a_pass(folder)
    found = []
    for number, work in enumerate(_WORKS):
        of_work = Rounds({arm: [one[number] for one in results] for arm, results in done.results.items()}, done.missing)
        found += _figures_of(f"larger-batches, {work}, {_IN_FLIGHT} in flight", of_work, work, size, rate)
    return found


def _figures_of(case: str, done: Rounds[Done], work: Work, size: int, rate: float) -> list[Figure]:
    ours = done.results.get(OURS, [])
    if ONE_BY_ONE in done.results:
        expected = done.results[ONE_BY_ONE][0].results
        done.strike(lambda one: one.results[: len(expected)], expected, "results")
    least = [max(0, size - one.budget) * work.passes / _IN_FLIGHT for one in ours]

    def figure(what: str, unit: str, value: Callable[[Done], float], limit: Sequence[float], name: str) -> Figure:
        return Figure(f"{case}: {what}", unit, done.values(value), list(limit), name, done.missing)

    return [
        figure("a batch", "s", lambda one: one.seconds, [one / rate for one in least], "reading over the budget once"),
        figure("bytes read, a batch", "B", lambda one: one.bytes_read, least, "over the budget, once"),
        figure("peak anonymous memory", "B", lambda one: one.peak_bytes, [], ""),
    ]


def trial(folder: Path, scratch: Path, in_flight: int) -> list[Done]:
    """Load, run the first batches, and measure as many of each work as are in flight, or two if one by one."""
    rehearse(OURS, folder, scratch)
    make_cold(files_in(folder))
    with torch.inference_mode():
        model = WAYS[OURS].load(folder, scratch)
        list(mapped(OURS, partial(_WORKS[0], model), range(max(in_flight, 1)), model, in_flight))
        return [_measured(model, work, in_flight) for work in _WORKS]


def _measured(model: Any, work: Work, in_flight: int) -> Done:
    count = in_flight or -(-2 // work.passes)
    with MemoryTrace() as memory:
        before, start = read_bytes(), time.perf_counter()
        results = list(mapped(OURS, partial(work, model), range(count), model, in_flight))
        seconds, read = time.perf_counter() - start, read_bytes() - before
    budget = offload.memory_summary().budget
    return Done(seconds / count, read / count, memory.peak, budget, results)
