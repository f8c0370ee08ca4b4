"""compressed-tensors weights, as published by llm-compressor: packed integers, and small floats with scales.

Always true:
- the pieces present determine which weights are packed; the configuration group that matches the layer says how, by
  name, by regular expression, or by class
- arithmetic is that of the package's `decompress`: (number - zero point) * scale, in the scale's dtype; except that
  8-bit floats of experts with a scale per row are multiplied in float32, as in transformers
- decoders return float32; rounding to the dtype of the scale is left to the copy
- settings for activations are ignored: weights are dense here, and activations are not quantized

Source: the package compressed-tensors 0.20, `compressors`; it is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from offload.annotations import Settings
from offload.checkpoints.forms.decoding import SCALES, Format, Pieces, decoded, number_rows, of_layer, read_now
from offload.checkpoints.forms.fp8 import decode
from offload.checkpoints.forms.numbers import E2M1, lessened, of_halves, of_words, scaled
from offload.kernels.packed import NumberRows
from offload.tensor.runs import Decoder
from offload.tensor.wrapper import OffloadedTensor

_SMALL = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
_ZEROS = (*_SMALL, torch.uint8, *SCALES)
_WORDS = "pack-quantized"
_NVFP4 = "nvfp4-pack-quantized"
_HALVES = (_NVFP4, "mxfp4-pack-quantized")
_BYTES = ("int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized")
_CENTRED = (-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")
_USUAL = {"actorder": ("static", "weight"), "dynamic": (), "type": ("float", "int")}  # settings of weights
_UNNAMED = (None, "mixed-precision", "dense")  # determined by the pieces


@dataclass(frozen=True)
class _Scheme:
    """How the weights of a group of layers are packed: in numbers of so many bits, with zero points if not symmetric.

    Attributes:
        targets: names of layers, regular expressions after "re:", or classes.
        form: the format's name, or None if the pieces determine it.
        strategy: what shares a scale: "tensor", "channel", "group", "tensor_group" or "block".
        size: the size of a group, or the rows and columns of a block.
    """

    targets: tuple[str, ...]
    form: str | None
    bits: int
    strategy: str
    size: Any
    symmetric: bool

    @classmethod
    def of(cls, group: Mapping[str, Any], form: object) -> _Scheme:
        """Raises `ValueError` and others for settings that are malformed or not carried out."""
        weights = group["weights"]
        size = weights.get("group_size")
        usual = "tensor" if size is None else "group" if size > 0 else "channel"
        strategy = str(weights.get("strategy") or usual)
        sizes: tuple[int, ...] = ()
        if strategy == "block":
            rows, columns = weights["block_structure"]
            sizes = size = int(rows), int(columns)
        elif strategy in ("group", "tensor_group"):
            sizes = (size := int(size),)
        layout = group.get("format") or form
        layout, bits = None if layout in _UNNAMED else str(layout), int(weights.get("num_bits", 8))
        scheme = cls(
            tuple(map(str, group["targets"])), layout, bits, strategy, size, bool(weights.get("symmetric", True))
        )
        is_known = strategy in _STRATEGIES and layout in (_WORDS, *_HALVES, *_BYTES, None)
        others = [f"{key} {weights[key]!r}" for key in _USUAL if (weights.get(key) or None) not in (None, *_USUAL[key])]
        if others or not is_known or min(sizes, default=1) < 1 or not 1 <= bits <= 8:
            raise ValueError(f"{others or scheme} is not decoded here")
        return scheme

    def __str__(self) -> str:
        zeros = "" if self.symmetric else ", with zero points"
        return f"{self.form or 'no format'}, {self.bits} bits, {self.strategy} {self.size or ''}{zeros}"


def _read(settings: Settings) -> tuple[_Scheme, ...]:
    sparse = (settings.get("sparsity_config") or {}).get("format") or "dense"
    if sparse != "dense":
        raise ValueError(f"weights that are {sparse} are not decoded here")
    groups = (settings.get("config_groups") or {}).values()
    return tuple(_Scheme.of(group, settings.get("format")) for group in groups if group.get("weights"))


def _scheme_of(pieces: Pieces) -> _Scheme:
    """The scheme of a layer: that of the most specific matching group. Classes of layers are not known here.

    Raises `CheckpointError` if groups that differ may be meant.
    """
    name = pieces.name.removesuffix("weight").removesuffix(".")
    schemes: tuple[_Scheme, ...] = pieces.settings
    names = (name, f"model.{name}", name.removeprefix("model."))  # targets may be those of the model with a head
    exact = [scheme for scheme in schemes if any(one in scheme.targets for one in names)]
    by_expression = [scheme for scheme in schemes if any(_matches(one, to) for one in names for to in scheme.targets)]
    named = [*exact, *by_expression]
    if named:
        return named[0]
    fitting = [scheme for scheme in schemes if any(map(str.isidentifier, scheme.targets))] or schemes
    is_one = len({replace(scheme, targets=()) for scheme in fitting}) == 1
    pieces.check(is_one, "no group of the quantization_config describes it, or several do that differ")
    return fitting[0]


def _matches(name: str, target: str) -> bool:
    try:
        return target.startswith("re:") and re.match(target[3:], name) is not None
    except re.error:
        return False


def _weight(pieces: Pieces) -> OffloadedTensor | None:
    packed, plain = pieces.get("weight_packed"), pieces.get("")
    if packed is None and plain is not None and plain.dtype not in _SMALL:
        pieces.check("weight_scale" not in pieces, "the weight is dense: whether the scale is to be used is not known")
        return None
    numbers = plain if packed is None and plain is not None else pieces["weight_packed"]
    pieces.check("weight_g_idx" not in pieces, "its columns are in another order (actorder), which is not decoded")
    pieces["weight_scale"]  # raises if it is missing
    layer = _Layer(pieces, numbers, _scheme_of(pieces))
    if packed is None:
        return layer.of_bytes()
    return layer.of_words() if numbers.dtype == torch.int32 else layer.of_halves()


@dataclass(frozen=True)
class _Layer:
    """The pieces of a packed layer, and how to decode them."""

    pieces: Pieces
    numbers: OffloadedTensor
    scheme: _Scheme

    def of_words(self) -> OffloadedTensor:
        """pack-quantized"""
        bits, scheme = self.scheme.bits, self.scheme
        self._needs(self.numbers.dim() == 2, "weight_packed", _WORDS)
        rows, columns = self._shape_of_words()
        fits = self.numbers.shape[1] == -(-columns * bits // 32) and len(self.numbers) == rows
        self._needs(fits, "weight_packed")
        granule = 32 // bits if 32 % bits == 0 else 32
        packed_zeros = granule if not scheme.symmetric and scheme.strategy != "tensor" else None
        return self._made(partial(_words, bits=bits, columns=columns), (rows, columns), packed_zeros=packed_zeros)

    def _shape_of_words(self) -> tuple[int, int]:
        rows, words = self.numbers.shape
        scales, noted_shape = self.pieces["weight_scale"], self.pieces.get("weight_shape")
        if self.scheme.strategy in ("group", "tensor_group") and scales.dim() == 2:
            return rows, scales.shape[1] * self.scheme.size
        if noted_shape is None:
            return rows, words * 32 // self.scheme.bits
        self._needs(noted_shape.shape == (2,) and not noted_shape.dtype.is_floating_point, "weight_shape")
        shape = read_now(noted_shape).tolist()
        self._needs(shape[0] == rows, f"weight_shape, {shape},")
        return shape[0], shape[1]

    def of_halves(self) -> OffloadedTensor:
        """nvfp4-pack-quantized, mxfp4-pack-quantized"""
        whole = self.pieces.get("weight_global_scale")
        is_known = self.numbers.dtype == torch.uint8 and self.numbers.dim() == 2 and self.scheme.bits == 4
        self._needs(is_known, "weight_packed", *_HALVES)
        if self.scheme.form == _NVFP4:
            whole = self.pieces["weight_global_scale"]
        self._needs(whole is None or (whole.numel() == 1 and whole.dtype.is_floating_point), "weight_global_scale")
        return self._made(partial(_halves), (len(self.numbers), 2 * self.numbers.shape[1]), whole=whole)

    def of_bytes(self) -> OffloadedTensor:
        """int-quantized, float-quantized, mxfp8-quantized"""
        self._needs(self.numbers.dim() == 2, "weight", *_BYTES)
        in_rows = self.scheme.strategy in ("tensor", "channel")
        is_float, is_expert = self.numbers.dtype.is_floating_point, re.search(r"\.experts\.\d+\.", self.pieces.name)
        return self._made(
            partial(_bytes), tuple(self.numbers.shape), is_wide=is_float and in_rows and is_expert is not None
        )

    def _made(
        self,
        decode: partial[torch.Tensor],
        shape: tuple[int, ...],
        *,
        whole: OffloadedTensor | None = None,
        packed_zeros: int | None = None,
        is_wide: bool = False,
    ) -> OffloadedTensor:
        """The recipe: from the packed piece, the scales, and zero points or a global scale (`whole`) if there are any.

        Args:
            packed_zeros: how many rows have their zero points in one word, or in the fewest whole words; None if zero
                points are not packed.
            is_wide: whether the dense weight is rounded to float32 only.
        """
        rows, columns, grid = self._blocks(*shape)
        numbers, scales, scheme = self.numbers, self.pieces["weight_scale"], self.scheme
        is_small, in_blocks = numbers.dtype == torch.uint8, scheme.strategy == "block"
        is_one = grid == (1, 1) or scheme.strategy == "tensor"
        dtypes = (*SCALES, *((torch.uint8,) if numbers.dtype.is_floating_point and not is_wide else ()))
        if is_small:  # FP8 beside a global scale, else bytes that are exponents
            dtypes = _SMALL[:1] if whole is not None else (torch.uint8,)
        fits = scales.numel() == 1 if is_one else tuple(scales.shape) == grid
        self._needs(scales.dtype in dtypes and fits, "weight_scale")
        granule = packed_zeros or (rows if in_blocks else 1)
        each = None if is_one else 1 if in_blocks else granule
        used, per = {"numbers": numbers, "scales": scales}, [granule, each]
        if whole is not None:
            used["divisor"] = whole
            per.append(None)
        zeros = None if is_small else self.pieces.get("weight_zero_point")
        if packed_zeros is not None or (zeros is None and not scheme.symmetric and not is_small):
            zeros = self.pieces["weight_zero_point"]
        if zeros is not None and packed_zeros is not None:
            right = (-(-shape[0] * scheme.bits // 32), grid[1])
            self._needs(zeros.dtype == torch.int32 and tuple(zeros.shape) == right, "weight_zero_point")
            each = packed_zeros * scheme.bits // 32
        elif zeros is not None:
            fits = zeros.numel() == 1 if is_one else tuple(zeros.shape) == grid
            self._needs(zeros.dtype in _ZEROS and fits, "weight_zero_point")
        if zeros is not None:
            used["zeros"] = zeros
            per.append(each)
        dtype = scales.dtype if scales.dtype in SCALES else torch.bfloat16
        keywords = {**decode.keywords, "rows": rows, "block": columns}
        return decoded(
            self.pieces.name,
            Decoder(
                partial(decode.func, **dict(sorted(keywords.items()))),
                tuple(per),
                granule,
                packed_zeros is None,
                self._by_kernel(used, shape[1], is_one),
            ),
            list(used.values()),
            shape=shape,
            dtype=torch.float32 if is_wide else dtype,
        )

    def _by_kernel(self, named: dict[str, OffloadedTensor], width: int, is_one: bool) -> NumberRows | None:
        numbers, zeros, whole, bits = named["numbers"], named.get("zeros"), named.get("divisor"), self.scheme.bits
        rows, columns, _ = self._blocks(len(numbers), width)
        sizes = {"group": columns if columns < width else 0, "rows_per_scale": 0 if is_one else rows}
        kind, table = None, E2M1
        if numbers.dtype == torch.int32:  # words, each with whole numbers of one row
            kind, table = {4: "halves_low", 8: "centred_bytes"}.get(bits), _CENTRED
            fits = kind is not None and width % (32 // bits) == 0 and (bits == 4 or zeros is None)
        elif numbers.dtype == torch.uint8:
            kind = "halves_low"
            fits = whole is None or (whole.dtype == torch.float32 and whole.dim() > 0)  # torch divides in float32
        else:
            fits = zeros is None or {zeros.dtype, numbers.dtype} == {torch.int8}
        return number_rows(kind, list(named.values()), tuple(named), table=table, **sizes) if fits else None

    def _blocks(self, height: int, width: int) -> tuple[int, int, tuple[int, int]]:
        strategy, size = self.scheme.strategy, self.scheme.size
        if strategy == "tensor":
            return height, width, (1, 1)
        if strategy == "block":
            return size[0], size[1], (-(-height // size[0]), -(-width // size[1]))
        columns = width if strategy == "channel" else size
        return 1, columns, (height, -(-width // columns))

    def _needs(self, fits: bool, piece: str, *forms: str) -> None:
        """Refuse a piece that does not match the scheme, or belongs to none of its formats."""
        is_so = fits and (not forms or self.scheme.form is None or self.scheme.form in forms)
        self.pieces.check(is_so, f"{piece} does not fit the quantization_config ({self.scheme})")


def _words(
    packed: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    *,
    bits: int,
    columns: int,
    rows: int,
    block: int,
) -> torch.Tensor:
    """Rows of a weight of integers; blocks of `rows` and `block` columns share a scale."""
    numbers = of_words(packed, bits)[:, :columns].to(torch.float32)
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = of_words(zeros.t().contiguous(), bits).t()[: len(packed)]
    return _dense(numbers, scales, zeros, rows, block)


def _halves(packed: torch.Tensor, scales: torch.Tensor, *others: torch.Tensor, rows: int, block: int) -> torch.Tensor:
    """Rows of a weight of 4-bit floats; the scales are divided by the global scale."""
    if scales.dtype == torch.uint8 and not others:
        return decode(packed, scales, rows=rows, columns=block, is_fp4=True)
    factors = scales.to(torch.bfloat16)
    for whole in others:
        factors = factors / whole
    return scaled(of_halves(packed, E2M1), factors.to(torch.float32), rows, block)


def _bytes(
    weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None, *, rows: int, block: int
) -> torch.Tensor:
    """Rows of a weight with one byte per number."""
    if zeros is None:
        return decode(weight, scales, rows=rows, columns=block, is_fp4=False)
    return _dense(weight.to(torch.float32, copy=True), scales, zeros, rows, block)


def _dense(
    numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, rows: int, block: int
) -> torch.Tensor:
    if zeros is not None:
        differences = lessened(numbers, zeros.to(torch.float32), rows, block)
        numbers = differences.to(scales.dtype).to(torch.float32)
    return scaled(numbers, scales.to(torch.float32), rows, block)


FORMAT = Format(
    {
        **of_layer("weight_packed", "weight_scale", "weight_zero_point"),
        **of_layer("weight_global_scale", "weight_shape", "weight_g_idx"),
        **{
            f".{side}_{piece}": (".weight", None)  # of activations
            for side in ("input", "output")
            for piece in ("scale", "zero_point", "global_scale")
        },
    },
    _weight,
    read=_read,
)
