"""Numbers of four bits (e2m1), two to a byte: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same below zero.

Source: OCP Microscaling Formats (MX) 1.0.
"""

from __future__ import annotations

from functools import lru_cache

import torch

_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp4_numbers(packed: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers of contiguous bytes, twice as many in the last dimension; the low half of a byte is the first."""
    pairs = _pairs(dtype)
    found = pairs.index_select(0, packed.view(torch.uint8).flatten().to(torch.int32))
    return found.view(dtype).view(*packed.shape[:-1], 2 * packed.shape[-1])


@lru_cache(maxsize=8)
def _pairs(dtype: torch.dtype) -> torch.Tensor:
    """What each byte holds, two numbers as one integer: these are looked up faster."""
    numbers = torch.tensor([*_NUMBERS, *(-number for number in _NUMBERS)], dtype=dtype, device="cpu")
    pairs = torch.stack([numbers.repeat(16), numbers.repeat_interleave(16)], 1)
    return pairs.view({2: torch.int32, 4: torch.int64}[dtype.itemsize]).flatten()
