"""Batches in lockstep beside the same batches one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import Qwen3MoeConfig

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


def mixture(**sizes: int) -> Qwen3MoeConfig:
    """The configuration of a small mixture whose experts have most of its weights."""
    common = {"vocab_size": 64, "intermediate_size": 64, "num_experts": 8, "num_attention_heads": 2}
    return Qwen3MoeConfig(**common, num_key_value_heads=1, head_dim=32, **sizes)
