"""Triton's kernels for packed rows, run by its interpreter on the CPU: as torch's chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import offload
from bench import gpu
from offload.checkpoints.forms import formats, fp8
from offload.checkpoints.forms.bitsandbytes import _NUMBERS, _ONE_OF_127, _decode_4_bits, _decode_8_bits
from offload.checkpoints.forms.fp8 import decode
from offload.checkpoints.forms.numbers import E2M1, of_halves, scaled
from offload.errors import ArgumentError
from offload.kernels import accelerated
from offload.kernels.packed import BLOCKS, GgufRows, NumberRows, Packed
from offload.tensor import blocks
from offload.tensor.views import handle_of
from tests.kernels.test_gguf_rows import same_bits
from tests.prefetch import delayed_device
from tests.processes import run_script

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

LEVELS = tuple(number - 8.0 for number in range(16))
ROWS, COLUMNS = 80, 160  # no whole tiles
_NESTED = ("numbers", "scales", "nested_scales", "nested_numbers")
BLOCK_KINDS = {"Q4_0": 18, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}  # and the bytes of a block


def bits(high: int, wide: int) -> torch.Tensor:
    """Every byte, and random ones."""
    found = torch.randint(0, 256, (high, wide), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    every = torch.arange(256, dtype=torch.uint8)
    found.view(-1)[:256] = every[: found.numel()]
    return found


def factors(high: int, wide: int, dtype: torch.dtype) -> torch.Tensor:
    """Random ones, and zero, a subnormal, a large one, infinity and not a number."""
    found = torch.rand(high, wide, generator=torch.Generator().manual_seed(1)) + 0.01
    some = torch.tensor([0.0, 1e-40, 3e38, float("inf"), float("nan"), -1.5])
    found.view(-1)[: len(some)] = some
    return found.to(dtype)


def halves(numbers: torch.Tensor, scales: torch.Tensor, *, table: tuple[float, ...], group: int) -> torch.Tensor:
    return scaled(of_halves(numbers, table), scales.float(), 1, group)


def of_halves_low(table: tuple[float, ...]) -> tuple[NumberRows, Callable[..., torch.Tensor]]:
    return NumberRows("halves_low", group=32, table=table), partial(halves, table=table, group=32)


FORMS: dict[str, tuple[NumberRows, Callable[..., torch.Tensor]]] = {
    "FP8 in blocks": (
        NumberRows("e4m3", group=64, rows_per_scale=32),
        partial(decode, rows=32, columns=64, is_fp4=False),
    ),
    "FP8 in rows": (NumberRows("e4m3"), partial(decode, rows=1, columns=COLUMNS, is_fp4=False)),
    "4-bit integers in groups": of_halves_low(LEVELS),
    "4-bit floats in groups": of_halves_low(E2M1),
    "4-bit integers, the first in the high half": (
        NumberRows("halves_high", group=32, table=LEVELS),
        lambda numbers, scales: halves(numbers << 4 | numbers >> 4, scales, table=LEVELS, group=32),
    ),
    "8-bit integers": (
        NumberRows("signed_bytes", group=32),
        lambda numbers, scales: scaled(numbers.view(torch.int8).float(), scales.float(), 1, 32),
    ),
    "8-bit integers of bitsandbytes": (
        NumberRows("signed_bytes", last=_ONE_OF_127),
        lambda numbers, scales: _decode_8_bits(numbers.view(torch.int8), scales),
    ),
    "8-bit integers around 128": (
        NumberRows("centred_bytes"),
        lambda numbers, scales: scaled(numbers.float() - 128, scales.float(), 1, COLUMNS),
    ),
}


def pieces_of(form: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    packed, _ = FORMS[form]
    stored = bits(ROWS, COLUMNS // 2 if "halves" in packed.kind else COLUMNS)
    scales = factors(-(-ROWS // packed.rows_per_scale), -(-COLUMNS // (packed.group or COLUMNS)), dtype)
    return [stored.view(torch.float8_e4m3fn) if packed.kind == "e4m3" else stored, scales]


def product(packed: Packed, pieces: list[torch.Tensor], x: torch.Tensor, count: int = ROWS) -> torch.Tensor:
    place = torch.empty(len(x), count)
    accelerated.multiply(packed, pieces, x, place)
    return place


def test_the_kernels_are_as_the_chain(delayed_library):
    """In one process with Triton's interpreter, which it has to know before it is imported."""
    code = "import sys; from tests.kernels.test_accelerated import check; check(sys.argv[1])"

    assert "checked" in run_script(code, delayed_library, env={"TRITON_INTERPRET": "1"}, fresh=True)


