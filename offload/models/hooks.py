"""accelerate's hooks: those that move weights, with what they hold, and those that move activations.

Always true:
- what a hook holds is what it would put into its module at the next forward, read only when needed
- a hook that moves no weights stays as it is
- accelerate's folders, and checkpoints that it refers to, are only read
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.errors import CorruptFileError, MetaTensorError, MissingFileError, ShapeMismatchError, UnsupportedOpError
from offload.models.slots import Slot, joined_slots
from offload.storage.file import TensorFile
from offload.storage.handle import Handle
from offload.storage.layout import contiguous_stride
from offload.storage.mapping import mapped_alone
from offload.storage.reasons import explained, reading
from offload.tensor.arguments import checked_device
from offload.tensor.deferred import as_dtype
from offload.tensor.saved import identity_of
from offload.tensor.wrapper import PathLike, is_offloaded, wrap_handle
from offload.torch_api import buffers_of, parameters_of

_DIGEST_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class Held:
    """A value that a hook keeps while its module does not run.

    Attributes:
        weights: the mapping that contains it, without accelerate's prefixes.
        key: its name there.
        device: where the hook runs the module.
        is_tied: whether accelerate knows that it is tied, though not to what.
    """

    weights: Any  # a mapping
    key: str
    device: torch.device
    is_tied: bool


def held_values(model: nn.Module) -> dict[str, Held]:
    """The values that accelerate's hooks hold for a model, by the full names of the tensors.

    Raises:
        UnsupportedOpError: they are 8-bit weights of bitsandbytes, whose scales are separate; or another library holds
            values and would not notice a replacement.
    """
    _refuse_strangers(model)
    held: dict[str, Held] = {}
    for prefix, module in model.named_modules():
        for hook in _hooks_of(getattr(module, "_hf_hook", None)):
            if getattr(hook, "offload", False) and getattr(hook, "weights_map", None) is not None:
                held.update(_held_by(hook, module, prefix))
    return held


def read_held(name: str, held: Held, like: torch.Tensor, offload_dir: PathLike | None) -> torch.Tensor:
    """The value of the tensor `name`, with the shape and dtype of `like`.

    An entry of a safetensors file is referenced there; a file in accelerate's own format is mapped.

    Raises:
        MetaTensorError: the hook does not have the value.
        MissingFileError, CorruptFileError, ReadError, ShapeMismatchError
    """
    try:
        value = _read(name, held, offload_dir)
    except KeyError as error:
        raise MetaTensorError(
            f"{name!r} is empty, and accelerate's hook has no value {held.key!r} for it: load it first"
        ) from error
    if value.shape != like.shape:
        raise ShapeMismatchError(
            f"{name!r} has shape {tuple(like.shape)}, and the value that accelerate's hook holds for it "
            f"{tuple(value.shape)}: the hook's weights are of another model"
        )
    return as_dtype(value, like.dtype)


def origin_of(held: Held) -> Hashable:
    """Equal for two values exactly if they are tied: the same memory, file entry or, if all else is lost, bytes.

    None for a value that is not tied.
    """
    info = _index_entry(held)
    if info is None:
        in_memory = held.weights if isinstance(held.weights, dict) else getattr(held.weights, "state_dict", None)
        value = in_memory.get(held.key) if isinstance(in_memory, dict) else None
        return identity_of(value) if isinstance(value, torch.Tensor) else None
    if info.get("safetensors_file") is not None:
        return os.path.abspath(info["safetensors_file"]), info.get("weight_name", held.key)
    return (_digest(_data_file(held)), str(info)) if held.is_tied else None


def held_for(slot: Slot, held: Mapping[str, Held]) -> Held | None:
    """What a hook holds for a slot."""
    return next((held[name] for name in slot.names if name in held), None)


def retied_slots(slots: Iterable[Slot], held: Mapping[str, Held]) -> list[Slot]:
    """Merge slots of one value: accelerate empties tied parameters separately, which unties them."""

    def key(slot: Slot) -> Hashable:
        found = held_for(slot, held)
        origin = origin_of(found) if found and slot.is_parameter else None
        return id(slot) if origin is None else (origin, slot.tensor.dtype)

    return joined_slots(slots, key)


def filled_slots(slots: Iterable[Slot], held: Mapping[str, Held], offload_dir: PathLike | None) -> Iterator[Slot]:
    """The slots one by one, each filled with the value that a hook holds for it."""
    for slot in slots:
        found = held_for(slot, held)
        if found:
            value = read_held(slot.name, found, slot.tensor, offload_dir)
            slot.fill(value if slot.is_parameter or is_offloaded(value) else value.clone())  # not the hook's own tensor
        yield slot


def release(model: nn.Module, *, keep_moves: bool) -> None:
    """Free a model of hooks that move weights, of what they hold, and of accelerate's notes on it.

    Args:
        model: what its hooks hold has been moved elsewhere.
        keep_moves: whether hooks still bring activations to the device that their module runs on.
    """
    _forget_placement(model)
    hooked = [module for module in model.modules() if hasattr(module, "_hf_hook")]
    if not hooked:
        return
    from accelerate.hooks import AlignDevicesHook, remove_hook_from_module

    for module in hooked:
        moving = [hook for hook in _hooks_of(module._hf_hook) if isinstance(hook, AlignDevicesHook)]
        for hook in moving:  # without weights it touches none, neither in forward nor when it is detached
            hook.offload, hook.weights_map, hook.tied_params_map = False, None, None
        if not moving or keep_moves:
            continue
        left = _without(module._hf_hook, AlignDevicesHook)
        if left is None:
            remove_hook_from_module(module)
        else:
            module._hf_hook = left


def move_activations(
    model: nn.Module, devices: Mapping[str, torch.device], *, skip_keys: str | list[str] | None
) -> None:
    """Add hooks that bring the inputs of modules (by name) to their devices, and the outputs of the model back."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for name, device in devices.items():
        hook = AlignDevicesHook(execution_device=device, io_same_device=not name, skip_keys=skip_keys)
        add_hook_to_module(model.get_submodule(name), hook, append=True)


