"""Offloaded tensors, wherever they are nested, made plain.

Always true:
- one tensor in several places stays one, and tensors over the same bytes stay tied
- the files are left as they are
"""

from __future__ import annotations

from typing import Any

from torch import nn

from offload.tensor.locals import is_offloaded, local_of, with_local
from offload.tensor.saved import identity_of
from offload.tensor.views import target_of
from offload.tensor.wrapper import carry_attributes
from offload.torch_api import buffers_of, parameters_of, tree_map


def materialize(value: object) -> Any:
    """`value` in memory: a plain, independent tensor in place of each offloaded one, on its target device.

    Args:
        value: a tensor; or lists, tuples and dicts of them, which are rebuilt; or a module, which is changed in place.

    Returns:
        The plain value; a module itself. What is not on disk comes back as it is.

    Example:
        >>> from offload import OffloadedTensor
        >>> w = OffloadedTensor.full((2,), 1.0, name="w")
        >>> materialize({"w": w})
        {'w': tensor([1., 1.])}
    """
    memo: dict[object, Any] = {}
    return tree_map(lambda leaf: _in_memory(leaf, memo), value)


def _in_memory(leaf: object, memo: dict[object, Any]) -> Any:
    if isinstance(leaf, nn.Module):
        _fill_module(leaf, memo)
    return _plain(leaf, memo)


def _fill_module(module: nn.Module, memo: dict[object, Any]) -> None:
    for part in module.modules():
        for name, parameter in parameters_of(part).items():
            if is_offloaded(parameter):
                parameters_of(part)[name] = _plain_parameter(parameter, memo)
        for name, buffer in buffers_of(part).items():
            buffers_of(part)[name] = _plain(buffer, memo)


def _plain_parameter(parameter: Any, memo: dict[object, Any]) -> nn.Parameter:
    plain: nn.Parameter | None = memo.get(parameter)
    if plain is None:
        plain = memo[parameter] = nn.Parameter(_plain(parameter, memo), parameter.requires_grad)
        plain.grad = parameter.grad
        carry_attributes(parameter, plain)
    return plain


def _plain(leaf: Any, memo: dict[object, Any]) -> Any:
    if not is_offloaded(leaf):
        return leaf
    local = local_of(leaf)
    key = identity_of(local), target_of(local)
    if key not in memo:
        memo[key] = local.materialize()
    return with_local(leaf, memo[key])