def check(library: str) -> None:
    """All that the interpreter is asked."""
    torch.set_num_threads(1)
    accelerated._HIGH = 32  # fewer programs, which the interpreter runs one after the other
    assert accelerated._works(torch.device("cpu"))
    for form in FORMS:
        numbers_are_those_of_the_chain(form)
        what_is_decoded_has_the_bits_of_the_chain(*FORMS[form], [pieces_of(form), pieces_of(form, torch.bfloat16)])
        a_product_is_no_further_from_the_truth_than_possible(form)
    stacks_that_are_stored_turned_are_decoded()
    blocks_that_run_across_rows_are_decoded()
    for kind, nbytes in BLOCK_KINDS.items():
        blocks_are_decoded_and_multiplied(kind, nbytes)
    device, used = on_the_stand_in(Path(library))
    a_layer_on_a_device_is_multiplied_by_its_packed_bytes(device, used)
    used.clear()
    experts_on_a_device_are_multiplied_by_their_packed_bytes(device, used)
    print("checked")


def numbers_are_those_of_the_chain(form: str) -> None:
    """Whatever the finite factors, of each dtype: seen by products with rows that are 1 in one column."""
    packed, chain = FORMS[form]
    for dtype in (torch.float32, torch.bfloat16):
        numbers, scales = pieces_of(form, dtype)
        pieces = [without_nan(numbers), torch.where(scales.isfinite(), scales, 1).clamp(-1e30, 1e30)]
        columns = torch.eye(COLUMNS).split(accelerated.MOST_ROWS)
        found = [product(packed, pieces, rows) for rows in columns]
        assert torch.equal(chain(*pieces).T, torch.cat(found))  # type: ignore[arg-type]


def what_is_decoded_has_the_bits_of_the_chain(
    packed: GgufRows | NumberRows, chain: Callable[..., torch.Tensor], given: list[list[torch.Tensor]]
) -> None:
    """Infinite and subnormal ones, and not-a-numbers, too; from a row within. The interpreter truncates to bfloat16."""
    for pieces in given:
        dense = chain(*pieces)
        for dtype, first in ((torch.float32, 0), (torch.float32, 7), (torch.float16, 20)):
            place = torch.full((len(dense) - first, dense.shape[1] + 3), 7.0, dtype=dtype)
            accelerated.decode(packed, pieces, first, place[:, :-3])
            assert same_bits(dense[first:].to(dtype), place[:, :-3])
            assert bool((place[:, -3:] == 7).all())


def stacks_that_are_stored_turned_are_decoded() -> None:
    """As of gpt-oss, with exponents: (blocks, outputs, 16) bytes are (inputs, outputs). All of them or none."""
    packed = NumberRows("halves_low", group=32, table=E2M1, is_turned=True)
    blocks, exponents = bits(24, 5 * 16).view(24, 5, 16).transpose(0, 1), bits(24, 5).T
    exponents[0, :3] = torch.tensor([0, 1, 255], dtype=torch.uint8)
    place, expected = torch.zeros(160, 24), fp8.decode_mxfp4(blocks, exponents)

    accelerated.decode(packed, [blocks, exponents], 0, place)

    assert same_bits(expected, place)
    for first, part in ((32, place[32:]), (0, place[:, :8])):
        with pytest.raises(ArgumentError, match="do not take"):
            accelerated.decode(packed, [blocks, exponents], first, part)


def blocks_that_run_across_rows_are_decoded() -> None:
    """As of bitsandbytes: bytes and scales are lists."""
    numbers, scales = bits(128, 32).view(-1, 1), factors(64, 2, torch.float32).flatten()
    packed = NumberRows("halves_high", group=64, table=_NUMBERS["nf4"])
    place = torch.zeros(64, 128)

    accelerated.decode(packed, [numbers, scales], 0, place)

    given = {"numbers": _NUMBERS["nf4"], "columns": 128, "block": 64}
    expected = _decode_4_bits(numbers, scales, scales_block=None, offset=0.0, **given)
    assert same_bits(expected, place)

    packed = replace(packed, roles=_NESTED, nested_block=32, nested_offset=0.125)
    nested = [bits(1, 128).flatten(), torch.tensor([0.5, 1e-40, 3e38, -0.25]), torch.randn(256)]

    accelerated.decode(packed, [numbers, *nested], 0, place)

    expected = _decode_4_bits(numbers, *nested, scales_block=32, offset=0.125, **given)
    assert same_bits(expected, place)
    assert not accelerated.supports(packed, [numbers, nested[0], nested[1][:3], nested[2]], 128, torch.float32)


