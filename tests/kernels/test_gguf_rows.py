"""Rows of GGUF blocks in C: decoded as the `gguf` package does, multiplied in one order."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import ArgumentError
from offload.kernels import native
from offload.kernels.packed import BLOCKS, CODED, GgufRows
from tests.campaigns import amount
from tests.kernels.multiplying import multiply

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(native.library() is None, reason="the kernels were not built")

LEVELS = range(native.best_level() + 1)
BFLOAT16 = 3  # the level whose products of bfloat16 are of numbers that are rounded to it, but those of blocks
DTYPES = list(native.DTYPES)


def some_bytes(kind: str, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Random rows: factors are any bit patterns, among them NaN, infinities and subnormal numbers."""
    numbers, nbytes = BLOCKS[kind]
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, columns // numbers * nbytes), dtype=torch.uint8, generator=generator)


def dequantized(rows: torch.Tensor, kind: str) -> torch.Tensor:
    with np.errstate(all="ignore"):
        found = gguf.quants.dequantize(rows.contiguous().numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(found)


@cache
def tame_bytes(kind: str, rows: int, columns: int) -> torch.Tensor:
    """Random rows whose numbers are finite and about 1."""
    many = some_bytes(kind, 64 * rows, columns, seed=1)
    numbers, nbytes = BLOCKS[kind]
    blocks = many.view(-1, nbytes)
    largest = dequantized(blocks, kind).abs().amax(1)
    kept = blocks[largest.isfinite() & (largest < 100) & (largest > 1e-3)]
    return kept[: rows * columns // numbers].reshape(rows, -1)


def decoded(rows: torch.Tensor, kind: str, columns: int, dtype: torch.dtype, level: int) -> torch.Tensor:
    found = torch.empty(len(rows), columns, dtype=dtype)
    native.decode(GgufRows(kind).matrix([rows], columns), 0, found, level=level)
    return found


def multiplied(
    x: torch.Tensor, rows: torch.Tensor, kind: str, level: int, bias: torch.Tensor | None = None, dtype: Any = None
) -> torch.Tensor:
    found = torch.empty(len(x), len(rows), dtype=dtype or x.dtype)
    multiply(GgufRows(kind).matrix([rows], x.shape[1]), x, bias, found, level=level)
    return found


def same_bits(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Of NaN only that it is one: torch's own casts give several."""
    whole = {4: torch.int32, 2: torch.int16}[expected.itemsize]
    return bool(((expected.view(whole) == found.view(whole)) | (expected.isnan() & found.isnan())).all())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", BLOCKS)
def test_rows_are_decoded_as_by_the_package_bit_for_bit(kind, level):
    rows = some_bytes(kind, 200, 512)
    expected = dequantized(rows, kind)

    for dtype in DTYPES:
        assert same_bits(expected.to(dtype), decoded(rows, kind, 512, dtype, level)), dtype
    assert (0, 512) == decoded(rows[:0], kind, 512, torch.float32, level).shape


@pytest.mark.parametrize("level", LEVELS)
def test_all_halves_are_decoded_as_factors(level):
    """Q8_0 with each of the 65,536 factors; casts meet every rounding of their products."""
    rows = some_bytes("Q8_0", 2048, 1024)
    rows.view(-1, 34)[:, :2] = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(-1, 1).view(torch.uint8)
    expected = dequantized(rows, "Q8_0")

    for dtype in DTYPES:
        assert same_bits(expected.to(dtype), decoded(rows, "Q8_0", 1024, dtype, level)), dtype


def as_multiplied(dense: torch.Tensor, level: int) -> torch.Tensor:
    """The numbers of decoded rows by which bfloat16 numbers are multiplied."""
    return dense.bfloat16().double() if level == BFLOAT16 else dense.double()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", BLOCKS)
def test_products_are_as_exact_as_those_of_the_decoded_rows(kind, level):
    """Accumulated in float32, of bfloat16 numbers too."""
    for dtype, shape, most in ((torch.float32, (40, 512), 3e-7), (torch.bfloat16, (43, 1536), 1e-6)):
        rows = tame_bytes(kind, *shape)
        is_rounded = dtype == torch.bfloat16 and kind in CODED
        dense = as_multiplied(dequantized(rows, kind), level if is_rounded else 0)
        x = torch.randn(7, shape[1], generator=torch.Generator().manual_seed(2)).to(dtype)
        exact, size = x.double() @ dense.T, x.abs().double() @ dense.abs().T

        error = (multiplied(x, rows, kind, level, dtype=torch.float32).double() - exact).abs() / size

        assert most > error.max()
    assert (7, 0) == multiplied(x, rows[:0], kind, level).shape


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if kind not in CODED])
@pytest.mark.parametrize("columns", [7 * 32, 7 * 256, 33 * 256], ids=str)
def test_all_instruction_sets_give_the_same_products(kind, dtype, columns):
    """With some columns, and with so many that they are taken in parts; a row is that of the product with it alone."""
    if columns % BLOCKS[kind][0]:
        pytest.skip("no whole blocks")
    rows = tame_bytes(kind, 11, columns)
    x = (torch.randn(6, columns, generator=torch.Generator().manual_seed(2)) ** 5).to(dtype)
    for out in {torch.float32, dtype}:
        expected = multiplied(x, rows, kind, 0, dtype=out)

        for level in LEVELS:
            assert torch.equal(expected, multiplied(x, rows, kind, level, dtype=out)), (level, out)
        alone = [multiplied(row[None], rows[n : n + 1], kind, LEVELS[-1], dtype=out) for row in x for n in range(11)]
        assert torch.equal(expected, torch.cat(alone).view(6, 11))


CODES = {  # where the codes of a block are
    "Q2_K": (0, 80), "Q3_K": (0, 108), "Q6_K": (0, 208), "TQ2_0": (0, 64), "IQ4_XS": (8, None),
    "Q4_1": (4, None), "Q5_1": (4, None), "MXFP4": (1, None),
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL"), (2, None)),
}  # fmt: skip
EXTREMES = [
    *(0.0, 1.0, 2 - 2**-23, -2 + 2**-23, 2 - 2**-7, -1.0, 2**-6),
    *(-(2**-6), 1 / 3, 2**-14 * (1 - 2**-24), -(2**-20)),
]


@given(
    kind=st.sampled_from([kind for kind in BLOCKS if kind not in CODED]),
    dtype=st.sampled_from(DTYPES),
    blocks=st.integers(1, 9),
    bytes_=st.lists(st.sampled_from([0, 0xFF, 0x0F, 0xF0, 0x80, 0x7F, 0x55, 0xAA]), min_size=1, max_size=5),
    x=st.lists(st.sampled_from(EXTREMES), min_size=1, max_size=9),
    count=st.integers(1, 6),
)
@settings(max_examples=amount("shapes", 100, 5000), deadline=None)
@pytest.mark.campaign("shapes")
def test_codes_and_activations_at_their_extremes_saturate_nothing(kind, dtype, blocks, bytes_, x, count):
    """The largest of 32 activations is rounded to 2^14, codes to all ones: whatever the vectors' sums, they hold it.

    The offset of a block is added to the middle of its codes in float32, so that it is as exact as the largest number
    that the block could hold.
    """
    columns = blocks * BLOCKS[kind][0]
    rows = tame_bytes(kind, 3, columns).clone().view(3 * blocks, -1)
    first, last = CODES.get(kind, (16, None))
    part, largest = rows[:, first:last], torch.zeros(())
    for codes in ([0], [0xFF], bytes_):  # the last ones stay
        part[:] = torch.tensor(codes, dtype=torch.uint8).repeat(part.numel())[: part.numel()].view(part.shape)
        dense = dequantized(rows.view(3, -1), kind).double()
        largest = torch.maximum(dense.abs(), largest)
    rows = rows.view(3, -1)
    given_x = torch.tensor(x).repeat(count * columns)[: count * columns].view(count, -1).to(dtype)
    expected = multiplied(given_x, rows, kind, 0, dtype=torch.float32)
    exact, size = given_x.double() @ dense.T, given_x.double().abs() @ dense.abs().T
    most = 3e-7 * size + 2.0**-28 * dense.abs().sum(1) + 2.0**-23 * (given_x.double().abs() @ largest.T)

    assert bool(((expected.double() - exact).abs() <= most).all())
    for level in LEVELS[1:]:
        assert torch.equal(expected, multiplied(given_x, rows, kind, level, dtype=torch.float32)), level


def errors(found: torch.Tensor, x: torch.Tensor, dense: torch.Tensor) -> tuple[float, float]:
    error = (found.double() - x.double() @ dense.double().T).abs()
    return float(error.max()), float(error.mean())


AMONG_SMALL_ONES = [
    *((kind, torch.float32, 100, 1000) for kind in ("Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q4_K", "Q6_K")),
    *((kind, torch.bfloat16, 32, large) for kind in ("Q4_0", "Q8_0", "Q4_K", "Q6_K") for large in (1, 30, 1e5)),
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("kind", "dtype", "step", "large"), AMONG_SMALL_ONES)
def test_large_activations_among_small_ones_cost_no_more_than_in_the_dense_product(kind, dtype, step, large, level):
    """Also if all are positive, where what is added to the integers has to cancel out.

    In bfloat16 also where the largest are multiplied by nothing, so that all is of those beside them.
    """
    is_whole = dtype == torch.float32
    rows = as_blocks(torch.randn(64, 1024, generator=torch.Generator().manual_seed(1)), kind)
    if not is_whole and kind in ("Q4_0", "Q8_0"):  # the first of 32, in Q4_0 with the seventeenth, too
        rows.view(64, 32, -1)[:, :, 2] = 8 if kind == "Q4_0" else 0
    dense = dequantized(rows, kind)
    x = torch.randn(8, 1024, generator=torch.Generator().manual_seed(2))
    x[:, ::step] *= large
    x[4:] = x[4:].abs() if is_whole else x[4:]

    for some in x.to(dtype).split(4 if is_whole else 8):
        largest, mean = errors(multiplied(some, rows, kind, level, dtype=dtype), some, dense)
        largest_of_dense, mean_of_dense = errors(some @ dense.to(dtype).T, some, dense)
        assert mean <= mean_of_dense
        assert largest <= largest_of_dense or not is_whole


def as_blocks(dense: torch.Tensor, kind: str) -> torch.Tensor:
    """Blocks whose numbers are about those of a matrix; random integers where the package does not quantize."""
    try:
        return torch.from_numpy(gguf.quants.quantize(dense.numpy(), gguf.GGMLQuantizationType[kind]))
    except NotImplementedError:
        rows = some_bytes(kind, *dense.shape)
        blocks = rows.view(-1, BLOCKS[kind][1])
        for at, factor in {"Q2_K": [(80, 0.1), (82, 0.15)], "Q4_K": [(0, 0.01), (2, 0.075)], "Q6_K": [(208, 1e-3)]}[
            kind
        ]:
            blocks[:, at : at + 2] = torch.tensor([factor], dtype=torch.float16).view(torch.uint8)
        return rows


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_activation_that_meets_a_zero_costs_its_neighbours_a_known_part_of_it(dtype, level):
    """2 to the power of -29 of the largest of 32 activations, for each of them."""
    rows = as_blocks(torch.randn(64, 1024, generator=torch.Generator().manual_seed(1)), "Q8_0")
    rows.view(64, -1, 34)[:, :, 2] = 0
    dense = dequantized(rows, "Q8_0").double()
    x = torch.randn(4, 1024, generator=torch.Generator().manual_seed(2)).to(dtype)
    x[:, ::32] = 60_000
    exact, size = x.double() @ dense.T, x.abs().double() @ dense.abs().T

    error = (multiplied(x, rows, "Q8_0", level, dtype=torch.float32).double() - exact).abs()

    assert bool((error <= 3e-7 * size + 60_000 / 2**29 * dense.abs().sum(1)).all())
    assert bool((size > 500).all())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K"])
def test_activations_that_integers_do_not_hold_are_multiplied_as_floats(kind, level):
    rows = tame_bytes(kind, 9, 512)
    dense = dequantized(rows, kind)
    x = torch.randn(7, 512, generator=torch.Generator().manual_seed(2))
    usual = multiplied(x[[1, 6]], rows, kind, level)
    x[0, 5], x[2, 300], x[3], x[4], x[5] = torch.inf, torch.nan, x[3] * 1e-30, x[4] * 1e30, 0

    found = multiplied(x, rows, kind, level)

    assert torch.equal(usual, found[[1, 6]])
    assert torch.equal((x @ dense.T)[[0, 2]].isfinite(), found[[0, 2]].isfinite())
    assert torch.equal(torch.zeros(9), found[5])
    size = x[3:5].abs().double() @ dense.abs().double().T
    assert 3e-7 > ((found[3:5].double() - x[3:5].double() @ dense.double().T).abs() / size).max()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_product_depends_neither_on_others_nor_on_threads(dtype, level, threads):
    rows = tame_bytes("Q4_K", 333, 512)
    x = torch.randn(17, 512, generator=torch.Generator().manual_seed(3)).to(dtype)
    bias = torch.randn(333).to(dtype)
    threads(1)
    expected = torch.cat([multiplied(one[None], rows, "Q4_K", level, bias) for one in x])

    for count in (1, 2, 3):
        threads(count)
        for step in (2, 3, 4, 5, 17):
            found = torch.cat([multiplied(some, rows, "Q4_K", level, bias) for some in x.split(step)])
            assert torch.equal(expected, found)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("level", LEVELS)
def test_pairs_of_heads_are_taken_apart(level):
    rows, heads = tame_bytes("Q4_0", 48, 64), 8
    dense = dequantized(rows, "Q4_0")
    expected = dense.view(6, 4, 2, 64).transpose(1, 2).reshape(48, 64)
    matrix = GgufRows("Q4_0", heads=heads).matrix([rows], 64)
    x = torch.randn(3, 64)

    whole, some, picked = torch.empty(48, 64), torch.empty(13, 64), torch.empty(3, 64)
    native.decode(matrix, 0, whole, level=level)
    native.decode(matrix, 21, some, level=level)
    native.pick(matrix, torch.tensor([40, 3, 3]), picked, level=level)
    product = torch.empty(3, 48)
    multiply(matrix, x, None, product, level=level)

    assert torch.equal(expected, whole)
    assert torch.equal(expected[21:34], some)
    assert torch.equal(expected[[40, 3, 3]], picked)
    in_pairs = multiplied(x, rows, "Q4_0", level)
    assert torch.equal(in_pairs.view(3, 6, 4, 2).transpose(2, 3).reshape(3, 48), product)


def at_the_end_of_memory(rows: torch.Tensor, pages: mmap.mmap) -> torch.Tensor:
    """The rows, read-only, before a page that can't be read, and wherever that leaves their start."""
    room = len(pages) - mmap.PAGESIZE
    pages[room - rows.numel() : room] = rows.numpy().tobytes()
    stored = torch.frombuffer(pages, dtype=torch.uint8, count=rows.numel(), offset=room - rows.numel()).view(rows.shape)
    start = stored.data_ptr() + rows.numel() - room
    libc = ctypes.CDLL(None, use_errno=True)
    assert 0 == libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(room), mmap.PROT_READ)
    assert 0 == libc.mprotect(ctypes.c_void_p(start + room), ctypes.c_size_t(mmap.PAGESIZE), 0)
    return stored


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", BLOCKS)
def test_nothing_beside_the_rows_is_read_or_written(kind, level):
    rows = tame_bytes(kind, 3, 512)
    pages = mmap.mmap(-1, 3 * mmap.PAGESIZE)
    stored = at_the_end_of_memory(rows, pages)
    around = torch.full((5, 520), 7.0)

    native.decode(GgufRows(kind).matrix([stored], 512), 0, around[1:4, :512], level=level)
    assert torch.equal(dequantized(rows, kind), around[1:4, :512])
    assert bool((around[[0, 4]] == 7).all() and (around[:, 512:] == 7).all())
    for dtype in DTYPES:
        for count in (1, 2):
            x = torch.ones(count, 512, dtype=dtype)
            assert same_bits(multiplied(x, rows, kind, level), multiplied(x, stored, kind, level))


def test_rows_of_another_size_are_not_taken():
    rows = some_bytes("Q4_K", 4, 512)

    for wrong, columns in [(rows, 256), (rows[:, :-1], 512), (rows.to(torch.int32), 512), (rows.T, 4), (rows, 511)]:
        assert GgufRows("Q4_K").by_role([wrong], columns) is None
        with pytest.raises(ArgumentError, match="do not take"):
            GgufRows("Q4_K").matrix([wrong], columns)
    assert GgufRows("Q4_K", heads=3).by_role([rows], 512) is None
