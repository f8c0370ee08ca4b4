"""The experts of a layer that is in memory, as they are computed by default, beside plain transformers.

Always true:
- every implementation computes the same tokens, routed to the same experts, in turn and in one process
- plain transformers has the dense weights in memory; offload has them dense, or in FP8, in the page cache
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import offload
from bench.page_cache import files_in, warm
from bench.peers import OURS
from bench.rounds import Figure, in_turn
from bench.scale import Scale

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PEERS = ("grouped_mm", "eager", "batched_mm")
_MOST_BATCHED = 8  # tokens: `batched_mm` copies the experts of each
_CALLS = 5  # whose median is one value


def figures(scale: Scale, scratch: Path) -> list[Figure]:
    """Seconds for the experts of one layer, for each number of tokens, with dense weights and in FP8."""
    from transformers import AutoModelForCausalLM

    packed = offload.from_pretrained(scale.packed_experts(scratch / "fp8", 0), dtype=torch.bfloat16)
    plain = AutoModelForCausalLM.from_config(packed.config, dtype=torch.bfloat16)
    plain.load_state_dict({name: offload.materialize(value) for name, value in packed.state_dict().items()})
    plain.save_pretrained(scratch / "dense")
    dense = offload.from_pretrained(scratch / "dense", dtype=torch.bfloat16)
    for form in ("fp8", "dense"):
        warm(files_in(scratch / form))
    return [
        _figure(f"experts: {form}, {tokens} tokens", tokens, plain, ours, scale.rounds)
        for form, ours in (("dense", dense), ("FP8", packed))
        for tokens in TOKENS[: scale.layer_counts]
    ]


def _figure(case: str, tokens: int, plain: Any, ours: Any, rounds: int) -> Figure:
    config = plain.config
    x = torch.randn(tokens, config.hidden_size, dtype=plain.dtype)
    picks = [torch.randperm(config.num_experts)[: config.num_experts_per_tok] for _ in range(tokens)]
    routed = x, torch.stack(picks), torch.rand(tokens, config.num_experts_per_tok).to(plain.dtype)
    arms: dict[str, Callable[[], float]] = {name: partial(_seconds, plain, name, routed) for name in PEERS}
    arms[OURS] = partial(_seconds, ours, OURS, routed)
    missing = {} if tokens <= _MOST_BATCHED else {"batched_mm": "copies the experts of each token"}
    done = in_turn(arms, rounds, missing)
    return Figure(case, "s", done.results, [], "", done.missing)


@torch.no_grad()
def _seconds(model: Any, implementation: str, routed: tuple[torch.Tensor, ...]) -> float:
    """The median of some calls, after one that warms up."""
    model.config._experts_implementation = implementation
    experts = model.model.layers[0].mlp.experts
    seconds = []
    for _ in range(1 + _CALLS):
        began = time.perf_counter()
        experts(*routed)
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])
