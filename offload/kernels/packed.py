"""How rows are packed, and the matrices that the library is given.

Always true:
- a description is immutable and picklable; it names what is stored, and holds no data
- `by_role` looks at sizes, dtypes and strides alone: those of meta tensors, too
- `matrix` checks these, and every index that is stored, before it passes on an address
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, TypeAlias

import torch

from offload.errors import ArgumentError
from offload.kernels.native import Matrix, memory_of, require

_BLOCKS = {  # numbers and bytes of a block, by kind, in the order of `BLOCK_KINDS` in kernels.h; see `limbs.h`
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
}
CODED = {  # the same, in the order of `CODED_KINDS`
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "TQ1_0": (256, 54),
    "NVFP4": (64, 36),
}
_BOOKS = {  # codes of a codebook, and the numbers that each stands for
    "IQ2_XXS": (256, 8),
    "IQ2_XS": (512, 8),
    "IQ2_S": (1024, 8),
    "IQ3_XXS": (256, 4),
    "IQ3_S": (512, 4),
    "IQ1_S": (2048, 8),
    "IQ1_M": (2048, 8),
}
BLOCKS = _BLOCKS | CODED  # of GGUF files
QUARTERS = ("quarter_0", "quarter_1", "quarter_2", "quarter_3")  # two of the bits of a byte, for one number
_ROWS = BLOCKS | dict.fromkeys(QUARTERS, (32, 32))
_BITS = {  # per number, for numbers whose factors are stored elsewhere, in the order of `NUMBER_KINDS` in kernels.h
    "halves_low": 4,
    "halves_high": 4,
    "signed_bytes": 8,
    "centred_bytes": 8,
    "e4m3": 8,
    "e5m2": 8,
    "bfloat16": 16,
    "float16": 16,
    "float32": 32,
}
_WORDS = ("inputs_in_words", "outputs_in_words")  # in the order of `WORD_KINDS` in kernels.h
_KINDS = {kind: number for number, kind in enumerate([*_BLOCKS, *_BITS, *CODED, *QUARTERS, *_WORDS])}
FACTORS = {  # dtypes of factors, in the order of the enumeration in kernels.h
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.uint8: 3,  # a power of two
    torch.float8_e4m3fn: 4,
    torch.int8: 5,
    torch.int32: 6,  # eight rows in a word
}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_BY_ROLE = {  # dtypes that the kernels take
    "scales": (*_FLOATS, torch.uint8, torch.float8_e4m3fn),
    "zeros": (*_FLOATS, torch.int8, torch.int32),
}
ByRole: TypeAlias = "dict[str, torch.Tensor]"

_NESTED = 7
_NONE = -1
_LANES = 16  # outputs that are computed together, of words


def takes(role: str, dtype: torch.dtype) -> bool:
    """Whether the kernels take pieces of this dtype in this role: see `NumberRows`."""
    return role not in _BY_ROLE or dtype in _BY_ROLE[role]


@dataclass(frozen=True)
class GgufRows:
    """Rows of blocks that hold their own factors, as in a GGUF file.

    Attributes:
        kind: the type of the blocks, as the GGUF format names it.
        heads: how many rows a head has, if its pairs are stored side by side and wanted apart, as in llama.cpp's
            queries and keys; else 0.
        is_rounded: see `Packed`.
    """

    kind: str
    heads: int = 0
    is_rounded: bool = False
    is_turned: ClassVar[bool] = False

    @property
    def in_integers(self) -> bool:
        """See `Packed`."""
        return self.kind in _BLOCKS

    def by_role(self, pieces: Sequence[torch.Tensor], columns: int) -> ByRole | None:
        """See `Packed`."""
        [rows] = pieces
        numbers, nbytes = _ROWS[self.kind]
        is_whole = columns % numbers == 0 and rows.shape[1:] == (columns // numbers * nbytes,)
        are_pairs = not self.heads or len(rows) % self.heads == self.heads % 2 == 0
        has_book = self.kind not in _BOOKS or _codebook(self.kind) is not None
        fits = rows.dtype == torch.uint8 and is_whole and rows.stride(-1) == 1 and are_pairs and has_book
        return {"numbers": rows} if fits else None

    def matrix(self, pieces: Sequence[torch.Tensor], columns: int) -> Matrix:
        """See `Packed`."""
        rows = _fitting(self, pieces, columns)["numbers"]
        matrix = _matrix(memory_of(rows), rows.stride(0), columns, self.kind, len(rows))
        matrix.heads = self.heads
        if self.kind in _BOOKS:
            book = _codebook(self.kind)
            assert book is not None
            matrix.book = memory_of(book)
        return matrix


@dataclass(frozen=True)
class NumberRows:
    """Rows of numbers whose factors are stored elsewhere: (number - zero point) / divisor * factor * last.

    Attributes:
        kind: the kind of the numbers: a name in `NUMBER_KINDS` in kernels.h.
        roles: the roles of the pieces, in order: "numbers", "scales", "zeros", "divisor" (of the scales),
            "nested_scales" and "nested_numbers" (of scales that are packed, too).
        group: how many columns share a factor: 16, or a multiple of 32; 0 for all.
        rows_per_scale: how many rows share factors; 0 for all.
        table: the 16 numbers for which half a byte stands.
        last: the number by which products are multiplied at last.
        nested_block, nested_offset: how many packed scales share a factor, and what is added to them.
    """

    kind: str
    roles: tuple[str, ...] = ("numbers", "scales")
    group: int = 0
    rows_per_scale: int = 1
    table: tuple[float, ...] = (0.0,) * 16
    last: float = 1.0
    nested_block: int = 1
    nested_offset: float = 0.0
    is_turned: bool = False
    is_rounded: bool = False
    in_integers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        assert self.group % 32 == 0 or self.group == 16, "groups are of whole vectors"

    def matrix(self, pieces: Sequence[torch.Tensor], columns: int) -> Matrix:
        """See `Packed`."""
        by_role = _fitting(self, pieces, columns)
        numbers, scales, zeros = by_role["numbers"], by_role.get("scales"), by_role.get("zeros")
        matrix = _matrix(memory_of(numbers), numbers.stride(0), columns, self.kind, len(numbers))
        matrix.last, matrix.table = self.last, (ctypes.c_float * 16)(*self.table)
        if scales is not None:
            matrix.group, matrix.rows_per_scale = self.shared_by(scales, columns, len(numbers))
            matrix.scale_dtype, matrix.scales = FACTORS[scales.dtype], memory_of(scales)
            matrix.scale_step = scales.stride(0) * scales.itemsize
        if zeros is not None:
            matrix.zero_dtype, matrix.zeros = FACTORS[zeros.dtype], memory_of(zeros)
            matrix.zero_step = zeros.stride(0) * zeros.itemsize
        if "divisor" in by_role:
            matrix.divisor = float(by_role["divisor"])
        if "nested_scales" in by_role:
            matrix.nested_block, matrix.nested_offset = self.nested_block, self.nested_offset
            matrix.scale_dtype, matrix.nested_scales = _NESTED, memory_of(by_role["nested_scales"])
            matrix.nested_numbers = memory_of(by_role["nested_numbers"])
        return matrix

    def by_role(self, pieces: Sequence[torch.Tensor], columns: int) -> ByRole | None:
        """See `Packed`."""
        if self.is_turned:
            pieces = [piece.transpose(0, 1) for piece in pieces]
        by_role = dict(zip(self.roles, pieces, strict=True))
        if not by_role["numbers"].dim() or by_role["numbers"].stride(-1) != 1 < by_role["numbers"].itemsize:
            return None
        numbers = as_rows(by_role["numbers"].view(torch.uint8), None, (columns * _BITS[self.kind] + 7) // 8)
        if numbers is None or not all(takes(role, piece.dtype) for role, piece in by_role.items()):
            return None
        if "scales" not in by_role:
            return {"numbers": numbers}
        group, each = self.shared_by(by_role["scales"], columns, len(numbers))
        groups, high = -(-columns // group), -(-len(numbers) // each)
        by_role["numbers"] = numbers
        for role in ("scales", "zeros") if "zeros" in by_role else ("scales",):
            is_in_words = by_role[role].dtype == torch.int32  # of eight rows
            factors = as_rows(by_role[role], -(-len(numbers) // 8) if is_in_words else high, groups)
            if factors is None:
                return None
            by_role[role] = factors
        nested = [by_role[role] for role in ("nested_scales", "nested_numbers") if role in by_role]
        if nested:
            are_floats = all(one.dtype == torch.float32 and one.is_contiguous() for one in nested)
            are_enough = nested[0].numel() * self.nested_block >= len(numbers) * groups and nested[1].numel() >= 256
            return by_role if are_floats and are_enough and by_role["scales"].dtype == torch.uint8 else None
        return by_role

    def shared_by(self, scales: torch.Tensor, columns: int, rows: int) -> tuple[int, int]:
        """How many columns share a factor, and how many rows."""
        is_for_all = scales.numel() == 1 or not self.rows_per_scale
        return self.group or -(-columns // 32) * 32, max(1, rows) if is_for_all else self.rows_per_scale


@dataclass(frozen=True)
class WordColumns:
    """Integers in words, outputs innermost; the pieces are turned: (outputs, ...), as a recipe has them.

    The pieces are the words, zero points, scales, and, for inputs in an order of their own, the group of each.

    Attributes:
        bits: the width of an integer.
        less: what was subtracted from the zero points before they were stored.
        is_awq: whether a word holds eight outputs of an input, and not some inputs of an output.
    """

    bits: int = 4
    less: int = 0
    is_awq: bool = False
    is_turned: ClassVar[bool] = False
    is_rounded: ClassVar[bool] = False
    in_integers: ClassVar[bool] = False

    def by_role(self, pieces: Sequence[torch.Tensor], columns: int) -> ByRole | None:
        """See `Packed`."""
        words, zeros, scales = (piece.t() for piece in pieces[:3])  # (inputs, outputs) and (groups, outputs)
        groups, outputs = scales.shape
        each = 32 // self.bits
        shapes = (columns, -(-outputs // 8)) if self.is_awq else (-(-columns // each), outputs)
        wanted = [(words, shapes), (zeros, (groups, -(-outputs // each))), (scales, (groups, outputs))]
        if any(tuple(piece.shape) != shape or piece.stride(1) != 1 for piece, shape in wanted):
            return None
        are_known = words.dtype == zeros.dtype == torch.int32 and scales.dtype in _FLOATS
        are_enough = groups > 0 and outputs >= _LANES and not (self.is_awq and outputs % 8)
        orders = ((one.dtype, tuple(one.shape), one.is_contiguous()) for one in pieces[3:])
        fits = are_known and are_enough and all(one == (torch.int32, (columns,), True) for one in orders)
        return {"numbers": words, "zeros": zeros, "scales": scales} if fits else None

    def matrix(self, pieces: Sequence[torch.Tensor], columns: int) -> Matrix:
        """See `Packed`."""
        words, zeros, scales = _fitting(self, pieces, columns).values()
        groups, outputs = scales.shape
        matrix = _matrix(memory_of(words), words.stride(0) * 4, columns, _WORDS[self.is_awq], outputs)
        matrix.group, matrix.scale_dtype = -(-columns // groups), FACTORS[scales.dtype]
        matrix.scales, matrix.scale_step = memory_of(scales), scales.stride(0) * scales.itemsize
        matrix.zeros, matrix.zero_step = memory_of(zeros), zeros.stride(0) * 4
        matrix.bits, matrix.less = self.bits, self.less
        for order in pieces[3:]:
            matrix.order = memory_of(order)
            least, most = map(int, order.aminmax()) if columns else (0, 0)
            require(0 <= least <= most < groups, "groups from", least, "to", most, "of", groups)
        return matrix


def _matrix(address: int, step: int, columns: int, kind: str, rows: int) -> Matrix:
    matrix = Matrix(address, step, columns, _KINDS[kind], 0, _NONE, _NONE)
    matrix.group, matrix.rows_per_scale, matrix.divisor, matrix.last, matrix.outputs = columns, 1, 1, 1, rows
    return matrix


def _fitting(packed: Packed, pieces: Sequence[torch.Tensor], columns: int) -> ByRole:
    by_role = packed.by_role(pieces, columns)
    if by_role is None:
        sizes = [(tuple(piece.shape), piece.dtype) for piece in pieces]
        raise ArgumentError(f"the kernels do not take {sizes} for {columns} columns of {packed}")
    return by_role


Packed: TypeAlias = GgufRows | NumberRows | WordColumns
"""How the rows of a matrix are packed.

