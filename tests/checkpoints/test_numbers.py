"""Packed numbers as floats: bit-identical to torch's own arithmetic, whatever their count and exponents."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import offload
from offload.checkpoints.forms.formats import unpacked
from offload.checkpoints.forms.fp8 import decode_mxfp4 as _decode_mxfp4
from offload.checkpoints.forms.numbers import E2M1, of_halves
from offload.storage.layout import contiguous
from offload.tensor.recipes import Joined, Piece
from offload.tensor.views import handle_of

BYTES = torch.arange(256, dtype=torch.uint8)


def _same(expected: torch.Tensor, made: torch.Tensor) -> bool:
    """Whether all bits are equal, except in NaNs."""
    is_nan = expected.isnan()
    bits = [one.view(torch.int32)[~is_nan] for one in (expected, made)]
    return torch.equal(is_nan, made.isnan()) and torch.equal(*bits)


@pytest.mark.parametrize("count", [1, 3, 64, 96, 1000])
@pytest.mark.parametrize("high_first", [True, False])
def test_halves_of_any_count_are_looked_up(count: int, high_first: bool) -> None:
    """Two per byte, in either order."""
    packed = torch.arange(count).mul_(37).to(torch.uint8)
    halves = [packed >> 4, packed & 15] if high_first else [packed & 15, packed >> 4]
    expected = torch.tensor(E2M1)[torch.stack(halves, -1).flatten().long()]

    assert _same(expected, of_halves(packed, E2M1, high_first=high_first))


def test_a_weight_is_rounded_to_its_own_dtype_before_another_one(tmp_path: Path) -> None:
    """A float32 model sees the rounding of a bfloat16 scale's products."""
    torch.manual_seed(0)
    packed = torch.randint(-(2**31), 2**31 - 1, (8, 16), dtype=torch.int32)
    pieces = {
        "weight_packed": packed,
        "weight_scale": torch.rand(8, 4).bfloat16(),
        "weight_shape": torch.tensor([8, 128]),
    }
    save_file({f"w.{name}": piece for name, piece in pieces.items()}, tmp_path / "w.safetensors")
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    config = {"format": "pack-quantized", "config_groups": {"all": {"targets": ["Linear"], "weights": weights}}}
    dense = unpacked(offload.load_file(tmp_path / "w.safetensors"), {"quant_method": "compressed-tensors", **config})
    assert dense is not None
    weight = dense["w.weight"]

    in_float32 = Joined(contiguous(torch.float32, (8, 128)), [Piece(handle_of(weight))], [(0, 0)]).value()

    assert torch.bfloat16 == weight.dtype
    assert torch.equal(weight.materialize().to(torch.float32), in_float32)


@pytest.mark.parametrize("exponents", [range(100, 140), range(256)])
def test_4_bit_floats_of_gpt_oss_have_any_exponent(exponents: range) -> None:
    """Each number times each power of two, rounded to the model's dtype."""
    scales = torch.tensor(list(exponents), dtype=torch.uint8).expand(1, -1)  # (blocks, outputs)
    blocks = BYTES.view(16, 16).repeat(-(-len(exponents) // 16), 1)[: len(exponents)].unsqueeze(0)
    halves = torch.stack([blocks & 15, blocks >> 4], -1).flatten(2).long()  # (blocks, outputs, inputs)
    expected = (torch.tensor(E2M1)[halves] * _powers_of_two(scales).unsqueeze(-1)).transpose(1, 2).flatten(0, 1)

    assert _same(expected, _decode_mxfp4(blocks, scales))


def _powers_of_two(scales: torch.Tensor) -> torch.Tensor:
    """2 to the power of each number minus 127."""
    return torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.to(torch.int32) - 127)
