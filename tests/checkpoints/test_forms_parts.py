"""A part of a packed weight is that of the whole one: for every form, any sizes, groups and cuts.

The whole one is what its package makes of the pieces, or what the format is defined to be.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import offload
from offload.checkpoints.forms.formats import unpacked
from tests.checkpoints.forms import awq_weight, gptq_weight
from tests.checkpoints.pieces import bits_of, random_bytes, random_scales, stored

Made = tuple[dict[str, torch.Tensor], dict[str, Any]]  # pieces, and the configuration
Draw = Callable[[int, int], int]  # a number between the two

GROUPS = (-1, 8, 16, 32, 64)
SCALES = (torch.bfloat16, torch.float16, torch.float32)


def finite(pieces: torch.Tensor) -> torch.Tensor:
    """8-bit floats without NaN."""
    raw = pieces.view(torch.uint8)
    return torch.where(raw & 127 == 127, raw & 120, raw).view(pieces.dtype)


def groups_of(draw: Draw) -> tuple[int, int, int]:
    """The size of a group as a configuration says it, how many there are, and the columns."""
    size, count = GROUPS[draw(0, 4)], draw(1, 4)
    return (size, 1, 32 * count) if size < 0 else (size, count, size * count)


def gptq(draw: Draw) -> Made:
    bits = (2, 4, 8)[draw(0, 2)]
    each = 32 // bits
    size, count, columns = groups_of(draw)
    columns += -columns % each if count == 1 else 0
    if columns % each:
        size, count, columns = 32, 2, 64
    size = columns if size > 0 and count == 1 else size
    rows = each * draw(1, 4)
    order = torch.arange(columns) // (columns // count)
    order = order[torch.randperm(columns)] if draw(0, 1) else order
    pieces = {
        "qweight": random_bytes(columns // each, rows, dtype=torch.int32),
        "qzeros": random_bytes(count, rows // each, dtype=torch.int32, seed=3),
        "scales": random_scales(count, rows, dtype=SCALES[draw(0, 2)]),
        "g_idx": order.to(torch.int32),
    }
    form = ("gptq", "gptq_v2")[draw(0, 1)]
    return pieces, {"quant_method": "gptq", "bits": bits, "group_size": size, "checkpoint_format": form}


def awq(draw: Draw) -> Made:
    size, count, columns = groups_of(draw)
    rows = 8 * draw(1, 4)
    pieces = {
        "qweight": random_bytes(columns, rows // 8, dtype=torch.int32),
        "qzeros": random_bytes(count, rows // 8, dtype=torch.int32, seed=3),
        "scales": random_scales(count, rows, dtype=torch.float16),
    }
    return pieces, {"quant_method": "awq", "bits": 4, "group_size": size}


def fp8(draw: Draw) -> Made:
    rows, columns, high, wide = draw(1, 40), draw(1, 70), draw(1, 16), draw(1, 40)
    dtype = (torch.float8_e4m3fn, torch.float8_e5m2)[draw(0, 1)]
    pieces = {
        "weight": finite(random_bytes(rows, columns, dtype=torch.float8_e4m3fn)).to(dtype),
        "weight_scale_inv": random_scales(-(-rows // high), -(-columns // wide)),
    }
    return pieces, {"quant_method": "fp8", "weight_block_size": [high, wide]}


def fp8_in_one(draw: Draw) -> Made:
    rows, columns = draw(1, 40), draw(1, 70)
    pieces = {
        "weight": finite(random_bytes(rows, columns, dtype=torch.float8_e4m3fn)),
        "weight_scale_inv": random_scales(*((), (1,), (1, 1))[draw(0, 2)]),
    }
    return pieces, {"quant_method": "fp8", "weight_block_size": None}


def fp4(draw: Draw) -> Made:
    rows, count = draw(1, 20), draw(1, 4)
    pieces = {
        "weight": random_bytes(rows, 16 * count, dtype=torch.int8),
        "weight_scale_inv": random_scales(rows, count),
    }
    return pieces, {"quant_method": "fp8", "weight_block_size": [128, 128]}


def fbgemm(draw: Draw) -> Made:
    rows, columns = draw(1, 40), draw(1, 70)
    pieces = {
        "weight": finite(random_bytes(rows, columns, dtype=torch.float8_e4m3fn)),
        "weight_scale": random_scales(rows, 1),
    }
    return pieces, {"quant_method": "fbgemm_fp8"}


def compressed(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "format": form, "weights": weights}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"all": group}}


def by_package(pieces: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor | None:
    """None for zero points in a single row of words, which the package (0.20) fails to unpack."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    zeros = pieces.get("weight_zero_point", torch.empty(0))
    if zeros.dtype == torch.int32 and len(zeros) == 1:
        return None
    scheme = QuantizationScheme.model_validate(config["config_groups"]["all"])
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    dense: torch.Tensor = compressor.decompress(dict(pieces), scheme)["weight"]
    return dense


