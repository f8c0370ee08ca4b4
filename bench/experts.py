"""The experts of a layer that is in memory, as they are computed by default, beside plain transformers.

    python -m bench.experts --tokens 1,8,64,512 --experts 128 --hidden 2048 --inner 768 --picks 8

Always true:
- every implementation computes the same tokens, routed to the same experts, in turn and in one process
- a ratio is the median over rounds, of two times of the same round; above 1, "offload" is faster
- times are the process's own on all of its threads, so that other processes hardly count, and by the clock
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

import offload

OURS = "offload"
PEERS = ("grouped_mm", "eager", "batched_mm")
_MOST_BATCHED = 8  # tokens: `batched_mm` copies the experts of each


@dataclass(frozen=True)
class Sizes:
    """Of the layer, and how often it is measured."""

    experts: int = 128
    hidden: int = 2048
    inner: int = 768
    picks: int = 8
    rounds: int = 9


@dataclass(frozen=True)
class Measured:
    """Seconds of one implementation, per round: of the process, and by the clock."""

    process: list[float]
    clock: list[float]


def measured(tokens: int, sizes: Sizes, plain: Any, ours: Any) -> dict[str, Measured]:
    """The times of every implementation for a number of tokens. The models are of one layer each."""
    x = torch.randn(tokens, sizes.hidden).to(plain.dtype)
    numbers = torch.stack([torch.randperm(sizes.experts)[: sizes.picks] for _ in range(tokens)])
    weights = torch.rand(tokens, sizes.picks).to(plain.dtype)
    arms = {name: plain for name in PEERS if name != "batched_mm" or tokens <= _MOST_BATCHED} | {OURS: ours}
    found = {name: Measured([], []) for name in arms}
    for number in range(sizes.rounds + 1):  # the first one warms up
        for name, model in arms.items():
            model.config._experts_implementation = name
            with torch.no_grad():
                began, process = time.perf_counter(), time.process_time()
                model.model.layers[0].mlp.experts(x, numbers, weights)
                seconds = time.process_time() - process, time.perf_counter() - began
            if number:
                found[name].process.append(seconds[0])
                found[name].clock.append(seconds[1])
    return found


def lines(tokens: int, found: dict[str, Measured]) -> Iterator[str]:
    """What was measured, in words."""
    for name, one in found.items():
        line = (
            f"{tokens:>5} tokens, {name:<10} {1000 * median(one.process):9.2f} ms, {1000 * median(one.clock):9.2f} ms"
        )
        if name != OURS:
            ratios = [
                median(peer / own for peer, own in zip(getattr(one, kind), getattr(found[OURS], kind), strict=True))
                for kind in ("process", "clock")
            ]
            line += f"   {ratios[0]:.2f}x, {ratios[1]:.2f}x by the clock"
        yield line


def models(sizes: Sizes, folder: Path) -> tuple[Any, Any]:
    """A mixture of one layer in bfloat16 with random values: in memory, and on disk."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=sizes.hidden,
        intermediate_size=256,
        moe_intermediate_size=sizes.inner,
        num_hidden_layers=1,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.picks,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    plain = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    plain.save_pretrained(folder)
    return plain, offload.from_pretrained(folder, dtype=torch.bfloat16)


def main(args: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="the experts of a layer, beside plain transformers")
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256,512")
    for name, value in vars(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = vars(parser.parse_args(args))
    tokens = [int(one) for one in given.pop("tokens").split(",")]
    sizes = Sizes(**given)
    with tempfile.TemporaryDirectory() as folder:
        plain, ours = models(sizes, Path(folder))
        for count in tokens:
            print(*lines(count, measured(count, sizes, plain, ours)), sep="\n", flush=True)


if __name__ == "__main__":
    main()
