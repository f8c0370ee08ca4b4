"""A Llama on disk quantized to int8, weight by weight."""

from __future__ import annotations

from pathlib import Path

import torch
from torchao.quantization import Int8Tensor, PerRow

from bench.models import toy_llama
from bench.process import MemoryTrace
from offload import from_pretrained, map_values
from offload.storage.subclasses import is_subclass_value

_BLOCK = 1 << 20  # bytes of a weight to quantize at a time
_MATRICES = "*proj.weight"


def to_int8(_: str, weight: torch.Tensor) -> torch.Tensor:
    """torchao's int8 with a scale per row, some rows at a time."""
    data = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight), 1)
    rows = max(1, _BLOCK // (weight[0].numel() * weight.itemsize))
    for start in range(0, len(weight), rows):
        part = Int8Tensor.from_hp(weight[start : start + rows] + 0, PerRow())
        data[start : start + rows], scales[start : start + rows] = part.qdata, part.scale
    return Int8Tensor(data, scales, [1, weight.shape[1]], weight.dtype)


def quantized(checkpoint: Path, offload_dir: Path) -> dict[str, int]:
    """What a run did, and its peak memory in bytes."""
    with MemoryTrace(0.002) as memory:
        model = from_pretrained(checkpoint, offload_dir=offload_dir)
        table = model.lm_head.weight = model.model.embed_tokens.weight
        done = map_values(to_int8, model, select=[_MATRICES, "model.embed_tokens.weight"], resume="int8")
    ties = model.lm_head.weight is model.model.embed_tokens.weight is table
    return {
        "replaced": len(done.replaced),
        "peak": memory.peak,
        "largest": max(weight.numel() * weight.itemsize for weight in model.parameters()),
        "ties": ties and is_subclass_value(table._handle.base()),
    }


def rehearse() -> None:
    """Do the imports and allocations of first calls."""
    map_values(to_int8, {"w": torch.ones(64, 64, dtype=torch.bfloat16)}, progress=False)
    map_values(to_int8, from_pretrained(toy_llama()), select=_MATRICES)
