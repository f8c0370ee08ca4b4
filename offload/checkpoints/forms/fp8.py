"""Weights of 8-bit floats with a scale per block, as published by DeepSeek, Qwen and Mistral.

Always true:
- a weight is its numbers times the scales of their blocks, in float32, as in transformers' `Fp8Dequantize`; that holds
  for wider floats, too, so that no weight that has scales is taken for a dense one
- experts of 4-bit floats (e2m1), two per byte, are recognised by their dtype, int8
- scales of activations are ignored: weights are dense here, and activations are not quantized

Source: transformers, `integrations/finegrained_fp8.py`; `fbgemm_fp8` has a scale per row.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial

import torch

from offload.annotations import Json, Settings
from offload.checkpoints.forms.decoding import Tensors, decoded, method_of, missing, number_rows, unfit
from offload.checkpoints.forms.numbers import E2M1, of_exponents, of_halves, product, scaled
from offload.errors import CheckpointError
from offload.kernels.packed import NumberRows
from offload.tensor.views import handle_of
from offload.tensor.wrapper import OffloadedTensor

_KINDS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "halves_low"}  # that the kernels take
_PACKED = (*_KINDS, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_WIDE = (torch.bfloat16, torch.float16, torch.float32)
_FP4_BLOCK = [1, 32]  # whatever the configuration says of other weights: transformers' `FP8Experts`


def unpack(tensors: Tensors, quantization: Settings) -> dict[str, OffloadedTensor]:
    """See `decoding.unpacked`."""
    renamed = {_usual(name, tensors): tensor for name, tensor in tensors.items()}
    is_of_rows = method_of(quantization) == "fbgemm_fp8"
    dense: dict[str, OffloadedTensor] = {}
    for name, tensor in renamed.items():
        scales = renamed.get(f"{name}_scale_inv")
        if name.endswith(("_scale_inv", "activation_scale")):
            continue
        if scales is None and tensor.dtype not in _PACKED:
            dense[name] = tensor
        elif scales is None:
            raise missing(tensor, f"{name}_scale_inv")
        elif tensor.dtype not in (_PACKED if is_of_rows else (*_PACKED, *_WIDE)):
            raise unfit(name, [tensor, scales], "there are scales, and the numbers are not 8-bit floats")
        else:
            dense[name] = _weight(name, tensor, scales, quantization.get("weight_block_size"))
    return dense


def _usual(name: str, names: Collection[str]) -> str:
    """The name of the scales of a weight as most checkpoints spell it; others, such as the scale of a norm, stay."""
    layer, _, piece = name.rpartition(".")
    is_scale = piece in ("scale", "weight_scale", "qscale_weight") and f"{layer}.weight" in names
    return f"{layer}.weight_scale_inv" if is_scale else name


def _weight(name: str, weight: OffloadedTensor, scales: OffloadedTensor, block_size: Json) -> OffloadedTensor:
    is_fp4 = weight.dtype == torch.int8
    shape = [*weight.shape[:-1], *(side * (2 if is_fp4 else 1) for side in weight.shape[-1:])]
    rows, columns = _block(weight, scales, shape, _FP4_BLOCK if is_fp4 else block_size)
    if scales.dim() < 2 or scales.numel() == 1:
        decode = partial(_decode, columns=shape[-1], rows=1, is_fp4=is_fp4)
        packed = _packed(weight, scales, 0, 0)
        return decoded(name, decode, [weight, scales], shape=shape, per=(1, None), packed=packed)
    decode = partial(_decode, columns=columns, rows=rows, is_fp4=is_fp4)
    packed = _packed(weight, scales, rows, columns if columns < shape[-1] else 0)
    if weight.dim() == 3:
        packed = packed if shape[1] % rows == 0 else None  # no block reaches into the next expert
        return decoded(name, decode, [weight, scales], shape=shape, per=(1, 1), packed=packed)
    pieces, per = [weight, scales], (rows, 1)
    return decoded(name, decode, pieces, shape=shape, granule=rows, per=per, is_divisible=True, packed=packed)


def _packed(weight: OffloadedTensor, scales: OffloadedTensor, rows: int, columns: int) -> NumberRows | None:
    """How the kernels take it; for rows and columns of a block, 0 stands for all."""
    kind = _KINDS.get(weight.dtype)
    if kind is None:
        return None
    return number_rows(kind, [weight, scales], group=columns, rows_per_scale=rows, table=E2M1)


def _block(weight: OffloadedTensor, scales: OffloadedTensor, shape: list[int], block_size: Json) -> tuple[int, int]:
    """Rows and columns that share a scale.

    Args:
        shape: of the dense weight.
        block_size: the configuration's block size; without one, the scales must divide the weight evenly.

    Raises:
        CheckpointError: the scales are not those of such blocks.
    """
    sides = shape[-2:]
    is_single = scales.dim() < 2 or scales.numel() == 1
    grid = [1, 1] if is_single else list(scales.shape[-2:])
    if block_size is None:
        found = [-(-side // max(count, 1)) for side, count in zip(sides, grid, strict=False)]
        fits = all(block * count == side for block, count, side in zip(found, grid, sides, strict=False))
        why = "the configuration has no weight_block_size, and they do not divide it evenly, so they do not cover it"
    else:
        found = list(block_size) if isinstance(block_size, list | tuple) else []
        is_size = len(found) == 2 and all(type(block) is int and block > 0 for block in found)
        fits = is_size and all(
            -(-side // block) == count for side, block, count in zip(sides, found, grid, strict=False)
        )
        fits = fits and (scales.numel() == math.prod(shape[:-2]) or not is_single)  # each expert has its own
        why = f"in blocks of {block_size}, they do not cover it"
    if not fits or not sides or not (is_single or scales.dim() == weight.dim() >= 2):
        raise CheckpointError(
            f"{handle_of(weight).name!r} in {handle_of(weight).path} is {list(weight.shape)}, and its scales are "
            f"{list(scales.shape)}: {why}. Download the checkpoint again, with its config.json."
        )
    return found[0], found[-1]


def _decode(weight: torch.Tensor, scales: torch.Tensor, *, rows: int, columns: int, is_fp4: bool) -> torch.Tensor:
    """Rows of a weight, in float32; blocks of `rows` and `columns` share a scale."""
    factors = of_exponents(scales) if scales.dtype == torch.uint8 else scales.to(torch.float32)
    if is_fp4:
        return scaled(of_halves(weight, E2M1), factors, rows, columns)
    return product(weight, factors, rows, columns)
