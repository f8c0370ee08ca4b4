"""Quantizing a model layer by layer with error feedback; the same code in memory and on disk.

Always true:
- the caller decides which tensors are on disk: by the model, `zeros`, and the surrounding context
- the method is that of GPTQ, Frantar et al. 2022, https://arxiv.org/abs/2210.17323
"""

from __future__ import annotations

import torch

LEVELS = 7  # of either sign: 4 bits
BLOCK = 32  # columns that are corrected before the rest


def factor(hessian: torch.Tensor, damp: float = 0.01) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of a damped Hessian, which is modified."""
    diagonal = hessian.diagonal()
    diagonal.add_(damp * diagonal.mean())
    lower = torch.linalg.cholesky(hessian)
    return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)


def quantized(weight: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """The weight on a grid per row, column by column; each error is distributed to the following columns."""
    rest = weight.clone()
    scale = weight.abs().amax(1) / LEVELS
    columns = weight.shape[1]
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        block, mix = rest[:, start:end], upper[start:end, start:end]
        errors = torch.zeros(len(weight), end - start)
        for column in range(end - start):
            now = block[:, column].clone()
            grid = (now / scale).round().clamp(-LEVELS, LEVELS) * scale
            errors[:, column] = (now - grid) / mix[column, column]
            block[:, column:] -= errors[:, column].outer(mix[column, column:])
            block[:, column] = grid
        rest[:, end:] -= errors @ upper[start:end, end:]
    return rest
