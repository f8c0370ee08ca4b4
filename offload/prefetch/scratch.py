"""Memory for values that are computed, or read past the page cache, reused once nothing refers to it.

Always true:
- memory that anything refers to, even a view, is never handed out again
- of unused memory, no more than 32 MiB is kept when new memory is taken, or once nothing was loaded for a while
"""

from __future__ import annotations

import torch

from offload.storage.layout import Layout, contiguous
from offload.storage.mapping import scratch
from offload.system.locks import fork_safe_lock
from offload.torch_api import storage_id, storage_uses

LEAST = 512 << 10  # smallest size in bytes
_MOST_UNUSED = 32 << 20  # bytes of unused memory to keep
_MOST_TIMES = 2  # most times the needed size that a reused block may have: what is kept of it keeps all of it
_BY_US = 2  # references to an unused storage: the tensor over all of it, and our own


class _Scratch:
    """Memory of earlier values, to be reused once nothing refers to it."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._blocks: list[tuple[torch.Tensor, torch.UntypedStorage]] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """At least `nbytes` bytes, uninitialized."""
        with self._lock:
            most = _MOST_TIMES * max(nbytes, LEAST)
            fitting = ((flat, storage) for flat, storage in self._blocks if nbytes <= flat.numel() <= most)
            block = min((flat for flat, storage in fitting if _is_free(storage)), key=torch.Tensor.numel, default=None)
            if block is not None:
                return block[:nbytes]
            flat = scratch(contiguous(torch.uint8, (max(nbytes, LEAST),)))
            if nbytes <= _MOST_UNUSED:
                self._blocks.append((flat, flat.untyped_storage()))
                self.shrink()
            return flat[:nbytes]

    def shrink(self) -> None:
        """Free the oldest unused blocks when there are too many; the newest stays."""
        with self._lock:
            unused = [flat for flat, storage in self._blocks if _is_free(storage)]
            total, leaving = sum(flat.numel() for flat in unused), set()
            for flat in unused:
                if total > _MOST_UNUSED and flat is not self._blocks[-1][0]:
                    total -= flat.numel()
                    leaving.add(flat.data_ptr())
            self._blocks = [(flat, storage) for flat, storage in self._blocks if flat.data_ptr() not in leaving]


def _is_free(storage: torch.UntypedStorage) -> bool:
    return storage_uses(storage_id(storage)) == _BY_US


def scratch_for(layout: Layout, device: torch.device) -> torch.Tensor:
    """A plain tensor of that dense layout, uninitialized. An accelerator's own allocator reuses memory."""
    if device.type != "cpu":
        return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=device)
    flat = take_scratch(max(layout.nbytes, 1))
    return torch.empty(0, dtype=layout.dtype, device="cpu").set_(flat.untyped_storage(), 0, layout.shape, layout.stride)


def take_scratch(nbytes: int) -> torch.Tensor:
    """So many bytes at the start of a page, uninitialized, for as long as anything refers to them."""
    return _SCRATCH.take(nbytes)


def release_scratch() -> None:
    """Many values were in use together, and will not be again."""
    _SCRATCH.shrink()


_SCRATCH = _Scratch()
