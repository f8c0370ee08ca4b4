"""The table of packed formats, and the dense weights of a checkpoint that is packed in one of them.

Always true:
- the pieces that are stored say which weights are packed; the settings say how
- a weight with a piece that the format does not have, or with a setting that is not carried out, is refused
- a setting without a value (None, False, empty) says nothing

Source of the settings: the configuration classes of transformers 5.23 and compressed-tensors 0.20; AutoGPTQ, GPTQModel,
AutoAWQ and auto-round.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.annotations import Settings
from offload.checkpoints.forms import bitsandbytes, compressed_tensors, fp8, integers
from offload.checkpoints.forms.decoding import Format, Pieces, Tensors, is_followed, method_of, unfit
from offload.errors import CheckpointError
from offload.system.reasons import short
from offload.tensor.views import handle_of
from offload.tensor.wrapper import OffloadedTensor
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
