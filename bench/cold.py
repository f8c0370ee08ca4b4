"""Forward passes with nothing in the page cache: does read-ahead keep up?

Always true:
- before every pass, the files of the checkpoint and of the peer are dropped from the page cache, which is verified
- the limit is the longer of two times in the same round: reading the weights with O_DIRECT, and computing in memory
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.apart import run_apart
from bench.generate import rehearse
from bench.limits import fastest_reader
from bench.models import bytes_of_a_pass
from bench.page_cache import files_in, make_cold
from bench.peers import IN_MEMORY, IN_PLACE, PACKAGES, WAYS, absent
from bench.rounds import Figure, Rounds, in_turn
from bench.scale import Scale

READING, COMPUTING = "reading", "computing"
LIMIT = "O_DIRECT or compute"


@dataclass(frozen=True)
class Passes:
    """Seconds of each pass, and its result."""

    seconds: list[float]
    answers: list[int]


def figures(scale: Scale, scratch: Path) -> list[Figure]:
    """The first pass after loading, and one per prompt length; then for models with other value sizes."""
    found = _figures_of("cold", scale.model(), WAYS, scale, scratch)
    for what, folder, _ in scale.by_value(scratch):
        found += _figures_of(f"cold, {what}", folder, IN_PLACE, scale, scratch)
    return found


def _figures_of(case: str, folder: Path, arms: Iterable[str], scale: Scale, scratch: Path) -> list[Figure]:
    trials = {arm: partial(run_apart, cold_trial, arm, folder, scratch, scale.prompts) for arm in arms}
    computing = partial(run_apart, warm_trial, folder, scratch, scale.prompts)
    needed = bytes_of_a_pass(folder) / sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    missing = absent({arm: PACKAGES[arm] for arm in trials})
    done = in_turn({READING: reading(folder, needed), COMPUTING: computing, **trials}, scale.rounds, missing)
    first, *_ = scale.prompts
    cases = [
        f"{case}, first pass: prompt of {first}",
        *(f"{case}, later: prompt of {count}" for count in scale.prompts),
    ]
    return figures_of(cases, done)


def reading(folder: Path, needed: float = 1.0) -> Callable[[], Passes]:
    """Times reading a part of a checkpoint in the fastest way."""
    files = sorted(folder.glob("*.safetensors"))
    make_cold(files)
    reader = fastest_reader(files)

    def read() -> Passes:
        make_cold(files)
        return Passes([reader.seconds(files) * needed], [])

    return read


def figures_of(cases: Sequence[str], done: Rounds[Passes]) -> list[Figure]:
    """One figure per pass; the first two passes have the same length."""
    read, computed = done.take(READING), done.take(COMPUTING)
    done.strike(lambda one: one.answers[1:], computed[0].answers, "answers")

    def figure(place: int, case: str) -> Figure:
        pairs = zip(read, computed, strict=True)
        limit = [max(io.seconds[0], compute.seconds[max(0, place - 1)]) for io, compute in pairs]
        return Figure(case, "s", done.values(lambda one: one.seconds[place]), limit, LIMIT, done.missing)

    return [figure(place, case) for place, case in enumerate(cases)]


def cold_trial(arm: str, folder: Path, scratch: Path, prompts: Sequence[int]) -> Passes:
    """The first pass, and then one per length."""
    rehearse(arm, folder, scratch)
    with tempfile.TemporaryDirectory(dir=scratch) as own:
        run = partial(next_token, WAYS[arm].load(folder, Path(own)))
        return cold_passes(run, [_ids(count) for count in (prompts[0], *prompts)], [folder, Path(own)])


def warm_trial(folder: Path, scratch: Path, prompts: Sequence[int]) -> Passes:
    """The same passes in memory."""
    rehearse(IN_MEMORY, folder, scratch)
    return warm_passes(partial(next_token, WAYS[IN_MEMORY].load(folder, scratch)), [_ids(count) for count in prompts])


def cold_passes(run: Callable[[Any], int], inputs: Iterable[Any], folders: Sequence[Path]) -> Passes:
    """Each input once, with cold files."""
    seconds, answers = [], []
    for one in inputs:
        make_cold(files_in(*folders))
        start = time.perf_counter()
        answers.append(run(one))
        seconds.append(time.perf_counter() - start)
    return Passes(seconds, answers)


def warm_passes(run: Callable[[Any], int], inputs: Iterable[Any]) -> Passes:
    """Each input twice; the second counts."""
    seconds, answers = [], []
    for one in inputs:
        run(one)
        start = time.perf_counter()
        answers.append(run(one))
        seconds.append(time.perf_counter() - start)
    return Passes(seconds, answers)


@torch.inference_mode()
def next_token(model: Any, ids: torch.Tensor) -> int:
    """The next token, greedily."""
    return int(model(ids, use_cache=False).logits[0, -1].argmax())


def _ids(count: int) -> torch.Tensor:
    return torch.arange(1, count + 1)[None]
