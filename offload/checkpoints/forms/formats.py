"""A checkpoint's values in the form in which a model has them, and the table of packed formats.

Always true:
- nothing is read or written: values are referenced, or recipes over what is referenced
- one table says which form of checkpoint is handled how, for loading, filling and converting
- the pieces that are stored say which weights are packed; the settings say how
- a weight with a piece that the format does not have is refused; so is a setting that is known not to be carried out
- the pieces of a model are saved as they are, under the names by which they were read, if none of its packed values
  was changed; otherwise all are saved dense

Source of the settings: the configuration classes of transformers 5.23 and compressed-tensors 0.20; AutoGPTQ, GPTQModel,
AutoAWQ and auto-round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import nn

from offload.annotations import Pretrained, Settings
from offload.checkpoints.checkpoint import Checkpoint
from offload.checkpoints.forms import bitsandbytes, compressed_tensors, fp8, integers
from offload.checkpoints.forms.decoding import Format, Pieces, Tensors, method_of, unfit
from offload.checkpoints.forms.gguf import as_saved
from offload.checkpoints.forms.integers import for_modules
from offload.checkpoints.forms.torchao import PARTS_NOTE, rebuilt
from offload.errors import CheckpointError
from offload.memory import uncollected
from offload.storage.handle import Handle
from offload.system.reasons import short
from offload.tensor.decoded import Decoded
from offload.tensor.guests import CPU
from offload.tensor.recipes import Joined, stored_in
from offload.tensor.views import handle_of, is_part
from offload.tensor.wrapper import OffloadedTensor, PathLike, is_offloaded, wrap_handle
from offload.torch_api import DisableTorchFunctionSubclass

FORMATS: dict[str, Format] = {  # by the method's name in a configuration
    "awq": integers.AWQ,
    "bitsandbytes": bitsandbytes.FORMAT,
    "compressed-tensors": compressed_tensors.FORMAT,
    "fbgemm_fp8": fp8.FORMAT,
    "fp8": fp8.FORMAT,
    "gptq": integers.GPTQ,
    "mxfp4": fp8.MXFP4,
    "mxfp8": fp8.FORMAT,
}
_LEFT_TO_TRANSFORMERS = ("bitnet", "metal", "torchao")
_REFUSED = ("is_marlin_format", "moe_sparsity_config", "rotation", "transform_config")  # settings that change weights
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
    try:
        settings = FORMATS[method].read(_followed(quantization))
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
        value = form.weight(Pieces(weight, by_role, form.ends, settings))
        if value is not None:
            dense[weight] = value
            packed.add(weight)
        else:
            dense.update({name: tensors[name] for role, name in names.items() if role == "" or "" not in names})
    for name in dense.keys() - packed:  # a piece that the format does not have may change what the weights are
        ends = (at for at, letter in enumerate(name) if letter in "._" and name[at:] != "_bias")
        part_of = next((name[:at] for at in ends if name[:at] in packed), None)
        if part_of is not None:
            raise unfit(part_of, [dense[part_of], dense[name]], f"{name!r} is not known here. {_WAY_OUT}")
    return dense


def _followed(quantization: Settings) -> Settings:
    """The settings, with those that are nested in them; raises `ValueError` for some that are not carried out."""
    settings = {**quantization, **(quantization.get("quantization_config") or {})}
    key = next(filter(settings.get, _REFUSED), None)
    if key is not None:
        raise ValueError(f"{key!r}, {settings[key]!r}, is not carried out here")
    return settings


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


# Saving: the packed pieces, if a model's values are still computed from them


@dataclass(frozen=True)
class Packed:
    """How a model's checkpoint was quantized: the attribute `packed_as` of the model.

    Attributes:
        quantization: the settings in its configuration.
        pieces: the names of the pieces of each value that was packed, by its name in the model.
        beside: tensors for kernels that quantize activations, which the checkpoint has and the model does not.
    """

    quantization: Settings
    pieces: Mapping[str, frozenset[str]]
    beside: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, model: nn.Module, quantization: Settings, beside: Mapping[str, torch.Tensor]) -> Packed:
        """From a model that has just been loaded."""
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        pieces = {name: frozenset(by_name) for name, tensor in named if (by_name := _pieces_of(tensor))}
        return cls(quantization, pieces, beside)

    def split(self, state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The tensors to save of packed values, by their names in the checkpoint; and the other values, by their own.

        There are none of the first kind if a value that was packed has been changed.
        """
        stored = dict(self.beside)
        for name, names in self.pieces.items():
            by_name = _pieces_of(state[name]) if name in state else {}
            if by_name.keys() != names:
                return {}, dict(state)
            stored |= {piece: wrap_handle(handle, CPU) for piece, handle in by_name.items()}
        others = {name: tensor for name, tensor in state.items() if name not in self.pieces}
        return (stored, others) if stored.keys().isdisjoint(others) else ({}, dict(state))


def left_beside(
    tensors: Mapping[str, OffloadedTensor], dense: Mapping[str, OffloadedTensor]
) -> dict[str, OffloadedTensor]:
    """The tensors of a packed checkpoint that no dense one is computed from."""
    used = set(stored_in(handle_of(tensor) for tensor in dense.values()))
    return {name: tensor for name, tensor in tensors.items() if handle_of(tensor) not in used}


def _pieces_of(tensor: torch.Tensor) -> dict[str, Handle]:
    """The stored values that a packed value is computed from, by their names; none of other values."""
    if not is_offloaded(tensor) or is_part(tensor):
        return {}
    handles = list(_sources(handle_of(tensor)))
    is_packed = any(is_decoded for _, is_decoded in handles)
    return {handle.name: handle for handle, _ in handles} if is_packed else {}


def _sources(handle: Handle) -> Iterator[tuple[Handle, bool]]:
    """The stored values that one is computed from, each with whether it is a piece of a packed one."""
    composed = handle.composed
    if isinstance(composed, Decoded):
        yield from ((piece.handle, True) for piece in composed.pieces)
    elif isinstance(composed, Joined):
        yield from (source for piece in composed.pieces for source in _sources(piece.handle))
    else:
        yield handle, False
