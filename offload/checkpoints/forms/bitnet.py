"""Ternary BitNet weights, four per byte, for the transformers modules that compute with them.

Always true:
- the modules stay transformers' own, as these quantize activations: if they hold packed weights, these are referenced
  as they are; if they hold -1, 0 and 1, these are recipes
- the lowest two bits of the bytes are the first quarter of the rows, the next two bits the second

Source: transformers, `integrations/bitnet.py`.
"""

from __future__ import annotations

from functools import partial

import torch

from offload.annotations import Settings
from offload.checkpoints.forms.decoding import Tensors, decoded
from offload.kernels.packed import QUARTERS, GgufRows
from offload.tensor.deferred import deferred
from offload.tensor.runs import Decoder
from offload.tensor.wrapper import OffloadedTensor


def for_modules(tensors: Tensors, quantization: Settings, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint as transformers' modules hold them, in this dtype."""
    is_unpacked = (
        quantization.get("linear_class") == "autobitlinear" and quantization.get("quantization_mode") == "offline"
    )
    found: dict[str, torch.Tensor] = dict(tensors)
    for name, packed in tensors.items():
        if is_unpacked and packed.dtype == torch.uint8 and packed.dim() == 2 and name.endswith(".weight"):
            quarters = [_quarter(name, packed, quarter, dtype) for quarter in range(len(QUARTERS))]
            found[name] = torch.cat([deferred(quarter) for quarter in quarters])
    return found


def _quarter(name: str, packed: OffloadedTensor, quarter: int, dtype: torch.dtype) -> OffloadedTensor:
    decode, shape = partial(_decode, shift=2 * quarter), tuple(packed.shape)
    rows = GgufRows(QUARTERS[quarter])
    return decoded(name, Decoder(decode, (1,), packed=rows), [packed], shape=shape, dtype=dtype)


def _decode(packed: torch.Tensor, *, shift: int) -> torch.Tensor:
    return packed.bitwise_right_shift(shift).bitwise_and_(3).view(torch.int8).sub_(1)