def blocks_are_decoded_and_multiplied(kind: str, nbytes: int) -> None:
    """Random bytes: any factors. With heads, pairs of rows are apart."""
    stored, x = bits(24, 3 * nbytes), torch.randn(4, 3 * BLOCKS[kind][0])
    chain = partial(blocks.decode, kind=kind)
    with_heads = lambda rows: chain(rows).view(4, 3, 2, -1).transpose(1, 2).reshape(24, -1)  # noqa: E731
    what_is_decoded_has_the_bits_of_the_chain(GgufRows(kind), chain, [[stored]])
    what_is_decoded_has_the_bits_of_the_chain(GgufRows(kind, heads=6), with_heads, [[stored]])

    usual = usual_blocks(kind, stored)
    found, dense = product(GgufRows(kind, heads=6), [usual], x, 24), with_heads(usual)
    limit = (x.abs().double() @ dense.abs().double().T) * x.shape[1] * 2.0**-22
    assert bool(((found.double() - x.double() @ dense.double().T).abs() <= limit).all())


def usual_blocks(kind: str, stored: torch.Tensor) -> torch.Tensor:
    """With factors of ordinary size."""
    usual = stored.clone().view(-1, BLOCK_KINDS[kind])
    factor = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    places = {"Q6_K": [208], "Q4_K": [0, 2], "Q5_K": [0, 2]}.get(kind, [0])
    for place in places:
        usual[:, place : place + 2] = factor
    return usual.view(stored.shape)


def without_nan(numbers: torch.Tensor) -> torch.Tensor:
    is_e4m3 = numbers.dtype == torch.float8_e4m3fn
    return (numbers.view(torch.uint8) & 0xBF).view(numbers.dtype) if is_e4m3 else numbers


def a_product_is_no_further_from_the_truth_than_possible(form: str) -> None:
    """With float32 sums; and its rows do not depend on the rows beside them."""
    packed, chain = FORMS[form]
    numbers, scales = pieces_of(form)
    pieces = [without_nan(numbers), torch.rand_like(scales) + 0.5]
    dense, x = chain(*pieces), torch.randn(16, COLUMNS)
    found, alone = (product(packed, pieces, rows) for rows in (x, x[5:6]))
    limit = (x.abs().double() @ dense.abs().double().T) * COLUMNS * 2.0**-24
    assert bool(((found.double() - x.double() @ dense.double().T).abs() <= limit).all())
    assert torch.equal(found[5], alone[0])


def a_layer_on_a_device_is_multiplied_by_its_packed_bytes(device: torch.device, used: list[str]) -> None:
    """On the stand-in; within `exact()`, with the dense weight, which is decoded there."""
    with TemporaryDirectory() as folder:
        weight = gpu.in_fp8(gpu.Scale(layers=1, side=256, passes=1, copied=1), Path(folder), device)[0]
        x, dense = torch.randn(2, 3, 256).bfloat16(), weight.to("cpu").materialize()
        bias = torch.randn(256).bfloat16()
        found = F.linear(x.to(device), weight, bias.to(device)).cpu()
        with offload.exact():
            exact = F.linear(x.to(device), weight).cpu()
    assert ["multiply", "decode"] == used
    truth = x.double() @ dense.double().T
    assert torch.equal(F.linear(x, dense), exact)
    limit = 2.0**-8 * (x.abs().double() @ dense.abs().double().T + bias.abs())  # weights, product and sum are rounded
    assert bool(((found.double() - truth - bias.double()).abs() <= limit).all())


def experts_on_a_device_are_multiplied_by_their_packed_bytes(device: torch.device, used: list[str]) -> None:
    """Those that have tokens; a stack that is stored turned."""
    pieces = {"e_blocks": bits(96, 32).view(4, 24, 2, 16), "e_scales": torch.full((4, 24, 2), 126, dtype=torch.uint8)}
    with TemporaryDirectory() as folder:
        stack = formats.unpacked(gpu._stored(Path(folder), pieces), {"quant_method": "mxfp4"})["e"]
        dense = stack.materialize().bfloat16()
        experts = gpu._as_bfloat16(handle_of(stack), device)
        x, ends = torch.randn(5, 64).bfloat16(), torch.tensor([2, 2, 5, 5], dtype=torch.int32)
        found = torch._grouped_mm(x.to(device), experts, offs=ends.to(device)).cpu()
    assert ["multiply", "multiply"] == used
    for rows, expert in ((slice(0, 2), 0), (slice(2, 5), 2)):
        truth = x[rows].double() @ dense[expert].double()
        limit = 2.0**-8 * (x[rows].abs().double() @ dense[expert].abs().double())
        assert bool(((found[rows].double() - truth).abs() <= limit).all())


