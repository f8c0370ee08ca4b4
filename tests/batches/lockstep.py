"""Batches in lockstep beside the same batches one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen3MoeConfig

import offload
from offload.batches.mapping import map_batches


def equal(expected: Iterable[Any], found: Iterable[Any]) -> bool:
    expected, found = list(expected), list(found)
    return len(expected) == len(found) and all(map(torch.equal, expected, found))


def assert_as_one_by_one(
    fn: Callable[[Any], torch.Tensor], batches: Iterable[Any], model: Any, *notes: Any, **options: Any
) -> None:
    """The results are those of one batch after the other, bit for bit.

    Args:
        notes: what calls add to; afterwards it has that of the lockstep alone.
    """
    batches = list(batches)
    expected = [fn(batch) for batch in batches]
    for one in notes:
        one.clear()

    found = list(map_batches(fn, batches, model, **options))

    assert equal(expected, found)


def on_disk(folder: Path, size: int, depth: int, **options: Any) -> nn.Sequential:
    """Layers stored in float32, each `size` wide."""

    def layers() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(depth)))

    torch.manual_seed(0)
    save_file({name: value / 8 for name, value in layers().state_dict().items()}, folder / "model.safetensors")
    with offload.init_empty_weights():
        model = layers()
    return offload.load_checkpoint_and_dispatch(model, folder, device_map="disk", **options)


def mixture(**sizes: int) -> Qwen3MoeConfig:
    """The configuration of a small mixture whose experts have most of its weights."""
    common = {"vocab_size": 64, "intermediate_size": 64, "num_experts": 8, "num_attention_heads": 2}
    return Qwen3MoeConfig(**common, num_key_value_heads=1, head_dim=32, **sizes)
