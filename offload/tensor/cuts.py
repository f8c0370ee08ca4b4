"""How a view is cut from a stored value.

Always true:
- a cut is a meta tensor (a twin): shape, strides, offset, dtype, and the bits of lazy conjugation and negation
- cutting reads nothing
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from offload.errors import StaleViewError
from offload.prefetch.staging import send
from offload.storage.handle import Handle
from offload.storage.layout import Layout
from offload.storage.modes import no_functions, no_modes
from offload.storage.subclasses import is_subclass_value, with_inner


@lru_cache(maxsize=1024)
def whole_twin(layout: Layout) -> torch.Tensor:
    """The meta tensor that stands for a whole value, shared by values of the same layout; it is not to be changed."""
    with no_functions(), no_modes():
        return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")


def twin_of(handle: Handle) -> torch.Tensor:
    """The twin of the whole value."""
    if handle.twin is None:
        handle.twin = whole_twin(handle.layout)
    return handle.twin


def cut(base: torch.Tensor, twin: torch.Tensor) -> torch.Tensor:
    """A tensor over the storage of `base`, which is plain, cut as `twin` is."""
    if base is twin:
        return base
    if base.dtype == twin.dtype:
        guest = base.as_strided(twin.shape, twin.stride(), twin.storage_offset())
    else:
        guest = torch.empty(0, dtype=twin.dtype, device=base.device)
        guest.set_(base.untyped_storage(), twin.storage_offset(), twin.shape, twin.stride())
    return with_bits_of(guest, twin) if twin.is_conj() or twin.is_neg() else guest


def uncut(base: torch.Tensor, twin: torch.Tensor, name: str) -> torch.Tensor:
    """`base`, which is of a tensor subclass, for a twin that is the whole of it.

    Raises:
        StaleViewError: the twin was cut from a plain value, which stood there before.
    """
    if (twin.shape, twin.stride(), twin.dtype) != (base.shape, base.stride(), base.dtype):
        raise StaleViewError(
            f"the value {name!r} was replaced by a {type(base).__name__}, and this tensor is an old view of a part: "
            "cut the view again"
        )
    return base


def copied(guest: torch.Tensor, target: torch.device) -> torch.Tensor:
    """An independent tensor of the same value, on `target`, whatever modes are on.

    Of a subclass the inner tensors are copied: some classes of torchao 0.18 lack `clone`, or have it wrong. One byte an
    element is copied as bytes, since torch has no copy kernel for some dtypes (2.13).
    """
    with no_functions(), no_modes():
        if guest.device != target:
            return sent_to(guest, target)
        if is_subclass_value(guest):
            return with_inner(guest, lambda inner: copied(inner, target))
        if guest.itemsize == 1:
            return guest.view(torch.uint8).clone().view(guest.dtype)
        return guest.clone()


def sent_to(guest: torch.Tensor, target: torch.device) -> torch.Tensor:
    """A copy of `guest` on `target`, with the same strides; sends the bytes that it spans and no others."""
    if guest.device == target:
        return guest
    if is_subclass_value(guest):
        return guest.to(target)
    span = 1 + sum((size - 1) * step for size, step in zip(guest.shape, guest.stride(), strict=True))
    copy = send(guest.as_strided((max(span, 0) if guest.numel() else 0,), (1,)), target)
    return copy.as_strided(guest.shape, guest.stride(), 0)


def with_bits_of(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`tensor` with the lazy conjugation and negation of `other`."""
    torch._C._set_conj(tensor, other.is_conj())
    torch._C._set_neg(tensor, other.is_neg())
    return tensor


def cut_like(twin: torch.Tensor, guest: torch.Tensor) -> torch.Tensor:
    """A cut of the value that `twin` is a cut of, with the metadata of `guest`."""
    return twin_with(twin, metadata_of(guest))


def metadata_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All that tells one cut from another."""
    return (
        tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
    )  # fmt: skip


def twin_with(twin: torch.Tensor, metadata: tuple[Any, ...]) -> torch.Tensor:
    """A cut of the value that `twin` is a cut of, with what `metadata_of` gave. A plain tensor serves as well."""
    shape, stride, offset, dtype, conjugate, negative = metadata
    cut = torch.empty(0, dtype=dtype, device=twin.device)
    cut.set_(twin.untyped_storage(), offset, shape, stride)
    torch._C._set_conj(cut, conjugate)
    torch._C._set_neg(cut, negative)
    return cut
