"""A checkpoint's values in the form in which a model has them, and the table of packed formats.

Always true:
- nothing is read or written: values are referenced, or recipes over what is referenced
- one table says which form of checkpoint is handled how, for loading, filling and converting
- the pieces that are stored say which weights are packed; the settings say how
- a weight with a piece that the format does not have, or with a setting that is not carried out, is refused
- a setting without a value (None, False, empty) says nothing
- pieces are saved as they are, under the names by which they were read; a value is saved dense if it was changed, or if
  another one that is computed from the same pieces was

Source of the settings: the configuration classes of transformers 5.23 and compressed-tensors 0.20; AutoGPTQ, GPTQModel,
AutoAWQ and auto-round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.annotations import Pretrained, Settings
from offload.checkpoints.checkpoint import Checkpoint
from offload.checkpoints.forms import bitsandbytes, compressed_tensors, fp8, integers
from offload.checkpoints.forms.decoding import Format, Pieces, Tensors, is_followed, method_of, unfit
from offload.checkpoints.forms.gguf import as_saved
from offload.checkpoints.forms.integers import for_modules
from offload.checkpoints.forms.torchao import PARTS_NOTE, rebuilt
from offload.errors import CheckpointError
from offload.memory import uncollected
from offload.storage.handle import Handle
from offload.system.reasons import short
from offload.tensor.decoded import Decoded
from offload.tensor.guests import CPU
from offload.tensor.recipes import Joined, Piece, stored_in
from offload.tensor.saved import identity_of
from offload.tensor.views import handle_of, is_part, meta_of
from offload.tensor.wrapper import OffloadedTensor, PathLike, is_offloaded, wrap_handle
from offload.torch_api import DisableTorchFunctionSubclass

FORMATS: dict[str, Format] = {  # by the method's name in a configuration
    "awq": integers.AWQ,
    "bitsandbytes": bitsandbytes.FORMAT,
    "compressed-tensors": compressed_tensors.FORMAT,
    "fbgemm_fp8": fp8.FBGEMM,
    "fp8": fp8.FORMAT,
    "gptq": integers.GPTQ,
    "mxfp4": fp8.MXFP4,
    "mxfp8": fp8.FORMAT,
}
_LEFT_TO_TRANSFORMERS = ("bitnet", "metal", "torchao")
_REFUSED = ("is_marlin_format", "moe_sparsity_config", "rotation", "transform_config")  # settings of any method
_OF_LAYERS = ("dynamic", "extra_config")  # settings of some layers, which must not be packed in other bits
_NOT_PACKED = 16  # bits of a layer that is left as it is
_WAY_OUT = "Get the checkpoint in another form, or dequantize it with the package that packed it, and save that."


def unpacked(tensors: Tensors, quantization: Settings) -> dict[str, OffloadedTensor] | None:
    """The tensors of a quantized checkpoint, referenced, as those of the dense one, by the names they would have there.

    None if the weights should stay packed because transformers computes with them as they are.

    Raises `CheckpointError` if pieces are missing, or do not match each other: the message names the tensor and its
    file; or if the format, or a setting, is not supported.
    """
    method = str(method_of(quantization))
    if method in _LEFT_TO_TRANSFORMERS:
        return None
    path = next((handle_of(tensor).path for tensor in tensors.values()), None)
    if method not in FORMATS:
        raise CheckpointError(
            f"the weights in {path} are packed by {method!r}, which is not decoded here: dequantize the model with the "
            f"package that packed it and save that, or get a checkpoint in one of the forms "
            f"{', '.join(sorted([*FORMATS, *_LEFT_TO_TRANSFORMERS]))}"
        )
    _refuse_settings(quantization, FORMATS[method], path)
    try:
        settings = FORMATS[method].read(quantization)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"the quantization_config of the checkpoint of {path} can't be followed ({type(error).__name__}: "
            f"{short(error)}). Download the checkpoint again, with its config.json. {_WAY_OUT}"
        ) from error
    with DisableTorchFunctionSubclass():  # answered by the wrappers' metadata: no rule is needed
        return _dense(tensors, FORMATS[method], settings)


def _dense(tensors: Tensors, form: Format, settings: object) -> dict[str, OffloadedTensor]:
    stored: dict[str, dict[str, str]] = {}  # by the name of the weight, the names of its pieces by their roles
    for name in tensors:
        weight, role = form.place_of(name)
        if role is not None and stored.setdefault(weight, {}).setdefault(role, name) != name:
            raise unfit(weight, [tensors[stored[weight][role]], tensors[name]], "both are there")
    dense: dict[str, OffloadedTensor] = {}
    packed = set()
    for weight, names in stored.items():
        by_role = {role: tensors[name] for role, name in names.items()}
        found = form.weight(Pieces(weight, by_role, form.ends, settings))
        if found is not None:
            dense[weight] = found
            packed.add(weight)
        else:
            dense.update({name: tensors[name] for role, name in names.items() if role == "" or "" not in names})
    for name in dense.keys() - packed:  # a piece that the format does not have may change what the weights are
        ends = (at for at, letter in enumerate(name) if letter in "._" and name[at:] != "_bias")
        part_of = next((name[:at] for at in ends if name[:at] in packed), None)
        if part_of is not None:
            raise unfit(part_of, [dense[part_of], dense[name]], f"{name!r} is not known here. {_WAY_OUT}")
    return dense


def _refuse_settings(quantization: Settings, form: Format, path: Path | None) -> None:
    """Refuse settings that say something of the weights that is not carried out, by their keys."""
    inner = quantization.get("quantization_config")
    for key, value in (*quantization.items(), *(inner.items() if isinstance(inner, Mapping) else ())):
        if value is None or value is False or value in ("", [], {}):
            continue
        followed = form.followed.get(key)
        is_refused = key in _REFUSED or (key in _OF_LAYERS and _has_other_bits(value, quantization.get("bits")))
        if is_refused or (followed is not None and not is_followed(value, followed)):
            ways = "" if followed is None else f", and weights are decoded with {' or '.join(map(str, followed))}"
            raise CheckpointError(
                f"the quantization_config of the checkpoint of {path} has {key!r}: {short(repr(value))}, which is not "
                f"carried out here{ways}. {_WAY_OUT}"
            )


def _has_other_bits(layers: object, bits: object) -> bool:
    each: list[Any] = list(layers.values()) if isinstance(layers, Mapping) else [layers]
    if not all(one is None or isinstance(one, Mapping) for one in each):
        return True
    own = [one["bits"] for one in each if one and one.get("bits") is not None]
    return any(one != bits and not (isinstance(one, int) and one >= _NOT_PACKED) for one in own)


# A checkpoint's values in the model's form


_BYTES = (
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.int8, torch.uint8),
)
_ENDS = ("_scale_inv", "_scale", ".absmax")  # of the names of scales, after the name of a weight
_SCALES = ("scale", "scales", "qscale_weight", "SCB")  # beside a weight


class Form(Enum):
    """How a checkpoint's values are stored, and so handled."""

    PLAIN = auto()  # as the model has them
    MAPPED = auto()  # in a GGUF file: under other names, in blocks
    DECODED = auto()  # packed: dense values are recipes over the pieces
    REBUILT = auto()  # in torchao's classes, over their inner tensors
    FOR_MODULES = auto()  # for modules of transformers' own, in a form that is known here
    LEFT = auto()  # for modules of transformers' own, and left to it


