"""A small network with tied weights, as tests of loading and saving need it."""

from __future__ import annotations

import torch
from torch import nn


class Network(nn.Module):
    """Two layers that share a weight, a norm with running statistics, and a computed buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8, bias=False)
        self.base = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.full((1,), 3.0), persistent=False)
        self.head.weight = self.base.weight

    def tie_weights(self) -> None:
        self.head.weight = self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.base(x)).relu()) * self.scale
        return found


def network(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    made = Network().eval()
    made.norm.running_mean.normal_()  # type: ignore[operator]
    return made
