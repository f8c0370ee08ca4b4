"""bitsandbytes weights: NF4 and FP4, whose scales may be packed, too, and 8-bit integers.

Always true:
- the pieces present determine which weights are packed, and how
- blocks that share a scale run across rows, from the end of one into the next
- a weight is what `dequantize_4bit` and `int8_vectorwise_dequant` return: float32, rounded once to its original dtype

Source: the package bitsandbytes 0.50, `functional` and `backends/default`; it is not needed. On CPUs with AVX-512, that
version mixes up the scales of 4-bit weights whose rows are not whole blocks; here these are decoded correctly.
A zero of FP4 with a sign is 0.0 there, as it is here, and -0.0 on other CPUs.
"""

from __future__ import annotations

import json
import math
from functools import partial

import torch

from offload.checkpoints.forms.decoding import Format, Pieces, decoded, number_rows, of_layer, read_now, unfit
from offload.checkpoints.forms.numbers import of_halves, scaled
from offload.system.reasons import short
from offload.tensor.runs import Decoder
from offload.tensor.views import handle_of
from offload.tensor.wrapper import OffloadedTensor

_FP4 = (0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25)
_NUMBERS = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": (0.0, *_FP4, 0.0, *(-number for number in _FP4)),
}
_ROLES = ("numbers", "scales", "nested_scales", "nested_numbers")  # of the pieces, for the kernels
_ONE_OF_127 = 7.874015718698502e-3  # as in the package
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def _weight(pieces: Pieces) -> OffloadedTensor | None:
    """The dense weight, of 4 bits if there is a state, which says how, or of 8."""
    weight = pieces.get("")
    kind = next((kind for kind in _NUMBERS if kind in pieces), None)
    if weight is not None and kind is not None:
        return _of_4_bits(pieces, weight, kind)
    if weight is None or (weight.dtype not in (torch.uint8, torch.int8) and "absmax" not in pieces):
        pieces.check(weight is None or "SCB" not in pieces, "there are scales, and the weight is not int8")
        return None
    if weight.dtype == torch.uint8 or "absmax" in pieces:
        return pieces["fp4" if pieces.settings.get("bnb_4bit_quant_type") == "fp4" else "nf4"]  # is missing
    return _of_8_bits(pieces, weight, pieces["SCB"])


def _state_of(pieces: Pieces, kind: str) -> tuple[tuple[int, ...], torch.dtype, int, int | None, float]:
    """Of a 4-bit weight: its dense shape and dtype; how many numbers share a scale; how many packed scales share one.

    The last is what is added to packed scales. Raises `CheckpointError` if it can't be parsed.
    """
    written = read_now(pieces[kind])
    try:
        if written.dtype != torch.uint8:
            raise ValueError("it should be text")
        fields = json.loads(bytes(written.flatten().tolist()))
        shape, block = tuple(map(int, fields["shape"])), int(fields["blocksize"])
        nested = fields.get("nested_blocksize")
        scales_block = None if nested is None else int(nested)
        if min(*shape, block, 1 if scales_block is None else scales_block) < 1:
            raise ValueError(f"no sizes: {fields}")
        return shape, _DTYPES[fields["dtype"]], block, scales_block, float(fields.get("nested_offset", 0.0))
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        why = f"{handle_of(pieces[kind]).name!r} can't be understood ({type(error).__name__}: {short(error)})"
        raise unfit(pieces.name, list(pieces), why) from error


def _of_4_bits(pieces: Pieces, weight: OffloadedTensor, kind: str) -> OffloadedTensor:
    shape, dtype, block, scales_block, offset = _state_of(pieces, kind)
    nested = scales_block is not None
    roles = ["absmax", "nested_absmax", "nested_quant_map"] if nested else ["absmax"]
    stored = [weight, *(pieces[role] for role in roles)]
    count, held = math.prod(shape), 2 * weight.dtype.itemsize  # in all, and per packed element
    counts = [held, block, *([block * scales_block, None] if scales_block else [])]
    needed = [256 if each is None else -(-count // each) for each in counts]
    dtypes = [weight.dtype, *([torch.uint8, torch.float32, torch.float32] if nested else [torch.float32])]
    fits = all(
        one.numel() == wanted and one.shape[:1] == (wanted,) and one.dtype == dtype
        for one, wanted, dtype in zip(stored, needed, dtypes, strict=True)
    )
    pieces.check(fits and len(shape) == 2, f"that is no weight of {list(shape)} in blocks of {block}")
    unit = math.lcm(*(each for each in counts if each is not None))
    granule = min(unit // math.gcd(unit, shape[1]), shape[0])
    per = [None if granule == shape[0] or each is None else granule * shape[1] // each for each in counts]
    decode = partial(
        _decode_4_bits, numbers=_NUMBERS[kind], columns=shape[1], block=block, scales_block=scales_block, offset=offset
    )
    options = {"nested_block": scales_block, "nested_offset": offset} if nested else {}
    packed = number_rows("halves_high", stored, _ROLES[: len(stored)], group=block, table=_NUMBERS[kind], **options)
    decoder = Decoder(decode, tuple(per), granule, packed=packed if shape[1] % block == 0 else None)
    return decoded(pieces.name, decoder, stored, shape=shape, dtype=dtype)


def _decode_4_bits(
    weight: torch.Tensor,
    scales: torch.Tensor,
    scales_of_scales: torch.Tensor | None = None,
    scale_numbers: torch.Tensor | None = None,
    *,
    numbers: tuple[float, ...],
    columns: int,
    block: int,
    scales_block: int | None,
    offset: float,
) -> torch.Tensor:
    """Rows of a weight, in float32; the high half of each byte comes first."""
    factors = scales.to(torch.float32)
    if scales_of_scales is not None and scale_numbers is not None and scales_block is not None:
        factors = scale_numbers.index_select(0, scales.to(torch.int32))
        factors = scaled(factors.view(1, -1), scales_of_scales.view(1, -1), 1, scales_block).add_(offset)
    decoded = of_halves(weight.reshape(-1).view(torch.uint8), numbers, high_first=True)
    rows = decoded.numel() // columns
    decoded = scaled(decoded.view(1, -1), factors.view(1, -1), 1, block)
    return decoded[0, : rows * columns].view(rows, columns)


def _of_8_bits(pieces: Pieces, weight: OffloadedTensor, scales: OffloadedTensor) -> OffloadedTensor:
    fits = weight.dim() == 2 and scales.dtype == torch.float32 and tuple(scales.shape) == (len(weight),)
    pieces.check(fits, "they do not fit")
    order = pieces.get("weight_format")
    pieces.check(
        order is None or read_now(order).tolist() in (0, [0]),
        "the weight is laid out in tiles, which is not decoded. Load the model with transformers and save it again: "
        "versions of bitsandbytes since 0.45 write rows",
    )
    packed = number_rows("signed_bytes", [weight, scales], last=_ONE_OF_127)
    return decoded(
        pieces.name, Decoder(_decode_8_bits, (1, 1), packed=packed), [weight, scales], shape=tuple(weight.shape)
    )


def _decode_8_bits(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return scaled(weight.to(torch.float32), scales.view(-1, 1), 1, weight.shape[1]).mul_(_ONE_OF_127)


FORMAT = Format(
    {
        **{f".{role}": ("", role) for role in ("absmax", "nested_absmax", "nested_quant_map")},
        **{f".quant_state.bitsandbytes__{kind}": ("", kind) for kind in _NUMBERS},
        **of_layer("SCB", "weight_format"),
        ".quant_map": ("", None),  # the numbers of the kind
    },
    _weight,
)
