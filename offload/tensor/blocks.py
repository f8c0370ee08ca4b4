"""Values packed in the blocks of a GGUF file, as recipes of dense values.

Always true:
- numbers are float32: those of the `gguf` package's `dequantize`, bit for bit, wherever they are decoded
- a row consists of whole blocks: rows can be decoded independently
- on the CPU the package decodes, on an accelerator transformers, with torch's ops; kinds that it lacks go to the CPU

Source: llama.cpp's `ggml-quants.c`, ported to numpy in `gguf.quants`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np
import torch

from offload.errors import CheckpointError, UnsupportedTransformersError
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
    """Decode rows of blocks of one kind: (rows, bytes) to (rows, elements), on the same device."""
    function = None if rows.is_cpu else _on_any_device(kind)
    if function is not None:
        return function(rows).view(len(rows), -1)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # factors may be any bit pattern
        return torch.from_numpy(dequantize(rows.cpu().numpy(), GGMLQuantizationType[kind])).to(rows.device)


def is_left_to_numpy(function: Callable[..., torch.Tensor]) -> bool:
    """Whether it is a decoder of blocks that decodes them on the CPU, wherever they are."""
    is_of_blocks = isinstance(function, partial) and function.func is decode
    return is_of_blocks and _on_any_device(function.keywords["kind"]) is None  # type: ignore[attr-defined]


@lru_cache(maxsize=64)
def _on_any_device(kind: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What decodes blocks of this kind by torch's ops; None if nothing does."""
    if kind in _FUNCTIONS:
        return _FUNCTIONS[kind]
    try:
        from offload.transformers_api import GGML_NAME, dequantize
    except UnsupportedTransformersError:  # older releases have none
        return None
    number = next((number for number, name in GGML_NAME.items() if name == kind), None)
    return None if number is None else partial(dequantize, ggml_type=number)


@lru_cache(maxsize=64)
def _is_decoded(kind: str) -> bool:
    """Whether blocks of this kind can be decoded: some only hold activations, or are newer than the package."""
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


_FUNCTIONS = {"Q5_0": _q5_0, "Q5_1": _q5_1}  # which transformers has not
