"""Numbers whose factors are stored elsewhere: decoded as the torch chains of `checkpoints/forms` do, and multiplied."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from offload.checkpoints.forms import integers
from offload.checkpoints.forms.bitsandbytes import _NUMBERS, _ONE_OF_127
from offload.checkpoints.forms.integers import _decode_awq, _decode_gptq
from offload.checkpoints.forms.numbers import E2M1, lessened, of_exponents, of_halves, of_words, scaled
from offload.errors import ArgumentError
from offload.kernels import native
from offload.kernels.packed import QUARTERS, GgufRows, NumberRows, Packed, WordColumns
from tests.kernels.multiplying import multiply
from tests.kernels.test_gguf_rows import LEVELS, as_multiplied, same_bits
from tests.kernels.test_sizes import OTHERS

pytestmark = pytest.mark.skipif(native.library() is None, reason="the kernels were not built")

ROWS = 64
WIDTHS = (256, 96, 100, 40, 17)  # whole vectors and groups, and not
FLOATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
CENTRED = tuple(float(number - 8) for number in range(16))

_ALIVE: list[torch.Tensor] = []  # pieces of the matrix that was made last
Case = tuple[str, Packed, list[torch.Tensor], torch.Tensor]


def some_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def some_words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


def factors(*shape: int) -> torch.Tensor:
    """Some are so large that a product overflows, or so small that it is subnormal."""
    return torch.randn(shape) * 2.0 ** torch.randint(-130, 127, shape)


def small_floats(width: int) -> Iterator[Case]:
    groups, raw = -(-width // 32), some_bytes(ROWS, width)
    finite = torch.where((raw & 127) < 100, raw, 0)
    for dtype, kind in FLOATS.items():
        packed, clean = raw.view(dtype), finite.view(dtype)
        blocks = factors(ROWS // 32, groups)
        yield (
            "blocks",
            NumberRows(kind, group=32, rows_per_scale=32),
            [packed, blocks],
            scaled(packed.float(), blocks, 32, 32),
        )
        rows = torch.rand(ROWS, 1).bfloat16()
        yield "rows", NumberRows(kind), [packed, rows], scaled(packed.float(), rows.float(), 1, width)
        one = torch.rand(1)
        yield "one", NumberRows(kind, rows_per_scale=0), [packed, one], scaled(packed.float(), one, ROWS, width)
        powers = some_bytes(ROWS, groups)
        expected = scaled(clean.float(), of_exponents(powers), 1, 32)
        yield "powers of two", NumberRows(kind, group=32), [clean, powers], expected


def whole_numbers(width: int) -> Iterator[Case]:
    groups = -(-width // 32)
    packed, scales = some_bytes(ROWS, width).view(torch.int8), torch.rand(ROWS, groups)
    zeros = some_bytes(ROWS, groups).view(torch.int8)
    expected = scaled(lessened(packed.float(), zeros.float(), 1, 32), scales, 1, 32)
    described = NumberRows("signed_bytes", ("numbers", "scales", "zeros"), group=32)
    yield "bytes with zero points", described, [packed, scales, zeros], expected
    rows = torch.rand(ROWS)
    expected = scaled(packed.float(), rows.view(-1, 1), 1, width).mul_(_ONE_OF_127)
    yield "vectors of 127ths", NumberRows("signed_bytes", last=_ONE_OF_127), [packed, rows], expected
    if width % 4 == 0:
        words = some_words(ROWS, width // 4)
        expected = scaled(of_words(words, 8).float(), scales, 1, 32)
        yield "bytes in words", NumberRows("centred_bytes", group=32), [words, scales], expected
    if width % 8 == 0:
        words, points = some_words(ROWS, width // 8), some_words(ROWS // 8, groups)
        zeros = of_words(points.t().contiguous(), 4).t().float()
        expected = scaled(lessened(of_words(words, 4).float(), zeros, 1, 32), scales, 1, 32)
        described = NumberRows("halves_low", ("numbers", "scales", "zeros"), group=32, table=CENTRED)
        yield "halves in words", described, [words, scales, points], expected


def halves(width: int) -> Iterator[Case]:
    if width % 2:
        return
    packed, groups = some_bytes(ROWS, width // 2), -(-width // 32)
    powers = some_bytes(ROWS, groups) // 4 + 90
    expected = scaled(of_halves(packed, E2M1), of_exponents(powers), 1, 32)
    yield "e2m1", NumberRows("halves_low", group=32, table=E2M1), [packed, powers], expected
    if width % 16 == 0:
        scales, whole = (some_bytes(ROWS, width // 16) % 127).view(torch.float8_e4m3fn), torch.tensor([3.7])
        expected = scaled(of_halves(packed, E2M1), (scales.bfloat16() / whole).float(), 1, 16)
        described = NumberRows("halves_low", ("numbers", "scales", "divisor"), group=16, table=E2M1)
        yield "e2m1 in sixteens", described, [packed, scales, whole], expected
    for table in _NUMBERS.values() if width % 32 == 0 else ():
        packed_scales, numbers = some_bytes(ROWS * groups), torch.randn(256)
        outer = torch.rand(-(-ROWS * groups // 4))
        scales = scaled(numbers[packed_scales.long()].view(1, -1), outer.view(1, -1), 1, 4).add_(0.3).view(ROWS, -1)
        expected = scaled(of_halves(packed, table, high_first=True), scales, 1, 32)
        roles = ("numbers", "scales", "nested_scales", "nested_numbers")
        described = NumberRows("halves_high", roles, group=32, table=table, nested_block=4, nested_offset=0.3)
        yield "nested", described, [packed.view(-1, 1), packed_scales, outer, numbers], expected


def floats(width: int) -> Iterator[Case]:
    for dtype, kind in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16"), (torch.float32, "float32")):
        dense = torch.randn(ROWS, width).to(dtype)
        yield kind, NumberRows(kind, ("numbers",)), [dense], dense.float()


def words(width: int) -> Iterator[Case]:
    if width % 32:
        return
    for bits in (2, 4, 8):
        for outputs in (16, 48, 176):
            each, groups = 32 // bits, width // 32
            pieces = [some_words(width // each, outputs), some_words(groups, outputs // each)]
            pieces = [*(piece.t() for piece in pieces), torch.rand(groups, outputs).half().t()]
            usual = torch.arange(width, dtype=torch.int32) // 32
            for order in (usual, usual[torch.randperm(width)]):
                given = [*pieces, order]
                yield f"{bits} bits", WordColumns(bits, 1), given, _decode_gptq(*given, bits=bits, less=1)
    for outputs in (16, 24, 176):
        pieces = [some_words(width, outputs // 8), some_words(width // 32, outputs // 8)]
        pieces = [*(piece.t() for piece in pieces), torch.rand(width // 32, outputs).half().t()]
        yield "turned", WordColumns(is_awq=True), pieces, _decode_awq(*pieces)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("cases", [small_floats, whole_numbers, halves, floats, words])
def test_numbers_are_decoded_as_by_torch_bit_for_bit(cases, width, level):
    torch.manual_seed(width)
    for name, described, pieces, expected in cases(width):
        matrix = described.matrix(pieces, width)
        assert matrix is not None, name
        for dtype in native.DTYPES:
            found = torch.empty(len(expected), width + 3, dtype=dtype)[:, :width]
            native.decode(matrix, 0, found, level=level)

            assert same_bits(expected.to(dtype), found), (name, dtype)
            if isinstance(described, NumberRows):
                turned = torch.empty(width, len(expected) + 5, dtype=dtype)[:, : len(expected)]
                native.decode_turned(matrix, turned, level=level)

                assert same_bits(expected.t().to(dtype), turned), (name, dtype)
        some = torch.empty(6, width)
        native.decode(matrix, 5, some, level=level)

        assert same_bits(expected[5:11], some), name

        rows = torch.tensor([11, 5, 5, len(expected) - 1, 0, 9])
        native.pick(matrix, rows, some, level=level)

        assert same_bits(expected[rows], some), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("width", [*WIDTHS, 4128])
@pytest.mark.parametrize("cases", [small_floats, whole_numbers, halves, floats, words])
def test_products_with_numbers_are_accurate_and_do_not_depend_on_other_rows(cases, width, level, dtype):
    torch.manual_seed(width)
    is_rounded = dtype == torch.bfloat16 and cases is not words
    for name, described, pieces, expected in cases(width) if width < 4128 or is_rounded else ():
        matrix, x = described.matrix(pieces, width), torch.randn(6, width).to(dtype)
        dense = as_multiplied(expected, level if is_rounded else 0)
        tame = ((expected.abs() < 1e30) & ((expected.abs() > 1e-37) | (expected == 0))).all(1)
        found, one = torch.empty(6, len(expected)), torch.empty(1, len(expected))
        multiply(matrix, x, None, found, level=level)
        multiply(matrix, x[3:4], None, one, level=level)

        error = (found.double() - x.double() @ dense.T).abs()[:, tame]
        assert bool((error <= 1e-6 * (x.double().abs() @ dense.abs().T)[:, tame]).all()), name
        assert same_bits(found[3:4], one), name


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("quarter", range(4))
def test_two_bits_of_each_byte_are_decoded_as_by_torch(quarter, level):
    packed, x = some_bytes(20, 96), torch.randn(5, 96)
    expected = integers._decode_quarter(packed, shift=2 * quarter)
    matrix = GgufRows(QUARTERS[quarter]).matrix([packed], 96)

    for dtype in native.DTYPES:
        found = torch.empty(20, 96, dtype=dtype)
        native.decode(matrix, 0, found, level=level)
        assert torch.equal(expected.to(dtype), found)
    product = torch.empty(5, 20)
    multiply(matrix, x, None, product, level=level)
    torch.testing.assert_close(x @ expected.float().T, product)


def test_pieces_of_other_sizes_are_not_taken():
    packed, scales = some_bytes(ROWS, 64).view(torch.int8), torch.rand(ROWS, 2)
    described = NumberRows("signed_bytes", group=32)

    assert described.by_role([packed, scales], 64) is not None
    assert described.by_role([packed, scales], 65) is None
    for wrong in (scales[1:], scales[:, :1], torch.rand(ROWS, 3)):
        assert described.by_role([packed, wrong], 64) is None
        with pytest.raises(ArgumentError, match="do not take"):
            described.matrix([packed, wrong], 64)


@pytest.mark.parametrize("width", [256, 40])
@pytest.mark.parametrize("cases", [small_floats, whole_numbers, halves, floats, words])
def test_a_piece_of_another_size_is_refused_or_has_the_same_numbers(cases, width):
    """What is taken is decoded as a whole, so that the sanitizer sees what is read."""
    torch.manual_seed(width)
    changing = "another dtype", "a dimension less"  # the latter gives one factor for all rows
    for name, described, pieces, expected in cases(width):
        for place, piece in enumerate(pieces):
            for other, change in OTHERS.items():
                matrix = matrix_or_none(described, pieces, place, change, width)
                if matrix is None:
                    continue
                found = torch.empty(matrix.outputs, width)
                native.decode(matrix, 0, found)
                both = min(len(found), len(expected))

                assert other not in ("no memory", "memory that was taken away") or not piece.numel()
                assert other in changing or same_bits(expected[:both], found[:both]), (name, place, other)


def matrix_or_none(
    described: Packed,
    pieces: list[torch.Tensor],
    place: int,
    change: Callable[[torch.Tensor], torch.Tensor],
    width: int,
) -> native.Matrix | None:
    try:
        _ALIVE[:] = [*pieces[:place], change(pieces[place]), *pieces[place + 1 :]]
        return described.matrix(_ALIVE, width)
    except (ValueError, RuntimeError):  # an ArgumentError is the first, what torch raises for a view is the second
        return None


def test_an_order_that_names_other_groups_is_not_taken():
    pieces = [some_words(8, 16).t(), some_words(2, 2).t(), torch.rand(2, 16).half().t()]
    for wrong in (2, -1):
        order = torch.zeros(64, dtype=torch.int32)
        order[63] = wrong

        with pytest.raises(ArgumentError, match="do not take"):
            WordColumns().matrix([*pieces, order], 64)
