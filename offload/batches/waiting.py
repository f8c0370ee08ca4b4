"""The tensors of a waiting batch, and how much memory they take.

Always true:
- memory that several tensors share counts once
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from offload.system.modes import no_functions, no_modes
from offload.torch_api import storage_id

_DEPTH = 4  # nesting depth of objects that are searched for tensors
_DEPTH_OF_CACHES = 6  # including the layers of KV caches


def tensors_in(given: object, *, caches: bool = False) -> list[torch.Tensor]:
    """The plain tensors in arguments or results: in lists, dictionaries, objects, and layers of `caches`."""
    return list(_tensors(given, _DEPTH_OF_CACHES if caches else _DEPTH))


def _tensors(given: object, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        if type(given) is torch.Tensor and given.device.type != "meta" and given.layout == torch.strided:
            yield given
    elif depth and not isinstance(given, str | bytes | int | float | torch.nn.Module | None):
        if isinstance(given, dict):
            parts: Iterable[object] = given.values()
        elif isinstance(given, list | tuple | set):
            parts = given
        else:
            parts = getattr(given, "__dict__", {}).values()
        for part in list(parts):
            yield from _tensors(part, depth - 1)


def waiting_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """How much main memory tensors take, counting shared memory once."""
    with no_functions(), no_modes():
        storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return sum({storage_id(storage): storage.nbytes() for storage in storages}.values())
