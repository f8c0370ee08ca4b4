"""bitsandbytes: weights are bit-identical to its own functions'; inconsistent pieces are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.checkpoints.forms.formats import unpacked
from tests.checkpoints.pieces import bits_of, random_bytes, random_scales, stored

Pieces = dict[str, torch.Tensor]

FOUR_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
EIGHT_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}


def packed(
    rows: int, columns: int, kind: str = "nf4", dtype: torch.dtype = torch.bfloat16, **options: Any
) -> tuple[Pieces, torch.Tensor]:
    """The pieces of a weight, named as in a checkpoint, and the package's result for them."""
    from bitsandbytes.functional import dequantize_4bit

    pieces, state = pieces_of(rows, columns, kind, dtype, **options)
    return pieces, dequantize_4bit(pieces["layer.weight"], state)


def pieces_of(
    rows: int, columns: int, kind: str = "nf4", dtype: torch.dtype = torch.bfloat16, **options: Any
) -> tuple[Pieces, Any]:
    from bitsandbytes.functional import quantize_4bit

    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight, state = quantize_4bit(values, quant_type=kind, **options)
    pieces = {"layer.weight": weight}
    pieces |= {f"layer.weight.{name}": piece.clone() for name, piece in state.as_dict(packed=True).items()}
    return pieces, state


def dense_of(folder: Path, pieces: Mapping[str, torch.Tensor], config: Mapping[str, Any] = FOUR_BITS) -> Any:
    return unpacked(stored(folder, pieces), config)["layer.weight"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(
    ("rows", "columns", "block"), [(320, 128, 64), (96, 256, 128), (7, 64, 64), (600, 192, 64), (2, 4096, 32)]
)
def test_numbers_of_4_bits_are_what_the_package_makes_of_them(
    rows: int, columns: int, block: int, kind: str, nested: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Also with packed scales; rows are decoded separately.

    A negative zero of FP4 is 0.0 in the package with AVX-512, and -0.0 without.
    """
    pieces, expected = packed(rows, columns, kind, dtype, blocksize=block, compress_statistics=nested)
    if kind == "fp4":
        expected = expected + 0.0  # zeros are positive, and nothing else changes

    found = dense_of(tmp_path, pieces)

    assert (expected.dtype, expected.shape) == (found.dtype, found.shape)
    assert torch.equal(bits_of(expected), bits_of(offload.materialize(found)))
    assert torch.equal(bits_of(expected[1:3]), bits_of(offload.materialize(found[1:3])))
    assert torch.equal(bits_of(expected[-1]), bits_of(offload.materialize(found[-1])))


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(5, 33), (300, 50), (4, 100), (3, 1001)])
def test_blocks_run_on_into_the_next_row(rows: int, columns: int, nested: bool, tmp_path: Path) -> None:
    """By definition: with AVX-512 the package mixes up scales if rows are not whole blocks."""
    pieces, _ = pieces_of(rows, columns, compress_statistics=nested)
    numbers, halves = pieces["layer.weight.quant_map"], pieces["layer.weight"].flatten()
    scales = pieces["layer.weight.absmax"].float()
    if nested:
        state = json.loads(bytes(pieces["layer.weight.quant_state.bitsandbytes__nf4"].tolist()))
        of_scales = pieces["layer.weight.nested_absmax"].repeat_interleave(256)[: len(scales)]
        scales = pieces["layer.weight.nested_quant_map"][scales.long()] * of_scales + state["nested_offset"]
    codes = torch.stack([halves >> 4, halves & 15], -1).flatten()[: rows * columns].long()
    expected = (numbers[codes] * scales.repeat_interleave(64)[: rows * columns]).bfloat16().view(rows, columns)

    found = dense_of(tmp_path, pieces)

    assert torch.equal(expected, offload.materialize(found))
    assert torch.equal(expected[1:3], offload.materialize(found[1:3]))


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_numbers_may_be_stored_as_another_dtype(storage: torch.dtype, tmp_path: Path) -> None:
    """As in models trained with FSDP."""
    pieces, expected = packed(96, 256, quant_storage=storage)

    found = dense_of(tmp_path, pieces)

    assert storage == pieces["layer.weight"].dtype
    assert torch.equal(expected, offload.materialize(found))


def of_8_bits(rows: int = 40, columns: int = 96) -> Pieces:
    return {
        "layer.weight": random_bytes(rows, columns, dtype=torch.int8),
        "layer.SCB": random_scales(rows) * 50,
        "layer.weight_format": torch.tensor(0, dtype=torch.uint8),
    }


def test_integers_of_8_bits_are_what_the_package_makes_of_them(tmp_path: Path) -> None:
    from bitsandbytes.functional import int8_vectorwise_dequant

    pieces = of_8_bits()
    expected = int8_vectorwise_dequant(pieces["layer.weight"], pieces["layer.SCB"])

    found = dense_of(tmp_path, pieces, EIGHT_BITS)

    assert torch.float32 == found.dtype
    assert torch.equal(expected, offload.materialize(found))
    assert torch.equal(expected[7:9], offload.materialize(found[7:9]))


def test_a_class_of_the_packages_own_is_made_of_a_layer_in_memory() -> None:
    """torch itself refuses, without a hook, to create one from a tensor on disk."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = offload.disk_offload(torch.nn.Linear(64, 64, bias=False))
    with pytest.raises(RuntimeError, match="already associated to a python object of type OffloadedTensor"):
        bitsandbytes.nn.Params4bit(layer.weight.data)

    offload.materialize(layer)
    made = bitsandbytes.nn.Params4bit(layer.weight.data, requires_grad=False)

    assert torch.equal(layer.weight.data, made.data)
