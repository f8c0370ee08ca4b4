"""Memory that values are carried out into, used again once nobody holds it.

Always true:
- memory that anybody holds, by a view too, is given to nobody else
- of what nobody holds, no more is kept than the next values are likely to need
"""

from __future__ import annotations

import torch

from offload.storage.layout import Layout, contiguous
from offload.storage.locks import fork_safe_lock
from offload.storage.mapping import scratch
from offload.torch_api import storage_id, storage_uses

_LEAST = 512 << 10  # bytes of a room
_MOST_KEPT = 32 << 20  # bytes of memory that are kept for the next value
_MOST_TIMES = 4  # times as much as is needed that a room may have
_BY_US = 2  # holders of a storage that is not in use: the tensor over all of it, and the storage that stands beside


class _Rooms:
    """Memory that values were carried out into, for others once nobody holds these."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._kept: list[tuple[torch.Tensor, torch.UntypedStorage]] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """At least so many bytes, with anything in them."""
        with self._lock:
            for flat, storage in self._kept:
                if nbytes <= flat.numel() <= _MOST_TIMES * max(nbytes, _LEAST) and _is_free(storage):
                    return flat[:nbytes]
            flat = scratch(contiguous(torch.uint8, (max(nbytes, _LEAST),)))
            if nbytes <= _MOST_KEPT:
                self._kept.append((flat, flat.untyped_storage()))
                self._shrink()
            return flat[:nbytes]

    def _shrink(self) -> None:
        """Let go of the oldest that nobody holds, where there is too much; the newest stays."""
        total = sum(flat.numel() for flat, _ in self._kept)
        left = []
        for flat, storage in self._kept[:-1]:
            if total > _MOST_KEPT and _is_free(storage):
                total -= flat.numel()
            else:
                left.append((flat, storage))
        self._kept = [*left, self._kept[-1]]


def _is_free(storage: torch.UntypedStorage) -> bool:
    return storage_uses(storage_id(storage)) == _BY_US


def room(layout: Layout) -> torch.Tensor:
    """A plain tensor of that dense layout, with anything in it."""
    flat = _ROOMS.take(max(layout.nbytes, 1))
    return torch.empty(0, dtype=layout.dtype, device="cpu").set_(flat.untyped_storage(), 0, layout.shape, layout.stride)


_ROOMS = _Rooms()
