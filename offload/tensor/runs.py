"""Which stored rows make rows of a value: one answer for all that decodes, multiplies or picks them.

Always true:
- it follows from shapes, strides and offsets: nothing is read
- the runs of a cut are its rows in order, each once
- the pieces of a run give whole granules: `first` rows, then those of the run, and maybe others
- a run does not refer to the recipe, which may refer to it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import torch

from offload.kernels.native import DTYPES, Matrix
from offload.kernels.packed import NumberRows, Packed
from offload.storage.handle import Handle
from offload.system.modes import no_functions, no_modes
from offload.tensor.guests import CPU

if TYPE_CHECKING:
    from offload.tensor.recipes import Piece

Decode: TypeAlias = Callable[..., torch.Tensor]

_DENSE = {dtype: NumberRows(str(dtype).removeprefix("torch."), ("numbers",)) for dtype in DTYPES}


@dataclass(frozen=True)
class Decoder:
    """How rows are computed from rows of pieces.

    Attributes:
        decode: computes some rows from the pieces' rows, as a tensor of any dtype that can be copied to the value's.
            It is pure and picklable.
        per: for each piece, its rows per granule; None if all of it is always needed.
        granule: how many rows have to be computed together, such as blocks that share a scale.
        is_divisible: whether some rows of a granule can be computed alone: from a proportional number of rows of
            each piece, or from all that a granule takes if a piece has fewer rows per granule than it. If a granule
            has several rows, `decode` is then a partial function with `rows`: how many share what a granule takes.
        packed: how the kernels take the pieces, if they do; they give the same numbers as `decode`.
    """

    decode: Decode
    per: tuple[int | None, ...]
    granule: int = 1
    is_divisible: bool = False
    packed: Packed | None = None


@dataclass(frozen=True)
class RowRun:
    """Rows that follow one another, all decoded alike.

    Attributes:
        pieces: cuts of stored or computed values, and the number of each, in the order in which they are read.
        count: how many rows there are.
        row: the shape of a row.
        dtypes: the dtypes to which its numbers are rounded, one after the other.
        decoder: what computes the rows from the pieces; None if they are those of the only one.
        first: how many rows the pieces give before the first one.
        is_whole: whether the pieces give no other rows.
        is_exact: whether products are those with the dense rows.
    """

    pieces: tuple[tuple[int, Piece], ...]
    count: int
    row: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    decoder: Decoder | None = None
    first: int = 0
    is_whole: bool = True
    is_exact: bool = False

    @cached_property
    def packed(self) -> Packed | None:
        """How the kernels take the pieces; None: they do not."""
        if self.decoder is not None:
            return self.decoder.packed
        [(_, piece)] = self.pieces
        is_matrix = len(self.row) == 1 and piece.view_spec.stride(1) == 1
        return _DENSE.get(piece.view_spec.dtype) if is_matrix else None

    @property
    def is_turned(self) -> bool:
        """Whether the packed rows are columns of the value: they are computed as a whole."""
        return self.packed is not None and self.packed.is_turned

    @property
    def columns(self) -> int:
        """Of a packed row."""
        return self.count if self.is_turned else self.row[-1]

    @property
    def begin(self) -> int:
        """How many packed rows the pieces give before the first one."""
        return self.first * math.prod(self.row[:-1])

    @property
    def outputs(self) -> int:
        """How many packed rows there are."""
        return self.row[-1] if self.is_turned else self.count * math.prod(self.row[:-1])

    def rounded(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows, as they are computed, in the last dtype."""
        for dtype in self.dtypes:
            rows = rows.to(dtype)
        return rows

    def rounds_once(self, dtype: torch.dtype) -> bool:
        """Whether its numbers, which are computed in float32, can be rounded to a dtype at once."""
        return all(one in (torch.float32, dtype) for one in self.dtypes)

    @cached_property
    def fits(self) -> bool:
        """Whether C takes pieces of these sizes and strides."""
        if self.packed is None or not self.row or (self.is_turned and not self.is_whole):
            return False
        with no_functions(), no_modes():
            return self.packed.by_role(self.specs(), self.columns) is not None

    def specs(self) -> list[torch.Tensor]:
        """The pieces as the decoder takes them, but meta tensors."""
        return [piece.view_spec for _, piece in sorted(self.pieces, key=lambda one: one[0])]

    def values(self, device: torch.device = CPU) -> list[torch.Tensor]:
        """The pieces as the decoder takes them."""
        values = {number: piece.value(device=device) for number, piece in self.pieces}
        return [values[number] for number in range(len(values))]

    def reads(self) -> Iterator[tuple[Handle, torch.Tensor]]:
        """The views of stored values that are read for it."""
        return (read for _, piece in self.pieces for read in piece.reads(piece.view_spec))

    def matrix(self, values: list[torch.Tensor]) -> Matrix:
        """Its packed rows as C takes them, over such values; raises `ArgumentError` if it does not."""
        assert self.packed is not None, "only what C supports is given to it"
        return self.packed.matrix(values, self.columns)
