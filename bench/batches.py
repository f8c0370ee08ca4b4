"""Many batches through a model that exceeds its memory budget: in lockstep, and one by one.

Always true:
- a memory cgroup counts what loading and computing use, including the page cache
- every arm gives the same results for the same batches, but where experts are multiplied as one act, which
  gives other last bits; figures are per batch, after at least two sweeps
- in lockstep, sweeps are measured within one call: three, or those of one text; what is read ahead after the last one,
  and not used, counts
- the cap has room for what kernels allocate: as much as `offload`, which maps the files, uses for this work uncapped
- the limit is the larger of computing, and of reading what exceeds the budget once for all batches in flight
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import offload
from bench.apart import run_apart
from bench.capped import ALLOWANCE
from bench.generate import rehearse
from bench.limits import MIB, fastest_reader
from bench.memory_cap import Group, memory_cap
from bench.models import bytes_of_a_pass
from bench.page_cache import files_in, make_cold
from bench.peers import IN_MEMORY, OURS, PACKAGES, WAYS, absent, limit_memory
from bench.process import MemoryTrace, read_bytes
from bench.rounds import Figure, Rounds, in_turn
from bench.scale import Scale

ONE_BY_ONE = "offload, one by one"
EXACT = "offload, exact"
_COMPUTING = "computing"
_FACTOR = 3.0  # size of the model relative to the budget
_A_BATCH = 6 * MIB  # memory per batch in flight: a thread, and kernel scratch memory
_REHEARSED = 16  # batches until kernels have allocated all that they keep: oneDNN does so per shape


@dataclass(frozen=True)
class Work:
    """What is done with a batch.

    Attributes:
        tokens: in the prompt.
        new_tokens: generated after it; 0 to score the prompt.
    """

    tokens: int
    new_tokens: int = 0

    @property
    def passes(self) -> int:
        """Passes through the model per batch."""
        return max(self.new_tokens, 1)

    @property
    def first(self) -> int:
        """Unmeasured batches, one by one: two passes or more."""
        return -(-2 // self.passes)

    @property
    def measured(self) -> int:
        """Batches, one by one, that correspond to those measured in lockstep."""
        return -(-3 // self.passes)

    def __call__(self, model: Any, number: int) -> list[int]:
        generator = torch.Generator().manual_seed(number)
        prompt = torch.randint(1, 500, (1, self.tokens), generator=generator)
        if not self.new_tokens:
            return [int(model(prompt, logits_to_keep=1, use_cache=False).logits[0, -1].argmax())]
        done = model.generate(
            prompt, max_new_tokens=self.new_tokens, min_new_tokens=self.new_tokens, do_sample=False, pad_token_id=0
        )
        return [int(token) for token in done[0, self.tokens :]]

    def __str__(self) -> str:
        return f"{self.tokens} tokens" + (f" and {self.new_tokens} generated" if self.new_tokens else "")


@dataclass(frozen=True)
class Trial:
    """Seconds and bytes read per batch. Memory in bytes above the start."""

    seconds: float
    bytes_read: float
    peak_bytes: int
    results: list[list[int]] = field(repr=False)


def figures(scale: Scale, scratch: Path) -> list[Figure]:
    """Time and bytes per batch, for several numbers of batches in flight.

    Raises:
        OSError: this process can't create a memory cgroup.
    """
    with memory_cap(ALLOWANCE):
        pass
    found = []
    for name, folder in (("dense", scale.model()), ("experts", scale.experts())):
        for work, counts in _works(scale):
            found += _figures_of(name, folder, work, counts, scale, scratch)
    return found


def _works(scale: Scale) -> list[tuple[Work, Sequence[int]]]:
    if scale.name == "toy":
        return [(Work(4, 2), (2,))]
    return [(Work(32), (1, 4, 16, 64)), (Work(256), (4, 16)), (Work(32, 16), (16,))]


def _figures_of(
    name: str, folder: Path, work: Work, counts: Sequence[int], scale: Scale, scratch: Path
) -> list[Figure]:
    files, size = files_in(folder), bytes_of_a_pass(folder)
    budget = max(int(size / _FACTOR), MIB)
    peak = run_apart(trial, OURS, folder, scratch, work, 0, max(_REHEARSED // work.passes, 1)).peak_bytes
    allowance = ALLOWANCE + peak + max(counts) * _A_BATCH
    capped = partial(_in_group, folder, scratch, budget, allowance, work)
    peers = {arm: partial(capped, arm, 0, 1) for arm in WAYS if arm != OURS}
    lockstep = {_lockstep(count): partial(capped, OURS, count, work.measured) for count in counts}
    alone = {ONE_BY_ONE: partial(capped, OURS, 0, 2)}
    if name == "experts":
        lockstep |= {_exactly(count): partial(capped, EXACT, count, work.measured) for count in counts}
    computing = partial(run_apart, trial, IN_MEMORY, folder, scratch, work, 0, 2)
    make_cold(files)
    rate = sum(path.stat().st_size for path in files) / fastest_reader(files).seconds(files)
    done = in_turn({_COMPUTING: computing, **peers, **alone, **lockstep}, scale.rounds, absent(PACKAGES))
    computed = done.take(_COMPUTING)
    one_act = (ONE_BY_ONE, *map(_lockstep, counts)) if name == "experts" else ()  # they have other last bits
    others = {arm: done.results.pop(arm) for arm in one_act if arm in done.results}
    done.strike(lambda one: one.results[:2], computed[0].results[:2], "results")
    done.results.update(others)
    found = []
    for count in counts:
        least = (size - budget) * work.passes / count
        limit = [max(least / rate, one.seconds) for one in computed]
        case = f"batches, {name}, {work}, {count} in flight"
        found += _of_a_count(case, _for(done, count, counts), limit, least)
    return found


def _lockstep(count: int) -> str:
    return f"lockstep {count}"


def _exactly(count: int) -> str:
    return f"{EXACT}: {count}"


def _for(done: Rounds[Trial], count: int, counts: Sequence[int]) -> Rounds[Trial]:
    """The results with `count` batches in flight as offload's."""
    others = {arm(one) for one in counts for arm in (_lockstep, _exactly)}
    name = {_lockstep(count): OURS, _exactly(count): EXACT}

    def renamed(arms: dict[str, Any]) -> dict[str, Any]:
        return {name.get(arm, arm): value for arm, value in arms.items() if arm not in others or arm in name}

    return Rounds(renamed(done.results), renamed(done.missing))


