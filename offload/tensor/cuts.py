"""How a view is cut from a stored value.

Always true:
- a cut is a meta tensor (a twin): shape, strides, offset, dtype, and the bits of lazy conjugation and negation
- cutting reads nothing
"""

from __future__ import annotations

import torch

from offload.storage.header import Layout
from offload.storage.subclasses import is_subclass_value


def whole_twin(layout: Layout) -> torch.Tensor:
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")


def cut(base: torch.Tensor, twin: torch.Tensor) -> torch.Tensor:
    """A tensor over the storage of `base`, cut as `twin` is."""
    if base is twin or is_subclass_value(base):
        return base
    if base.dtype == twin.dtype:
        guest = base.as_strided(twin.shape, twin.stride(), twin.storage_offset())
    else:
        guest = torch.empty(0, dtype=twin.dtype, device=base.device)
        guest.set_(base.untyped_storage(), twin.storage_offset(), twin.shape, twin.stride())
    return with_bits_of(guest, twin) if twin.is_conj() or twin.is_neg() else guest


def sent_to(guest: torch.Tensor, target: torch.device) -> torch.Tensor:
    """A copy of `guest` on `target`, with the same strides; sends the bytes that it spans and no others."""
    if guest.device == target:
        return guest
    if is_subclass_value(guest):
        return guest.to(target)
    span = 1 + sum((size - 1) * step for size, step in zip(guest.shape, guest.stride(), strict=True))
    copy = guest.as_strided((max(span, 0) if guest.numel() else 0,), (1,)).to(target)
    return copy.as_strided(guest.shape, guest.stride(), 0)


def with_bits_of(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`tensor` with the lazy conjugation and negation of `other`."""
    torch._C._set_conj(tensor, other.is_conj())
    torch._C._set_neg(tensor, other.is_neg())
    return tensor


def same_cut(twin: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        twin is other
        or (twin.shape, twin.stride(), twin.storage_offset(), twin.dtype, twin.is_conj(), twin.is_neg())
        == (other.shape, other.stride(), other.storage_offset(), other.dtype, other.is_conj(), other.is_neg())
    )  # fmt: skip


def cut_like(twin: torch.Tensor, guest: torch.Tensor) -> torch.Tensor:
    """A cut of the value that `twin` is a cut of, with the metadata of `guest`."""
    cut = torch.empty(0, dtype=guest.dtype, device="meta")
    cut.set_(twin.untyped_storage(), guest.storage_offset(), guest.shape, guest.stride())
    return with_bits_of(cut, guest)
