"""Weights of 4-bit floats with an exponent per block of 32, as gpt-oss is published.

Always true:
- a weight is its numbers times 2 to the power of the exponents of their blocks, as in transformers'
  `Mxfp4Dequantize`, in any floating-point dtype
- an expert is stored with its inputs innermost, and read with its outputs innermost: (experts, inputs, outputs)

Source: transformers, `integrations/mxfp4.py`.
"""

from __future__ import annotations

import torch

from offload.checkpoints.forms.decoding import Format, Pieces, decoded, number_rows
from offload.checkpoints.forms.numbers import E2M1, of_exponents
from offload.tensor.runs import Decoder
from offload.tensor.wrapper import OffloadedTensor

_BLOCK = 32  # inputs that share an exponent
_OF_FLOAT16 = 0x8E00 - (1 << 16)  # where a float16 has the sign, the exponent and the fraction of a 4-bit float
_LESS = 2.0**14  # factor by which such a float16 is too small: its exponent bias differs
_LARGE = 2.0**113  # limit above which multiplying by that factor would overflow
_TOGETHER = 4  # blocks of a row that are read at once: 64 bytes, a cache line


def _weight(pieces: Pieces) -> OffloadedTensor | None:
    """The dense weight of a layer's experts."""
    if "" in pieces and len(pieces.by_role) == 1:
        return None
    blocks, scales = stored = [pieces["blocks"], pieces["scales"]]
    pieces.check("" not in pieces, "it is there packed and dense")
    are_bytes = {piece.dtype for piece in stored} == {torch.uint8}
    fits = are_bytes and blocks.dim() == 4 and tuple(blocks.shape) == (*scales.shape, _BLOCK // 2)
    pieces.check(fits, "blocks should be bytes, (experts, outputs, blocks, 16), with a scale for each")
    experts, outputs, count, _ = blocks.shape
    packed = number_rows("halves_low", stored, group=_BLOCK, table=E2M1, is_turned=True)
    return decoded(
        pieces.name,
        Decoder(_decode, (_TOGETHER, _TOGETHER), _BLOCK * _TOGETHER, packed=packed),
        [blocks.transpose(1, 2), scales.transpose(1, 2)],  # type: ignore[list-item]
        shape=(experts, count * _BLOCK, outputs),
        stacked=True,
    )


def _decode(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows of inputs, in float32. `blocks`: (blocks, outputs, 16) bytes. `scales`: (blocks, outputs) bytes."""
    turned = blocks.transpose(1, 2).contiguous()  # (blocks, 16, outputs): pairs of input rows
    bits = torch.empty(len(blocks), _BLOCK // 2, 2, turned.shape[2], dtype=torch.int16, device=blocks.device)
    bits[:, :, 0].copy_(turned & 0x0F)
    bits[:, :, 1].copy_(turned >> 4)
    bits.mul_(1 << 9).add_(0x7000).bitwise_and_(_OF_FLOAT16)  # the addition carries the sign to its place
    numbers = bits.view(torch.float16).to(torch.float32).view(len(blocks), _BLOCK, -1)
    factors = of_exponents(scales).unsqueeze(1)
    if factors.is_cpu and bool(factors.max() < _LARGE):
        factors = factors * _LESS
    else:
        numbers.mul_(_LESS)
    return numbers.mul_(factors).flatten(0, 1)


FORMAT = Format({"_blocks": ("", "blocks"), "_scales": ("", "scales")}, _weight)