def scales_of(draw: Draw, rows: int, columns: int, size: int) -> tuple[str, int | None, tuple[int, ...]]:
    """What shares a scale, the size of its group, and the shape of the scales."""
    strategy = ("tensor", "channel", "group")[draw(0, 2)]
    shape = {"tensor": (1,), "channel": (rows, 1), "group": (rows, columns // size)}[strategy]
    return strategy, size if strategy == "group" else None, shape


def words(draw: Draw) -> Made:
    bits, rows, size = draw(1, 8), draw(1, 40), 8 * draw(1, 8)
    columns = size * draw(1, 4)
    strategy, group, shape = scales_of(draw, rows, columns, size)
    is_symmetric = strategy == "tensor" or draw(0, 1) == 1
    pieces = {
        "weight_packed": random_bytes(rows, -(-columns * bits // 32), dtype=torch.int32),
        "weight_scale": random_scales(*shape, dtype=SCALES[draw(0, 2)]),
        "weight_shape": torch.tensor([rows, columns]),
    }
    if not is_symmetric:
        pieces["weight_zero_point"] = random_bytes(-(-rows * bits // 32), shape[-1], dtype=torch.int32, seed=3)
    said = {"num_bits": bits, "strategy": strategy, "group_size": group, "symmetric": is_symmetric, "type": "int"}
    return pieces, compressed("pack-quantized", said)


def eight_bits(draw: Draw) -> Made:
    rows, size = draw(1, 40), 8 * draw(1, 8)
    columns = size * draw(1, 4)
    strategy, group, shape = scales_of(draw, rows, columns, size)
    is_float = draw(0, 1) == 1
    weight = random_bytes(rows, columns, dtype=torch.float8_e4m3fn if is_float else torch.int8)
    scales = random_scales(*shape, dtype=SCALES[draw(0, 2)])
    pieces = {"weight": finite(weight) if is_float else weight, "weight_scale": scales}
    if draw(0, 1):  # in the dtype of the scale: differences of 8-bit floats are rounded to it
        pieces["weight_zero_point"] = (random_bytes(*shape, seed=3) % 100).view(weight.dtype)
    kind, form = ("float", "float-quantized") if is_float else ("int", ("int-quantized", "naive-quantized")[draw(0, 1)])
    said = {"num_bits": 8, "strategy": strategy, "group_size": group, "type": kind}
    return pieces, compressed(form, {**said, "symmetric": "weight_zero_point" not in pieces})


def eight_bits_in_blocks(draw: Draw) -> Made:
    high, wide = draw(1, 16), draw(1, 40)
    rows, columns = high * draw(1, 3), wide * draw(1, 3)
    pieces = {
        "weight": finite(random_bytes(rows, columns, dtype=torch.float8_e4m3fn)),
        "weight_scale": random_scales(rows // high, columns // wide),
    }
    said = {"num_bits": 8, "strategy": "block", "block_structure": [high, wide], "type": "float"}
    return pieces, compressed("float-quantized", said)


def mxfp8(draw: Draw) -> Made:
    rows, count = draw(1, 40), draw(1, 4)
    pieces = {
        "weight": random_bytes(rows, 32 * count, dtype=torch.float8_e4m3fn),  # NaN, too
        "weight_scale": random_bytes(rows, count) % 40 + 100,
    }
    said = {"num_bits": 8, "strategy": "group", "group_size": 32, "type": "float"}
    return pieces, compressed("mxfp8-quantized", said)


def nvfp4(draw: Draw) -> Made:
    """A 0-d global scale leaves the scales in bfloat16, by torch's type promotion."""
    rows, count = draw(1, 40), draw(1, 5)
    pieces = {
        "weight_packed": random_bytes(rows, 8 * count),
        "weight_scale": random_scales(rows, count).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.full(((1,), ())[draw(0, 1)], 777.7),
    }
    said = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "type": "float"}
    return pieces, compressed("nvfp4-pack-quantized", said)


def mxfp4_of_compressed_tensors(draw: Draw) -> Made:
    rows, count = draw(1, 40), draw(1, 5)
    pieces = {
        "weight_packed": random_bytes(rows, 16 * count),
        "weight_scale": random_bytes(rows, count).clamp(119, 124),
    }
    said = {"num_bits": 4, "strategy": "group", "group_size": 32, "type": "float"}
    return pieces, compressed("mxfp4-pack-quantized", said)


def four_bits_weight(pieces: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    """By definition: with AVX-512 the package mixes up scales if rows are not whole blocks. Zeros are positive."""
    from bitsandbytes.functional import get_4bit_type

    [name] = [name for name in pieces if "quant_state" in name]
    state = json.loads(bytes(pieces[name].tolist()))
    count, halves = state["shape"][0] * state["shape"][1], pieces["weight"].flatten().view(torch.uint8)
    codes, scales = torch.stack([halves >> 4, halves & 15], -1).flatten()[:count].long(), pieces["weight.absmax"]
    if "nested_blocksize" in state:
        of_scales = pieces["weight.nested_absmax"].repeat_interleave(state["nested_blocksize"])[: len(scales)]
        scales = pieces["weight.nested_quant_map"][scales.long()] * of_scales + state["nested_offset"]
    dense = get_4bit_type(state["quant_type"], "cpu")[codes] * scales.repeat_interleave(state["blocksize"])[:count] + 0
    return dense.to(getattr(torch, state["dtype"])).view(state["shape"])


def int8_weight(pieces: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    from bitsandbytes.functional import int8_vectorwise_dequant

    found: torch.Tensor = int8_vectorwise_dequant(pieces["weight"], pieces["SCB"])
    return found


def four_bits(draw: Draw) -> Made:
    """The numbers may be stored as another dtype, as in models trained with FSDP."""
    rows, columns, block = draw(1, 20), 2 * draw(1, 70), 2 ** draw(2, 6)
    kind, count = ("nf4", "fp4")[draw(0, 1)], -(-rows * columns // block)
    dtype = ("bfloat16", "float16", "float32")[draw(0, 2)]
    state: dict[str, Any] = {"shape": [rows, columns], "dtype": dtype, "blocksize": block, "quant_type": kind}
    weight = random_bytes(rows * columns // 2, 1)
    if draw(0, 1) and len(weight) % 4 == 0:
        weight = weight.view(1, -1).view((torch.bfloat16, torch.float32)[draw(0, 1)]).view(-1, 1)
    pieces = {"weight": weight, "weight.absmax": random_scales(count)}
    if draw(0, 1):
        nested = 2 ** draw(1, 5)
        state |= {"nested_blocksize": nested, "nested_offset": 0.25}
        pieces["weight.absmax"] = random_bytes(count, seed=3)
        pieces["weight.nested_absmax"] = random_scales(-(-count // nested))
        pieces["weight.nested_quant_map"] = random_scales(256)
    written = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return {**pieces, f"weight.quant_state.bitsandbytes__{kind}": written}, {"quant_method": "bitsandbytes"}


def int8(draw: Draw) -> Made:
    rows, columns = draw(1, 40), draw(1, 70)
    pieces = {"weight": random_bytes(rows, columns, dtype=torch.int8), "SCB": random_scales(rows)}
    return pieces, {"quant_method": "bitsandbytes", "load_in_8bit": True}


def mxfp4_weight(pieces: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    found: torch.Tensor = convert_moe_packed_tensors(*pieces.values(), dtype=torch.float32)
    return found


def mxfp4(draw: Draw) -> Made:
    experts, outputs, count = draw(1, 3), draw(1, 12), draw(1, 9)
    pieces = {
        "weight_blocks": random_bytes(experts, outputs, count, 16),
        "weight_scales": random_bytes(experts, outputs, count),
    }
    return pieces, {"quant_method": "mxfp4"}


def fp8_weight(pieces: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    weight, scales = (piece.float() for piece in pieces.values())
    rows, columns = config.get("weight_block_size") or weight.shape
    if scales.dim() == 2:  # a scale for each block, or row
        scales = scales.repeat_interleave(rows if len(scales) < len(weight) else 1, 0)[: len(weight)]
        scales = scales.repeat_interleave(columns, 1)[:, : weight.shape[1]]
    return weight * scales


def fp4_weight(pieces: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    """Two numbers per byte, from its low half, of e2m1; blocks of 32 columns."""
    packed, scales = pieces["weight"].view(torch.uint8).long(), pieces["weight_scale_inv"]
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    return numbers[torch.stack([packed & 15, packed >> 4], -1).flatten(1)] * scales.repeat_interleave(32, 1)


FORMS = {
    form.__name__: form
    for form in (
        *(gptq, awq, fp8, fp8_in_one, fp4, fbgemm, words, eight_bits, eight_bits_in_blocks, mxfp8, nvfp4),
        *(mxfp4_of_compressed_tensors, four_bits, int8, mxfp4),
    )
}
WEIGHTS = {
    "gptq": gptq_weight,
    "awq": awq_weight,
    "fp8": fp8_weight,
    "fp8_in_one": fp8_weight,
    "fp4": fp4_weight,
    "fbgemm": fp8_weight,
    "four_bits": four_bits_weight,
    "int8": int8_weight,
    "mxfp4": mxfp4_weight,
}


def cuts_of(draw: Draw, shape: tuple[int, ...]) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """A row, rows, columns, a part of both, one number, rows out of order, a column, and a part of all in a row."""
    rows, columns = shape[-2:]
    row, column = draw(0, rows - 1), draw(0, columns - 1)
    low, left = draw(row, rows - 1) + 1, draw(column, columns - 1) + 1
    first = [0] * (len(shape) - 2)
    some, step, end = torch.tensor([row, rows - 1, 0, row]), draw(1, 5), draw(1, rows * columns)
    return [
        lambda value: value[(*first, row)],
        lambda value: value[(..., slice(row, low), slice(None))],
        lambda value: value[(..., slice(None, 8), slice(None))],
        lambda value: value[..., column:left],
        lambda value: value[(*first, slice(row, low), slice(column, left))],
        lambda value: value[(*first, row, column)],
        lambda value: value[..., -1, -1],
        lambda value: value[tuple(first)][some],
        lambda value: value[(..., slice(row, None, step), slice(None))],
        lambda value: value.mT[(*first, column)],
        lambda value: value[tuple(first)].reshape(-1)[:end],
        lambda value: value.sum(),
    ]


@pytest.mark.parametrize("form", FORMS)
@given(st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("nothing_small")
def test_any_part_of_a_packed_weight_is_that_of_the_whole(form: str, data: st.DataObject) -> None:
    def draw(least: int, most: int) -> int:
        return data.draw(st.integers(least, most))

    pieces, config = FORMS[form](draw)
    with tempfile.TemporaryDirectory() as folder:
        dense = unpacked(stored(Path(folder), {f"layer.{name}": piece for name, piece in pieces.items()}), config)
        assert dense is not None
        found = dense["layer.weight"]
        whole = found.materialize()
        weight = by_package if "config_groups" in config else WEIGHTS.get(form)
        expected = None if weight is None else weight(pieces, config)
        if expected is not None:
            assert (expected.dtype, expected.shape) == (whole.dtype, whole.shape)
            assert torch.equal(bits_of(expected), bits_of(whole))

        for number, cut in enumerate(cuts_of(draw, tuple(whole.shape))):
            assert torch.equal(bits_of(cut(whole)), bits_of(offload.materialize(cut(found)))), number
