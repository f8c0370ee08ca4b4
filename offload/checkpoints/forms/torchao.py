"""torchao's quantized weights: tensor subclasses, each stored as its inner tensors and a note in the file's metadata.

Always true:
- a weight stays the subclass that it is, as torchao has kernels for it; its inner tensors are referenced
- an inner tensor is written as it is, under the key where torchao looks for it
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from offload.checkpoints.forms.decoding import Tensors, unfit
from offload.errors import ArgumentError, CheckpointError, OffloadError, UnknownSubclassError
from offload.storage.handle import Handle
from offload.storage.subclasses import flatten, is_subclass_value, with_inner
from offload.system.modes import no_functions, no_modes
from offload.tensor.guests import CPU
from offload.tensor.rebuilt import Rebuilt
from offload.tensor.recipes import Piece
from offload.tensor.saved import subclass_value
from offload.tensor.views import handle_of, view_spec_of
from offload.tensor.wrapper import OffloadedTensor, wrap_handle

PARTS_NOTE = "tensor_names"  # lists the tensors, both whole ones and those stored in parts


def rebuilt(tensors: Tensors, metadata: Mapping[str, str]) -> dict[str, OffloadedTensor]:
    """The tensors of a checkpoint in torchao's format: quantized weights by name, the others as they are, referenced.

    Raises `CheckpointError` if an inner tensor is missing, or they don't match each other: the message names the tensor
    and its file.
    """
    values = dict(tensors)
    for name, note in _notes(metadata).items():
        keys = {f"{name}.{part}": f"{_prefix(name)}{part}" for part in note.get("_tensor_data_names", ())}
        parts = {inner: values.pop(key) for inner, key in keys.items() if key in values}
        if parts:
            if len(parts) < len(keys):
                lacking = next(key for key in keys.values() if key not in tensors)
                raise unfit(name, list(parts.values()), f"{lacking!r} is missing, which is needed to decode it")
            values[name] = _weight(name, note, parts)
    return values


def _notes(metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The note on each tensor in the metadata."""
    try:
        names = json.loads(metadata.get(PARTS_NOTE, "[]"))
        return {str(name): dict(json.loads(metadata[str(name)])) for name in names}
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"the checkpoint's metadata should list tensors under {PARTS_NOTE}, but does not ({error}): download or "
            "copy it again"
        ) from error


def _weight(name: str, note: Mapping[str, object], parts: Mapping[str, OffloadedTensor]) -> OffloadedTensor:
    """The weight over its inner tensors, given by the names that `flatten` uses."""
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    prefix, pieces = _prefix(name), list(parts.values())
    with no_functions(), no_modes():
        view_specs = {key: view_spec_of(part) for key, part in parts.items()}
        given = {prefix + key.removeprefix(f"{name}."): view_spec for key, view_spec in view_specs.items()}
        try:
            notes = {name: json.dumps(note), PARTS_NOTE: json.dumps([name])}
            value = unflatten_tensor_state_dict(given, notes)[0][name]
            with suppress(NotImplementedError):  # some classes lack it
                actual = value.dequantize().shape  # without data: raises if inner tensors don't match each other
                if actual != value.shape:
                    raise ValueError(f"they make {list(actual)}, not {list(value.shape)}")
            _, recipe = flatten(value, name)
        except OffloadError:
            raise
        except Exception as error:  # torchao can raise anything for tensors that don't match
            raise unfit(name, pieces, str(error)) from error
        inner = {key: Piece(handle_of(part), view_specs[key]) for key, part in parts.items()}
    composed = Rebuilt(name, inner, recipe)
    return wrap_handle(Handle.compose(composed, name, handle_of(pieces[0]).folder), CPU)


def in_torchaos_form(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The same as torchao's `flatten_tensor_state_dict`, without copies: plain tensors by key, and the metadata.

    The metadata can't represent names without a dot.

    Raises `UnknownSubclassError` if torchao can't store a value's class.
    """
    parts: dict[str, torch.Tensor] = {}
    notes: dict[str, str] = {}
    for name, tensor in tensors.items():
        value = subclass_value(tensor)
        inner = {name: tensor}
        if value is not None:
            keys, notes[name] = _torchaos(name, value)
            if not keys or not all(key.startswith(_prefix(name)) for key in keys):
                raise _no_form(name, value, "its form is unknown")
            inner = {key: getattr(value, key.removeprefix(_prefix(name))) for key in keys}
        elif "." in name:
            _, notes[name] = _torchaos(name, torch.empty(0))
        if not parts.keys().isdisjoint(inner):
            raise ArgumentError(f"{name!r} and another tensor would both be stored as {sorted(inner)}: rename one")
        parts |= inner
    return parts, {**notes, PARTS_NOTE: json.dumps(list(notes))}


def _prefix(name: str) -> str:
    module, _, attribute = name.rpartition(".")
    return f"{module}._{attribute}_"


def _torchaos(name: str, value: torch.Tensor) -> tuple[list[str], str]:
    """The keys of a weight's inner tensors, and the note about it.

    Source: `torchao.prototype.safetensors`, which copies tensors; so it is called on ones without data.
    """
    try:
        from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

        is_plain = not is_subclass_value(value)
        bare = value if is_plain else with_inner(value, lambda part: part.to("meta"))
        flat, notes = flatten_tensor_state_dict({name: bare})
    except ImportError as error:
        raise _no_form(name, value, "torchao, which knows such forms, can't be imported") from error
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        raise _no_form(name, value, f"torchao has no form for it ({error})") from error
    return list(flat), notes[name]


def _no_form(name: str, value: torch.Tensor, why: str) -> UnknownSubclassError:
    return UnknownSubclassError(
        f"{name!r} is a {type(value).__name__}, and {why}: save its dequantize() or full_tensor(), "
        "or keep it in an offload folder (offload.disk_offload)"
    )
