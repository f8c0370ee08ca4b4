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
from dataclasses import dataclass
from functools import partial

import torch

from offload.annotations import Settings
from offload.checkpoints.forms.decoding import Tensors, decoded, missing, number_rows, read_now, unfit
from offload.checkpoints.forms.numbers import of_halves, scaled
from offload.errors import CheckpointError
from offload.kernels.packed import NumberRows
from offload.storage.reasons import short
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
_STATE = ".quant_state.bitsandbytes__"
_STATES = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", *(_STATE + kind for kind in _NUMBERS))
_ONE_OF_127 = 7.874015718698502e-3  # as in the package
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def unpack(tensors: Tensors, quantization: Settings) -> dict[str, OffloadedTensor]:
    """See `decoding.unpacked`."""
    dense: dict[str, OffloadedTensor] = {}
    for name, tensor in tensors.items():
        layer = name.removesuffix("weight")
        if name.rpartition(".")[2] in ("SCB", "weight_format") or any(part in name for part in _STATES):
            continue
        states = {kind: tensors.get(name + _STATE + kind) for kind in _NUMBERS}
        found = next(((kind, state) for kind, state in states.items() if state is not None), None)
        if found is not None:
            _refuse_other(quantization, "load_in_8bit", tensor)
            dense[name] = _of_4_bits(name, tensors, *found)
        elif tensor.dtype == torch.uint8 or f"{name}.absmax" in tensors:
            raise missing(tensors[name], name + _STATE + str(quantization.get("bnb_4bit_quant_type", "nf4")))
        elif tensor.dtype != torch.int8:
            if name.endswith("weight") and f"{layer}SCB" in tensors:
                raise unfit(name, [tensor, tensors[f"{layer}SCB"]], "there are scales, and the weight is not int8")
            dense[name] = tensor
        elif f"{layer}SCB" not in tensors:
            raise missing(tensors[name], f"{layer}SCB")
        else:
            _refuse_other(quantization, "load_in_4bit", tensor)
            dense[name] = _of_8_bits(name, tensor, tensors[f"{layer}SCB"], tensors.get(f"{layer}weight_format"))
    return dense


def _refuse_other(quantization: Settings, key: str, weight: OffloadedTensor) -> None:
    if quantization.get(key) or quantization.get(f"_{key}"):
        raise CheckpointError(
            f"{_described(weight)}: the quantization_config says {key}, which it is not. Download the checkpoint "
            "again, its config.json too."
        )


def _described(piece: OffloadedTensor) -> str:
    handle = handle_of(piece)
    return f"{handle.name!r} in {handle.path} is {piece.dtype} {list(piece.shape)}"


# 4 bits


