"""Rows that tests of several kinds of caches hold."""

from __future__ import annotations

import torch

NUMBERS = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)),
]


def logps() -> dict[str, torch.Tensor]:
    """The columns of each cache."""
    torch.manual_seed(0)
    return {
        "chosen_logps": torch.randn(5),
        "hidden": torch.randn(5, 2, 3).to(torch.bfloat16),
        "good": torch.tensor([True, False, True, True, False]),
        "wide": torch.randn(5, 4, dtype=torch.float64).to(torch.complex128),
    }
