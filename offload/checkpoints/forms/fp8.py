"""Weights of small floats with a scale per block: of 8 bits (DeepSeek, Qwen, Mistral), and of 4 (gpt-oss).

Always true:
- a weight is its numbers times the scales of their blocks, in float32, as in transformers' `Fp8Dequantize`; a weight of
  wider floats that has scales is refused
- experts of 4-bit floats (e2m1), two per byte, are recognised by their dtype, int8
- in gpt-oss's MXFP4, a scale is the exponent of a block of 32, in any floating-point dtype; an expert is stored with
  its inputs innermost, and read with its outputs innermost: (experts, inputs, outputs)
- scales of activations are ignored: weights are dense here, and activations are not quantized

Source: transformers, `integrations/finegrained_fp8.py` and `integrations/mxfp4.py`; `fbgemm_fp8` has a scale per row.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from offload.annotations import Json
from offload.checkpoints.forms.decoding import Format, Pieces, decoded, number_rows
from offload.checkpoints.forms.numbers import E2M1, of_exponents, of_halves, scaled
from offload.tensor.runs import Decoder
from offload.tensor.wrapper import OffloadedTensor

_PACKED = (*(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), torch.int8)
_FP4_BLOCK = [1, 32]  # whatever the configuration says of other weights: transformers' `FP8Experts`
_MX_BLOCK = 32  # inputs that share an exponent
_MX_TOGETHER = 4  # blocks of a row that are read at once: 64 bytes, a cache line


def _weight(pieces: Pieces) -> OffloadedTensor | None:
    weight = pieces.get("")
    if weight is None or ("scales" not in pieces and weight.dtype not in _PACKED):
        return None  # a scale alone, such as that of a norm, is a value of the model
    scales, is_fp4 = pieces["scales"], weight.dtype == torch.int8
    pieces.check(weight.dtype in _PACKED, "there are scales, and the numbers are not 8-bit floats")
    shape = [*weight.shape[:-1], *(side * (2 if is_fp4 else 1) for side in weight.shape[-1:])]
    rows, columns = _block(pieces, weight, scales, shape, _FP4_BLOCK if is_fp4 else pieces.settings)
    granule = rows
    per: list[int | None] = [rows, 1]
    is_one, is_stack = scales.dim() < 2 or scales.numel() == 1, weight.dim() == 3
    if is_one:
        rows, columns, granule, per = 0, shape[-1], 1, [1, None]
    elif is_stack:
        granule, per = 1, [1, 1]
    kind = "halves_low" if is_fp4 else None
    group = columns if columns < shape[-1] else 0
    packed = number_rows(kind, [weight, scales], group=group, rows_per_scale=rows, table=E2M1)
    if is_stack and not is_one and shape[1] % rows:  # a block would be in two experts
        packed = None
    by_block = partial(decode, columns=columns, rows=max(rows, 1), is_fp4=is_fp4)
    decoder = Decoder(by_block, tuple(per), granule, not (is_one or is_stack), packed)
    return decoded(pieces.name, decoder, [weight, scales], shape=shape)


def _block(
    pieces: Pieces, weight: OffloadedTensor, scales: OffloadedTensor, shape: list[int], block_size: Json
) -> tuple[int, int]:
    """Rows and columns that share a scale, of a dense weight of this shape.

    Without a block size in the configuration, the scales must divide the weight evenly. Raises `CheckpointError` if the
    scales are not those of such blocks.
    """
    sides = shape[-2:]
    is_single = scales.dim() < 2 or scales.numel() == 1
    grid = [1, 1] if is_single else list(scales.shape[-2:])
    if block_size is None:
        size = [-(-side // max(count, 1)) for side, count in zip(sides, grid, strict=False)]
        fits = all(block * count == side for block, count, side in zip(size, grid, sides, strict=False))
        why = "the configuration has no weight_block_size, and they do not divide it evenly, so they do not cover it"
    else:
        size = list(block_size) if isinstance(block_size, list | tuple) else []
        is_size = len(size) == 2 and all(type(block) is int and block > 0 for block in size)
        fits = is_size and all(
            -(-side // block) == count for side, block, count in zip(sides, size, grid, strict=False)
        )
        fits = fits and (scales.numel() == math.prod(shape[:-2]) or not is_single)  # each expert has its own
        why = f"in blocks of {block_size}, they do not cover it"
    is_grid = is_single or scales.dim() == weight.dim() >= 2
    pieces.check(bool(fits and sides and is_grid), why)
    return size[0], size[-1]


def decode(weight: torch.Tensor, scales: torch.Tensor, *, rows: int, columns: int, is_fp4: bool) -> torch.Tensor:
    """Rows of a weight, in float32; blocks of `rows` and `columns` share a scale."""
    factors = of_exponents(scales) if scales.dtype == torch.uint8 else scales.to(torch.float32)
    if is_fp4:
        return scaled(of_halves(weight, E2M1), factors, rows, columns)
    return scaled(weight.to(torch.float32, copy=True), factors, rows, columns)


def _mx_weight(pieces: Pieces) -> OffloadedTensor | None:
    if "" in pieces and len(pieces.by_role) == 1:
        return None
    blocks, scales = stored = [pieces["blocks"], pieces["scales"]]
    pieces.check("" not in pieces, "it is there packed and dense")
    are_bytes = {piece.dtype for piece in stored} == {torch.uint8}
    fits = are_bytes and blocks.dim() == 4 and tuple(blocks.shape) == (*scales.shape, _MX_BLOCK // 2)
    pieces.check(fits, "blocks should be bytes, (experts, outputs, blocks, 16), with a scale for each")
    experts, outputs, count, _ = blocks.shape
    packed = number_rows("halves_low", stored, group=_MX_BLOCK, table=E2M1, is_turned=True)
    return decoded(
        pieces.name,
        Decoder(decode_mxfp4, (_MX_TOGETHER, _MX_TOGETHER), _MX_BLOCK * _MX_TOGETHER, packed=packed),
        [blocks.transpose(1, 2), scales.transpose(1, 2)],  # type: ignore[list-item]
        shape=(experts, count * _MX_BLOCK, outputs),
        stacked=True,
    )


def decode_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows of inputs, in float32. `blocks`: (blocks, outputs, 16) bytes. `scales`: (blocks, outputs) bytes."""
    numbers = of_halves(blocks.contiguous(), E2M1).mul_(of_exponents(scales).unsqueeze(-1))
    return numbers.transpose(1, 2).flatten(0, 1)


FORMAT = Format(
    {
        "_scale_inv": ("", "scales"),
        **dict.fromkeys((".scale", ".weight_scale", ".qscale_weight"), (".weight", "scales")),  # as others spell it
        "activation_scale": ("", None),
    },
    _weight,
    read=lambda settings: settings.get("weight_block_size"),
)
MXFP4 = Format({"_blocks": ("", "blocks"), "_scales": ("", "scales")}, _mx_weight)
