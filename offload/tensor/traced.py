"""What stands for a stored value while a compiler traces.

Always true:
- a traced value has no file; it is a tensor of the compiler's
"""

from __future__ import annotations

import torch


class Traced:
    """Stands for a handle while a compiler traces: the value is a tensor of the compiler's."""

    __slots__ = ("generation", "inner")
    owned = True
    has_holes = False
    recipe = None

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner
        self.generation = 0

    def base(self) -> torch.Tensor:
        return self.inner

    writable_base = base

    @property
    def twin(self) -> torch.Tensor:
        return self.inner