@dataclass(frozen=True)
class _State:
    """The stored parameters of a 4-bit weight.

    Attributes:
        shape, dtype: of the dense weight.
        block: how many numbers share a scale.
        scales_block, offset: if the scales are packed, how many of them share one, and what is added; None if not.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    block: int
    scales_block: int | None
    offset: float

    @classmethod
    def of(cls, piece: OffloadedTensor) -> _State:
        """
        Raises:
            CheckpointError: it can't be parsed.
        """
        written = read_now(piece)
        try:
            if written.dtype != torch.uint8:
                raise ValueError("it should be text")
            fields = json.loads(bytes(written.flatten().tolist()))
            nested = fields.get("nested_blocksize")
            found = cls(
                tuple(map(int, fields["shape"])),
                _DTYPES[fields["dtype"]],
                int(fields["blocksize"]),
                None if nested is None else int(nested),
                float(fields.get("nested_offset", 0.0)),
            )
            if min(*found.shape, found.block, 1 if found.scales_block is None else found.scales_block) < 1:
                raise ValueError(f"no sizes: {fields}")
            return found
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CheckpointError(
                f"{_described(piece)} and can't be understood ({type(error).__name__}: {short(error)}). Download the "
                "checkpoint again."
            ) from error


def _of_4_bits(name: str, tensors: Tensors, kind: str, piece: OffloadedTensor) -> OffloadedTensor:
    state, weight = _State.of(piece), tensors[name]
    nested = state.scales_block is not None
    suffixes = [".absmax", *([".nested_absmax", ".nested_quant_map"] if nested else [])]
    for suffix in suffixes:
        if f"{name}{suffix}" not in tensors:
            raise missing(tensors[name], f"{name}{suffix}")
    pieces = [weight, *(tensors[f"{name}{suffix}"] for suffix in suffixes)]
    count, held = math.prod(state.shape), 2 * weight.dtype.itemsize  # in all, and per packed element
    counts = [held, state.block, *([state.block * state.scales_block, None] if state.scales_block else [])]
    needed = [256 if each is None else -(-count // each) for each in counts]
    dtypes = [weight.dtype, *([torch.uint8, torch.float32, torch.float32] if nested else [torch.float32])]
    fits = [
        one.numel() == wanted and one.shape[:1] == (wanted,) and one.dtype == dtype
        for one, wanted, dtype in zip(pieces, needed, dtypes, strict=True)
    ]
    if not all(fits) or len(state.shape) != 2:
        wrong = pieces[fits.index(False)] if not all(fits) else weight
        raise CheckpointError(
            f"{_described(wrong)}: that does not make a weight of {list(state.shape)} in blocks of {state.block}, as "
            f"{handle_of(piece).name!r} says. Download the checkpoint again."
        )
    unit = math.lcm(*(each for each in counts if each is not None))
    granule = min(unit // math.gcd(unit, state.shape[1]), state.shape[0])
    is_whole = granule == state.shape[0]
    per = [None if is_whole or each is None else granule * state.shape[1] // each for each in counts]
    decode = partial(
        _decode_4_bits,
        numbers=_NUMBERS[kind],
        columns=state.shape[1],
        block=state.block,
        scales_block=state.scales_block,
        offset=state.offset,
    )
    packed = _packed(kind, state, pieces) if state.shape[1] % state.block == 0 else None
    return decoded(name, decode, pieces, shape=state.shape, granule=granule, per=per, dtype=state.dtype, packed=packed)


def _packed(kind: str, state: _State, pieces: list[OffloadedTensor]) -> NumberRows | None:
    """How the kernels take weights whose rows are whole blocks."""
    roles = ("numbers", "scales", "nested_scales", "nested_numbers")[: len(pieces)]
    nested = {} if state.scales_block is None else {"nested_block": state.scales_block, "nested_offset": state.offset}
    return number_rows("halves_high", pieces, roles, group=state.block, table=_NUMBERS[kind], **nested)


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
    found = of_halves(weight.reshape(-1).view(torch.uint8), numbers, high_first=True)
    rows = found.numel() // columns
    found = scaled(found.view(1, -1), factors.view(1, -1), 1, block)
    return found[0, : rows * columns].view(rows, columns)


# 8 bits


def _of_8_bits(
    name: str, weight: OffloadedTensor, scales: OffloadedTensor, order: OffloadedTensor | None
) -> OffloadedTensor:
    if weight.dim() != 2 or scales.dtype != torch.float32 or tuple(scales.shape) != (len(weight),):
        raise CheckpointError(
            f"{_described(weight)}, and {_described(scales)}: they do not fit. Download the checkpoint again."
        )
    if order is not None and read_now(order).tolist() not in (0, [0]):
        raise CheckpointError(
            f"{_described(order)}, and says that the weight is laid out in tiles, which is not decoded. Load the model "
            "with transformers and save it again: versions of bitsandbytes since 0.45 write rows."
        )
    packed = number_rows("signed_bytes", [weight, scales], last=_ONE_OF_127)
    return decoded(name, _decode_8_bits, [weight, scales], shape=tuple(weight.shape), per=(1, 1), packed=packed)


def _decode_8_bits(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows of a weight, in float32."""
    return scaled(weight.to(torch.float32), scales.view(-1, 1), 1, weight.shape[1]).mul_(_ONE_OF_127)
