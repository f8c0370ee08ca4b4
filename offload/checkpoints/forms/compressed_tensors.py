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
from offload.checkpoints.forms.decoding import SCALES, Tensors, decoded, missing, number_rows, read_now
from offload.checkpoints.forms.numbers import (
    E2M1,
    lessened,
    numbers_of,
    of_exponents,
    of_halves,
    of_words,
    product,
    scaled,
)
from offload.errors import CheckpointError
from offload.kernels.packed import NumberRows
from offload.tensor.views import handle_of
from offload.tensor.wrapper import OffloadedTensor

_PIECES = re.compile(
    r"(?P<layer>.*?)(?P<piece>weight(_packed|_scale|_zero_point|_global_scale|_shape|_g_idx)?"
    r"|(input|output)_(scale|zero_point|global_scale))"
)
_SMALL = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
_ZEROS = (*_SMALL, torch.uint8, *SCALES)
_SMALLEST = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
_BYTES = ("int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized")
_CENTRED = (-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
_UNNAMED = (None, "mixed-precision", "dense")  # determined by the pieces


def unpack(tensors: Tensors, quantization: Settings) -> dict[str, OffloadedTensor]:
    """See `decoding.unpacked`."""
    layers: dict[str, dict[str, OffloadedTensor]] = {}
    dense: dict[str, OffloadedTensor] = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(_PIECES, name)
        if found is None or not (found["layer"] == "" or found["layer"].endswith(".")):
            dense[name] = tensor
        else:
            layers.setdefault(found["layer"], {})[found["piece"]] = tensor
    groups = _Groups.of(quantization, next(iter(tensors.values()), None))
    for layer, pieces in layers.items():
        if "weight_packed" in pieces or ("weight" in pieces and pieces["weight"].dtype in _SMALL):
            dense[f"{layer}weight"] = _Packed(f"{layer}weight", pieces, groups.of_layer(layer)).weight()
        elif "weight" not in pieces and "weight_scale" in pieces:
            raise missing(pieces["weight_scale"], f"{layer}weight_packed")
        elif "weight" in pieces:
            if "weight_scale" in pieces:
                groups.refuse_packed(layer, pieces["weight"])
            dense[f"{layer}weight"] = pieces["weight"]
    return dense


@dataclass(frozen=True)
class _Scheme:
    """How the weights of a group of layers are packed.

    Attributes:
        targets: names of layers, regular expressions after "re:", or classes.
        form: the format's name, or None if the pieces determine it.
        bits: per number.
        strategy: what shares a scale: "tensor", "channel", "group", "tensor_group" or "block".
        size: of a group, or the rows and columns of a block.
        symmetric: whether there are no zero points.
    """

    targets: tuple[str, ...]
    form: str | None
    bits: int
    strategy: str
    size: Any
    symmetric: bool

    @classmethod
    def of(cls, group: Mapping[str, Any], form: object) -> _Scheme:
        weights = group["weights"]
        size = weights.get("group_size")
        usual = "tensor" if size is None else "group" if size > 0 else "channel"
        strategy = str(weights.get("strategy") or usual)
        if strategy not in ("tensor", "channel", "group", "tensor_group", "block"):
            raise ValueError(f"weights can't have the strategy {strategy!r}")
        if strategy == "block":
            rows, columns = weights["block_structure"]
            size = int(rows), int(columns)
        elif strategy in ("group", "tensor_group"):
            size = int(size)
        if (
            size is not None
            and strategy not in ("tensor", "channel")
            and min(size if strategy == "block" else [size]) < 1
        ):
            raise ValueError(f"{size} numbers can't share a scale")
        bits = int(weights.get("num_bits", 8))
        if not 1 <= bits <= 8:
            raise ValueError(f"weights have 1 to 8 bits, not {bits}")
        found = group.get("format") or form
        return cls(
            tuple(map(str, group["targets"])),
            None if found in _UNNAMED else str(found),
            bits,
            strategy,
            size,
            bool(weights.get("symmetric", True)),
        )


@dataclass(frozen=True)
class _Groups:
    """The configuration's groups of weights."""

    schemes: tuple[_Scheme, ...]
    path: Any

    @classmethod
    def of(cls, quantization: Settings, any_tensor: OffloadedTensor | None) -> _Groups:
        """
        Raises:
            CheckpointError: it can't be parsed, or the format is not supported.
        """
        path = None if any_tensor is None else handle_of(any_tensor).path
        try:
            config = quantization.get("quantization_config") or quantization
            sparse = (config.get("sparsity_config") or {}).get("format") or "dense"
            groups = (config.get("config_groups") or {}).values()
            schemes = tuple(_Scheme.of(group, config.get("format")) for group in groups if group.get("weights"))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"The quantization_config of the checkpoint of {path} can't be understood ({type(error).__name__}: "
                f"{error}). Download the checkpoint again, with its config.json."
            ) from error
        known = ("pack-quantized", *_SMALLEST, *_BYTES, None)
        unknown = [form for form in (scheme.form for scheme in schemes) if form not in known]
        if sparse != "dense" or unknown:
            raise CheckpointError(
                f"The weights of the checkpoint of {path} are {unknown[0] if unknown else sparse}, a form of "
                "compressed-tensors that is not decoded here. Decompress it with the package, and save that."
            )
        return cls(schemes, path)

    def refuse_packed(self, layer: str, weight: OffloadedTensor) -> None:
        """
        Raises:
            CheckpointError: a weight that is not packed, beside a scale, is in a group of packed ones.
        """
        form = self.of_layer(layer).form
        if form is not None or not weight.dtype.is_floating_point:
            handle = handle_of(weight)
            raise CheckpointError(
                f"{handle.name!r} in {handle.path} is {weight.dtype}, beside a scale, and the quantization_config says "
                f"{form}: whether it is to be multiplied by the scale is not known. Get a checkpoint whose weights are "
                "packed, or one of the dense weights."
            )

    def of_layer(self, layer: str) -> _Scheme:
        """The scheme of a layer: that of the most specific matching group. Classes of layers are not known here.

        Raises:
            CheckpointError: groups that differ may be meant.
        """
        name = layer.removesuffix(".")
        names = (name, f"model.{name}", name.removeprefix("model."))  # targets may be those of the model with a head
        exact = [scheme for scheme in self.schemes if any(one in scheme.targets for one in names)]
        by_expression = [
            scheme for scheme in self.schemes if any(_matches(one, to) for one in names for to in scheme.targets)
        ]
        named = [*exact, *by_expression]
        if named:
            return named[0]
        by_class = [scheme for scheme in self.schemes if any(map(str.isidentifier, scheme.targets))]
        found = by_class or self.schemes
        if len({replace(scheme, targets=()) for scheme in found}) != 1:
            raise CheckpointError(
                f"{name!r} in the checkpoint of {self.path} is packed, but no group of the quantization_config "
                "describes it, or several do that differ. Download the checkpoint again, with its config.json."
            )
        return found[0]


