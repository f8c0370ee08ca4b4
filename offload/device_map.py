"""Which tensor goes where.

Always true:
- the longest prefix in the map wins
- every tensor has a place, or there is an error that names it
- a value on disk executes on the map's first accelerator, else the current one, else the CPU, unless it says which
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from offload.errors import DeviceMapError

ON_DISK = "disk"
AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")

Word: TypeAlias = "str | int | torch.device"
_CPU = torch.device("cpu")
DeviceMap: TypeAlias = "Word | Mapping[str, Word]"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is kept and where ops on it run. `device` is meta for a tensor that is not to be loaded."""

    on_disk: bool
    device: torch.device


def infer_device_map(
    model: nn.Module,
    word: str,
    *,
    max_memory: Mapping[int | str, Any] | float | str | None,
    no_split_module_classes: list[str] | None,
    dtype: torch.dtype | None,
) -> dict[str, Any]:
    """The device map that accelerate computes for one of the words `AUTOMATIC`.

    Args:
        model: its tensors may be empty.
        word: "auto", "balanced", "balanced_low_0" or "sequential".
        max_memory: bytes, or "8GiB", by device, which the weights there may take; None for what is free.
        no_split_module_classes: classes that stay on one device; None for those that the model itself names.
        dtype: of the weights once loaded.

    Raises:
        DeviceMapError: `max_memory` does not name devices.
    """
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    if max_memory is not None and not isinstance(max_memory, Mapping):
        raise DeviceMapError(f"device_map={word!r} needs max_memory by device, as {{'cpu': {max_memory!r}}}")
    if no_split_module_classes is None:
        no_split_module_classes = list(getattr(model, "_no_split_modules", None) or [])
    options = {"no_split_module_classes": no_split_module_classes, "dtype": dtype}
    if word != "sequential":
        max_memory = get_balanced_memory(model, max_memory, low_zero=word == "balanced_low_0", **options)
    inferred: dict[str, Any] = infer_auto_device_map(model, max_memory=max_memory, **options)
    return inferred


def places(names: Iterable[str], device_map: DeviceMap) -> dict[str, Place]:
    """The place of each tensor, by its full name.

    Args:
        names: names of parameters and buffers.
        device_map: a word for everything, or module names to words: `"cpu"`, `0`, `"cuda:1"`, `"disk"`,
            `"disk:cuda:1"`, `"meta"`. The name `""` stands for the whole model.

    Raises:
        DeviceMapError: an unknown word, or a tensor that the map leaves out.
    """
    words = device_map if isinstance(device_map, Mapping) else {"": device_map}
    said = {prefix: place_of(word, _CPU, module=prefix) for prefix, word in words.items() if word != ON_DISK}
    on_disk = Place(True, _first_accelerator(said.values()))
    known = {prefix: said.get(prefix, on_disk) for prefix in words}
    return {name: _longest(name, known) for name in names}


def place_of(word: Word, default: torch.device, *, module: str = "") -> Place:
    """What a word of a device map means; `default` is where values on disk execute.

    Raises:
        DeviceMapError: it is not a word of the map's language, or there is no such device.
    """
    if word == ON_DISK:
        return Place(True, default)
    on_disk = isinstance(word, str) and word.startswith(f"{ON_DISK}:")
    device = word.removeprefix(f"{ON_DISK}:") if isinstance(word, str) and on_disk else word
    try:
        if device is None:
            raise TypeError("None is no device")
        return Place(on_disk, torch.empty(0, device=device).device)
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        where = f" for {module!r}" if module else ""
        raise DeviceMapError(
            f"{word!r}{where} is not a place that a device map can name here: "
            f"use 'disk', 'disk:<device>', 'meta', or a device that torch has ({str(error).splitlines()[0]})"
        ) from error


def _longest(name: str, known: Mapping[str, Place]) -> Place:
    prefix = name
    while True:
        if prefix in known:
            return known[prefix]
        if not prefix:
            raise DeviceMapError(f"the device map has no place for {name!r}: add its module, or '' for all the rest")
        prefix = prefix.rpartition(".")[0]


def _first_accelerator(said: Iterable[Place]) -> torch.device:
    for place in said:
        if place.device.type not in ("cpu", "meta"):
            return place.device
    current = torch.accelerator.current_accelerator()
    return _CPU if current is None else torch.empty(0, device=current).device
