"""Which tensor goes where, and accelerate's hooks: those that move activations there, and those that hold values.

Always true:
- the longest prefix in the map wins; every tensor has a place, or an error names it
- a name in the map that matches nothing in the model has no effect but a warning
- no map, None, means the CPU's memory, as in accelerate and transformers
- a value on disk executes on the map's first accelerator, else the current one, else the CPU, unless the map says where
- a model whose values are held by somebody else is refused, and not changed; a hook that holds none stays as it is
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from offload.errors import ArgumentTypeError, DeviceMapError, UnsupportedOpError
from offload.memory import as_bytes
from offload.system.reasons import first_line, some
from offload.torch_api import buffers_of, parameters_of, usable_accelerator

ON_DISK = "disk"
AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")

Word: TypeAlias = "str | int | torch.device"
_CPU = torch.device("cpu")
_META = torch.device("meta")
DeviceMap: TypeAlias = "Word | Mapping[str, Word] | None"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is kept and where its ops run. The device is meta for a tensor that is not loaded."""

    on_disk: bool
    device: torch.device


def infer_device_map(
    model: nn.Module,
    device_map: DeviceMap,
    *,
    max_memory: Mapping[int | str, Any] | int | str | None = None,
    no_split_module_classes: list[str] | None = None,
    dtype: torch.dtype | None = None,
    offload_buffers: bool = False,
) -> DeviceMap:
    """The map that accelerate computes for a word of `AUTOMATIC`, others unchanged; may raise `DeviceMapError`."""
    if not isinstance(device_map, str) or device_map not in AUTOMATIC:
        return device_map
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    if max_memory is not None and not isinstance(max_memory, Mapping):
        raise DeviceMapError(
            f"device_map={device_map!r} needs max_memory by device, as {{'cpu': '8GiB'}}, not {max_memory!r}"
        )
    if no_split_module_classes is None:
        no_split_module_classes = list(getattr(model, "_no_split_modules", None) or [])
    if not hasattr(no_split_module_classes, "__iter__"):
        raise ArgumentTypeError(f"no_split_module_classes is a list of names, not {repr(no_split_module_classes)[:80]}")
    options: dict[str, Any] = {"no_split_module_classes": no_split_module_classes, "dtype": dtype}
    try:
        shares: Any = None if max_memory is None else {device: as_bytes(share) for device, share in max_memory.items()}
        if device_map != "sequential":
            shares = get_balanced_memory(model, shares, low_zero=device_map == "balanced_low_0", **options)
        return infer_auto_device_map(model, max_memory=shares, offload_buffers=offload_buffers, **options)  # type: ignore[no-any-return]
    except (ValueError, TypeError, RuntimeError) as error:
        raise DeviceMapError(f"accelerate can't divide the model ({first_line(error)}): mend max_memory") from error


def places(names: Iterable[str], device_map: DeviceMap) -> dict[str, Place]:
    """The place of each tensor, by its full name.

    Args:
        names: names of parameters and buffers.
        device_map: a word for everything, or module names to words: `"cpu"`, `0`, `"cuda:1"`, `"disk"`,
            `"disk:cuda:1"`, `"meta"`. The name `""` means the whole model. None is `"cpu"` for everything.

    Raises:
        DeviceMapError: an unknown word, or a tensor that the map leaves out.
    """
    words = device_map if isinstance(device_map, Mapping) else {"": "cpu" if device_map is None else device_map}
    named = {prefix: place_of(word, _CPU, module=prefix) for prefix, word in words.items() if word != ON_DISK}
    there = next((one.device for one in named.values() if one.device.type not in ("cpu", "meta")), None)
    on_disk = Place(True, there or existing(usable_accelerator() or _CPU))
    known = {prefix: named.get(prefix, on_disk) for prefix in words}
    return {name: _longest(name, known) for name in names}