def _matches(name: str, target: str) -> bool:
    try:
        return target.startswith("re:") and re.match(target[3:], name) is not None
    except re.error:
        return False


@dataclass(frozen=True)
class _Packed:
    """The pieces of a layer, and how to decode them."""

    name: str
    pieces: Mapping[str, OffloadedTensor]
    scheme: _Scheme

    def weight(self) -> OffloadedTensor:
        """The dense weight.

        Raises:
            CheckpointError: pieces are missing, or do not match each other or the configuration.
        """
        if "weight_g_idx" in self.pieces:
            raise CheckpointError(
                f"{self._of('weight_g_idx')} puts columns in another order (actorder), which compressed-tensors no "
                "longer decodes. Get a checkpoint without it."
            )
        if "weight_scale" not in self.pieces:
            marker = "weight_packed" if "weight_packed" in self.pieces else "weight"
            raise missing(self.pieces[marker], f"{self.name}_scale")
        if "weight_packed" not in self.pieces:
            return self._of_bytes()
        return self._of_words() if self.pieces["weight_packed"].dtype == torch.int32 else self._of_halves()

    def _of_words(self) -> OffloadedTensor:
        """pack-quantized"""
        packed, bits = self.pieces["weight_packed"], self.scheme.bits
        self._needs("weight_packed", packed.dim() == 2, "pack-quantized")
        rows, columns = self._shape_of_words()
        self._needs("weight_packed", packed.shape[1] == -(-columns * bits // 32) and len(packed) == rows)
        decode = partial(_words, bits=bits, columns=columns)
        is_packed = not self.scheme.symmetric and self.scheme.strategy != "tensor"
        granule = 32 // bits if 32 % bits == 0 else 32
        return self._made(decode, "weight_packed", (rows, columns), packed_zeros=granule if is_packed else None)

    def _shape_of_words(self) -> tuple[int, int]:
        rows, words = self.pieces["weight_packed"].shape
        scales, noted_shape = self.pieces["weight_scale"], self.pieces.get("weight_shape")
        if self.scheme.strategy in ("group", "tensor_group") and scales.dim() == 2:
            return rows, scales.shape[1] * self.scheme.size
        if noted_shape is None:
            return rows, words * 32 // self.scheme.bits
        self._needs("weight_shape", noted_shape.shape == (2,) and not noted_shape.dtype.is_floating_point)
        found = read_now(noted_shape).tolist()
        self._needs("weight_shape", found[0] == rows, more=f" and says {found}")
        return found[0], found[1]

    def _of_halves(self) -> OffloadedTensor:
        """nvfp4-pack-quantized, mxfp4-pack-quantized"""
        packed, whole = self.pieces["weight_packed"], self.pieces.get("weight_global_scale")
        is_known = packed.dtype == torch.uint8 and packed.dim() == 2 and self.scheme.bits == 4
        self._needs("weight_packed", is_known, *_SMALLEST)
        if whole is not None:
            self._needs("weight_global_scale", whole.numel() == 1 and whole.dtype.is_floating_point)
        elif self.scheme.form == _SMALLEST[0]:
            raise missing(self.pieces["weight_packed"], f"{self.name}_global_scale")
        return self._made(partial(_halves), "weight_packed", (packed.shape[0], 2 * packed.shape[1]), whole=whole)

    def _smallest_scales(self) -> tuple[torch.dtype, ...]:
        """FP8 beside a global scale, else bytes that are exponents."""
        has_global = "weight_global_scale" in self.pieces or self.scheme.form == _SMALLEST[0]
        return _SMALL[:1] if has_global else (torch.uint8,)

    def _of_bytes(self) -> OffloadedTensor:
        """int-quantized, float-quantized, mxfp8-quantized"""
        weight = self.pieces["weight"]
        self._needs("weight", weight.dim() == 2, *_BYTES)
        in_rows = self.scheme.strategy in ("tensor", "channel")
        wide = weight.dtype.is_floating_point and in_rows and re.search(r"\.experts\.\d+\.", self.name) is not None
        return self._made(partial(_bytes, is_wide=wide), "weight", tuple(weight.shape))

    def _made(
        self,
        decode: partial[torch.Tensor],
        packed: str,
        shape: tuple[int, ...],
        *,
        whole: OffloadedTensor | None = None,
        packed_zeros: int | None = None,
    ) -> OffloadedTensor:
        """The recipe: from the packed piece, the scales, and the zero points or the global scale if there are any.

        Args:
            whole: the global scale.
            packed_zeros: how many rows have their zero points in one word, or in the fewest whole words; None if zero
                points are not packed.
        """
        rows, columns, grid = self._blocks(*shape)
        numbers, scales = self.pieces[packed], self.pieces["weight_scale"]
        is_small = numbers.dtype == torch.uint8
        zeros = None if is_small else self.pieces.get("weight_zero_point")
        exponents = (torch.uint8,) if numbers.dtype.is_floating_point and not decode.keywords["is_wide"] else ()
        self._needs("weight_scale", scales.dtype in (self._smallest_scales() if is_small else (*SCALES, *exponents)))
        is_one = grid == (1, 1) or self.scheme.strategy == "tensor"
        self._needs("weight_scale", scales.numel() == 1 if is_one else tuple(scales.shape) == grid)
        granule = packed_zeros or (rows if self.scheme.strategy == "block" else 1)
        each = None if is_one else 1 if self.scheme.strategy == "block" else granule
        used, per = [numbers, scales], [granule, each]
        if whole is not None:
            used, per = [*used, whole], [*per, None]
        if packed_zeros is not None:
            if zeros is None:
                raise missing(self.pieces[packed], f"{self.name}_zero_point")
            words = packed_zeros * self.scheme.bits // 32
            right = (-(-shape[0] * self.scheme.bits // 32), grid[1])
            self._needs("weight_zero_point", zeros.dtype == torch.int32 and tuple(zeros.shape) == right)
            used, per = [*used, zeros], [*per, words]
        elif zeros is not None:
            fits = zeros.numel() == 1 if is_one else tuple(zeros.shape) == grid
            self._needs("weight_zero_point", zeros.dtype in _ZEROS and fits)
            used, per = [*used, zeros], [*per, each]
        elif not self.scheme.symmetric and not is_small:
            raise missing(self.pieces[packed], f"{self.name}_zero_point")
        dtype = scales.dtype if scales.dtype in SCALES else torch.bfloat16
        dtype = torch.float32 if decode.keywords.get("is_wide") else dtype
        keywords = {**decode.keywords, "rows": rows, "block": columns}
        roles = {"numbers": numbers, "scales": scales, "divisor": whole, "zeros": zeros}
        by_kernel = self._by_kernel({role: one for role, one in roles.items() if one is not None}, shape[1], is_one)
        return decoded(
            self.name,
            partial(decode.func, **dict(sorted(keywords.items()))),
            used,
            shape=shape,
            granule=granule,
            per=per,
            is_divisible=packed_zeros is None,
            dtype=dtype,
            packed=by_kernel,
        )

    def _by_kernel(self, named: dict[str, OffloadedTensor], width: int, is_one: bool) -> NumberRows | None:
        """How the kernels take it, if they do."""
        numbers, zeros, whole, bits = named["numbers"], named.get("zeros"), named.get("divisor"), self.scheme.bits
        rows, columns, _ = self._blocks(len(numbers), width)
        sizes = {"group": columns if columns < width else 0, "rows_per_scale": 0 if is_one else rows}
        if numbers.dtype == torch.int32:  # words, each with whole numbers of one row
            kind, table = {4: "halves_low", 8: "centred_bytes"}.get(bits), _CENTRED
            fits = kind is not None and width % (32 // bits) == 0 and (bits == 4 or zeros is None)
        elif numbers.dtype == torch.uint8:
            kind, table = "halves_low", E2M1
            is_float = whole is None or (whole.dtype == torch.float32 and whole.dim() > 0)  # torch divides in float32
            fits = is_float and zeros is None
        else:
            kind = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "signed_bytes"}[numbers.dtype]
            fits, table = zeros is None or {zeros.dtype, numbers.dtype} == {torch.int8}, E2M1
        return number_rows(str(kind), list(named.values()), tuple(named), table=table, **sizes) if fits else None

    def _blocks(self, height: int, width: int) -> tuple[int, int, tuple[int, int]]:
        """The rows and columns that share a scale, and the numbers of such blocks in both directions."""
        strategy, size = self.scheme.strategy, self.scheme.size
        if strategy == "tensor":
            return height, width, (1, 1)
        if strategy == "block":
            return size[0], size[1], (-(-height // size[0]), -(-width // size[1]))
        columns = width if strategy == "channel" else size
        return 1, columns, (height, -(-width // columns))

    def _needs(self, piece: str, is_so: bool, *forms: str, more: str = "") -> None:
        """Refuse a piece that does not match the scheme, or belongs to none of its formats."""
        if is_so and (not forms or self.scheme.form is None or self.scheme.form in forms):
            return
        scheme = self.scheme
        size = "" if scheme.size is None else f" of {scheme.size}"
        raise CheckpointError(
            f"{self._of(piece)} is {self.pieces[piece].dtype} {list(self.pieces[piece].shape)}{more}, beside "
            f"{', '.join(f'{key} {list(one.shape)}' for key, one in self.pieces.items() if key != piece)}: that does "
            f"not fit the quantization_config ({scheme.form or 'no format'}, {scheme.bits} bits, {scheme.strategy}"
            f"{size}{'' if scheme.symmetric else ', with zero points'}). Download the checkpoint again, "
            "with its config.json."
        )

    def _of(self, piece: str) -> str:
        handle = handle_of(self.pieces[piece])
        return f"{handle.name!r} in {handle.path}"


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
    factors = (of_exponents(scales) if scales.dtype == torch.uint8 else numbers_of(scales)).to(torch.bfloat16)
    for whole in others:
        factors = factors / whole
    return scaled(of_halves(packed, E2M1), factors.to(torch.float32), rows, block)


def _bytes(
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    *,
    is_wide: bool,
    rows: int,
    block: int,
) -> torch.Tensor:
    """Rows of a weight with one byte per number."""
    if is_wide:
        return product(weight, scales.to(torch.float32), rows, block)
    if scales.dtype == torch.uint8:
        scales = of_exponents(scales).to(torch.bfloat16)
    if zeros is None:
        return product(weight, scales.to(torch.float32), rows, block)
    return _dense(numbers_of(weight), scales, zeros, rows, block)


def _dense(
    numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, rows: int, block: int
) -> torch.Tensor:
    if zeros is not None:
        differences = lessened(numbers, zeros.to(torch.float32), rows, block)
        numbers = differences.to(scales.dtype).to(torch.float32)
    return scaled(numbers, scales.to(torch.float32), rows, block)
