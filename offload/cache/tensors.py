"""The tensors of a cache, by column: a dict that its owner is told the changes of.

Always true:
- what is assigned or removed here is so in the cache, or it is an error
- a pickle of it, also one of `torch.save`, is one of a plain dict
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from offload.errors import CacheError


class Tensors(dict[str, torch.Tensor]):
    """Tensors by column. `TensorCache.tensors` gives it."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], put: Callable[[str, torch.Tensor | None], None]) -> None:
        super().__init__(tensors)
        self._put = put

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        self._put(name, tensor)
        super().__setitem__(name, tensor)

    def __delitem__(self, name: str) -> None:
        self._put(name, None)
        super().__delitem__(name)

    def __ior__(self, other: Any) -> Tensors:  # type: ignore[misc, override]
        self.update(other)
        return self

    update = MutableMapping.update
    setdefault = MutableMapping.setdefault
    pop = MutableMapping.pop
    popitem = MutableMapping.popitem

    def clear(self) -> None:
        raise CacheError("a cache has at least one column: drop the cache, or remove some of its columns")

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (list(self.items()),)