`is_turned` says whether its rows are the columns of the dense value; `is_rounded`, whether the dense value is computed
in another dtype than float32, so that decoding it gives other last bits; `in_integers`, whether its kernel multiplies
in integers: see `limbs.h`. `by_role` gives the pieces, (rows, ...) each, as matrices whose rows are in one place each;
None if the kernels do not take such sizes or strides. `matrix` makes the matrix over them, valid while they are, and
raises an `ArgumentError` for others.
"""


def as_rows(piece: torch.Tensor, high: int | None, wide: int) -> torch.Tensor | None:
    """A piece as a matrix, each of whose rows is in one place; None if it is not of that size, or lies otherwise.

    Args:
        high: None for any number of rows.
    """
    if piece.dim() == 3 and piece.stride(1) == piece.shape[2] * piece.stride(2):
        piece = piece.view(len(piece), -1)
    if piece.dim() != 2 or piece.shape[1] != wide:
        if not piece.is_contiguous() or wide == 0 or piece.numel() % wide:
            return None
        piece = piece.view(-1, wide)
    is_so = (high is None or len(piece) == high) and (wide == 1 or piece.stride(1) == 1)
    return piece if is_so else None


@lru_cache(maxsize=len(_BOOKS))
def _codebook(kind: str) -> torch.Tensor | None:
    """What the codes stand for, (codes, 8 or 4), int8; None if the `gguf` package has none of that shape."""
    from gguf import quants

    quant = getattr(quants, kind, None)
    if quant is None:
        return None
    quant.init_grid()
    if quant.grid is None or tuple(quant.grid.shape[-2:]) != _BOOKS[kind]:
        return None
    return torch.from_numpy(quant.grid).reshape(_BOOKS[kind]).to(torch.int8)
