"""Experts of transformers' mixtures as one act: the experts implementation "offload", and where it is the default.

Always true:
- experts on disk are multiplied where they lie, in one act for all experts of a layer, which gives other last bits than
  transformers' implementations
- modules whose experts are on disk run them so unless another implementation is asked for
- what that does not take, gradients, and everything within `offload.exact()`, is computed as by transformers'
  `grouped_mm`
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offload.tensor.experts import Between, multiplied_by_experts
from offload.tensor.guests import CPU
from offload.tensor.wrapper import is_offloaded
from offload.torch_api import hooks_of, parameters_of, pre_hooks_of

NAME = "offload"
_USUAL = "grouped_mm"  # transformers' default
_OF_MATRICES = 3  # dimensions of a stack of matrices
_OF_PRODUCTS = {f"{name}{end}" for name in ("gate_up_proj", "up_proj", "down_proj") for end in ("", "_bias")}


class _Default(str):
    """The name where it was not asked for: pickled as transformers' default, for readers without `offload`."""

    __slots__ = ()

    def __reduce__(self) -> tuple[object, ...]:
        return str, (_USUAL,)

    def __deepcopy__(self, memo: object) -> _Default:
        return self


def register_experts() -> None:
    from offload.transformers_api import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, multiply_experts)


def prefer_experts(model: nn.Module) -> None:
    """Have a model run experts on disk by this implementation, in place of the usual."""
    for module in model.modules():
        if not (hasattr(module, "is_transposed") and hasattr(module, "is_concatenated")):
            continue
        config: Any = getattr(module, "config", None)
        stacks = [one for one in parameters_of(module).values() if one is not None and one.dim() == _OF_MATRICES]
        are_on_disk = bool(stacks) and all(map(is_offloaded, stacks))
        if are_on_disk and getattr(config, "_experts_implementation", None) == _USUAL:
            register_experts()
            config._experts_implementation = _Default(NAME)


def multiply_experts(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> Any:
    """The sum of the outputs of the experts that each token is routed to: (tokens, width).

    `hidden_states` is (tokens, width), the others (tokens, experts per token). The number after the last expert
    stands for none; raises `RowIndexError` for others that are no expert's.
    """
    have_norm = getattr(experts, "has_post_expert_norm", False)  # after them; transformers before 5.20 has no such
    if not (have_norm or _act_elsewhere(experts, hidden_states) or torch.compiler.is_compiling()):
        up = experts.gate_up_proj if experts.has_gate else experts.up_proj
        if getattr(experts, "_is_expert_parallel", False):
            top_k_index = top_k_index.clamp(max=len(up))  # other ranks', which have this number before 5.18
        routed, down, is_turned = (hidden_states, top_k_index, top_k_weights), experts.down_proj, experts.is_transposed
        result = multiplied_by_experts(*routed, up, down, _between(experts), is_turned=is_turned)
        if result is not None:
            return result
    from offload.transformers_api import grouped_mm_experts_forward

    return grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)


def _act_elsewhere(experts: Any, x: torch.Tensor) -> bool:
    """Whether what is between the products is computed on an accelerator alone: it has parameters there."""
    return x.device != CPU and any(name not in _OF_PRODUCTS for name, _ in experts.named_parameters())


def _between(experts: Any) -> Between:
    gate = experts._apply_gate if experts.has_gate else experts.act_fn
    if not experts.has_bias:
        from offload.transformers_api import SiLUActivation, _default_apply_gate

        act: Any = getattr(experts, "act_fn", None)
        is_silu = type(act) in (SiLUActivation, nn.SiLU) and not (pre_hooks_of(act) or hooks_of(act))
        is_silu = is_silu and experts.has_gate and type(experts)._apply_gate is _default_apply_gate
        return Between(experts, lambda products, _: gate(products), is_silu=is_silu)
    up = experts.gate_up_proj_bias if experts.has_gate else experts.up_proj_bias
    down = experts.down_proj_bias
    return Between(
        experts,
        lambda products, numbers: gate(products + up.to(products.device)[numbers]),
        finish=lambda products, numbers: products + down.to(products.device)[numbers],
    )