@dataclass(frozen=True)
class Values:
    """A checkpoint's values, on disk or deferred, by the names that they have in a checkpoint of the model.

    Attributes:
        form: how they are stored.
        quantization: the settings in the model's configuration, if there are any.
        beside: tensors of the checkpoint that no decoded value is computed from.
    """

    form: Form
    tensors: Mapping[str, torch.Tensor]
    quantization: Settings | None = None
    beside: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def keeps_dtype(self, name: str) -> bool:
        """Whether transformers leaves a value in its own dtype when it dequantizes: a weight that is not packed."""
        tensor = self.tensors[name]
        return (
            self.form is Form.DECODED
            and method_of(self.quantization or {}) in ("bitsandbytes", "fp8")
            and name.endswith(".weight")
            and is_offloaded(tensor)
            and handle_of(tensor).composed is None
        )


@uncollected()
def values_in(
    source: Checkpoint,
    quantization: Settings | None,
    offload_dir: PathLike | None = None,
    *,
    model: Pretrained | None = None,
    dtype: torch.dtype | None = None,
) -> Values:
    """The values of a checkpoint.

    Args:
        quantization: the settings in the model's configuration; None if there are none.
        offload_dir: where values go at their first write.
        model: on the meta device; needed for a GGUF file, and for values in a form for modules of its own.
        dtype: the requested one, of what is mapped or for modules; None for the model's.

    Raises `CheckpointError` if pieces are missing or do not match each other, or the form is not supported.
    """
    tensors = source.tensors(offload_dir)
    if source.is_gguf:
        assert model is not None
        return Values(Form.MAPPED, as_saved(source, tensors, model, dtype or model.dtype))
    if quantization is None:
        _refuse_scaled(source, tensors, model)
        return Values(Form.PLAIN, tensors)
    dense = unpacked(tensors, quantization)
    if dense is not None:
        _refuse_scaled(source, dense, model, method_of(quantization))
        return Values(Form.DECODED, dense, quantization, left_beside(tensors, dense))
    if method_of(quantization) == "bitnet" and model is not None:
        return Values(Form.FOR_MODULES, for_modules(tensors, quantization, dtype or model.dtype), quantization)
    if PARTS_NOTE in (metadata := source.metadata):
        return Values(Form.REBUILT, rebuilt(tensors, metadata), quantization)
    return Values(Form.LEFT, tensors, quantization)


