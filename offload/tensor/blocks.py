"""Values packed in the blocks of a GGUF file, as recipes of dense values.

Always true:
- numbers are float32 and bit-identical to the `gguf` package's `dequantize`: each arithmetic step rounds as there
- a row consists of whole blocks: rows can be decoded independently
- they are decoded where they are; kinds that are left to numpy are decoded on the CPU

Source: llama.cpp's `ggml-quants.c`, ported to numpy in `gguf.quants`, which decodes the kinds without a function below.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np
import torch

from offload.errors import CheckpointError
from offload.kernels.packed import BLOCKS, GgufRows
from offload.storage.file import TensorFile
from offload.storage.gguf_header import dense_shape
from offload.storage.handle import Handle
from offload.storage.layout import Layout, contiguous
from offload.system.modes import no_functions, no_modes
from offload.tensor.decoded import Decoded
from offload.tensor.recipes import Piece
from offload.tensor.runs import Decoder
from offload.tensor.views import meta_of

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)
_F32 = torch.float32


def dense_layout(file: TensorFile, key: str) -> Layout:
    """The layout of the decoded values of a packed entry."""
    packed = file.entries[key].layout
    return contiguous(_F32, dense_shape(file.header.kinds[key], packed.shape))


def referenced(file: TensorFile, key: str, offload_dir: str | os.PathLike[str] | None = None) -> Handle:
    """Like `Handle.reference`; for a packed entry, its dense value as a matrix of its rows.

    Raises `CheckpointError` if such blocks can't be decoded.
    """
    if key not in file.header.kinds:
        return Handle.reference(file, key, offload_dir)
    kind, packed = file.header.kinds[key], Handle.reference(file, key, offload_dir)
    if not _is_decoded(kind):
        raise CheckpointError(
            f"{key!r} in {file.path} is in blocks of the kind {kind}, which neither offload nor the gguf package "
            "decodes: get the file in another quantization"
        )
    with no_functions(), no_modes():
        view_spec = meta_of(packed)
        piece = Piece(packed, view_spec.view(-1, view_spec.shape[-1]))
    shape = dense_shape(kind, tuple(piece.view_spec.shape))
    rows = GgufRows(kind) if kind in BLOCKS else None
    recipe = Decoded(contiguous(_F32, shape), Decoder(partial(decode, kind=kind), (1,), packed=rows), [piece])
    return Handle.compose(recipe, key, offload_dir)


def in_shape(tensor: _Tensor, file: TensorFile, key: str) -> _Tensor:
    """A tensor over the value from `referenced`, in the shape of the entry's values."""
    if key in file.header.kinds:
        tensor = tensor.view(dense_layout(file, key).shape)  # type: ignore[assignment]
    return tensor


def decode(rows: torch.Tensor, *, kind: str) -> torch.Tensor:
    """Decode rows of blocks of one kind: (rows, bytes) to (rows, elements)."""
    function = _FUNCTIONS.get(kind)
    if function is not None:
        return function(rows).view(len(rows), -1)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # factors may be any bit pattern
        return torch.from_numpy(dequantize(rows.cpu().numpy(), GGMLQuantizationType[kind])).to(rows.device)


def is_left_to_numpy(function: Callable[..., torch.Tensor]) -> bool:
    """Whether it is a decoder of blocks that decodes them on the CPU, wherever they are."""
    return isinstance(function, partial) and function.func is decode and function.keywords["kind"] not in _FUNCTIONS


@lru_cache(maxsize=64)
def _is_decoded(kind: str) -> bool:
    """Whether blocks of this kind can be decoded: some only hold activations, or are newer than the package."""
    if kind in _FUNCTIONS:
        return True
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    _, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    try:
        decode(torch.zeros(1, nbytes, dtype=torch.uint8, device="cpu"), kind=kind)
    except NotImplementedError:
        return False
    return True


def _halves(blocks: torch.Tensor) -> torch.Tensor:
    """float16 factors, as float32."""
    return blocks.view(torch.float16).to(_F32)


def _q8_0(rows: torch.Tensor) -> torch.Tensor:
    """A factor and 32 8-bit numbers."""
    blocks = rows.view(-1, 34)
    return blocks[:, 2:].view(torch.int8).to(_F32).mul_(_halves(blocks[:, :2]))


def _q4_0(rows: torch.Tensor) -> torch.Tensor:
    """A factor and 32 4-bit numbers, minus 8; the first 16 are the low halves of the bytes."""
    blocks = rows.view(-1, 18)
    numbers = torch.empty(len(blocks), 2, 16, dtype=torch.uint8, device=rows.device)
    torch.bitwise_and(blocks[:, 2:], 15, out=numbers[:, 0])
    torch.bitwise_right_shift(blocks[:, 2:], 4, out=numbers[:, 1])
    return numbers.view(torch.int8).sub_(8).to(_F32).view(-1, 32).mul_(_halves(blocks[:, :2]))


