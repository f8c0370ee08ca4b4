"""Integer weights with a scale and a zero point per group of inputs: GPTQ, and AWQ's "gemm" layout.

Always true:
- a weight is scale x (integer - zero point), in the dtype of the scales
- several integers are packed in an int32, and outputs are innermost: a row of the weight is a column there

Source: Frantar et al. 2022, https://arxiv.org/abs/2210.17323, as AutoGPTQ and GPTQModel store it (versions 1 and 2);
Lin et al. 2023, https://arxiv.org/abs/2306.00978, as AutoAWQ stores it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from offload.annotations import Settings
from offload.checkpoints.forms.decoding import SCALES, Tensors, decoded, method_of, missing, read_now, unfit, weights_in
from offload.checkpoints.forms.numbers import of_words
from offload.errors import CheckpointError
from offload.kernels.packed import WordColumns
from offload.tensor.recipes import Decode
from offload.tensor.wrapper import OffloadedTensor

_WORD = 32  # bits of a packed word
_AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs is at each position of a word, from the lowest bits
_PIECES = ("qweight", "qzeros", "scales", "g_idx")


def unpack(tensors: Tensors, quantization: Settings) -> dict[str, OffloadedTensor]:
    """See `decoding.unpacked`."""
    is_awq, bits = method_of(quantization) == "awq", int(quantization.get("bits") or 4)
    size = _group_size(tensors, quantization)
    dense = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in _PIECES}
    done: set[str] = set()
    for name in tensors:
        layer, _, piece = name.rpartition(".")
        if piece not in _PIECES or layer in done:
            continue
        done.add(layer)
        wanted = _PIECES[:3] if is_awq else _PIECES
        lacking = next((f"{layer}.{one}" for one in wanted if f"{layer}.{one}" not in tensors), None)
        if lacking is not None:
            raise missing(tensors[name], lacking)
        pieces = [tensors[f"{layer}.{one}"] for one in wanted]
        if f"{layer}.weight" in tensors:
            raise unfit(f"{layer}.weight", [tensors[f"{layer}.weight"], *pieces], "it is there packed and dense")
        dense[f"{layer}.weight"] = _weight(f"{layer}.weight", pieces, quantization, bits, size)
    return dense


def _group_size(tensors: Tensors, quantization: Settings) -> int:
    """Inputs of a group; -1 for all."""
    size = quantization.get("group_size")
    size = -1 if size is None else size
    if type(size) is not int or (size < 1 and size != -1):
        raise CheckpointError(
            f"{weights_in(tensors)} should be in groups of {size!r} inputs, as the quantization_config says, which is "
            "neither a count nor -1. Download the checkpoint again, with its config.json."
        )
    return size


def _weight(name: str, pieces: list[OffloadedTensor], quantization: Settings, bits: int, size: int) -> OffloadedTensor:
    integers, zeros, scales, *order = pieces
    if any(piece.dim() != 2 for piece in pieces[:3]) or {integers.dtype, zeros.dtype} != {torch.int32}:
        raise unfit(name, pieces, "qweight and qzeros should be matrices of int32, and scales a matrix")
    each, (groups, outputs) = _WORD // bits, scales.shape
    shape = (outputs, integers.shape[0] * (each if order else 1))
    if scales.dtype not in SCALES:
        raise unfit(name, pieces, "scales should be of float16, bfloat16 or float32")
    if not order and size > 0 and shape[1] % size:
        raise unfit(name, pieces, f"{shape[1]} inputs do not divide into groups of {size}")
    if groups != (1 if size < 0 else -(-shape[1] // size)) or outputs % each:
        raise unfit(name, pieces, f"{shape[1]} inputs in groups of {size} do not make {groups}")
    wide = outputs if order else outputs // each
    if integers.shape[1] != wide or tuple(zeros.shape) != (groups, outputs // each):
        raise unfit(name, pieces, f"qweight and qzeros do not make {groups} groups of {outputs} outputs")
    turned: list[Any] = [piece.t() for piece in pieces[:3]]  # outputs outermost
    decode: Decode = _decode_awq
    per: tuple[int | None, ...] = (1, 1, each)
    packed = WordColumns(is_awq=True)
    if order:
        _check_order(name, pieces, shape[1], groups)
        form = quantization.get("checkpoint_format") or quantization.get("format") or "gptq"
        less = int(str(form).lower() != "gptq_v2")
        turned, per = [*turned, *order], (each, 1, each, None)
        decode, packed = partial(_decode_gptq, bits=bits, less=less), WordColumns(bits, less)
    return decoded(name, decode, turned, shape=shape, granule=each, per=per, dtype=scales.dtype, packed=packed)


def _check_order(name: str, pieces: list[OffloadedTensor], inputs: int, groups: int) -> None:
    """Raises `CheckpointError` unless `g_idx` names a group of each input."""
    order = pieces[3]
    if tuple(order.shape) != (inputs,) or order.dtype not in (torch.int32, torch.int64):
        raise unfit(name, pieces, f"g_idx should name the group of each of {inputs} inputs")
    found = read_now(order)
    if inputs and not 0 <= int(found.min()) <= int(found.max()) < groups:
        raise unfit(name, pieces, f"g_idx names groups from {int(found.min())} to {int(found.max())} of {groups}")


def _decode_gptq(
    words: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, order: torch.Tensor, *, bits: int, less: int
) -> torch.Tensor:
    """Rows of a weight, in float32.

    Args:
        words: (rows, inputs / 8) for 4 bits.
        zeros: (rows / 8, groups); the first version stores them minus one.
        scales: (rows, groups).
        order: the group of each input.
    """
    half = 2 ** (bits - 1)  # subtracted from both
    numbers = of_words(words.contiguous(), bits).to(torch.float32)
    points = of_words(zeros.contiguous().view(-1, 1), bits).view(*zeros.shape, -1).transpose(1, 2).flatten(0, 1)
    points = (points.to(torch.float32) + (half + less)).remainder_(2 * half).sub_(half)
    groups = scales.shape[1]
    factors = scales.to(torch.float32)
    if order.is_cpu and len(order) % groups == 0:  # elsewhere the CPU would have to wait for it
        usual = torch.arange(len(order), dtype=order.dtype, device="cpu") // -(-len(order) // groups)
        if torch.equal(order, usual):
            return _scaled(numbers, points, factors)
    return numbers.sub_(points.index_select(1, order)).mul_(factors.index_select(1, order))


def _decode_awq(words: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows of a weight, in float32.

    Args:
        words: (rows / 8, inputs).
        zeros: (rows / 8, groups).
        scales: (rows, groups).
    """
    return _scaled(_awq_rows(words), _awq_rows(zeros), scales.to(torch.float32))


def _awq_rows(words: torch.Tensor) -> torch.Tensor:
    """The integers in the words, (8 * rows, inputs)."""
    words = words.contiguous()
    rows = torch.empty(len(words), 8, words.shape[1], dtype=torch.float32, device=words.device)
    for place, row in enumerate(_AWQ_ROWS):
        rows[:, row].copy_((words >> (4 * place)).bitwise_and_(15))
    return rows.flatten(0, 1)


def _scaled(numbers: torch.Tensor, points: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """(number - point) x factor, for equal groups of columns, in place; exact except for the last rounding."""
    groups = numbers.view(*points.shape, -1)
    groups.sub_(points.unsqueeze(-1)).mul_(factors.unsqueeze(-1))
    return numbers
