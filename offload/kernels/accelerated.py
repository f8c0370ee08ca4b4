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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, TypeAlias, cast

import torch

from offload.kernels.packed import BLOCKS, GgufRows, NumberRows, Packed, as_rows

log = logging.getLogger("offload.kernels")
Rows: TypeAlias = "GgufRows | NumberRows"
MOST_ROWS = 16  # of activations
_KINDS = frozenset(
    ("e4m3", "halves_low", "halves_high", "signed_bytes", "centred_bytes", "Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
)
_SCALES = {  # and how they are read
    torch.float32: "float",
    torch.float16: "float",
    torch.bfloat16: "bfloat16",
    torch.uint8: "exponent",
}
_ROLES = (("numbers", "scales"), ("numbers", "scales", "nested_scales", "nested_numbers"))
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
    if packed.is_rounded:
        return False
    return isinstance(packed, GgufRows) or packed.roles in _ROLES


def multiply(packed: Rows, pieces: Sequence[torch.Tensor], x: torch.Tensor, count: int) -> torch.Tensor | None:
    """`x @ rows.T`, of up to 16 rows of activations and `count` packed rows; None for other sizes or strides."""
    found = _layout(packed, pieces, x.shape[1])
    if found is None or found.rows != count or len(x) > MOST_ROWS:
        return None
    x = x.contiguous()
    out = torch.empty(len(x), count, dtype=x.dtype, device=x.device)
    most = 1 << (len(x) - 1).bit_length()
    _kernels().multiply[(-(-count // _HIGH),)](
        *(out, x, len(x), *found.given, count, x.shape[1]),
        MOST=most, HIGH=_HIGH, WIDE=_WIDE, enable_fp_fusion=True, **found.meant,
    )  # fmt: skip
    return out


def decode(packed: Packed | None, pieces: Sequence[torch.Tensor], first: int, place: torch.Tensor) -> bool:
    """Whether rows of the pieces, from row `first` on, have been decoded into `place`: (..., rows, columns).

    Where they have not been, torch's chain has to: there is no Triton, or these are rows, sizes or strides of another
    kind.
    """
    if not takes(packed, place.dtype) or not is_there(place.device):
        return False
    assert packed is not None
    if place.dim() == _OF_MATRICES and place.is_contiguous() and not packed.is_turned:
        place, first = place.flatten(0, 1), first * place.shape[1]
    return place.dim() == 2 and _decode(cast("Rows", packed), pieces, first, place)


def _decode(packed: Rows, pieces: Sequence[torch.Tensor], first: int, place: torch.Tensor) -> bool:
    if packed.is_turned:  # the packed rows are columns of the dense value: only all of them
        place = place.t()
    found = _layout(packed, pieces, place.shape[1])
    if found is None or not 0 <= first <= found.rows - len(place):
        return False
    if packed.is_turned and len(place) != found.rows:
        return False
    rows, columns = place.shape
    programs = -(-rows // _HIGH), -(-columns // _WIDE)
    _kernels().decode[programs](
        *(place, *place.stride(), first, *found.given, rows, columns),
        HIGH=_HIGH, WIDE=_WIDE, enable_fp_fusion=False, **found.meant,
    )  # fmt: skip
    return True


@dataclass(frozen=True)
class _Layout:
    """What both kernels are given.

    Attributes:
        rows: that are packed.
        given: the numbers, their step, rows per head, scales, the width of their grid, rows and columns that share one,
            the table; scales of the scales, their numbers, how many share one, and what is added; the last factor.
        meant: what they mean.
    """

    rows: int
    given: tuple[Any, ...]
    meant: dict[str, Any]


def _layout(packed: Rows, pieces: Sequence[torch.Tensor], columns: int) -> _Layout | None:
    """None if the pieces are not of these sizes."""
    pieces = [piece.transpose(0, 1) for piece in pieces] if packed.is_turned else pieces
    if isinstance(packed, GgufRows):
        each, nbytes = BLOCKS[packed.kind]
        width = columns // each * nbytes if columns % each == 0 else 0
    else:
        width = columns if "halves" not in packed.kind else -(-columns // 2)
    numbers = as_rows(pieces[0].view(torch.uint8), None, width) if width else None
    if numbers is None or not len(numbers):
        return None
    rows, device = len(numbers), numbers.device
    meant = {"KIND": packed.kind, "IN_BLOCKS": False, "SCALES": "float", "IN_HEADS": False}
    if isinstance(packed, GgufRows):
        if packed.heads and (rows % packed.heads or packed.heads % 2):
            return None
        meant["IN_BLOCKS"], meant["IN_HEADS"] = True, packed.heads > 0
        table = _table(_NO_TABLE, device)
        return _Layout(
            rows, (numbers, numbers.stride(0), packed.heads, table, 1, 1, 1, table, *_not_nested(table)), meant
        )
    scales = pieces[1]
    group, high = packed.group or columns, packed.rows_per_scale or rows
    if scales.numel() == 1:
        group, high = columns, rows
    grid = -(-rows // high), -(-columns // group)
    found = as_rows(scales, *grid)
    if found is None or scales.dtype not in _SCALES:
        return None
    if scales.dtype == torch.bfloat16:
        found = found.view(torch.int16)
    table = _table(packed.table, device)
    meant["SCALES"], nested = _SCALES[scales.dtype], _not_nested(table, packed.last)
    if len(pieces) > 2:
        outer, inner = pieces[2:]
        are_floats = all(one.dtype == torch.float32 and one.is_contiguous() for one in (outer, inner))
        fits = found.is_contiguous() and outer.numel() * packed.nested_block >= found.numel() and inner.numel() >= 256
        if not are_floats or not fits or scales.dtype != torch.uint8:
            return None
        meant["SCALES"] = "nested"
        nested = (outer, inner, packed.nested_block, packed.nested_offset, packed.last)
    given = (numbers, numbers.stride(0), 0, found, found.stride(0), high, group, table, *nested)
    return _Layout(rows, given, meant)


def _not_nested(table: torch.Tensor, last: float = 1.0) -> tuple[Any, ...]:
    """The same for scales that are not packed, too."""
    return table, table, 1, 0.0, last


@lru_cache(maxsize=16)
def _table(numbers: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device="cpu").to(device)


@lru_cache(maxsize=1)
def _kernels() -> Any:
    from offload.kernels import triton_rows

    return triton_rows
