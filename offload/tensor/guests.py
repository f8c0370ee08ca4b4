"""Guests: plain tensors that stand in for a stored value during an op.

Always true:
- a guest of a value on the CPU maps the file, on another device it is a copy; it is neither kept nor handed out
- a read writes nothing, but for what compiled code has stored into a mapping (`store_what_compiled_code_wrote`)
- only values in files that are never written to stay on an accelerator, and only within a budget: no copy can become
  stale
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offload.prefetch.engine import POOL, brought_in, replanning
from offload.prefetch.plan import Pool
from offload.prefetch.staging import lend, send, settle
from offload.prefetch.value import Value, page_state_of
from offload.storage import clock
from offload.storage.handle import Handle
from offload.storage.modes import no_functions, no_modes
from offload.storage.owning import replace_whole
from offload.storage.subclasses import is_subclass_value, with_inner
from offload.tensor.views import Traced, cut, handle_of, meta_of, uncut, view_spec_of
from offload.torch_api import version_of

if TYPE_CHECKING:
    from offload.tensor.wrapper import OffloadedTensor

CPU = torch.device("cpu")
_AS_MAPPED = version_of(torch.empty(0).set_(torch.empty(0).untyped_storage()))  # version of an unwritten mapping


def guest(tensor: OffloadedTensor) -> torch.Tensor:
    """The plain tensor that stands in for `tensor` during an op: over the mapped file on the CPU, a copy elsewhere.

    Do not write to it or hand it out.

    Raises:
        StaleViewError, and as `Handle.base`.
    """
    target = tensor._target
    if target is CPU or target == CPU:
        return value_on_cpu(tensor)
    handle = tensor._handle
    resident = resident_guest(handle, view_spec_of(tensor), target) if type(handle) is Handle else None
    return sent_to(value_on_cpu(tensor), target) if resident is None else resident


def value_on_cpu(tensor: OffloadedTensor) -> torch.Tensor:
    """Like `guest_of`, but where the file is mapped, whatever the target device."""
    value = mapped_value(tensor)
    known = tensor._range
    if known is not None and known.checked_until >= clock.now():
        return value
    if tensor._handle.source.composed is None:  # computing a value has read its sources already
        tensor._range = brought_in(handle_of(tensor), tensor._view_spec)
    return value


def mapped_value(tensor: OffloadedTensor) -> torch.Tensor:
    """Like `value_on_cpu`, but not prefetched: for code that reads only a part of it, or writes to it."""
    handle, view_spec = tensor._handle, tensor._view_spec
    if tensor._generation != handle.generation:
        view_spec_of(tensor)  # raises
    source = handle.source
    if source.composed is not None:
        return source.composed.value(view_spec)
    base = handle.base()
    if view_spec is not handle.meta:
        base = cut(base, view_spec) if source.recipe is None else uncut(base, view_spec, handle_of(tensor).name)
    if not source.owned and version_of(base) > _AS_MAPPED and source.recipe is None:
        store_what_compiled_code_wrote(handle_of(tensor))
        return mapped_value(tensor)
    return base


def store_what_compiled_code_wrote(handle: Handle) -> None:
    """Make a file of a referenced value that compiled code wrote to, in place.

    Such code is given the mapping itself, which is only memory if the file is not ours, and calls nothing of ours when
    it has written. The next read of the value is the first to see it, and has to act: pages that are dropped would
    bring the old value back.
    """
    replace_whole(handle, handle.base())


def where_torch_expects(value: torch.Tensor, handle: Handle | Traced, view_spec: torch.Tensor) -> torch.Tensor:
    """`value`, the cut by `view_spec`, at the storage offset of `view_spec`, which compilers check (2.13).

    A computed value is elsewhere: in the file of a piece, or in memory of its own.
    """
    if handle.composed is None or value.storage_offset() == view_spec.storage_offset():
        return value
    base = handle.base()
    span = base.untyped_storage()[int(base.storage_offset()) * base.itemsize :]
    return cut(torch.empty(0, dtype=base.dtype, device=CPU).set_(span, 0, base.shape, base.stride()), view_spec)


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
    base, resident = handle.base(), copy.base
    if resident is None:
        brought_in(handle, meta_of(handle))
        with no_functions(), no_modes():  # it outlives the mode in which it is first used
            resident = sent_to(base, target)
            settle(target)
        copy.base = resident
    lend(resident, target)
    return cut(resident, view_spec)


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
