"""Packed numbers as 32-bit floats, and factors shared by blocks.

Always true:
- functions take plain tensors and don't modify them, except the first argument where the docstring says in place; they
  compute where these are, and tables are there once per device
- on an accelerator nothing depends on the numbers in a tensor: the CPU would have to wait for them
- every number of up to 8 bits is exact as a float, and so is its product with a factor of a 16-bit dtype: rounding it
  to that dtype gives the same as arithmetic in that dtype

Source of the 4-bit floats (e2m1) and of exponent scales: OCP Microscaling Formats (MX) 1.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_ROWS = 64


def of_halves(packed: torch.Tensor, numbers: tuple[float, ...], *, high_first: bool = False) -> torch.Tensor:
    """The numbers encoded in the halves of bytes, two per byte.

    Args:
        packed: (..., n) of a one-byte dtype; contiguous.
        numbers: the 16 values of the format.
        high_first: whether the high half of a byte comes first.

    Returns: (..., 2 * n)
    """
    flat = _bytes(packed).to(torch.int64)
    rows = math.gcd(flat.numel(), _ROWS)  # torch (2.13) uses all cores for a matrix, but one for a list
    pairs = _pairs_of_halves(numbers, high_first, flat.device).expand(rows, -1)
    decoded = pairs.gather(1, flat.view(rows, flat.numel() // rows))
    return decoded.view(torch.float32).view(*packed.shape[:-1], 2 * packed.shape[-1])


@lru_cache(maxsize=16)
def _pairs_of_halves(numbers: tuple[float, ...], high_first: bool, device: torch.device) -> torch.Tensor:
    byte = torch.arange(256, device="cpu")
    halves = [byte >> 4, byte & 15] if high_first else [byte & 15, byte >> 4]
    of_each = torch.tensor(numbers, dtype=torch.float32, device="cpu")
    return torch.stack([of_each[half] for half in halves], -1).view(torch.int64).flatten().to(device)


def of_words(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers packed one after the other in the bits of 32-bit words, each minus 2 ** (bits - 1).

    Args:
        packed: (rows, n), int32.
        bits: per number, 1 to 8; a number may cross a word boundary.

    Returns: (rows, 32 * n // bits), int8; an incomplete number at the end is left out.
    """
    rows = len(packed)
    if bits == 8:
        return (_bytes(packed) ^ 128).view(torch.int8).view(rows, -1)
    if bits == 4:
        two = _bytes(packed).to(torch.int16)
        apart = (two * 16).bitwise_or_(two).bitwise_and_(0x0F0F)
        return apart.view(torch.int8).view(rows, -1).sub_(8)
    count = 32 * packed.shape[1] // bits
    words = torch.nn.functional.pad(packed, (0, -packed.shape[1] % bits)).view(rows, -1, bits)
    numbers = torch.empty(rows, words.shape[1], 32, dtype=torch.int8, device=packed.device)
    for number in range(32):
        word, first = divmod(number * bits, 32)
        shifted = words[..., word] >> first
        if first + bits > 32:
            shifted = (shifted & ((1 << (32 - first)) - 1)) | (words[..., word + 1] << (32 - first))
        numbers[..., number] = (shifted & ((1 << bits) - 1)) - (1 << (bits - 1))
    return numbers.view(rows, -1)[:, :count]


def of_exponents(packed: torch.Tensor) -> torch.Tensor:
    """Powers of two, given by their exponents plus 127 (e8m0)."""
    return _powers(packed.device).index_select(0, _bytes(packed).to(torch.int32)).view(packed.shape)


@lru_cache(maxsize=16)
def _powers(device: torch.device) -> torch.Tensor:
    return (torch.arange(256, dtype=torch.float32, device="cpu") - 127.0).exp2().to(device)


def _bytes(packed: torch.Tensor) -> torch.Tensor:
    flat = packed.reshape(-1)
    if flat.stride() != (1,):  # that of one number may be any
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def scaled(numbers: torch.Tensor, factors: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Numbers times the factors of their blocks, in place.

    Args:
        numbers: (..., height, width), contiguous.
        factors: one, or (..., height / rows, width / columns), both rounded up: the last blocks may be smaller.
        rows, columns: of a block that shares a factor.
    """
    return _with_blocks(torch.Tensor.mul_, numbers, factors, rows, columns)


def lessened(numbers: torch.Tensor, zeros: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Numbers minus the zero points of their blocks, in place; for other arguments see `scaled`."""
    return _with_blocks(torch.Tensor.sub_, numbers, zeros, rows, columns)


def _with_blocks(
    act: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    numbers: torch.Tensor,
    others: torch.Tensor,
    rows: int,
    columns: int,
) -> torch.Tensor:
    if others.numel() == 1:
        return act(numbers, others.view(()))
    *over, height, width = numbers.shape
    rows = min(rows, height)  # only part of a block, or of the last one
    if height % rows or width % columns:
        others = others.repeat_interleave(rows, -2)[..., :height, :]
        return act(numbers, others.repeat_interleave(columns, -1)[..., :width])
    blocks = numbers.view(*over, height // rows, rows, width // columns, columns)
    act(blocks, others.unsqueeze(-1).unsqueeze(-3))
    return numbers