def _q4_1(rows: torch.Tensor) -> torch.Tensor:
    """A factor, an offset, and 32 4-bit numbers in the order of Q4_0."""
    blocks = rows.view(-1, 20)
    numbers = torch.stack([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], 1).to(_F32).view(-1, 32)
    return numbers.mul_(_halves(blocks[:, :2])).add_(_halves(blocks[:, 2:4]))


def _q5_0(rows: torch.Tensor) -> torch.Tensor:
    """A factor, the fifth bits of 32 numbers, minus 16, and the others in the order of Q4_0."""
    blocks = rows.view(-1, 22)
    return _with_fifth_bits(blocks[:, 2:6], blocks[:, 6:]).sub_(16).mul_(_halves(blocks[:, :2]))


def _q5_1(rows: torch.Tensor) -> torch.Tensor:
    """Like Q5_0, with an offset, and nothing subtracted."""
    blocks = rows.view(-1, 24)
    return _with_fifth_bits(blocks[:, 4:8], blocks[:, 8:]).mul_(_halves(blocks[:, :2])).add_(_halves(blocks[:, 2:4]))


def _with_fifth_bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """32 numbers of 5 bits, in float32, from 4 bytes with the highest bits and 16 with two numbers each."""
    bits = high.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=high.device) & 1
    numbers = torch.stack([low & 15, low >> 4], 1).view(-1, 32)
    return (numbers | bits.view(-1, 32) << 4).to(_F32)


def _q4_k(rows: torch.Tensor) -> torch.Tensor:
    """8 groups of 32 4-bit numbers, with 6-bit factors and offsets, and one factor for each of these two."""
    blocks = rows.view(-1, 144)
    factors, offsets = _of_groups(blocks)
    packed = blocks[:, 16:].view(-1, 4, 32)
    numbers = torch.empty(len(blocks), 4, 2, 32, dtype=_F32, device=rows.device)
    numbers[:, :, 0].copy_(packed & 15)
    numbers[:, :, 1].copy_(packed >> 4)
    return numbers.view(-1, 8, 32).mul_(factors).sub_(offsets)


def _q5_k(rows: torch.Tensor) -> torch.Tensor:
    """Like Q4_K; the fifth bits of group n are bits n of 32 bytes."""
    blocks = rows.view(-1, 176)
    factors, offsets = _of_groups(blocks)
    packed, high = blocks[:, 48:].view(-1, 4, 32), blocks[:, 16:48].unsqueeze(1)
    numbers = torch.empty(len(blocks), 8, 32, dtype=torch.uint8, device=rows.device)
    torch.bitwise_right_shift(high, torch.arange(8, dtype=torch.uint8, device=rows.device).view(8, 1), out=numbers)
    numbers.bitwise_and_(1).bitwise_left_shift_(4)
    numbers[:, 0::2].bitwise_or_(packed & 15)
    numbers[:, 1::2].bitwise_or_(packed >> 4)
    return numbers.to(_F32).mul_(factors).sub_(offsets)


def _of_groups(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors and offsets of the 8 groups in Q4_K and Q5_K blocks."""
    scales = blocks[:, 4:16].view(-1, 3, 4)
    first, second, rest = scales.unbind(1)
    factors = torch.cat([first & 63, (rest & 15) | ((first >> 2) & 48)], 1).to(_F32)
    offsets = torch.cat([second & 63, (rest >> 4) | ((second >> 2) & 48)], 1).to(_F32)
    halves = _halves(blocks[:, :4])
    return factors.mul_(halves[:, :1]).unsqueeze(-1), offsets.mul_(halves[:, 1:]).unsqueeze(-1)


def _q6_k(rows: torch.Tensor) -> torch.Tensor:
    """16 groups of 16 6-bit numbers, minus 32, with 8-bit factors, and one factor for these."""
    blocks = rows.view(-1, 210)
    factors = blocks[:, 192:208].view(torch.int8).to(_F32).mul_(_halves(blocks[:, 208:]))
    low, high = blocks[:, :128].view(-1, 2, 2, 32), blocks[:, 128:192].view(-1, 2, 32)
    numbers = torch.empty(len(blocks), 2, 4, 32, dtype=torch.uint8, device=rows.device)
    torch.bitwise_and(low, 15, out=numbers[:, :, :2])
    torch.bitwise_right_shift(low, 4, out=numbers[:, :, 2:])
    for place, moved in enumerate((high << 4, high << 2, high, high >> 2)):
        numbers[:, :, place].bitwise_or_(moved & 48)
    return numbers.view(torch.int8).sub_(32).to(_F32).view(-1, 16, 16).mul_(factors.unsqueeze(-1))


_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
