"""Guests: plain tensors that stand in for a stored value during an op.

Always true:
- a cut is a view described by a meta tensor, the view spec: shape, strides, offset, dtype, lazy conjugation
  and negation
- cutting reads nothing; a cut of a value on the CPU maps the file, on another device it is a copy
- only values in files that are never written to stay on an accelerator, and only within a budget: no copy can become
  stale
- a value traced by a compiler has no file, it is the compiler's tensor; `torch.jit.trace` sees offloaded tensors
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, final

import torch

from offload.errors import StaleViewError
from offload.prefetch.engine import POOL, brought_in, replanning
from offload.prefetch.plan import Pool
from offload.prefetch.staging import lend, send, settle
from offload.prefetch.value import Value, page_state_of
from offload.storage.handle import Handle
from offload.storage.layout import Layout
from offload.storage.modes import no_functions, no_modes
from offload.storage.subclasses import is_subclass_value, with_inner
from offload.torch_api import set_conj, set_neg

CPU = torch.device("cpu")


# Meta tensors that describe values and views


@lru_cache(maxsize=1024)
def meta_of_layout(layout: Layout) -> torch.Tensor:
    """The meta tensor for a whole value, shared by values of the same layout; do not change it."""
    with no_functions(), no_modes():
        return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")


def meta_of(handle: Handle) -> torch.Tensor:
    """The meta tensor of the whole value, which is also the view spec of all of it."""
    if handle.meta is None:
        handle.meta = meta_of_layout(handle.layout)
    return handle.meta


def metadata_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Everything that distinguishes one cut from another."""
    return (
        tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
    )  # fmt: skip


def view_with(view_spec: torch.Tensor, metadata: tuple[Any, ...]) -> torch.Tensor:
    """A cut of the same value as `view_spec`, with the metadata from `metadata_of`. Works for a plain tensor, too."""
    shape, stride, offset, dtype, conjugate, negative = metadata
    cut = torch.empty(0, dtype=dtype, device=view_spec.device)
    cut.set_(view_spec.untyped_storage(), offset, shape, stride)
    set_conj(cut, conjugate)
    set_neg(cut, negative)
    return cut


