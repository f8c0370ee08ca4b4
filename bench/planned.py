"""Predictions of `offload plan` against the running model.

Always true:
- plan and model are in one process: the plan is made first, with its own measurements of disk and processor
- the limit of a figure is the prediction, so that a ratio of 1 means it was exact
- "cold" is the first pass, of one token, with nothing cached; "warm" the tokens of a model that fits, and is cached;
  "capped" means in a memory cgroup that counts everything, without the passes until all that stays is in memory: two,
  and for a mixture as many as it takes to use nearly all experts

`python -m bench.planned RESULTS.json` prints the table of the page on `offload plan`.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import offload
from bench.apart import run_apart
from bench.capped import ALLOWANCE
from bench.decode import Decoder
from bench.generate import PROMPT, rehearse
from bench.limits import MIB
from bench.memory_cap import Group, memory_cap
from bench.page_cache import files_in, make_cold, warm
from bench.peers import OURS, WAYS, limit_memory
from bench.rounds import Figure, Rounds, in_turn
from bench.scale import Scale
from offload.integrations.compressed_tensors import quantize_checkpoint

_CONTEXT = 64  # tokens whose keys and values have room
_UNCOUNTED = 2  # tokens until everything that stays is in memory
_UNUSED = 0.05  # of the experts, at most, when all that stay are
_VOCABULARY = 500  # tokens known to all of the models
_NAME = "offload plan"


@dataclass(frozen=True)
class PlanTrial:
    """Seconds, planned and measured."""

    planned_first: float
    planned: float
    first: float
    token: float


def figures(scale: Scale, scratch: Path) -> list[Figure]:
    """Each model cold, warm, and with a budget of a fraction of its size.

    Raises:
        OSError: this process can't create a memory cgroup.
    """
    with memory_cap(ALLOWANCE):
        pass
    return [figure for name, folder in models(scale, scratch) for figure in figures_of(name, folder, scale, scratch)]


def table(results: Path) -> str:
    """The contents of a result file in Markdown: seconds, planned and measured, medians of the rounds."""
    lines = ["| model | pass | planned | measured | planned / measured |", "| --- | --- | --- | --- | --- |"]
    for figure in json.loads(results.read_text(encoding="utf-8"))["figures"]:
        planned, measured = median(figure["limit"]), median(figure["values"][OURS])
        name, _, what = figure["case"].removeprefix("plan, ").partition(": ")
        lines.append(f"| {name} | {what} | {planned:.3f} s | {measured:.3f} s | {planned / measured:.2f} |")
    return "\n".join(lines)


def models(scale: Scale, scratch: Path) -> Iterator[tuple[str, Path]]:
    """The models: name and folder, which exists until the next one is requested."""
    yield "dense", scale.model()
    yield "experts", scale.experts()
    for form in ("fp8", "int4"):
        with tempfile.TemporaryDirectory(dir=scratch) as made:
            folder = Path(made) / form
            quantize_checkpoint(scale.model(), folder, form, group_size=32, progress=False)
            yield form, folder


def figures_of(name: str, folder: Path, scale: Scale, scratch: Path) -> list[Figure]:
    """The first pass of a model, and its tokens, for each budget."""
    size = sum(path.stat().st_size for path in files_in(folder))
    run = partial(_run, folder, scratch, scale.capped_tokens)
    cold = in_turn({OURS: partial(run, 2 * size, is_cold=True)}, scale.rounds, {})
    found = [_figure(f"plan, {name}: first pass, cold", cold, "first", "planned_first")]
    done = in_turn({OURS: partial(run, 2 * size)}, scale.rounds, {})
    found.append(_figure(f"plan, {name}: a token, warm", done, "token", "planned"))
    for factor in scale.factors:
        done = in_turn({OURS: partial(_run_capped, run, max(int(size / factor), MIB))}, scale.rounds, {})
        found.append(_figure(f"plan, {name}: a token, {factor:g}x", done, "token", "planned"))
    return found


def _figure(case: str, done: Rounds[PlanTrial], key: str, planned: str) -> Figure:
    limit = [getattr(one, planned) for one in done.results.get(OURS, ())]
    return Figure(case, "s", done.values(lambda one: getattr(one, key)), limit, _NAME, done.missing)


def _run(
    folder: Path, scratch: Path, tokens: int, budget: int, group: Group | None = None, *, is_cold: bool = False
) -> PlanTrial:
    files = files_in(folder)
    make_cold(files) if is_cold or group else warm(files)
    return run_apart(trial, folder, scratch, tokens, budget, group)


def _run_capped(run: partial[PlanTrial], budget: int) -> PlanTrial:
    with memory_cap(budget + 2 * ALLOWANCE) as group:
        return run(budget, group)


def trial(folder: Path, scratch: Path, tokens: int, budget: int, group: Group | None = None) -> PlanTrial:
    """Plan, load, read a prompt of one token, and decode."""
    rehearse(OURS, folder, scratch)
    found = offload.plan(folder, max_memory=budget, context=_CONTEXT)
    planned, share = found.as_it_is, found.model.share
    uncounted = max(_UNCOUNTED, math.ceil(math.log(_UNUSED) / math.log1p(-share)) if share < 1 else 0)
    if group:
        group.join()
    limit_memory(OURS, budget)
    with tempfile.TemporaryDirectory(dir=scratch) as own:
        decoder, chance = Decoder(WAYS[OURS].load(folder, Path(own)), PROMPT[:1]), random.Random(0)
        for _ in range(uncounted):
            _step(decoder, chance)
        token = sum(_step(decoder, chance) for _ in range(tokens)) / tokens
    return PlanTrial(planned.first_seconds, planned.token_seconds, decoder.first_seconds, token)


def _step(decoder: Decoder, chance: random.Random) -> float:
    """Seconds of a pass over a token not chosen by the model: an untrained one repeats itself."""
    decoder.tokens.append(chance.randrange(_VOCABULARY))
    return decoder.step()


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
