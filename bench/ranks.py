"""A tensor-parallel model on one machine, from disk: time and bytes, against the plain parallel model.

Always true:
- the ranks are gloo processes that share one copy of the checkpoint and the cores of the machine: more of them are not
  faster here, and what one has read is cached for the others
- all of them compute and load once before files are made cold: imports are done by then
- under a cap each rank has its own memory cgroup, which also counts cached files
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from bench.apart import run_together
from bench.capped import ALLOWANCE
from bench.decode import Decoder
from bench.limits import MIB
from bench.memory_cap import Group, memory_cap
from bench.page_cache import files_in, make_cold
from bench.peers import OURS, limit_memory
from bench.process import read_bytes
from bench.rounds import Figure, Rounds, in_turn
from bench.scale import Scale

PLAIN = "plain parallel"
_PATIENCE = 120  # seconds for which ranks wait for one that has failed


@dataclass(frozen=True)
class RankTrial:
    """One rank's results: seconds per token, bytes read, and the size of its shard without the table of tokens."""

    seconds: float
    first_bytes: int
    token_bytes: float
    share: int
    tokens: list[int]


def figures(scale: Scale, scratch: Path) -> list[Figure]:
    """Bytes and time for each number of ranks: for a model that fits, and for one larger than each rank's memory."""
    folder = scale.model()
    found = []
    for world in scale.worlds:
        fits = _measured(world, None, folder, scale, scratch)
        if not fits.results:
            raise RuntimeError(f"no ranks ran: {fits.missing}")
        expected = [rank.tokens for rank in next(iter(fits.results.values()))[0]]
        capped = _measured(world, scale.factors[0], folder, scale, scratch)
        for done in (fits, capped):
            done.strike(lambda ranks, expected=expected: _beginnings(ranks, expected), expected, "tokens")  # type: ignore[misc]
        found += _figures_of(world, fits) + _capped_figures_of(world, scale.factors[0], capped)
    return found


def _measured(world: int, factor: float | None, folder: Path, scale: Scale, scratch: Path) -> Rounds[list[RankTrial]]:
    tokens = scale.tokens if factor is None else scale.capped_tokens
    arms = {arm: partial(_all_ranks, arm, world, folder, scratch, tokens, factor) for arm in (PLAIN, OURS)}
    return in_turn(arms, scale.rounds, {})


def _beginnings(ranks: list[RankTrial], expected: list[list[int]]) -> list[list[int]]:
    """The tokens of ranks; where these are fewer, the rest of the expected ones."""
    return [rank.tokens + tokens[len(rank.tokens) :] for rank, tokens in zip(ranks, expected, strict=True)]


def _figures_of(world: int, done: Rounds[list[RankTrial]]) -> list[Figure]:
    read = done.values(lambda ranks: _mean(ranks, lambda rank: rank.first_bytes))
    return [
        Figure(f"ranks, {world}: a token", "s", done.values(_slowest), [], "", done.missing),
        Figure(f"ranks, {world}: read by a rank to the first token", "B", read, _shares(done), "share", done.missing),
    ]


def _capped_figures_of(world: int, factor: float, done: Rounds[list[RankTrial]]) -> list[Figure]:
    case = f"ranks, {world}, {factor:g}x capped"
    read = done.values(lambda ranks: _mean(ranks, lambda rank: rank.token_bytes))
    least = [max(0, share - _budget(share, factor)) for share in _shares(done)]
    return [
        Figure(f"{case}: a token", "s", done.values(_slowest), [], "", done.missing),
        Figure(f"{case}: read by a rank, a token", "B", read, least, "share - budget", done.missing),
    ]


def _budget(share: float, factor: float) -> int:
    """A rank's budget, at least the smallest allowed one."""
    return max(MIB, int(share / factor))


def _slowest(ranks: list[RankTrial]) -> float:
    return max(rank.seconds for rank in ranks)


def _shares(done: Rounds[list[RankTrial]]) -> list[float]:
    return [_mean(ranks, lambda rank: rank.share) for ranks in done.results.get(OURS, [])]


def _mean(ranks: list[RankTrial], value: Callable[[RankTrial], float]) -> float:
    return sum(map(value, ranks)) / len(ranks)


def _all_ranks(arm: str, world: int, folder: Path, scratch: Path, tokens: int, factor: float | None) -> list[RankTrial]:
    share = _share(folder, world)
    budget = None if factor is None else _budget(share, factor)
    with ExitStack() as stack:
        store = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=scratch))) / "store"
        caps = [] if budget is None else [memory_cap(budget + ALLOWANCE) for _ in range(world)]
        groups = [stack.enter_context(cap) for cap in caps]
        return run_together(trial, world, world, arm, folder, store, tokens, share, budget, groups)


def trial(
    rank: int,
    world: int,
    arm: str,
    folder: Path,
    store: Path,
    tokens: int,
    share: int,
    budget: int | None,
    groups: Sequence[Group],
) -> RankTrial:
    """Load, read the prompt, decode a token, and measure the following ones; without groups there is no cap."""
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    others = dist.FileStore(str(store), world)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=others, timeout=timedelta(seconds=_PATIENCE))
    cuts = store.parent / "cuts"
    Decoder(_loaded(arm, folder, cuts))
    gc.collect()
    dist.barrier()
    if not rank:
        make_cold(files_in(folder, cuts))
    dist.barrier()
    if budget is not None:
        groups[rank].join()
        limit_memory(arm, budget)
    before = read_bytes()
    decoder = Decoder(_loaded(arm, folder, cuts))
    decoder.step()
    loaded = read_bytes()
    start = time.perf_counter()
    for _ in range(tokens):
        decoder.step()
    seconds, read = time.perf_counter() - start, read_bytes() - loaded
    dist.barrier()
    dist.destroy_process_group()
    return RankTrial(seconds / tokens, loaded - before, read / tokens, share, decoder.tokens)


def _loaded(arm: str, folder: Path, cuts: Path) -> Any:
    from transformers import AutoModelForCausalLM

    import offload

    if arm == OURS:
        return offload.from_pretrained(folder, tp_plan="auto", offload_dir=cuts, store=True)
    return AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")


def _share(folder: Path, world: int) -> int:
    """The size of a rank's shard: its part of matrices, all of vectors, without the table of tokens."""
    from offload.checkpoints.checkpoint import open_checkpoint

    total = 0
    for name, value in open_checkpoint(folder).items():
        assert value.layout is not None
        if not name.endswith("embed_tokens.weight"):
            total += value.layout.nbytes // (world if len(value.layout.shape) > 1 else 1)
    return total
