"""accelerate's hooks: those that move activations between devices, and refusing a model whose hooks hold its weights.

Always true:
- a model whose values are held by somebody else is refused, and not changed
- a hook that holds no values stays as it is
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from offload.errors import UnsupportedOpError
from offload.system.reasons import some
from offload.tensor.arguments import checked_device
from offload.torch_api import buffers_of, parameters_of


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


def refuse_other_device(model: nn.Module, device: torch.device) -> None:
    """Raises `UnsupportedOpError` if accelerate's hooks would move activations away from the device."""
    for name, module in model.named_modules():
        for hook in _hooks_of(module):
            theirs = getattr(hook, "execution_device", None)
            if theirs is not None and checked_device(theirs) != device:
                raise UnsupportedOpError(
                    f"accelerate's hook on {name or 'the model'!r} moves its inputs to {theirs}, and the model is to "
                    f"run on {device}: call accelerate.hooks.remove_hook_from_submodules(model) first"
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
