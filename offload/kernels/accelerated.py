"""Packed rows on a GPU: multiplied by Triton, where it is installed.

Always true:
- Triton is imported when a product is about to use it, and is never needed: without it, or where a small trial of it
  fails, torch's chain decodes
- a product is accumulated in float32 from unrounded numbers, and a row of the result does not depend on the rows beside
  it
- sizes are checked here before a kernel is given a tensor
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from offload.kernels.packed import NumberRows, Packed

log = logging.getLogger("offload.kernels")
MOST_ROWS = 16  # of activations
_KINDS = {"e4m3": 0, "halves_low": 1, "halves_high": 2}
_SCALES = (torch.float32, torch.float16, torch.bfloat16)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_HIGH, _WIDE = 32, 64  # of the tiles that a program decodes at a time


@lru_cache(maxsize=16)
def is_there(device: torch.device) -> bool:
    """Whether products with packed rows can be computed on a device: tried once, on small ones."""
    return device.type == "cuda" and find_spec("triton") is not None and _works(device)


def _works(device: torch.device) -> bool:
    """Whether the kernels compile, and give the numbers that they should."""
    rows = torch.eye(16, 32, device=device)
    some = (torch.arange(512, device=device) % 127).to(torch.uint8).view(16, 32)
    halves = torch.stack([some[:, :16] & 15, some[:, :16] >> 4], -1).view(16, 32).float()
    floats, scales = some.view(torch.float8_e4m3fn), torch.full((16, 1), 0.5, device=device)
    low = NumberRows("halves_low", group=32, table=tuple(map(float, range(16))))
    trials = [(NumberRows("e4m3"), floats, floats.float()), (low, some[:, :16].contiguous(), halves)]
    try:
        made = [(multiply(packed, [numbers, scales], rows, 16), dense) for packed, numbers, dense in trials]
        return all(found is not None and torch.equal(found, dense[:, :16].t() / 2) for found, dense in made)
    except Exception as error:  # of any kind: without a compiler, without support for the device
        log.warning("Triton can't be used on %s: %s", device, error)
        return False


def description() -> str:
    """What packed weights are multiplied with on a GPU, in words."""
    return "Triton" if find_spec("triton") is not None else "torch, after they are decoded (Triton is not installed)"


def takes(packed: Packed, dtype: torch.dtype) -> bool:
    """Whether the kernels take rows that are packed so, for activations of a dtype."""
    return (
        isinstance(packed, NumberRows)
        and packed.kind in _KINDS
        and packed.roles == ("numbers", "scales")
        and not (packed.is_turned or packed.is_rounded)
        and packed.last == 1.0
        and dtype in _DTYPES
    )


def multiply(packed: NumberRows, pieces: Sequence[torch.Tensor], x: torch.Tensor, count: int) -> torch.Tensor | None:
    """`x @ rows.T`, of up to 16 rows of activations and `count` packed rows; None for other sizes or strides."""
    found = _layout(packed, pieces, count, x.shape[1])
    if found is None or len(x) > MOST_ROWS:
        return None
    x = x.contiguous()
    out = torch.empty(len(x), count, dtype=x.dtype, device=x.device)
    kind, programs = _KINDS[packed.kind], (-(-count // _HIGH),)
    _kernels().multiply[programs](
        out, x, len(x), *found, count, x.shape[1], MOST=MOST_ROWS, HIGH=_HIGH, WIDE=_WIDE, KIND=kind
    )
    return out


def _layout(packed: NumberRows, pieces: Sequence[torch.Tensor], rows: int, columns: int) -> tuple[Any, ...] | None:
    """The arguments of the kernels: numbers and their step, scales and theirs, rows and columns of a block, table."""
    numbers, scales = pieces
    numbers = numbers.view(torch.uint8)
    group, high = packed.group or columns, packed.rows_per_scale or rows
    if scales.numel() == 1:
        group, high, scales = columns, rows, scales.view(1, 1)
    width = columns if packed.kind == "e4m3" else -(-columns // 2)
    grid = -(-rows // high), -(-columns // group)
    fits = tuple(numbers.shape) == (rows, width) and numbers.stride(1) == 1
    fits = fits and scales.numel() == grid[0] * grid[1] and scales.is_contiguous() and scales.dtype in _SCALES
    if not fits or not rows or not columns:
        return None
    scales = scales.to(torch.float32)  # exact; the interpreter takes subnormal numbers of bfloat16 for zero
    return numbers, numbers.stride(0), scales, grid[1], high, group, _table(packed.table, numbers.device)


@lru_cache(maxsize=16)
def _table(numbers: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device="cpu").to(device)


@lru_cache(maxsize=1)
def _kernels() -> Any:
    from offload.kernels import triton_rows

    return triton_rows
