"""Quantizing a model layer by layer with error feedback; the same code in memory and on disk.

Always true:
- the caller decides which tensors are on disk: by the model, `zeros`, and the surrounding context
- the method is that of GPTQ, Frantar et al. 2022, https://arxiv.org/abs/2210.17323
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

Zeros: TypeAlias = Callable[[str, tuple[int, ...]], torch.Tensor]

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


@contextmanager
def gathering(linears: Mapping[str, nn.Linear], zeros: Zeros) -> Any:
    """Hessians of the layers, accumulated by each forward inside: (columns, columns) each."""
    hessians = {name: zeros(f"{name}.hessian", (layer.in_features,) * 2) for name, layer in linears.items()}

    def watch(hessian: torch.Tensor) -> Callable[[nn.Module, tuple[torch.Tensor]], None]:
        def add(_: nn.Module, args: tuple[torch.Tensor]) -> None:
            rows = args[0].flatten(0, -2)
            hessian.addmm_(rows.T, rows, alpha=2)

        return add

    with ExitStack() as stack:
        for name, layer in linears.items():
            stack.callback(layer.register_forward_pre_hook(watch(hessians[name])).remove)
        yield hessians


@torch.no_grad()
def walk(model: Any, batches: list[torch.Tensor], zeros: Zeros, replace: Callable[[Any, torch.Tensor], None]) -> None:
    """Quantize the linear layers of a Llama, one decoder layer after the other, on outputs of the quantized ones."""
    length, width = batches[0].shape[1], model.config.hidden_size
    states = zeros("states", (len(batches), *batches[0].shape, width))
    for row, tokens in zip(states, batches, strict=True):
        row.copy_(model.model.embed_tokens(tokens))
    turns = model.model.rotary_emb(torch.empty(1, length, width), torch.arange(length)[None])
    for number, layer in enumerate(model.model.layers):
        linears = {f"{number}.{name}": part for name, part in layer.named_modules() if isinstance(part, nn.Linear)}
        with gathering(linears, zeros) as hessians:
            for row in states:
                layer(row, position_embeddings=turns)
        for name, part in linears.items():
            replace(part.weight, quantized(part.weight, factor(hessians.pop(name))))
        for row in states:
            row.copy_(layer(row, position_embeddings=turns))