def _of_a_count(case: str, done: Rounds[Trial], limit: list[float], least: float) -> list[Figure]:
    def figure(what: str, unit: str, value: Callable[[Trial], float], limit: list[float], name: str) -> Figure:
        return Figure(f"{case}: {what}", unit, done.values(value), limit, name, done.missing)

    return [
        figure("a batch", "s", lambda one: one.seconds, limit, "O_DIRECT or compute"),
        figure("bytes read, a batch", "B", lambda one: one.bytes_read, [least] * len(limit), "model - budget"),
        replace(figure("peak anonymous memory", "B", lambda one: one.peak_bytes, [], "")),
    ]


def _in_group(
    folder: Path, scratch: Path, budget: int, allowance: int, work: Work, arm: str, in_flight: int, times: int
) -> Trial:
    make_cold(files_in(folder))
    with memory_cap(budget + allowance) as group:
        return run_apart(trial, arm, folder, scratch, work, in_flight, times, budget, group)


def trial(
    arm: str,
    folder: Path,
    scratch: Path,
    work: Work,
    in_flight: int,
    times: int,
    budget: int | None = None,
    group: Group | None = None,
) -> Trial:
    """Load, run the first batches, and measure the others: `times` batches, or that many times those in flight."""
    package = OURS if arm == EXACT else arm
    rehearse(package, folder, scratch)
    if group:
        group.join()
    if budget:
        limit_memory(package, budget)
    with tempfile.TemporaryDirectory(dir=scratch) as own, torch.inference_mode(), MemoryTrace() as memory:
        model = WAYS[package].load(folder, Path(own))
        if arm == EXACT:
            model.set_experts_implementation("grouped_mm")
        fn = partial(work, model)
        each = max(in_flight, 1)
        first = work.first * each
        results = mapped(arm, fn, range(first + times * each), model, in_flight)
        done = [next(results) for _ in range(first)]
        before, start = read_bytes(), time.perf_counter()
        done.extend(results)
        seconds, read = time.perf_counter() - start, read_bytes() - before
    measured = len(done) - first
    return Trial(seconds / measured, read / measured, memory.peak, done)


def mapped(arm: str, fn: Callable[[int], Any], numbers: Sequence[int], model: Any, in_flight: int) -> Iterator[Any]:
    """The results of a function of numbers: `in_flight` at a time, or one by one for 0."""
    if arm in (OURS, EXACT) and in_flight:
        return offload.map_batches(fn, numbers, model, in_flight=in_flight, progress=False)
    return map(fn, numbers)
