"""A mixture of experts: bytes read for a decoded token, cold, and which experts are in memory under a budget.

Always true:
- before the token, no file of the model is in the page cache, and the model has had time to notice
- the limit is what the token needs: all weights except experts and the table of tokens, and the experts it uses
- under a budget, the limit is what the best fixed set of experts would miss, chosen with hindsight
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import offload
from bench.apart import run_apart
from bench.cold import next_token
from bench.generate import rehearse
from bench.page_cache import files_in, make_cold
from bench.peers import IN_MEMORY, OURS, PACKAGES, WAYS, absent
from bench.process import read_bytes
from bench.rounds import Figure, in_turn
from bench.scale import Scale
from bench.traces import hits_in_hindsight, orders, replayed, stack

NOTICED = 2.1  # seconds after which memory is checked again
_COUNT = 64  # matrices in the stack


@dataclass
class Trial:
    """Bytes read from the disk for a token, and the next token."""

    bytes_read: int
    token: int


def figures(scale: Scale, scratch: Path) -> list[Figure]:
    """Bytes read from the disk."""
    folder = scale.experts()
    arms = {arm: partial(run_apart, trial, arm, folder, scratch) for arm in WAYS if arm != IN_MEMORY}
    done = in_turn(arms, scale.rounds, absent(PACKAGES))
    needed = run_apart(of_the_model_in_memory, folder)
    done.strike(lambda one: one.token, needed.token, "tokens")
    limit = [float(needed.bytes_read)] * scale.rounds
    case = "routed: bytes read by one token of a mixture of experts, cold"
    cold = Figure(case, "B", done.values(lambda one: one.bytes_read), limit, "what it needs", done.missing)
    return [cold, *(_under_a_budget(name, share, scale, scratch) for name in orders(1, 1) for share in (4, 2))]


def _under_a_budget(name: str, share: int, scale: Scale, scratch: Path) -> Figure:
    order, places = orders(_COUNT, scale.picks)[name], _COUNT // share
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        path = stack(Path(folder), _COUNT)
        make_cold([path])
        found = run_apart(replayed, path, order, places)
    missed = float(len(order) - hits_in_hindsight(order, places))
    case = f"routed, {name}: misses, 1/{share} stays"
    return Figure(case, "reads", {OURS: [float(len(order) - found.hits)]}, [missed], "the best fixed set", {})


def trial(arm: str, folder: Path, scratch: Path) -> Trial:
    """The second token, with nothing cached."""
    rehearse(arm, folder, scratch)
    with tempfile.TemporaryDirectory(dir=scratch) as own, torch.inference_mode():
        model = WAYS[arm].load(folder, Path(own))
        next_token(model, torch.tensor([[1]]))
        make_cold(files_in(folder, Path(own), *own_folders(model)))
        time.sleep(NOTICED)
        before = read_bytes()
        next_token(model, _INPUT)
        read = read_bytes() - before
        with offload.exact():  # experts are rounded otherwise than in memory, by default
            return Trial(read, next_token(model, _INPUT))


def own_folders(model: Any) -> set[Path]:
    """The folders of a model's files, if it says."""
    return {weight.offload_path.parent for weight in model.parameters() if hasattr(weight, "offload_path")}


def of_the_model_in_memory(folder: Path) -> Trial:
    """All weights except experts and the table of tokens, and as many experts per layer as a token uses."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    share = model.config.num_experts_per_tok / model.config.num_experts
    total = 0.0
    for name, weight in model.named_parameters():
        if "embed_tokens" not in name:
            total += weight.nbytes * (share if ".experts." in name else 1)
    with torch.inference_mode():
        return Trial(round(total), next_token(model, _INPUT))


_INPUT = torch.tensor([[2]])