def _refuse_scaled(
    source: Checkpoint, values: Mapping[str, torch.Tensor], model: Pretrained | None, method: str | None = None
) -> None:
    is_stored = {name: is_offloaded(value) and handle_of(value).composed is None for name, value in values.items()}
    dtypes = {name: value.dtype for name, value in values.items() if is_stored[name] and value.dtype in _BYTES}
    if dtypes:
        refuse_scaled(source, dtypes, set(source) - set(model.state_dict() if model is not None else ()), method)


def refuse_scaled(
    source: Checkpoint, dtypes: Mapping[str, torch.dtype], unused: Collection[str], method: str | None = None
) -> None:
    """Refuse packed numbers whose scales are not used: by themselves they are no weight.

    `dtypes` are those of values that a model is to be filled with as they are stored; of `unused` names it has no
    value. The configuration says that weights are packed by `method`. Raises `CheckpointError`.
    """
    for name, dtype in dtypes.items():
        layer = name.removesuffix("weight")
        names = [*(name + end for end in _ENDS), *(layer + end for end in _SCALES)]
        scale = next((one for one in names if one in unused), None)
        if dtype in _BYTES and scale is not None:
            what = "does not say how they are packed" if method is None else f"says {method!r}, which they are not"
            raise CheckpointError(
                f"{name!r} in {source[name].file.path} is {dtype}, and {scale!r} is there, too, which the model does "
                f"not use: the weights are packed, and the quantization_config of the model {what}. Download the "
                "checkpoint again, with its config.json."
            )


# Saving: the packed pieces, where a model's values are still computed from them


_LEFT_OUT = {  # where a configuration lists the dense modules, by method
    "bitsandbytes": "llm_int8_skip_modules",
    "compressed-tensors": "ignore",
}
_USUAL = "modules_to_not_convert"
_OF_A_MATRIX = 2  # dimensions


