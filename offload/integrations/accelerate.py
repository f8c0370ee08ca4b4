"""accelerate: empty weights, automatic device maps, activations that follow the modules.

Always true:
- accelerate's own functions do the work; its hooks never hold or load weights here
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from offload.device_map import Place


def init_empty_weights(include_buffers: bool = False) -> AbstractContextManager[Any]:
    """accelerate's context: a model that is built inside has parameters on the meta device, which take no memory."""
    from accelerate import init_empty_weights as context

    return context(include_buffers=include_buffers)


def infer_device_map(
    model: nn.Module,
    word: str,
    *,
    max_memory: Mapping[int | str, int | str] | None,
    no_split_module_classes: list[str] | None,
    dtype: torch.dtype | None,
) -> dict[str, Any]:
    """The device map that accelerate computes for "auto", "balanced", "balanced_low_0" or "sequential"."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    if no_split_module_classes is None:
        no_split_module_classes = list(getattr(model, "_no_split_modules", None) or [])
    options = {"no_split_module_classes": no_split_module_classes, "dtype": dtype}
    if word != "sequential":
        max_memory = get_balanced_memory(model, max_memory, low_zero=word == "balanced_low_0", **options)
    inferred: dict[str, Any] = infer_auto_device_map(model, max_memory=max_memory, **options)
    return inferred


def move_activations(model: nn.Module, modules: Mapping[str, Place], *, skip_keys: str | list[str] | None) -> None:
    """Have accelerate's hooks bring the inputs of each mapped module to its device, and the outputs back."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    known = dict(model.named_modules())
    first = next(iter(modules.values())).device
    add_hook_to_module(model, AlignDevicesHook(execution_device=first, io_same_device=True, skip_keys=skip_keys), append=True)
    for name, place in modules.items():
        if name in known and name and place.device.type != "meta":
            add_hook_to_module(known[name], AlignDevicesHook(execution_device=place.device, skip_keys=skip_keys), append=True)
