"""Integer weights: GPTQ and AWQ's "gemm" layout, with a scale and a zero point per group of inputs; ternary BitNet.

Always true:
- a weight is scale x (integer - zero point), in the dtype of the scales
- several integers are packed in an int32, and outputs are innermost: a row of the weight is a column there
- modules for BitNet stay transformers' own, as these quantize activations: if they hold packed weights, these are
  referenced as they are; if they hold -1, 0 and 1, these are recipes. The lowest two bits of the bytes are the first
  quarter of the rows, the next two bits the second

Source: Frantar et al. 2022, https://arxiv.org/abs/2210.17323, as AutoGPTQ and GPTQModel store it (versions 1 and 2);
Lin et al. 2023, https://arxiv.org/abs/2306.00978, as AutoAWQ stores it; transformers, `integrations/bitnet.py`.
"""

from __future__ import annotations

from functools import partial

import torch

from offload.annotations import Settings
from offload.checkpoints.forms.decoding import SCALES, Format, Pieces, Tensors, decoded, of_layer, read_now
from offload.checkpoints.forms.numbers import of_words
from offload.kernels.packed import QUARTERS, GgufRows, WordColumns
from offload.tensor.deferred import deferred
from offload.tensor.runs import Decoder
from offload.tensor.wrapper import OffloadedTensor

_WORD = 32  # bits of a packed word
_WORDED = ("checkpoint_format", "data_type", "format", "pack_dtype", "packing_format")  # settings of the layout
_AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs is at each position of a word, from the lowest bits


def _weight(pieces: Pieces, *, is_awq: bool) -> OffloadedTensor | None:
    """The dense weight of a layer; AWQ packs outputs, and names no groups."""
    if "" in pieces and len(pieces.by_role) == 1:
        return None
    stored = [pieces[role] for role in ("qweight", "qzeros", "scales", *(() if is_awq else ("g_idx",)))]
    pieces.check("" not in pieces, "it is there packed and dense")
    integers, zeros, scales, *order = stored
    bits, size, less = pieces.settings
    are_matrices = all(piece.dim() == 2 for piece in stored[:3]) and {integers.dtype, zeros.dtype} == {torch.int32}
    pieces.check(are_matrices, "qweight and qzeros should be matrices of int32, and scales a matrix")
    each, (groups, outputs) = _WORD // bits, scales.shape
    inputs = integers.shape[0] * (1 if is_awq else each)
    pieces.check(scales.dtype in SCALES, "scales should be of float16, bfloat16 or float32")
    divides = not is_awq or size < 0 or inputs % size == 0
    pieces.check(divides, f"{inputs} inputs do not divide into groups of {size}")
    fits = groups == (1 if size < 0 else -(-inputs // size)) and outputs % each == 0
    pieces.check(fits, f"{inputs} inputs in groups of {size} do not make {groups}")
    wide = outputs // each if is_awq else outputs
    fits = integers.shape[1] == wide and tuple(zeros.shape) == (groups, outputs // each)
    pieces.check(fits, f"qweight and qzeros do not make {groups} groups of {outputs} outputs")
    for one in order:
        _check_order(pieces, one, inputs, groups)
    gptq = Decoder(
        partial(_decode_gptq, bits=bits, less=less), (each, 1, each, None), each, packed=WordColumns(bits, less)
    )
    decoder = Decoder(_decode_awq, (1, 1, each), each, packed=WordColumns(is_awq=True)) if is_awq else gptq
    turned = [*(piece.t() for piece in stored[:3]), *order]  # outputs outermost
    return decoded(pieces.name, decoder, turned, shape=(outputs, inputs), dtype=scales.dtype)  # type: ignore[arg-type]


def _check_order(pieces: Pieces, order: OffloadedTensor, inputs: int, groups: int) -> None:
    """Raises `CheckpointError` unless `g_idx` names a group of each input."""
    fits = tuple(order.shape) == (inputs,) and order.dtype in (torch.int32, torch.int64)
    pieces.check(fits, f"g_idx should name the group of each of {inputs} inputs")
    least, most = read_now(order).aminmax() if inputs else (0, 0)
    fits = bool(not inputs or 0 <= least <= most < groups)
    pieces.check(fits, f"g_idx names groups from {int(least)} to {int(most)} of {groups}")


def _read(settings: Settings, *, is_awq: bool) -> tuple[int, int, int]:
    """The bits of a number, the inputs of a group (-1 for all), and what zero points are stored too small by."""
    size = settings.get("group_size")
    size = -1 if size is None else size
    if type(size) is not int or (size < 1 and size != -1):
        raise ValueError(f"groups of {size!r} inputs, which is neither a count nor -1")
    bits = settings.get("bits") or 4
    given = [settings.get(key) for key in (*_WORDED, *(("version",) if is_awq else ()))]
    layouts = [str(getattr(one, "value", one)).lower() for one in given if one]
    known, counts = ({"gemm"}, (4,)) if is_awq else ({"gptq", "gptq_v2"}, (2, 4, 8))
    known |= {"int", "int32", "torch.int32", "auto_round:auto_awq" if is_awq else "auto_round:auto_gptq"}
    if bits not in counts or not known.issuperset(layouts):
        raise ValueError(f"{bits} bits in the layout {layouts or 'usual'} are not decoded")
    return int(bits), size, int("gptq_v2" not in layouts)


def _decode_gptq(
    words: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, order: torch.Tensor, *, bits: int, less: int
) -> torch.Tensor:
    """Rows of a weight, in float32.

    Of words (rows, inputs / 8) for 4 bits, zeros (rows / 8, groups), which the first version stores minus one, scales
    (rows, groups), and the group of each input.
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
    """Rows of a weight, in float32: of words (rows / 8, inputs), zeros (rows / 8, groups), scales (rows, groups)."""
    return _scaled(_awq_rows(words), _awq_rows(zeros), scales.to(torch.float32))


def _awq_rows(words: torch.Tensor) -> torch.Tensor:
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


GPTQ, AWQ = (
    Format(
        of_layer("qweight", "qzeros", "scales", "g_idx"), partial(_weight, is_awq=is_awq), partial(_read, is_awq=is_awq)
    )
    for is_awq in (False, True)
)


def for_modules(tensors: Tensors, quantization: Settings, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint as transformers' modules for BitNet hold them, in this dtype."""
    is_unpacked = (
        quantization.get("linear_class") == "autobitlinear" and quantization.get("quantization_mode") == "offline"
    )
    values: dict[str, torch.Tensor] = dict(tensors)
    for name, packed in tensors.items():
        if is_unpacked and packed.dtype == torch.uint8 and packed.dim() == 2 and name.endswith(".weight"):
            quarters = [_quarter(name, packed, quarter, dtype) for quarter in range(len(QUARTERS))]
            values[name] = torch.cat([deferred(quarter) for quarter in quarters])
    return values


def _quarter(name: str, packed: OffloadedTensor, quarter: int, dtype: torch.dtype) -> OffloadedTensor:
    decode, shape = partial(_decode_quarter, shift=2 * quarter), tuple(packed.shape)
    rows = GgufRows(QUARTERS[quarter])
    return decoded(name, Decoder(decode, (1,), packed=rows), [packed], shape=shape, dtype=dtype)


def _decode_quarter(packed: torch.Tensor, *, shift: int) -> torch.Tensor:
    return packed.bitwise_right_shift(shift).bitwise_and_(3).view(torch.int8).sub_(1)
