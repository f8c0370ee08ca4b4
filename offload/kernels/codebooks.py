"""The numbers that codes in GGUF blocks stand for, as the `gguf` package has them.

Always true:
- a codebook has as many entries as the codes of its kind can name, and lives as long as the process
"""

from __future__ import annotations

from functools import lru_cache

import torch

_SHAPES = {  # codes, and the numbers that each stands for
    "IQ2_XXS": (256, 8),
    "IQ2_XS": (512, 8),
    "IQ2_S": (1024, 8),
    "IQ3_XXS": (256, 4),
    "IQ3_S": (512, 4),
    "IQ1_S": (2048, 8),
    "IQ1_M": (2048, 8),
}


def has_codebook(kind: str) -> bool:
    """Whether the codes of this kind stand for entries of a codebook."""
    return kind in _SHAPES


@lru_cache(maxsize=len(_SHAPES))
def codebook(kind: str) -> torch.Tensor | None:
    """Its numbers, (codes, 8 or 4), int8; None if the package has none of that shape."""
    from gguf import quants

    quant = getattr(quants, kind, None)
    if quant is None:
        return None
    quant.init_grid()
    if quant.grid is None or tuple(quant.grid.shape[-2:]) != _SHAPES[kind]:
        return None
    return torch.from_numpy(quant.grid).reshape(_SHAPES[kind]).to(torch.int8)
