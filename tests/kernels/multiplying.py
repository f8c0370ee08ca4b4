"""A product with packed rows, for one use."""

from __future__ import annotations

import torch

from offload.kernels.native import Matrix, Product


def multiply(
    matrix: Matrix, x: torch.Tensor, bias: torch.Tensor | None, place: torch.Tensor, *, level: int | None = None
) -> None:
    """`place = x @ rows.T + bias`, of the first `place.shape[-1]` rows."""
    Product([(matrix, place.shape[-1] if place.dim() else 0)]).into(x, bias, place, level=level)
