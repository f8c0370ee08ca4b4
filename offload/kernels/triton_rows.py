"""Triton's functions for packed rows: 8-bit floats, and halves of bytes with a table, with a scale per block.

Always true:
- nothing outside a tensor is read or written, whatever its size
- each number is exact in float32, and is multiplied by its scale once, as in torch's chain
- imported by `accelerated` alone, when a kernel is first needed
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _dense(numbers, step, scales, across, high, group, table, row, column, inside, KIND: tl.constexpr):
    """A tile of the dense value, in float32."""
    row = row.to(tl.int64)
    if KIND == 0:
        byte = tl.load(numbers + row * step + column, mask=inside, other=0).to(tl.int32)
        exponent, fraction = (byte >> 3) & 15, byte & 7
        power = ((tl.where(exponent == 0, 1, exponent) + 117) << 23).to(tl.float32, bitcast=True)
        number = tl.where(exponent == 0, fraction, fraction + 8).to(tl.float32) * power
        number = tl.where(byte & 127 == 127, float("nan"), number)
        number = tl.where(byte & 128 != 0, -number, number)
    else:
        byte = tl.load(numbers + row * step + column // 2, mask=inside, other=0).to(tl.int32)
        is_high = column % 2 == (1 if KIND == 1 else 0)
        number = tl.load(table + tl.where(is_high, byte >> 4, byte & 15))
    scale = tl.load(scales + row // high * across + column // group, mask=inside, other=0)
    return tl.where(inside, number * scale, 0.0)


@triton.jit
def multiply(
    out, x, count, numbers, step, scales, across, high, group, table, rows, columns,
    MOST: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Some packed rows per program, with all rows of activations."""
    first = tl.program_id(0) * HIGH
    row = (first + tl.arange(0, HIGH))[:, None]
    one = tl.arange(0, MOST)[:, None]
    total = tl.zeros((MOST, HIGH), dtype=tl.float32)
    for begin in range(0, columns, WIDE):
        column = (begin + tl.arange(0, WIDE))[None, :]
        inside = (row < rows) & (column < columns)
        dense = _dense(numbers, step, scales, across, high, group, table, row, column, inside, KIND)
        given = tl.load(x + one * columns + column, mask=(one < count) & (column < columns), other=0.0).to(tl.float32)
        total += tl.dot(given, tl.trans(dense), input_precision="ieee")
    place = first + tl.arange(0, HIGH)[None, :]
    tl.store(out + one * rows + place, total.to(out.dtype.element_ty), mask=(one < count) & (place < rows))
