"""Packed rows on a GPU: decoded, and multiplied, by Triton, where it is installed.

Always true:
- Triton is imported when a kernel is about to be used, and is never needed: without it, or where a small trial of it
  fails, torch's chain decodes
- a product is accumulated in float32 from unrounded numbers, and a row of the result does not depend on the rows beside
  it; what is decoded has the bits of torch's chain
- sizes are checked here before a kernel is given a tensor
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, TypeAlias, cast

import torch

from offload.kernels.packed import BLOCKS, GgufRows, NumberRows, Packed

log = logging.getLogger("offload.kernels")
Rows: TypeAlias = "GgufRows | NumberRows"
MOST_ROWS = 16  # of activations
_KINDS = frozenset(
    ("e4m3", "halves_low", "halves_high", "signed_bytes", "centred_bytes", "Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
)
_SCALES = (torch.float32, torch.float16, torch.bfloat16)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_HIGH, _WIDE = 4, 256  # of the tiles that a program decodes at a time
_NO_TABLE = (0.0,) * 16
_OF_MATRICES = 3  # dimensions of a stack of matrices


@lru_cache(maxsize=16)
def is_there(device: torch.device) -> bool:
    """Whether packed rows can be decoded and multiplied on a device: tried once, on small ones."""
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
        for packed, numbers, dense in trials:
            product, place = multiply(packed, [numbers, scales], rows, 16), torch.empty_like(dense)
            is_decoded = _decode(packed, [numbers, scales], 0, place)
            if product is None or not is_decoded or not torch.equal(place, dense / 2):
                return False
            if not torch.equal(product, dense[:, :16].t() / 2):
                return False
    except Exception as error:  # of any kind: without a compiler, without support for the device
        log.warning("Triton can't be used on %s: %s", device, error)
        return False
    return True


def description() -> str:
    """What packed weights are multiplied with on a GPU, in words."""
    return "Triton" if find_spec("triton") is not None else "torch, after they are decoded (Triton is not installed)"


def takes(packed: Packed | None, dtype: torch.dtype) -> bool:
    """Whether the kernels take rows that are packed so, for dense values of a dtype."""
    if not isinstance(packed, GgufRows | NumberRows) or packed.kind not in _KINDS or dtype not in _DTYPES:
        return False
    if packed.is_turned or packed.is_rounded:
        return False
    return isinstance(packed, GgufRows) or (packed.roles == ("numbers", "scales") and packed.last == 1.0)


def multiply(packed: Rows, pieces: Sequence[torch.Tensor], x: torch.Tensor, count: int) -> torch.Tensor | None:
    """`x @ rows.T`, of up to 16 rows of activations and `count` packed rows; None for other sizes or strides."""
    found = _layout(packed, pieces, count, x.shape[1])
    if found is None or len(x) > MOST_ROWS:
        return None
    x = x.contiguous()
    out = torch.empty(len(x), count, dtype=x.dtype, device=x.device)
    most, (given, meant) = 1 << (len(x) - 1).bit_length(), found
    _kernels().multiply[(-(-count // _HIGH),)](
        out, x, len(x), *given, count, x.shape[1], MOST=most, HIGH=_HIGH, WIDE=_WIDE, **meant
    )
    return out


def decode(packed: Packed | None, pieces: Sequence[torch.Tensor], first: int, place: torch.Tensor) -> bool:
    """Whether rows of the pieces, from row `first` on, have been decoded into `place`: (..., rows, columns).

    Where they have not been, torch's chain has to: there is no Triton, or these are rows, sizes or strides of another
    kind.
    """
    if not takes(packed, place.dtype) or not is_there(place.device):
        return False
    if place.dim() == _OF_MATRICES and place.is_contiguous():
        place, first = place.flatten(0, 1), first * place.shape[1]
    return place.dim() == 2 and _decode(cast("Rows", packed), pieces, first, place)


def _decode(packed: Rows, pieces: Sequence[torch.Tensor], first: int, place: torch.Tensor) -> bool:
    high = math.prod(pieces[0].shape[:-1])
    found = _layout(packed, pieces, high, place.shape[1]) if place.stride(1) == 1 else None
    if found is None or first + len(place) > high:
        return False
    (given, meant), (rows, columns) = found, place.shape
    programs = -(-rows // _HIGH), -(-columns // _WIDE)
    _kernels().decode[programs](
        place, place.stride(0), first, *given, rows, columns, HIGH=_HIGH, WIDE=_WIDE, enable_fp_fusion=False, **meant
    )
    return True


def _layout(
    packed: Rows, pieces: Sequence[torch.Tensor], rows: int, columns: int
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """What both kernels are given: numbers, their step, rows per head, scales, their grid and table; and what is meant.

    None if the pieces are not of these sizes.
    """
    numbers = _as_matrix(pieces[0].view(torch.uint8), packed)
    if numbers is None or not rows or not columns:
        return None
    device, meant = numbers.device, {"KIND": packed.kind, "IN_BLOCKS": False, "IN_BFLOAT16": False, "IN_HEADS": False}
    if isinstance(packed, GgufRows):
        each, nbytes = BLOCKS[packed.kind]
        width = columns // each * nbytes
        fits = columns % each == 0 and (not packed.heads or (rows % packed.heads == 0 and packed.heads % 2 == 0))
        if not fits or tuple(numbers.shape) != (rows, width) or numbers.stride(1) != 1:
            return None
        meant["IN_BLOCKS"], meant["IN_HEADS"] = True, packed.heads > 0
        table = _table(_NO_TABLE, device)
        return (numbers, numbers.stride(0), packed.heads, table, 1, 1, 1, table), meant
    scales = pieces[1]
    group, high = packed.group or columns, packed.rows_per_scale or rows
    if scales.numel() == 1:
        group, high, scales = columns, rows, scales.view(1, 1)
    width = columns if "halves" not in packed.kind else -(-columns // 2)
    grid = -(-rows // high), -(-columns // group)
    fits = tuple(numbers.shape) == (rows, width) and numbers.stride(1) == 1
    if not fits or scales.numel() != grid[0] * grid[1] or not scales.is_contiguous() or scales.dtype not in _SCALES:
        return None
    if scales.dtype == torch.bfloat16:
        scales, meant["IN_BFLOAT16"] = scales.view(torch.int16), True
    return (numbers, numbers.stride(0), 0, scales, grid[1], high, group, _table(packed.table, device)), meant


def _as_matrix(numbers: torch.Tensor, packed: Rows) -> torch.Tensor | None:
    """The numbers of a stack of matrices as those of one, if it is of whole blocks."""
    if numbers.dim() != _OF_MATRICES:
        return numbers
    high = packed.heads or 1 if isinstance(packed, GgufRows) else packed.rows_per_scale
    is_one = numbers.is_contiguous() and (len(numbers) == 1 or (high > 0 and numbers.shape[1] % high == 0))
    return numbers.flatten(0, 1) if is_one else None


@lru_cache(maxsize=16)
def _table(numbers: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device="cpu").to(device)


@lru_cache(maxsize=1)
def _kernels() -> Any:
    from offload.kernels import triton_rows

    return triton_rows
