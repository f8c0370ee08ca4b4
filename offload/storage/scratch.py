"""Memory for one value on its way from file to file.

Always true:
- it goes back to the system when it is dropped: what torch frees below 32 MB may stay in glibc's heap, where small
  things take its place, so that a model's worth of it gathers
"""

from __future__ import annotations

import mmap

import torch

from offload.errors import ReadError
from offload.storage.layout import Layout


def scratch_bytes(count: int) -> mmap.mmap:
    """At least `count` writable bytes, all zero.

    Raises:
        ReadError: the system does not give them.
    """
    try:
        return mmap.mmap(-1, max(count, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        reason = f"there are no {count} bytes of memory for a value on its way ({error.strerror}): free some memory"
        raise ReadError(error.errno, reason) from error


def scratch(layout: Layout) -> torch.Tensor:
    """A plain tensor of that layout, all zero."""
    flat = torch.frombuffer(scratch_bytes(layout.nbytes), dtype=torch.uint8, requires_grad=False)
    empty = torch.empty(0, dtype=layout.dtype, device="cpu")
    return empty.set_(flat.untyped_storage(), 0, layout.shape, layout.stride)
