"""Guests: plain tensors that stand in for a stored value during an op.

Always true:
- a guest of a value on the CPU maps the file, on another device it is a copy; it is neither kept nor handed out
- what crosses the bus is what is stored: a recipe is carried out where the op computes
- a read writes nothing, but for what compiled code has stored into a mapping (`store_what_compiled_code_wrote`)
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from offload.prefetch.copies import copy_on, retry_on_oom
from offload.prefetch.engine import ensure_resident
from offload.prefetch.loads import view_in_load
from offload.prefetch.staging import send
from offload.storage.handle import Handle
from offload.storage.owning import replace_whole
from offload.storage.subclasses import is_subclass_value, with_inner
from offload.system import clock
from offload.system.modes import no_functions, no_modes
from offload.tensor.boxes import recut
from offload.tensor.views import Traced, cut, handle_of, uncut, view_spec_of
from offload.torch_api import version_of

if TYPE_CHECKING:
    from offload.tensor.wrapper import OffloadedTensor

CPU = torch.device("cpu")
_MOST_SCATTERED = 2  # bytes that are sent, as a multiple of those that are needed
_AS_MAPPED = version_of(torch.empty(0).set_(torch.empty(0).untyped_storage()))  # version of an unwritten mapping


def guest(tensor: OffloadedTensor) -> torch.Tensor:
    """The plain tensor that stands in for `tensor` in an op, over its file or a copy: do not write to it."""
    target = tensor._target
    if target is CPU or target == CPU:
        return value_on_cpu(tensor)
    if type(tensor._handle) is not Handle:
        return sent_to(value_on_cpu(tensor), target)
    return value_on(tensor._handle, view_spec_of(tensor), target)


def value_on_cpu(tensor: OffloadedTensor) -> torch.Tensor:
    """Like `guest`, but where the file is mapped, whatever the target device."""
    value = mapped_value(tensor)
    known = tensor._range
    if known is not None and known.checked_until >= clock.now():
        return value
    if tensor._handle.source.composed is None:  # computing a value has read its sources already
        tensor._range = ensure_resident(handle_of(tensor), tensor._view_spec)
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
        base = cut(base, view_spec) if source.subclass is None else uncut(base, view_spec, handle_of(tensor).name)
    if not source.owned and version_of(base) > _AS_MAPPED and source.subclass is None:
        store_what_compiled_code_wrote(handle_of(tensor))
        return mapped_value(tensor)
    return base


def store_what_compiled_code_wrote(handle: Handle) -> None:
    """Store what compiled code wrote to memory of a referenced value: dropped pages would bring back the old one."""
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


def value_on(handle: Handle, view_spec: torch.Tensor, target: torch.device) -> torch.Tensor:
    """The cut by `view_spec` of a value, on an accelerator: do not write to it or keep it."""
    composed = handle.source.composed
    value = partial(stored_on, handle) if composed is None else composed.value
    return retry_on_oom(target, lambda: value(view_spec, target))


def stored_on(handle: Handle, view_spec: torch.Tensor, target: torch.device) -> torch.Tensor:
    """The cut by `view_spec` of a stored value on a device; on an accelerator, from what stays there or is sent now."""
    if target == CPU and (value := view_in_load(handle, view_spec)) is not None:
        return value
    base = handle.base()
    if target != CPU and not handle.owned and handle.subclass is None:
        if version_of(base) > _AS_MAPPED:
            store_what_compiled_code_wrote(handle)
            return stored_on(handle, view_spec, target)
        with no_functions(), no_modes():  # it may outlive the mode in which it is first used
            copy = copy_on(handle, view_spec, target)
            if copy is not None:
                return recut(*copy, view_spec)
    ensure_resident(handle, view_spec)
    return sent_to(cut(base, view_spec) if handle.subclass is None else uncut(base, view_spec, handle.name), target)


def sent_to(guest: torch.Tensor, target: torch.device) -> torch.Tensor:
    """A copy of `guest` on `target`, with the same strides; transfers what it spans, or what it has if that is less."""
    if guest.device == target:
        return guest
    if is_subclass_value(guest):
        return guest.to(target)
    steps = zip(guest.shape, guest.stride(), strict=True)
    span = 1 + sum((size - 1) * step for size, step in steps) if guest.numel() else 0
    if span > _MOST_SCATTERED * guest.numel():
        dense = send(guest.contiguous().view(-1), target).view(guest.shape)
        place = torch.empty(span, dtype=guest.dtype, device=target).as_strided(guest.shape, guest.stride())
        return dense if guest.is_conj() or guest.is_neg() else place.copy_(dense)
    copy = send(guest.as_strided((max(span, 0),), (1,)), target)
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