def _refuse_strangers(model: nn.Module) -> None:
    """Refuse a model if another library keeps the parameters of a module and hands out copies."""
    for name, module in model.named_modules():
        for members in (parameters_of(module), buffers_of(module)):
            if not isinstance(members, dict):
                package = type(members).__module__.partition(".")[0]
                way_out = {"compressed_tensors": "call compressed_tensors.offload.remove_dispatch(model, True) first"}
                raise UnsupportedOpError(
                    f"the values of {name or 'the model'!r} are held by {package} (a {type(members).__name__}), which "
                    f"returns copies of them: {way_out.get(package, 'have it release the model first')}"
                )


# Which hooks there are


def _hooks_of(hook: Any) -> Iterator[Any]:
    """A module's hook, or one by one those that it consists of."""
    if hasattr(hook, "hooks"):
        for part in hook.hooks:
            yield from _hooks_of(part)
    elif hook is not None:
        yield hook


def _without(hook: Any, kind: type) -> Any | None:
    """A hook without its parts of one type; None if nothing is left."""
    from accelerate.hooks import SequentialHook

    if type(hook) is not SequentialHook:
        return None if isinstance(hook, kind) else hook
    left = [part for part in (_without(part, kind) for part in hook.hooks) if part is not None]
    return SequentialHook(*left) if len(left) > 1 else next(iter(left), None)


def _forget_placement(model: nn.Module) -> None:
    """Undo what `dispatch_model` leaves on a model: its map, and the `to` and `cuda` that refuse to run."""
    vars(model).pop("hf_device_map", None)
    for name, member in list(vars(model).items()):
        if getattr(member, "__globals__", {}).get("__name__") == "accelerate.big_modeling":
            delattr(model, name)


def _held_by(hook: Any, module: nn.Module, prefix: str) -> Iterator[tuple[str, Held]]:
    from accelerate.utils import named_module_tensors

    device = checked_device("cpu" if hook.execution_device is None else hook.execution_device)
    names = named_module_tensors(
        module, include_buffers=hook.offload_buffers, recurse=hook.place_submodules, remove_non_persistent=True
    )
    for name, tensor in names:
        weights, key = _unprefixed(hook.weights_map, name)
        full_name = f"{prefix}.{name}" if prefix else name
        if tensor.dtype == torch.int8 and "weight" in key and key.replace("weight", "SCB") in weights:
            raise UnsupportedOpError(f"{full_name!r} is an 8-bit weight of bitsandbytes: dequantize the model first")
        yield full_name, Held(weights, key, device, name in hook.tied_params_names)


def _unprefixed(weights: Any, key: str) -> tuple[Mapping[str, Any], str]:
    from accelerate.utils import PrefixedDataset

    while type(weights) is PrefixedDataset:
        weights, key = weights.dataset, f"{weights.prefix}{key}"
    return weights, key


# What hooks hold


def _read(name: str, held: Held, offload_dir: PathLike | None) -> torch.Tensor:
    info = _index_entry(held)
    if info is None:
        value: torch.Tensor = held.weights[held.key]
        return value.detach()
    if info.get("safetensors_file") is None:
        return _map_data(name, _data_file(held), info)
    file = TensorFile.open(info["safetensors_file"])
    stored = wrap_handle(Handle.reference(file, info.get("weight_name", held.key), offload_dir), held.device)
    return as_dtype(stored, _dtype(info["dtype"])) if "dtype" in info else stored


def _index_entry(held: Held) -> Mapping[str, Any] | None:
    """accelerate's index entry of a value on disk; None for one that only its mapping can return."""
    from accelerate.utils import OffloadedWeightsLoader

    if type(held.weights) is not OffloadedWeightsLoader or held.key in held.weights.state_dict:
        return None
    entry: Mapping[str, Any] | None = held.weights.index.get(held.key)
    return entry


def _data_file(held: Held) -> Path:
    return Path(held.weights.save_folder, f"{held.key}.dat")


def _map_data(name: str, path: Path, info: Mapping[str, Any]) -> torch.Tensor:
    """A raw data file of accelerate's as a tensor over a private mapping."""
    dtype, shape = _dtype(info["dtype"]), tuple(info["shape"])
    nbytes = math.prod(shape) * dtype.itemsize
    try:
        found = path.stat().st_size
    except FileNotFoundError as error:
        raise MissingFileError(f"{path}, from which accelerate was to read {name!r}, is missing") from error
    except OSError as error:
        raise explained(path, error) from error
    if found != nbytes:
        raise CorruptFileError(
            f"{path} has {found} bytes, and {name!r} takes {nbytes} ({dtype}, {shape}): the file belongs to "
            "another tensor"
        )
    return torch.empty(0, dtype=dtype).set_(mapped_alone(path, 0, nbytes), 0, shape, contiguous_stride(shape))


def _dtype(word: str) -> torch.dtype:
    dtype = getattr(torch, word, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptFileError(f"accelerate's index gives {word!r} as a dtype, which torch does not have")
    return dtype


def _digest(path: Path) -> bytes:
    digest = hashlib.blake2b()
    with reading(path), path.open("rb") as file:
        while block := file.read(_DIGEST_BLOCK):
            digest.update(block)
    return digest.digest()
