"""Experts in MXFP4: bit-identical to transformers' decoding, and parts are decoded from their own blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import offload
from offload import OffloadedTensor
from offload.checkpoints.forms.formats import unpacked
from offload.kernels import native

CONFIG = {"quant_method": "mxfp4"}
EXPERTS, OUTPUTS, BLOCKS = 3, 10, 7  # seven blocks of 32 inputs: more than are read at once, and not a multiple


def _packed() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (EXPERTS, OUTPUTS, BLOCKS, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 255, (EXPERTS, OUTPUTS, BLOCKS), dtype=torch.uint8, generator=generator)
    return {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales, "e.down_proj_bias": torch.ones(3, 2)}


def _both(folder: Path, dtype: torch.dtype) -> tuple[torch.Tensor, OffloadedTensor]:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed = _packed()
    save_file(packed, folder / "experts.safetensors")
    blocks, scales = packed["e.down_proj_blocks"], packed["e.down_proj_scales"]
    dense = unpacked(offload.load_file(folder / "experts.safetensors"), CONFIG)
    assert dense is not None
    return convert_moe_packed_tensors(blocks, scales, dtype=dtype), dense["e.down_proj"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_the_numbers_are_those_of_transformers_in_any_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    """Even the smallest exponents, and numbers outside the dtype's range."""
    expected, found = _both(tmp_path, dtype)

    assert (EXPERTS, BLOCKS * 32, OUTPUTS) == found.shape
    assert expected.stride() == found.stride()
    assert torch.equal(_bits(expected), _bits(found.materialize().to(dtype)))


@pytest.mark.skipif(native.library() is None, reason="the kernels were not built")
@pytest.mark.usefixtures("nothing_small")
def test_a_whole_expert_is_decoded_by_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, found = _both(tmp_path, torch.float32)
    made: list[torch.Size] = []
    decode_turned = native.decode_turned

    def note(matrix: Any, place: torch.Tensor) -> None:
        made.append(place.shape)
        decode_turned(matrix, place)

    monkeypatch.setattr(native, "decode_turned", note)

    assert torch.equal(expected[2], offload.materialize(found[2]))
    assert [(BLOCKS * 32, OUTPUTS)] == made


def test_other_tensors_are_referenced(tmp_path: Path) -> None:
    save_file(_packed(), tmp_path / "experts.safetensors")
    dense = unpacked(offload.load_file(tmp_path / "experts.safetensors"), CONFIG)

    assert dense is not None
    assert {"e.down_proj", "e.down_proj_bias"} == set(dense)


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.view(torch.int32 if value.itemsize == 4 else torch.int16)