def with_bits_of(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`tensor` with the lazy conjugation and negation of `other`."""
    set_conj(tensor, other.is_conj())
    set_neg(tensor, other.is_neg())
    return tensor


# Cuts of a value


def cut(base: torch.Tensor, view_spec: torch.Tensor) -> torch.Tensor:
    """A tensor over the storage of `base`, a plain tensor, cut like `view_spec`."""
    if base is view_spec:
        return base
    if base.dtype != view_spec.dtype:
        return view_with(base, metadata_of(view_spec))
    guest = base.as_strided(view_spec.shape, view_spec.stride(), view_spec.storage_offset())
    return with_bits_of(guest, view_spec) if view_spec.is_conj() or view_spec.is_neg() else guest


def uncut(base: torch.Tensor, view_spec: torch.Tensor, name: str) -> torch.Tensor:
    """`base`, of a tensor subclass, for a view spec of the whole value.

    Raises:
        StaleViewError: it describes a cut of the plain value that was there before.
    """
    if (view_spec.shape, view_spec.stride(), view_spec.dtype) != (base.shape, base.stride(), base.dtype):
        raise StaleViewError(
            f"the value {name!r} was replaced by a {type(base).__name__}, and this tensor is an old view of a part: "
            "cut the view again"
        )
    return base


def where_torch_expects(value: torch.Tensor, handle: Handle | Traced, view_spec: torch.Tensor) -> torch.Tensor:
    """`value`, the cut by `view_spec`, at the storage offset of `view_spec`, which compilers check (2.13).

    A computed value is elsewhere: in the file of a piece, or in memory of its own.
    """
    if handle.composed is None or value.storage_offset() == view_spec.storage_offset():
        return value
    base = handle.base()
    span = base.untyped_storage()[int(base.storage_offset()) * base.itemsize :]
    return cut(torch.empty(0, dtype=base.dtype, device=CPU).set_(span, 0, base.shape, base.stride()), view_spec)


def start_of_run(handle: Handle, view_spec: torch.Tensor) -> int | None:
    """The first byte in the file of a view whose elements are contiguous there; None for any other view."""
    if (
        handle.recipe is not None
        or handle.composed is not None
        or not view_spec.is_contiguous()
        or view_spec.is_conj()
        or view_spec.is_neg()
    ):
        return None
    return handle.extent[0] + int(view_spec.storage_offset()) * view_spec.itemsize


# Copies, and those that stay on an accelerator


def sent_to(guest: torch.Tensor, target: torch.device) -> torch.Tensor:
    """A copy of `guest` on `target`, with the same strides; transfers only the bytes that it spans."""
    if guest.device == target:
        return guest
    if is_subclass_value(guest):
        return guest.to(target)
    span = 1 + sum((size - 1) * step for size, step in zip(guest.shape, guest.stride(), strict=True))
    copy = send(guest.as_strided((max(span, 0) if guest.numel() else 0,), (1,)), target)
    return copy.as_strided(guest.shape, guest.stride(), 0)


def copied(guest: torch.Tensor, target: torch.device) -> torch.Tensor:
    """An independent tensor with the same value on `target`, whatever modes are on.

    For a subclass the inner tensors are copied: some classes of torchao 0.18 lack `clone` or get it wrong. One-byte
    elements are copied as bytes, since torch has no copy kernel for some of their dtypes (2.13).
    """
    with no_functions(), no_modes():
        if guest.device != target:
            return sent_to(guest, target)
        if is_subclass_value(guest):
            return with_inner(guest, lambda inner: copied(inner, target))
        if guest.itemsize == 1:
            return guest.view(torch.uint8).clone().view(guest.dtype)
        return guest.clone()


class Copy(Value):
    """A whole value on a device. `base` is None while it is not there."""

    __slots__ = ("base",)

    def __init__(self, pool: Pool, handle: Handle) -> None:
        super().__init__(pool, handle.file, *handle.extent, shared=False)
        self.base: torch.Tensor | None = None

    def cached_bytes(self) -> int:
        """How many of its bytes are on the device."""
        return 0 if self.base is None else self.nbytes

    def let_go(self) -> None:
        """Drop it from the device."""
        self.base = None


def resident_guest(handle: Handle, view_spec: torch.Tensor, target: torch.device) -> torch.Tensor | None:
    """The cut by `view_spec` of a value that stays on a device; None if it has to be sent for each op.

    Raises: as `Handle.base`, even if the file is not read.
    """
    copy = _copy_to_stay(handle, target)
    if copy is None:
        return None
    base, there = handle.base(), copy.base
    if there is None:
        brought_in(handle, meta_of(handle))
        with no_functions(), no_modes():  # it outlives the mode in which it is first used
            there = sent_to(base, target)
            settle(target)
        copy.base = there
    lend(there, target)
    return cut(there, view_spec)


def _copy_to_stay(handle: Handle, target: torch.device) -> Copy | None:
    page_state = page_state_of(handle)
    pool = (page_state.pool or POOL).on_devices.get(target)
    if pool is None or handle.owned or handle.recipe is not None or handle.composed is not None:
        return None
    with replanning() as leaving:
        copy = page_state.copies.get(target)
        if type(copy) is not Copy or copy.pool is not pool:
            copy = page_state.copies[target] = Copy(pool, handle)
            leaving.extend(pool.add([copy]))
        return copy if copy.kept else None


# Stand-ins while a value is traced


@final
class Traced:
    """Stands in for a handle while a compiler traces: the value is one of the compiler's tensors."""

    __slots__ = ("generation", "inner", "recipe")
    owned = True
    composed = None

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner
        self.recipe: dict[str, Any] | None = {} if is_subclass_value(inner) else None
        self.generation = 0

    def base(self) -> torch.Tensor:
        return self.inner

    @property
    def source(self) -> Traced:
        return self

    @property
    def meta(self) -> torch.Tensor:
        return self.inner
