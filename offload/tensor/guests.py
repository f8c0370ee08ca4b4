"""Guests: the plain tensors that stand for a stored value in an op, and what has to be read for that.

Always true:
- a cut is a meta tensor (a twin): shape, strides, offset, dtype, and the bits of lazy conjugation and negation
- cutting reads nothing; a cut of a value on the CPU is over the mapped file, elsewhere it is a copy
- what is small, and not known to be read soon, is left to the mapping; so is a view of small pieces that lie far apart
- where what lies between the pieces of a view is so little that the system reads it along, it counts as read
- a view of most of a value counts as the value: one that grows by a row at a time is one range, not a new one each time
- only values in files that nobody writes to stay on an accelerator, and only within a budget for it: there is no copy
  that could be stale
"""

from __future__ import annotations

import sys
from functools import lru_cache
from time import monotonic
from typing import Any

import torch

from offload.errors import StaleViewError
from offload.prefetch.reads import POOL, UNTRACKED, arrive, let_go, lock, tracked
from offload.prefetch.residency import SMALL, Pool, Value
from offload.prefetch.staging import lend, send, settle
from offload.prefetch.tracked import Tracked
from offload.storage.handle import Handle
from offload.storage.layout import Layout
from offload.storage.modes import no_functions, no_modes
from offload.storage.pages import Range
from offload.storage.subclasses import is_subclass_value, with_inner

CPU = torch.device("cpu")
_MOST_SCATTERED = 2  # times as many bytes as are read
_BETWEEN = 64 << 10  # bytes between two pieces that the system reads along: half of what it reads around a page
_LEAST_PIECE = 64 << 10  # bytes from which on a piece that lies apart is worth a look
_MOST = 2  # times a part is more than the value


# Twins: how a view is cut


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


def with_bits_of(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`tensor` with the lazy conjugation and negation of `other`."""
    torch._C._set_conj(tensor, other.is_conj())
    torch._C._set_neg(tensor, other.is_neg())
    return tensor


# Cuts of a value


def cut(base: torch.Tensor, twin: torch.Tensor) -> torch.Tensor:
    """A tensor over the storage of `base`, which is plain, cut as `twin` is."""
    if base is twin:
        return base
    if base.dtype != twin.dtype:
        return twin_with(base, metadata_of(twin))
    guest = base.as_strided(twin.shape, twin.stride(), twin.storage_offset())
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


# What a cut reads, in memory


def brought_in(handle: Handle, twin: torch.Tensor) -> Range:
    """What a view cut as `twin` reads, now in memory.

    Raises:
        ReadError: the disk did not give it.
    """
    if sys.is_finalizing():  # the reader may have stopped anywhere
        return UNTRACKED
    found = _range_of(handle, twin)
    if found is None:
        return _pieces_brought_in(handle, twin)
    if found.calm_until < monotonic() and isinstance(found, Tracked):
        arrive(found)
    return found


def _range_of(handle: Handle, twin: torch.Tensor) -> Range | None:
    """The bytes that are read as one; None for several pieces, each worth a look of its own."""
    nbytes = twin.numel() * twin.itemsize
    start, most = handle.extent
    whole: Range | None = handle.ranges.get(handle.extent)
    if handle.recipe is not None or nbytes == most:
        return whole or (tracked(handle, start, most) if most > SMALL else UNTRACKED)
    if whole is not None and whole.calm_until >= monotonic():
        return whole
    steps = sum((size - 1) * step for size, step in zip(twin.shape, twin.stride(), strict=True))
    span = (1 + int(steps)) * twin.itemsize
    if nbytes <= SMALL:
        return UNTRACKED
    if span > _MOST_SCATTERED * nbytes:
        piece, others = _piece_of(twin)
        if others:
            return None if piece >= _LEAST_PIECE else UNTRACKED
    if span * _MOST > most:
        return whole or tracked(handle, start, most)
    return tracked(handle, start + int(twin.storage_offset()) * twin.itemsize, span)


def _piece_of(twin: torch.Tensor) -> tuple[int, list[tuple[int, int]]]:
    """The bytes of a piece of a scattered view; and how often, and at which distances, there are others."""
    piece, others = twin.itemsize, []
    for step, size in sorted(zip(twin.stride(), twin.shape, strict=True)):
        distance = int(step) * twin.itemsize
        if distance - piece <= _BETWEEN:
            piece += (int(size) - 1) * distance
        else:
            others.append((int(size), distance))
    return piece, others


def _pieces_brought_in(handle: Handle, twin: torch.Tensor) -> Range:
    """The pieces of a scattered view, now in memory; the one that is to be looked at again first."""
    piece, others = _piece_of(twin)
    starts = [handle.extent[0] + int(twin.storage_offset()) * twin.itemsize]
    for size, distance in others:
        starts = [start + number * distance for start in starts for number in range(size)]
    found = [tracked(handle, start, piece) for start in starts]
    for one in found:
        if one.calm_until < monotonic() and isinstance(one, Tracked):
            arrive(one)
    return min(found, key=lambda one: one.calm_until)


def start_of_run(handle: Handle, twin: torch.Tensor) -> int | None:
    """The byte of the file at which a view begins whose elements lie there as they read; None for any other view."""
    if handle.recipe is not None or not twin.is_contiguous() or twin.is_conj() or twin.is_neg():
        return None
    return handle.extent[0] + int(twin.storage_offset()) * twin.itemsize


# Copies, and those that stay on an accelerator


def sent_to(guest: torch.Tensor, target: torch.device) -> torch.Tensor:
    """A copy of `guest` on `target`, with the same strides; sends the bytes that it spans and no others."""
    if guest.device == target:
        return guest
    if is_subclass_value(guest):
        return guest.to(target)
    span = 1 + sum((size - 1) * step for size, step in zip(guest.shape, guest.stride(), strict=True))
    copy = send(guest.as_strided((max(span, 0) if guest.numel() else 0,), (1,)), target)
    return copy.as_strided(guest.shape, guest.stride(), 0)


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


class Copy(Value):
    """A whole value on a device. `base` is None while it is not there."""

    __slots__ = ("base",)

    def __init__(self, pool: Pool, handle: Handle) -> None:
        super().__init__(pool, handle.file, *handle.extent, shared=False)
        self.base: torch.Tensor | None = None

    def cached_bytes(self) -> int:
        """How much of it is on the device."""
        return 0 if self.base is None else self.nbytes

    def let_go(self) -> None:
        """Drop it from the device."""
        self.base = None


def resident_guest(handle: Handle, twin: torch.Tensor, target: torch.device) -> torch.Tensor | None:
    """What `twin` cuts out of the value on a device, if that stays there; None if it is to be sent for each op.

    Raises: as `Handle.base`, also where the file is not read.
    """
    copy = _copy_to_stay(handle, target)
    if copy is None:
        return None
    base, there = handle.base(), copy.base
    if there is None:
        brought_in(handle, twin_of(handle))
        with no_functions(), no_modes():  # it outlives the mode that it was first asked for in
            there = sent_to(base, target)
            settle(target)
        copy.base = there
    lend(there, target)
    return cut(there, twin)


def _copy_to_stay(handle: Handle, target: torch.device) -> Copy | None:
    pool = (handle.pool or POOL).on_devices.get(target)
    if pool is None or handle.owned or handle.recipe is not None:
        return None
    leaving: list[Value] = []
    try:
        with lock():
            copy: Copy | None = handle.copies.get(target)
            if copy is None or copy.pool is not pool:
                copy = handle.copies[target] = Copy(pool, handle)
                leaving.extend(pool.add([copy]))
            return copy if copy.kept else None
    finally:
        let_go(leaving)
