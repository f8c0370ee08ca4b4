"""Triton's functions for packed rows: numbers with a scale per block, and blocks of GGUF files.

Always true:
- nothing outside a tensor is read or written, whatever its size
- `decode` rounds where torch's chain does, and nowhere else: it gives its bits
- imported by `accelerated` alone, when a kernel is first needed
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _byte(numbers, place, inside):
    return tl.load(numbers + place, mask=inside, other=0).to(tl.int32)


@triton.jit
def _half(numbers, place, inside):
    """The float16 at a byte, in float32."""
    bits = _byte(numbers, place, inside) | (_byte(numbers, place + 1, inside) << 8)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _six_bits(numbers, block, group, inside, OFFSET: tl.constexpr):
    """The factor, or the offset, of a group in a block of Q4_K or Q5_K."""
    own = _byte(numbers, block + 4 + OFFSET * 4 + group % 4, inside)
    rest = _byte(numbers, block + 12 + group % 4, inside)
    late = ((rest >> 4) if OFFSET else (rest & 15)) | ((own >> 2) & 48)
    return tl.where(group < 4, own & 63, late).to(tl.float32)


@triton.jit
def _in_blocks(numbers, start, column, inside, KIND: tl.constexpr):
    """A tile of the dense value of rows of blocks, in float32."""
    if KIND == "Q8_0":
        block = start + column // 32 * 34
        byte = _byte(numbers, block + 2 + column % 32, inside)
        return (byte - (byte & 128) * 2).to(tl.float32) * _half(numbers, block, inside)
    if KIND == "Q4_0":
        block = start + column // 32 * 18
        byte = _byte(numbers, block + 2 + column % 16, inside)
        number = tl.where(column % 32 < 16, byte & 15, byte >> 4) - 8
        return number.to(tl.float32) * _half(numbers, block, inside)
    if KIND == "Q6_K":
        block = start + column // 256 * 210
        inner = column % 256
        half, part, place = inner // 128, inner % 128 // 32, inner % 32
        low = _byte(numbers, block + half * 64 + part % 2 * 32 + place, inside)
        low = tl.where(part < 2, low & 15, low >> 4)
        high = _byte(numbers, block + 128 + half * 32 + place, inside) >> (part * 2)
        number = (low | ((high & 3) << 4)) - 32
        factor = _byte(numbers, block + 192 + inner // 16, inside)
        factor = (factor - (factor & 128) * 2).to(tl.float32) * _half(numbers, block + 208, inside)
        return number.to(tl.float32) * factor
    size: tl.constexpr = 144 if KIND == "Q4_K" else 176
    block = start + column // 256 * size
    inner = column % 256
    group = inner // 32
    number = _byte(numbers, block + size - 128 + group // 2 * 32 + inner % 32, inside)
    number = tl.where(group % 2 == 0, number & 15, number >> 4)
    if KIND == "Q5_K":
        number = number | (((_byte(numbers, block + 16 + inner % 32, inside) >> group) & 1) << 4)
    factor = _six_bits(numbers, block, group, inside, 0) * _half(numbers, block, inside)
    offset = _six_bits(numbers, block, group, inside, 1) * _half(numbers, block + 2, inside)
    return number.to(tl.float32) * factor - offset


@triton.jit
def _with_scales(
    numbers, start, scales, across, high, group, table, outer, inner, nested, offset, last, row, column, inside,
    KIND: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """A tile of the dense value of rows whose scales are stored elsewhere, in float32."""
    if KIND == "e4m3":
        byte = _byte(numbers, start + column, inside)
        exponent, fraction = (byte >> 3) & 15, byte & 7
        power = ((tl.where(exponent == 0, 1, exponent) + 117) << 23).to(tl.float32, bitcast=True)
        number = tl.where(exponent == 0, fraction, fraction + 8).to(tl.float32) * power
        number = tl.where(byte & 127 == 127, float("nan"), number)
        number = (number.to(tl.int32, bitcast=True) | (byte & 128) << 24).to(tl.float32, bitcast=True)  # zero, too
    elif KIND == "signed_bytes":
        byte = _byte(numbers, start + column, inside)
        number = (byte - (byte & 128) * 2).to(tl.float32)
    elif KIND == "centred_bytes":
        number = (_byte(numbers, start + column, inside) - 128).to(tl.float32)
    else:
        byte = _byte(numbers, start + column // 2, inside)
        is_high = column % 2 == (1 if KIND == "halves_low" else 0)
        number = tl.load(table + tl.where(is_high, byte >> 4, byte & 15))
    place = row // high * across + column // group
    scale = tl.load(scales + place, mask=inside, other=0)
    if SCALES == "bfloat16":  # given as integers: the interpreter takes subnormal numbers of bfloat16 for zero
        scale = (scale.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif SCALES == "exponent":  # of 2, plus 127
        exponent = scale.to(tl.int32)
        scale = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
    elif SCALES == "nested":  # a number of a table, with a scale and an offset
        scale = tl.load(inner + scale.to(tl.int32)) * tl.load(outer + place // nested, mask=inside, other=0) + offset
    return number * scale.to(tl.float32) * last


@triton.jit
def _dense(
    numbers, step, heads, scales, across, high, group, table, outer, inner, nested, offset, last, row, column, inside,
    KIND: tl.constexpr, IN_BLOCKS: tl.constexpr, SCALES: tl.constexpr, IN_HEADS: tl.constexpr,
):  # fmt: skip
    """A tile of the dense value, in float32; zero outside."""
    stored = row
    if IN_HEADS:  # pairs of rows are stored side by side
        within = row % heads
        stored = row - within + within % (heads // 2) * 2 + within // (heads // 2)
    start = stored.to(tl.int64) * step
    if IN_BLOCKS:
        dense = _in_blocks(numbers, start, column, inside, KIND)
    else:
        dense = _with_scales(
            numbers, start, scales, across, high, group, table, outer, inner, nested, offset, last,
            row, column, inside, KIND, SCALES,
        )  # fmt: skip
    return tl.where(inside, dense, 0.0)


@triton.jit
def multiply(
    out, out_step, x, count,
    numbers, step, heads, scales, across, high, group, table, outer, inner, nested, offset, last, rows, columns,
    MOST: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    KIND: tl.constexpr, IN_BLOCKS: tl.constexpr, SCALES: tl.constexpr, IN_HEADS: tl.constexpr,
):  # fmt: skip
    """Some packed rows per program, with all rows of activations; each lane sums its own columns."""
    first = tl.program_id(0) * HIGH
    row = (first + tl.arange(0, HIGH))[:, None]
    one = tl.arange(0, MOST)[:, None]
    total = tl.zeros((MOST, HIGH, WIDE), dtype=tl.float32)
    for begin in range(0, columns, WIDE):
        column = (begin + tl.arange(0, WIDE))[None, :]
        inside = (row < rows) & (column < columns)
        dense = _dense(
            numbers, step, heads, scales, across, high, group, table, outer, inner, nested, offset, last,
            row, column, inside, KIND, IN_BLOCKS, SCALES, IN_HEADS,
        )  # fmt: skip
        given = tl.load(x + one * columns + column, mask=(one < count) & (column < columns), other=0.0).to(tl.float32)
        total += given[:, None, :] * dense[None, :, :]
    place = first + tl.arange(0, HIGH)[None, :]
    product = tl.sum(total, axis=2).to(out.dtype.element_ty)
    tl.store(out + one * out_step + place, product, mask=(one < count) & (place < rows))


@triton.jit
def decode(
    out, out_step, out_wide, begin,
    numbers, step, heads, scales, across, high, group, table, outer, inner, nested, offset, last, rows, columns,
    HIGH: tl.constexpr, WIDE: tl.constexpr,
    KIND: tl.constexpr, IN_BLOCKS: tl.constexpr, SCALES: tl.constexpr, IN_HEADS: tl.constexpr,
):  # fmt: skip
    """A tile of the dense value per program, from packed row `begin` on: launch it without fused products and sums."""
    place = (tl.program_id(0) * HIGH + tl.arange(0, HIGH))[:, None]
    column = (tl.program_id(1) * WIDE + tl.arange(0, WIDE))[None, :]
    inside = (place < rows) & (column < columns)
    dense = _dense(
        numbers, step, heads, scales, across, high, group, table, outer, inner, nested, offset, last,
        begin + place, column, inside, KIND, IN_BLOCKS, SCALES, IN_HEADS,
    )  # fmt: skip
    tl.store(
        out + place.to(tl.int64) * out_step + column.to(tl.int64) * out_wide,
        dense.to(out.dtype.element_ty),
        mask=inside,
    )