@dataclass(frozen=True)
class Packed:
    """How a model's checkpoint was quantized: the attribute `packed_as` of the model.

    Attributes:
        quantization: the settings in its configuration.
        names: of the model's values that were packed.
        beside: tensors for kernels that quantize activations, which the checkpoint has and the model does not.
    """

    quantization: Settings
    names: tuple[str, ...]
    beside: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, model: nn.Module, quantization: Settings, beside: Mapping[str, torch.Tensor]) -> Packed:
        """From a model that has just been loaded."""
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        return cls(quantization, tuple(name for name, tensor in named if _is_packed(tensor)), beside)

    def still_beside(self, dense: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors to save beside the packed pieces if these values of the model are dense."""
        changed = {name.rpartition(".")[0] for name in set(self.names) & dense.keys()}
        if len(changed) == len({name.rpartition(".")[0] for name in self.names}):
            return {}
        return {
            name: tensor
            for name, tensor in self.beside.items()
            if not any(".".join(name.split(".")[:depth]) in changed for depth in range(1, name.count(".") + 1))
        }

    def now(self, dense: Mapping[str, torch.Tensor]) -> dict[str, Any] | None:
        """The settings for the configuration if these values of the model are dense; None if all are."""
        changed = sorted(set(self.names) & dense.keys())
        if len(changed) == len(self.names):
            return None
        if not changed:
            return dict(self.quantization)
        key = _LEFT_OUT.get(str(method_of(self.quantization)), _USUAL)
        listed = self.quantization.get(key)
        if listed is None:  # a list replaces what is left out without one, such as the output layer
            listed = [name.removesuffix(".weight") for name, tensor in dense.items() if tensor.dim() == _OF_A_MATRIX]
        return {**self.quantization, key: sorted({*listed, *(name.removesuffix(".weight") for name in changed)})}


def left_beside(
    tensors: Mapping[str, OffloadedTensor], dense: Mapping[str, OffloadedTensor]
) -> dict[str, OffloadedTensor]:
    """The tensors of a packed checkpoint that no dense one is computed from."""
    used = set(stored_in(handle_of(tensor) for tensor in dense.values()))
    return {name: tensor for name, tensor in tensors.items() if handle_of(tensor) not in used}


def packed_state(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The packed pieces of a model's values, by their names in the checkpoint; and the other values, by their own."""
    owners = {name: list(_owners(tensor)) for name, tensor in state.items()}
    made = {name for name, found in owners.items() if any(isinstance(owner, Decoded) for owner, _ in found)}
    distinct = {identity_of(state[name]): name for name in made}  # tied values count once
    used: Counter[Any] = Counter()
    for name in distinct.values():
        for owner, count in owners[name]:
            used[owner] += count
    whole = {owner for owner, count in used.items() if count == _size(owner)}
    packed = {name for name in made if whole.issuperset(owner for owner, _ in owners[name])}
    pieces: dict[str, torch.Tensor] = {
        handle.name: wrap_handle(handle, CPU)
        for name in sorted(packed)
        for owner, _ in owners[name]
        for handle in ([piece.handle for piece in owner.pieces] if isinstance(owner, Decoded) else [owner])
    }
    return pieces, {name: tensor for name, tensor in state.items() if name not in packed}


def _is_packed(tensor: torch.Tensor) -> bool:
    return any(isinstance(owner, Decoded) for owner, _ in _owners(tensor))


def _owners(tensor: torch.Tensor) -> Iterator[tuple[Decoded | Handle, int]]:
    """The sources that a value is computed from, and the number of elements of each; nothing for other values."""
    if is_offloaded(tensor) and not is_part(tensor) and handle_of(tensor).composed is not None:
        yield from _of_piece(Piece(handle_of(tensor)))


def _of_piece(piece: Piece) -> Iterator[tuple[Decoded | Handle, int]]:
    composed = piece.handle.composed
    if isinstance(composed, Joined):
        for inner, _ in composed.rows_of(piece.view_spec):
            yield from _of_piece(inner)
    else:
        yield composed if isinstance(composed, Decoded) else piece.handle, piece.view_spec.numel()


def _size(owner: Decoded | Handle) -> int:
    return meta_of(owner).numel() if isinstance(owner, Handle) else torch.Size(owner.layout.shape).numel()
