"""The ops that the rules of `offload.tensor` do not fit.

Always true:
- each handler says in one line why the rule does not do
- an op has one handler; a second registration is an error
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from offload.tensor.rules import guests_of, named_guests, records_graph
from offload.tensor.tables import FUNCTIONS, RULES, Rule, registrar
from offload.tensor.wrapper import guest_of

aten = torch.ops.aten


def implements(*ops: torch._ops.OpOverload) -> Callable[[Rule], Rule]:
    """Register the rule of aten ops, below autograd."""
    return registrar(RULES, *ops)


def overrides(*functions: Any) -> Callable[[Rule], Rule]:
    """Register the rule of functions of torch's Python interface, above autograd."""
    return registrar(FUNCTIONS, *functions)


@overrides(torch.tensor_split, torch.Tensor.tensor_split)
def split_at_offloaded_indices(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """torch reads the indices in memory, under every dispatcher."""
    tensor, where, *rest = [
        *args,
        *(kwargs.pop(key) for key in ("indices_or_sections", "tensor_indices_or_sections") if key in kwargs),
    ]
    with torch._C.DisableTorchFunctionSubclass():
        return func(tensor, guest_of(where), *rest, **kwargs)


@overrides(
    F.linear, F.layer_norm, F.rms_norm, F.group_norm, F.bilinear,
    F.scaled_dot_product_attention, torch.conv1d, torch.conv2d, torch.conv3d,
    torch.matmul, torch.mm, torch.bmm, torch.mv, torch.dot, torch.addmm, torch.baddbmm, torch.cat, torch.stack,
    torch.add, torch.sub, torch.mul, torch.div, torch.pow, torch.where, torch.index_select, torch.gather,
    torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.Tensor.mm, torch.Tensor.bmm,
    torch.Tensor.add, torch.Tensor.sub, torch.Tensor.mul, torch.Tensor.div, torch.Tensor.pow,
    torch.Tensor.__add__, torch.Tensor.__sub__, torch.Tensor.__mul__, torch.Tensor.__truediv__,
    torch.Tensor.__radd__, torch.Tensor.__rmul__,
    # These take another branch, with other last bits, when an argument is of a subclass (torch 2.13):
    torch.norm, torch.linalg.cond, torch.linalg.eigvalsh, torch.linalg.lstsq, torch.linalg.matrix_norm,
    torch.linalg.norm, torch.linalg.svdvals,
)  # fmt: skip
def read_directly(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Without a graph to record, the whole function runs on guests: one step instead of one for each op inside.

    Only for functions that neither write nor give views.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if torch._C._len_torch_dispatch_stack() or records_graph(args, kwargs):
            return func(*args, **kwargs)
        memo: dict[int, torch.Tensor] = {}
        return func(*guests_of(args, memo), **named_guests(kwargs, memo))
