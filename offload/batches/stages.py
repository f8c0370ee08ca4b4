"""The parts of a model that batches pass together.

Always true:
- stages are modules in the order in which the model probably calls them; a wrong order costs only time
- a stage contains parameters or buffers, directly or in its submodules
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from offload.errors import ArgumentError
from offload.storage.handle import Handle
from offload.tensor.locals import local_of
from offload.tensor.recipes import stored_in
from offload.tensor.views import handle_of
from offload.tensor.wrapper import is_offloaded
from offload.torch_api import blocks_of, buffers_of, parameters_of


def models_of(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    return [model] if isinstance(model, nn.Module) else list(model)


def stages_of(models: Iterable[nn.Module], blocks: Iterable[nn.Module | str] | None) -> list[nn.Module]:
    """The modules before which batches wait: `blocks`, or each block and the modules beside; or `ArgumentError`."""
    models = list(models)
    if blocks is not None:
        return list(dict.fromkeys(_named(models, block) for block in blocks))
    instances = (members for model in models for members in blocks_of(model))
    hookable = (members for members in instances if not isinstance(members[0], torch.jit.ScriptModule))
    held = ((members[0], [{**parameters_of(one), **buffers_of(one)} for one in members]) for members in hookable)
    filled = (stage for stage, values in held if any(one is not None for own in values for one in own.values()))
    return list(dict.fromkeys(filled))


def handles_of(models: Iterable[nn.Module], stages: Sequence[nn.Module]) -> list[list[Handle]]:
    """The values on disk of each stage, and of what follows it up to the next one."""
    of_stages: dict[int, dict[Handle, None]] = {id(stage): {} for stage in stages}
    for model in models:
        current: dict[Handle, None] = {}
        for module in model.modules():
            current = of_stages.get(id(module), current)
            members = (*parameters_of(module).values(), *buffers_of(module).values())
            stored = (member for member in map(local_of, members) if is_offloaded(member))
            current.update(dict.fromkeys(stored_in(map(handle_of, stored))))
    return [list(current) for current in of_stages.values()]


def _named(models: Sequence[nn.Module], block: object) -> nn.Module:
    if isinstance(block, str):
        for model in models:
            for name, module in model.named_modules():
                if name == block:
                    named: nn.Module = module
                    return named
        raise ArgumentError(f"blocks: the model has no module {block!r}")
    stage = next((module for model in models for module in model.modules() if module is block), None)
    if stage is None:
        raise ArgumentError(f"blocks: a {type(block).__name__} is not part of the model")
    return stage
