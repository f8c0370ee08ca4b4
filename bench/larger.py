"""Models that exceed the machine's memory: loading, the first pass, and the tokens after it.

Always true:
- no budget is set: each way may use the whole machine
- the checkpoint is created for these figures, cold at the start of each trial, and removed afterwards
- for a token, the limit is reading what exceeds `offload`'s budget, at the disk rate measured before and after the
  trials, whichever is higher: the host may still be writing the checkpoint before them
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import psutil
import torch

import offload
from bench.apart import run_apart
from bench.cold import next_token
from bench.generate import rehearse
from bench.limits import fastest_reader
from bench.models import bytes_of_a_pass, bytes_of_a_token
from bench.page_cache import files_in, make_cold
from bench.peers import IN_MEMORY, IN_PLACE, OURS, PACKAGES, WAYS, absent
from bench.process import MemoryTrace, read_bytes
from bench.rounds import Figure, Rounds, in_turn
from bench.scale import Scale

_ARMS = (*IN_PLACE, _COPIES := "accelerate")  # needs disk space for another copy of the checkpoint
_EXACT = "offload, exact"
_PROMPT, _TOKENS = 16, 3
NEW, _SETTLED = 20, 10  # tokens of a mixture in which many experts are used for the first time; and some after them
_ENOUGH = 2 << 30  # bytes that suffice to measure the disk rate


@dataclass(frozen=True)
class LargerTrial:
    """Seconds, and bytes read: of loading, of the first pass, and of each token after it."""

    load_seconds: float
    first_seconds: float
    seconds: list[float]
    bytes_read: list[float]
    peak_bytes: int
    budget: int
    answers: list[int]


def figures(scale: Scale, scratch: Path) -> list[Figure]:
    """Figures for each kind of model.

    Raises:
        OSError: the disk has no room for it.
    """
    return [figure for kind in scale.larger for figure in _figures_of(kind, scale, scratch)]


@contextmanager
def made_larger(make: Callable[[Path, float], Path], scale: Scale, scratch: Path) -> Iterator[tuple[Path, float]]:
    """The folder of a checkpoint that exceeds memory, and the disk rate; the folder is removed at the end.

    Args:
        make: writes a checkpoint of so many gigabytes to a folder.
        scale: how large it is.
        scratch: where the folder is made.

    Raises:
        OSError: the disk has no room for it.
    """
    nbytes = psutil.virtual_memory().total * scale.larger_times
    free = shutil.disk_usage(scratch).free
    if free < 1.1 * nbytes:
        raise OSError(f"{nbytes / 1e9:.0f} GB are needed on the disk, and {free / 1e9:.0f} are free")
    with tempfile.TemporaryDirectory(dir=scratch) as made:
        folder = make(Path(made), nbytes / 1e9)
        yield folder, disk_rate(folder)


def disk_rate(folder: Path) -> float:
    """Bytes per second at which the disk delivers a checkpoint."""
    files = files_in(folder)
    make_cold(files)
    enough = min(_ENOUGH, sum(path.stat().st_size for path in files))
    return enough / fastest_reader(files).seconds(files, enough)


def _figures_of(kind: str, scale: Scale, scratch: Path) -> list[Figure]:
    with made_larger(scale.larger[kind], scale, scratch) as (folder, rate):
        missing = absent({arm: PACKAGES[arm] for arm in _ARMS})
        if shutil.disk_usage(scratch).free < 1.1 * sum(path.stat().st_size for path in files_in(folder)):
            missing[_COPIES] = "it copies the checkpoint, for which the disk has no room"
        is_mixture = bytes_of_a_token(folder) < bytes_of_a_pass(folder)
        tokens = NEW + _SETTLED if is_mixture else _TOKENS
        wanted = (*_ARMS, _EXACT) if is_mixture else _ARMS
        arms = {arm: partial(run_apart, trial, arm, folder, scratch, tokens) for arm in wanted}
        done = in_turn(arms, scale.rounds, missing)
        return _as_figures(f"larger, {kind}", done, max(rate, disk_rate(folder)), folder, tokens)


def _as_figures(case: str, done: Rounds[LargerTrial], rate: float, folder: Path, tokens: int) -> list[Figure]:
    size = bytes_of_a_pass(folder)
    budget = min(done.results[OURS][0].budget, size) if OURS in done.results else 0
    least = bytes_of_a_token(folder) * (size - budget) / size
    one_act = done.results.pop(OURS, None) if _EXACT in done.results else None  # it has other last bits
    if IN_MEMORY in done.results:
        done.strike(lambda one: one.answers, done.results[IN_MEMORY][0].answers, "answers")
    if one_act is not None:
        done.results[OURS] = one_act

    def figure(
        what: str, unit: str, value: Callable[[LargerTrial], float], limit: Sequence[float] = (), name: str = ""
    ) -> Figure:
        return Figure(f"{case}: {what}", unit, done.values(value), list(limit), name, done.missing)

    found = [
        figure("load", "s", lambda one: one.load_seconds),
        figure("first pass", "s", lambda one: one.first_seconds),
    ]
    spans = {"a token": slice(_TOKENS)} | ({f"a token after {NEW}": slice(NEW, None)} if tokens > NEW else {})
    for what, span in spans.items():
        found += [
            figure(what, "s", lambda one, span=span: median(one.seconds[span]), [least / rate], "over the budget"),
            figure(
                f"bytes read, {what}", "B", lambda one, span=span: median(one.bytes_read[span]), [least],
                "over the budget",
            ),
        ]  # fmt: skip
    return [*found, figure("peak anonymous memory", "B", lambda one: one.peak_bytes)]


def trial(arm: str, folder: Path, scratch: Path, tokens: int) -> LargerTrial:
    """Load, run a prompt, then so many single tokens."""
    package = OURS if arm == _EXACT else arm
    rehearse(package, folder, scratch)
    make_cold(files_in(folder))
    with tempfile.TemporaryDirectory(dir=scratch) as own, MemoryTrace() as memory:
        start = time.perf_counter()
        model = WAYS[package].load(folder, Path(own))
        if arm == _EXACT:
            model.set_experts_implementation("grouped_mm")
        loaded = time.perf_counter()
        answers = [next_token(model, torch.arange(1, _PROMPT + 1)[None])]
        first, seconds, read = time.perf_counter() - loaded, [], []
        for token in range(tokens):
            before, begun = read_bytes(), time.perf_counter()
            answers.append(next_token(model, torch.tensor([[token]])))
            seconds.append(time.perf_counter() - begun)
            read.append(read_bytes() - before)
        budget = offload.memory_summary().budget
    return LargerTrial(loaded - start, first, seconds, read, memory.peak, budget, answers)