def on_the_stand_in(library: Path) -> tuple[torch.device, list[str]]:
    """The stand-in, and what is used of the kernels there. The interpreter has no way to the memory of this device."""
    device, used = delayed_device.register(library), list[str]()
    delayed_device.ops.late(20)
    multiplier, decoder = accelerated.multiply, accelerated.decode

    def multiply(packed: Packed, pieces: list[torch.Tensor], x: torch.Tensor, place: torch.Tensor) -> None:
        assert {device} == {piece.device for piece in (*pieces, x)}
        used.append("multiply")
        found = torch.empty(place.shape, dtype=torch.float32)
        multiplier(packed, [piece.cpu() for piece in pieces], x.cpu().float(), found)
        place.copy_(found)

    def decode(packed: Packed, pieces: list[torch.Tensor], first: int, place: torch.Tensor) -> None:
        used.append("decode")
        dense = torch.empty(place.shape, dtype=torch.float32)
        decoder(packed, [piece.cpu() for piece in pieces], first, dense)
        place.copy_(dense)

    accelerated.is_there, accelerated.multiply, accelerated.decode = lambda _: True, multiply, decode
    return device, used


COMPILED = [  # a kind, how its scales are read, and their type
    *(("e4m3", *scales) for scales in (("float", "*fp32"), ("bfloat16", "*i16"), ("exponent", "*u8"))),
    ("halves_low", "float", "*fp16"),
    ("halves_high", "nested", "*u8"),
    ("signed_bytes", "float", "*fp32"),
    ("centred_bytes", "bfloat16", "*i16"),
    *((kind, "float", "*fp32") for kind in BLOCK_KINDS),
]


@pytest.mark.parametrize(("kind", "scales", "type_of_scales"), COMPILED)
def test_the_kernels_compile_for_a_gpu_that_is_not_here(kind, scales, type_of_scales, tmp_path, monkeypatch):
    """For compute capability 8.0; and what decodes fuses no product with a sum, which would round otherwise."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from offload.kernels import triton_rows

    meant = {"KIND": kind, "IN_BLOCKS": kind in BLOCK_KINDS, "SCALES": scales, "IN_HEADS": kind in BLOCK_KINDS}
    tiles = {"MOST": 2, "HIGH": accelerated._HIGH, "WIDE": accelerated._WIDE}
    pointers = {"out": "*bf16", "x": "*bf16", "numbers": "*u8", "scales": type_of_scales}
    types = {**pointers, **dict.fromkeys(("table", "outer", "inner"), "*fp32"), "offset": "fp32", "last": "fp32"}

    def code_of(function: Any, *, is_fused: bool) -> str:
        constants = {name: value for name, value in {**meant, **tiles}.items() if name in function.arg_names}
        signature = {name: types.get(name, "i32") for name in function.arg_names}
        signature |= dict.fromkeys(constants, "constexpr")
        source, target = ASTSource(function, signature, constants), GPUTarget("cuda", 80, 32)
        return str(compile(source, target, options={"enable_fp_fusion": is_fused}).asm["ptx"])

    assert "fma.rn.f32" in code_of(triton_rows.multiply, is_fused=True)
    decoding = code_of(triton_rows.decode, is_fused=False)
    assert "fma.rn" not in decoding
    assert ".ftz" not in decoding  # subnormal numbers stay


def test_pieces_of_other_sizes_are_not_taken():
    packed = NumberRows("e4m3", group=64, rows_per_scale=32)
    numbers, scales = bits(ROWS, COLUMNS).view(torch.float8_e4m3fn), torch.ones(3, 3)
    x = torch.ones(1, COLUMNS)

    for wrong in ([numbers, scales[:2]], [numbers, scales.double()]):
        assert not accelerated.supports(packed, wrong, COLUMNS, torch.float32)
    for pieces, rows in [([numbers[:-1], scales], x), ([numbers, scales], torch.ones(17, COLUMNS))]:
        with pytest.raises(ArgumentError, match="do not take"):
            product(packed, pieces, rows)
    for first in (-1, 1):
        with pytest.raises(ArgumentError, match="do not take"):
            accelerated.decode(packed, [numbers, scales], first, torch.empty(ROWS, COLUMNS))
