"""Many small values, cold: a pass over a model in which every weight is 64 KiB.

Always true:
- the weights are in one safetensors file; peers that copy each to its own file are measured with those
- caches are dropped before every pass, and the limit is that of `bench.cold`: one sequential read, or computing
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import offload
from bench.apart import run_apart
from bench.cold import COMPUTING, READING, Passes, cold_passes, figures_of, reading, warm_passes
from bench.peers import IN_MEMORY, PACKAGES, WAYS, absent
from bench.rounds import Figure, in_turn
from bench.scale import Scale

_SIDE = 128  # 128 x 128 numbers of four bytes are 64 KiB
_FILE = "model.safetensors"


def figures(scale: Scale, scratch: Path) -> list[Figure]:
    """The first pass after loading, and a later one."""
    count = scale.small_tensors
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        torch.manual_seed(0)
        save_file(many(count).state_dict(), Path(folder) / _FILE, metadata={"format": "pt"})
        trials = {arm: partial(run_apart, cold_trial, arm, Path(folder), count) for arm in WAYS}
        computing = partial(run_apart, warm_trial, Path(folder), count)
        arms = {READING: reading(Path(folder)), COMPUTING: computing, **trials}
        done = in_turn(arms, scale.rounds, absent(PACKAGES))
    case = f"small, cold: {count} tensors of 64 KiB"
    return figures_of([f"{case}, first pass", f"{case}, later"], done)


def many(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(_SIDE, _SIDE, bias=False) for _ in range(count)))


def cold_trial(arm: str, folder: Path, count: int) -> Passes:
    """The first pass and a later one."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        run = partial(_signs, _filled(arm, folder, Path(own), count))
        return cold_passes(run, [torch.ones(1, _SIDE)] * 2, [folder])


def warm_trial(folder: Path, count: int) -> Passes:
    """A pass in memory."""
    return warm_passes(partial(_signs, _filled(IN_MEMORY, folder, folder, count)), [torch.ones(1, _SIDE)])


def _filled(arm: str, folder: Path, own: Path, count: int) -> nn.Module:
    with offload.init_empty_weights():
        model = many(count)
    return WAYS[arm].fill(model, folder / _FILE, own)


@torch.inference_mode()
def _signs(model: nn.Sequential, x: torch.Tensor) -> int:
    """A pass; the answer is the number of positive results."""
    for layer in model:
        x = nn.functional.normalize(layer(x))
    return int((x > 0).sum())