def place_of(word: Word, default: torch.device, *, module: str = "") -> Place:
    """What a word means; what is on disk runs on `default`. `DeviceMapError` for an unknown word or device."""
    if word == ON_DISK:
        return Place(True, default)
    on_disk = isinstance(word, str) and word.startswith(f"{ON_DISK}:")
    device = word.removeprefix(f"{ON_DISK}:") if isinstance(word, str) and on_disk else word
    try:
        if device is None:
            raise TypeError("None is not a device")
        return Place(on_disk, existing(device))
    except (RuntimeError, AssertionError, TypeError, ValueError, ImportError) as error:
        where = f" for {module!r}" if module else ""
        raise DeviceMapError(
            f"{word!r}{where} is not a place that a device map can name here: "
            f"use 'disk', 'disk:<device>', 'cpu', 'meta', or a device that torch has ({str(error).splitlines()[0]})"
        ) from error


def existing(device: Word) -> torch.device:
    """The device with its index, as torch reports it; raises torch's own errors if there is none."""
    return torch.empty(0, device=device).device


def execution_devices(placed: Mapping[str, Place]) -> dict[str, torch.device]:
    """The device that each module runs on, by name, given the places of its tensors.

    It is that of the module's own tensors, else the one that all below it share; a module with neither is left out.
    The model itself, `""`, starts on its first tensor's device.
    """
    own: dict[str, torch.device] = {}
    below: dict[str, set[torch.device]] = {}
    for name, place in placed.items():
        if place.device == _META:
            continue
        module = name.rpartition(".")[0]
        own.setdefault(module, place.device)
        for prefix in _prefixes(module):
            below.setdefault(prefix, set()).add(place.device)
    alone = {name: next(iter(devices)) for name, devices in below.items() if len(devices) == 1}
    first = next(iter(own.values()), None)
    return alone if first is None else {"": first, **alone, **own}


def warn_of_strangers(device_map: DeviceMap, modules: Iterable[str], tensors: Iterable[str]) -> None:
    """Warn about names in a device map that match no module or tensor: what they should place is somewhere else."""
    known = {"", *modules, *tensors}
    strangers = [name for name in device_map if name not in known] if isinstance(device_map, Mapping) else []
    if strangers:
        text = f"the device map names modules that this model does not have; they are ignored: {some(strangers)}"
        warnings.warn(text, stacklevel=4)


def _prefixes(name: str) -> Iterable[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _longest(name: str, known: Mapping[str, Place]) -> Place:
    for prefix in _prefixes(name):
        if prefix in known:
            return known[prefix]
    raise DeviceMapError(f"the device map has no place for {name!r}: add its module, or '' for all the rest")


def refuse_held(model: nn.Module) -> None:
    """Raises `UnsupportedOpError` if accelerate's hooks, or another library's mappings, hold the model's values."""
    hooked = [
        name or "the model itself"
        for name, module in model.named_modules()
        if any(getattr(hook, "offload", False) for hook in _hooks_of(module))
    ]
    if hooked:
        raise UnsupportedOpError(
            f"accelerate has dispatched this {type(model).__name__}: its hooks hold the weights of {len(hooked)} "
            f"modules ({some(hooked)}). Load it with offload instead: offload.load_checkpoint_and_dispatch fills an "
            "empty model from a checkpoint, and offload.from_pretrained loads one of transformers"
        )
    for name, module in model.named_modules():
        for members in (parameters_of(module), buffers_of(module)):
            if not isinstance(members, dict):
                package = type(members).__module__.partition(".")[0]
                way_out = {"compressed_tensors": "call compressed_tensors.offload.remove_dispatch(model, True) first"}
                raise UnsupportedOpError(
                    f"the values of {name or 'the model'!r} are held by {package} (a {type(members).__name__}), which "
                    f"returns copies of them: {way_out.get(package, 'have it release the model first')}"
                )


def move_activations(
    model: nn.Module, devices: Mapping[str, torch.device], *, skip_keys: str | list[str] | None
) -> None:
    """Add hooks that bring the inputs of modules (by name) to their devices, and the outputs of the model back."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for name, device in devices.items():
        hook = AlignDevicesHook(execution_device=device, io_same_device=not name, skip_keys=skip_keys)
        add_hook_to_module(model.get_submodule(name), hook, append=True)


def _hooks_of(module: nn.Module) -> Iterator[Any]:
    """accelerate's hooks on a module; one that consists of several is taken apart."""
    left: list[Any] = [getattr(module, "_hf_hook", None)]
    while left:
        hook = left.pop()
        if hasattr(hook, "hooks"):
            left.extend(hook.hooks)
        elif hook is not None:
            yield hook
