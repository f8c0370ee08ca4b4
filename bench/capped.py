"""Decoding a model that exceeds its memory cap.

Always true:
- a memory cgroup counts what loading and decoding use, including the page cache; earlier memory does not count
- every arm has the same cap: the budget, and the same allowance for everything but weights; with large values, also
  for two of them: the one in use, and the next. If the model fits in that, it is not capped, and not measured
- nothing of the checkpoint is cached at the start: cached pages would belong to another group, and be free
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from bench.apart import run_apart
from bench.decode import Decoder
from bench.generate import rehearse
from bench.limits import MIB, fastest_reader
from bench.memory_cap import Group, memory_cap
from bench.models import bytes_of_a_pass
from bench.page_cache import files_in, make_cold
from bench.peers import IN_MEMORY, IN_PLACE, PACKAGES, WAYS, absent, limit_memory
from bench.process import MemoryTrace, read_bytes
from bench.rounds import Figure, Rounds, Trace, in_turn
from bench.scale import Scale

ALLOWANCE = 96 * MIB  # activations, keys and values, the read-ahead window
_COMPUTING = "computing"


@dataclass(frozen=True)
class CappedTrial:
    """Seconds and bytes read per token. Memory in bytes above the start."""

    seconds: float
    bytes_read: float
    peak_bytes: int
    tokens: list[int]
    trace: Trace = field(repr=False)
    facts: dict[str, int] = field(default_factory=dict)


def figures(scale: Scale, scratch: Path) -> list[Figure]:
    """Time and bytes per token, for each ratio of model to budget.

    Raises:
        OSError: this process can't create a memory cgroup.
    """
    with memory_cap(ALLOWANCE):
        pass
    found = _figures_of_model("capped", scale.model(), WAYS, 0, scale, scratch)
    for what, folder, nbytes in scale.by_value(scratch):
        found += _figures_of_model(f"capped, {what}", folder, IN_PLACE, 2 * nbytes, scale, scratch)
    return found


def _figures_of_model(
    case: str, folder: Path, ways: Iterable[str], of_values: int, scale: Scale, scratch: Path
) -> list[Figure]:
    size, allowance = bytes_of_a_pass(folder), ALLOWANCE + of_values
    factors = [factor for factor in scale.factors if size / factor + of_values < size]
    of_factors = [_figures_at(factor, case, folder, ways, allowance, scale, scratch) for factor in factors]
    return [figure for figures in of_factors for figure in figures]


def _figures_at(
    factor: float, case: str, folder: Path, ways: Iterable[str], allowance: int, scale: Scale, scratch: Path
) -> list[Figure]:
    files, size = files_in(folder), bytes_of_a_pass(folder)
    budget = int(size / factor)
    arms = {arm: partial(_in_group, arm, folder, scratch, budget, allowance, scale.capped_tokens) for arm in ways}
    computing = partial(run_apart, trial, IN_MEMORY, folder, scratch, scale.capped_tokens)
    make_cold(files)
    rate = sum(path.stat().st_size for path in files) / fastest_reader(files).seconds(files)
    missing = absent({arm: PACKAGES[arm] for arm in arms})
    done = in_turn({_COMPUTING: computing, **arms}, scale.rounds, missing)
    computed = done.take(_COMPUTING)
    done.strike(lambda one: one.tokens, computed[0].tokens, "tokens")
    least = size - budget
    limit = [max(least / rate, one.seconds) for one in computed]
    return _figures_of(f"{case}, {factor:g}x", done, limit, least, budget)


def _figures_of(case: str, done: Rounds[CappedTrial], limit: list[float], least: int, budget: int) -> list[Figure]:
    def figure(what: str, unit: str, value: Callable[[CappedTrial], float], limit: list[float], name: str) -> Figure:
        return Figure(f"{case}: {what}", unit, done.values(value), limit, name, done.missing)

    rounds = len(limit)
    read = figure("bytes read, a token", "B", lambda one: one.bytes_read, [least] * rounds, "model - budget")
    peak = figure("peak anonymous memory", "B", lambda one: one.peak_bytes, [budget] * rounds, "budget")
    return [
        figure("a token", "s", lambda one: one.seconds, limit, "O_DIRECT or compute"),
        replace(read, facts={arm: results[-1].facts for arm, results in done.results.items()}),
        replace(peak, traces={arm: results[0].trace for arm, results in done.results.items()}),
    ]


def _in_group(arm: str, folder: Path, scratch: Path, budget: int, allowance: int, tokens: int) -> CappedTrial:
    make_cold(files_in(folder))
    with memory_cap(budget + allowance) as group:
        done = run_apart(trial, arm, folder, scratch, tokens, budget, group)
        return replace(done, facts=group.facts())


def trial(
    arm: str, folder: Path, scratch: Path, tokens: int, budget: int | None = None, group: Group | None = None
) -> CappedTrial:
    """Load, read the prompt, decode a token, and measure the following ones; without a group there is no cap."""
    rehearse(arm, folder, scratch)
    if group:
        group.join()
    if budget:
        limit_memory(arm, budget)
    with tempfile.TemporaryDirectory(dir=scratch) as own, MemoryTrace() as memory:
        decoder = Decoder(WAYS[arm].load(folder, Path(own)))
        decoder.step()
        before = read_bytes()
        seconds = sum(decoder.step() for _ in range(tokens))
        read = read_bytes() - before
    return CappedTrial(seconds / tokens, read / tokens, memory.peak, decoder.tokens, memory.samples)
