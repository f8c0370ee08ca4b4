"""A real accelerator, of any kind, or the stand-in (`make gpu DRY=1`): as on the CPU. Left out where there is none."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import offload
from bench import gpu
from offload.checkpoints.forms.bitsandbytes import _NUMBERS, _decode_4_bits
from offload.checkpoints.forms.fp8 import decode as fp8
from offload.checkpoints.forms.fp8 import decode_mxfp4 as mxfp4
from offload.checkpoints.forms.integers import _decode_awq, _decode_gptq
from offload.checkpoints.forms.numbers import E2M1, of_halves, scaled
from offload.kernels import accelerated
from offload.kernels.packed import GgufRows, NumberRows, Packed
from offload.prefetch import staging
from offload.tensor.blocks import decode
from offload.tensor.wrapper import guest_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")]
SMALL = gpu.Scale(layers=4, side=512, passes=1, copied=1 << 20)


BLOCKS = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def words(*shape: int) -> torch.Tensor:
    return random_bytes(*shape[:-1], 4 * shape[-1]).view(torch.int32)


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape) + 0.01


DECODERS: dict[str, tuple[Callable[..., torch.Tensor], Callable[[], list[torch.Tensor]]]] = {
    "FP8": (
        partial(fp8, rows=128, columns=128, is_fp4=False),
        lambda: [random_bytes(256, 256).view(torch.float8_e4m3fn), scales(2, 2)],
    ),
    "NF4": (
        partial(_decode_4_bits, numbers=_NUMBERS["nf4"], columns=128, block=64, scales_block=None, offset=0.0),
        lambda: [random_bytes(64 * 64), scales(128)],
    ),
    "GPTQ": (
        partial(_decode_gptq, bits=4, less=1),
        lambda: [words(64, 16), words(8, 4), scales(64, 4), torch.randint(0, 4, (128,), dtype=torch.int32)],
    ),
    "AWQ": (_decode_awq, lambda: [words(8, 128), words(8, 4), scales(64, 4)]),
    "MXFP4": (mxfp4, lambda: [random_bytes(64, 4, 16).transpose(0, 1), random_bytes(64, 4).t()]),
    **{
        kind: (partial(decode, kind=kind), lambda nbytes=nbytes: [random_bytes(8, 2 * nbytes)])
        for kind, nbytes in BLOCKS.items()
    },
}


LEVELS = tuple(number - 8.0 for number in range(16))
PACKED: dict[str, tuple[Packed, Callable[..., torch.Tensor], Callable[[], list[torch.Tensor]]]] = {
    "FP8": (NumberRows("e4m3", group=128, rows_per_scale=128), *DECODERS["FP8"]),
    "4-bit integers": (
        NumberRows("halves_low", group=32, table=LEVELS),
        lambda numbers, factors: scaled(of_halves(numbers, LEVELS), factors.float(), 1, 32),
        lambda: [random_bytes(72, 80), scales(72, 5).bfloat16()],
    ),
    "MXFP4": (NumberRows("halves_low", group=32, table=E2M1, is_turned=True), *DECODERS["MXFP4"]),
    "NF4": (NumberRows("halves_high", group=64, table=_NUMBERS["nf4"]), *DECODERS["NF4"]),
    **{kind: (GgufRows(kind), *DECODERS[kind]) for kind in ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")},
}


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_gives_the_bits_that_it_gives_on_the_cpu(name: str) -> None:
    """Of random bytes: not-a-numbers, infinities and subnormal factors among them."""
    function, make = DECODERS[name]
    pieces = make()

    found = function(*(piece.to(gpu.accelerator()) for piece in pieces)).cpu()
    expected = function(*pieces)

    assert torch.equal(expected.isnan(), found.isnan())
    assert torch.equal(expected.nan_to_num(0).view(torch.int32), found.nan_to_num(0).view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PACKED)
def test_a_kernel_decodes_to_the_bits_of_the_decoder(name: str, dtype: torch.dtype) -> None:
    """Of random bytes, too; and its products are no further from the truth than those with the dense weight."""
    device = gpu.accelerator()
    if not accelerated.is_there(device):
        pytest.skip("there is no Triton, or it does not work here")
    packed, function, make = PACKED[name]
    pieces = make()
    expected = function(*pieces)
    on_device, place = [piece.to(device) for piece in pieces], torch.empty(expected.shape, dtype=dtype, device=device)

    accelerated.decode(packed, on_device, 0, place)

    found, dense = place.cpu(), expected.to(dtype)
    assert torch.equal(dense.isnan(), found.isnan())
    words = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    assert torch.equal(dense.nan_to_num(0).view(words), found.nan_to_num(0).view(words))

    usual = expected.nan_to_num(0).clamp(-100, 100).to(dtype)
    rows_of = (lambda value: value.t()) if packed.is_turned else (lambda value: value)
    usual, dense, expected = map(rows_of, (usual, dense, expected))
    for rows in (1, 5, 16):
        x = torch.randn(rows, dense.shape[1]).to(dtype)
        product, alone = (torch.empty(count, len(dense), dtype=dtype, device=device) for count in (rows, 1))
        accelerated.multiply(packed, on_device, x.to(device), product)
        accelerated.multiply(packed, on_device, x[-1:].to(device), alone)
        assert torch.equal(product[-1:].nan_to_num(), alone.nan_to_num())
        if torch.equal(usual, dense):  # no infinities
            truth = x.double() @ expected.double().T
            limit = (x.abs().double() @ expected.abs().double().T) * (2.0**-20 + torch.finfo(dtype).eps)
            assert bool(((product.cpu().double() - truth).abs() <= limit + 1e-30).all())


def test_values_reach_the_accelerator_through_pinned_memory() -> None:
    values = torch.randn((5 * staging._SLOT) // 8)  # two and a half slots

    for _ in range(3):
        assert torch.equal(values, staging.send(values, gpu.accelerator()).cpu())


@pytest.mark.parametrize("make", [gpu.in_bfloat16, gpu.in_fp8, gpu.in_4_bits, gpu.in_q4_k])
@pytest.mark.parametrize("budget", [None, 1 << 20, 64 << 20])
def test_values_are_those_of_the_cpu_under_every_budget(tmp_path: Path, make: gpu.Make, budget: int | None) -> None:
    """In an order, as layers are, and in none."""
    device = gpu.accelerator()
    weights = make(SMALL, tmp_path, device)
    expected = [weight.to("cpu").materialize() for weight in weights]
    order = [*range(len(weights))] * 3 + random.Random(1).choices(range(len(weights)), k=8)

    with torch.no_grad(), offload.set_max_memory({str(device): budget} if budget else None):
        found = [guest_of(weights[number]).clone() for number in order]

    assert all(torch.equal(expected[number], one.cpu()) for number, one in zip(order, found, strict=True))
