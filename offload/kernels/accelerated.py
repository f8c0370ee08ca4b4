"""Packed rows on a GPU: decoded, and multiplied, by Triton, where it is installed.

Always true:
- Triton is imported when a kernel is about to be used, and is never needed: without it, or where a small trial of it
  fails, `is_there` is False
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
from typing import Any

import torch

from offload.errors import ArgumentError
from offload.kernels.native import require
from offload.kernels.packed import GgufRows, NumberRows, Packed, WordColumns

log = logging.getLogger("offload.kernels")
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
            product, place = torch.empty(16, 16, device=device), torch.empty_like(dense)
            multiply(packed, [numbers, scales], rows, product)
            decode(packed, [numbers, scales], 0, place)
            if not torch.equal(place, dense / 2) or not torch.equal(product, dense[:, :16].t() / 2):
                return False
    except Exception as error:  # of any kind: without a compiler, without support for the device
        log.warning("Triton can't be used on %s: %s", device, error)
        return False
    return True


def description() -> str:
    """What packed weights are multiplied with on a GPU, in words."""
    return "Triton" if find_spec("triton") is not None else "torch, after they are decoded (Triton is not installed)"


def supports(packed: Packed, pieces: Sequence[torch.Tensor], columns: int, dtype: torch.dtype) -> bool:
    """Whether the kernels take rows that are packed so, in pieces of these sizes and strides, for values of a dtype."""
    return dtype in _DTYPES and not packed.is_rounded and _layout(packed, pieces, columns) is not None


def multiply(packed: Packed, pieces: Sequence[torch.Tensor], x: torch.Tensor, place: torch.Tensor) -> None:
    """`place = x @ rows.T`, of up to 16 rows of activations; `place` has as many columns as there are packed rows.

    Raises:
        ArgumentError: the kernels do not take these sizes or strides.
    """
    given = _given(packed, pieces, x.shape[1])
    count, rows = place.shape
    fits = given.rows == rows and 0 < len(x) == count <= MOST_ROWS and (rows < 2 or place.stride(1) == 1)
    require(fits, place.shape, "of", x.shape, "and", given.rows, "rows")
    most = 1 << (count - 1).bit_length()
    _kernels().multiply[(-(-rows // _HIGH),)](
        *(place, place.stride(0), x.contiguous(), count, *given.given, rows, x.shape[1]),
        MOST=most, HIGH=_HIGH, WIDE=_WIDE, enable_fp_fusion=True, **given.meant,
    )  # fmt: skip


def decode(packed: Packed, pieces: Sequence[torch.Tensor], first: int, place: torch.Tensor) -> None:
    """Decode packed rows, from row `first` on, into a tensor of shape (rows, columns), in its dtype.

    Raises: as `multiply`.
    """
    if packed.is_turned:  # the packed rows are columns of the dense value: only all of them
        place = place.t()
    rows, columns = place.shape
    given = _given(packed, pieces, columns)
    is_whole = rows == given.rows or not packed.is_turned
    require(is_whole and 0 <= first <= given.rows - rows, rows, "rows from", first, "on, of", given.rows)
    programs = -(-rows // _HIGH), -(-columns // _WIDE)
    _kernels().decode[programs](
        *(place, *place.stride(), first, *given.given, rows, columns),
        HIGH=_HIGH, WIDE=_WIDE, enable_fp_fusion=False, **given.meant,
    )  # fmt: skip


def _given(packed: Packed, pieces: Sequence[torch.Tensor], columns: int) -> _Layout:
    layout = _layout(packed, pieces, columns)
    if layout is None:
        raise ArgumentError(f"the kernels do not take {[piece.shape for piece in pieces]} for {columns} columns")
    return layout


@dataclass(frozen=True)
class _Layout:
    """What both kernels are given.

    Attributes:
        rows: how many rows are packed.
        given: the numbers, their step, rows per head, scales, the width of their grid, rows and columns that share one,
            the table; scales of the scales, their numbers, how many share one, and what is added; the last factor.
        meant: the constants of the kernels, which say how these are to be read.
    """

    rows: int
    given: tuple[Any, ...]
    meant: dict[str, Any]


def _layout(packed: Packed, pieces: Sequence[torch.Tensor], columns: int) -> _Layout | None:
    if isinstance(packed, WordColumns) or packed.kind not in _KINDS:
        return None
    pieces_by_role = packed.by_role(pieces, columns)
    if pieces_by_role is None:
        return None
    numbers = pieces_by_role["numbers"].view(torch.uint8)
    rows, step, scales = len(numbers), numbers.stride(0), pieces_by_role.get("scales")
    meant = {"KIND": packed.kind, "IN_BLOCKS": scales is None, "SCALES": "float", "IN_HEADS": False}
    if isinstance(packed, GgufRows):
        table = _table(_NO_TABLE, numbers.device)
        meant["IN_HEADS"] = packed.heads > 0
        return _Layout(rows, (numbers, step, packed.heads, table, 1, 1, 1, table, *_not_nested(table)), meant)
    if not rows or scales is None or packed.roles not in _ROLES or scales.dtype not in _SCALES:
        return None
    group, high = packed.shared_by(scales, columns, rows)
    meant["SCALES"] = _SCALES[scales.dtype]
    if scales.dtype == torch.bfloat16:
        scales = scales.view(torch.int16)
    table = _table(packed.table, numbers.device)
    nested = _not_nested(table, packed.last)
    if "nested_scales" in pieces_by_role:
        if not scales.is_contiguous():
            return None
        meant["SCALES"], (outer, inner) = "nested", (pieces_by_role["nested_scales"], pieces_by_role["nested_numbers"])
        nested = (outer, inner, packed.nested_block, packed.nested_offset, packed.last)
    return _Layout(rows, (numbers, step, 0, scales, scales.stride(0), high, group, table, *nested), meant)


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
