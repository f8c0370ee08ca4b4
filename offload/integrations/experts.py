"""An implementation of transformers' experts: `from_pretrained(..., experts_implementation="offload")`.

Always true:
- it computes what transformers' `grouped_mm` does; but experts whose parts are stored apart are multiplied where they
  lie, and not joined first, which gives other last bits
"""

from __future__ import annotations

from typing import Any

import torch

from offload.annotations import Pretrained
from offload.tensor.products import apart

NAME = "offload"


def register_experts() -> None:
    """Make it known to transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, multiply_experts)


def multiply_experts(
    experts: Pretrained, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> Any:
    """The sum of the outputs of the experts that each token is routed to: (tokens, width).

    Args:
        experts: the module with a layer's experts.
        hidden_states: (tokens, width).
        top_k_index, top_k_weights: (tokens, experts per token).
    """
    from transformers.integrations.moe import grouped_mm_experts_forward

    with apart():
        return grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
