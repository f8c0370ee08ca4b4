"""Guests: the plain tensors that stand for a stored value in an op.

Always true:
- a cut is a meta tensor (a twin): shape, strides, offset, dtype, and the bits of lazy conjugation and negation
- cutting reads nothing; a cut of a value on the CPU is over the mapped file, elsewhere it is a copy
- only values in files that nobody writes to stay on an accelerator, and only within a budget for it: there is no copy
  that could be stale
- a value that a compiler traces has no file: it is the compiler's tensor; `torch.jit.trace` sees offloaded ones
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from types import FrameType, FunctionType
from typing import Any, final

import torch

from offload.errors import StaleViewError
from offload.prefetch.engine import POOL, brought_in, lock
from offload.prefetch.residency import Pool, Value, books_of, let_go
from offload.prefetch.staging import lend, send, settle
from offload.storage.handle import Handle
from offload.storage.layout import Layout
from offload.storage.modes import no_functions, no_modes
from offload.storage.subclasses import is_subclass_value, with_inner
from offload.torch_api import set_conj, set_neg

CPU = torch.device("cpu")


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
    set_conj(cut, conjugate)
    set_neg(cut, negative)
    return cut


def with_bits_of(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`tensor` with the lazy conjugation and negation of `other`."""
    set_conj(tensor, other.is_conj())
    set_neg(tensor, other.is_neg())
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


def where_torch_expects(value: torch.Tensor, handle: Handle | Traced, twin: torch.Tensor) -> torch.Tensor:
    """`value`, what `twin` cuts out, at the place in its storage that `twin` says: compilers look at it (2.13).

    What is carried out is elsewhere: in the file of a piece, or in memory for itself.
    """
    if handle.composed is None or value.storage_offset() == twin.storage_offset():
        return value
    base = handle.base()
    span = base.untyped_storage()[int(base.storage_offset()) * base.itemsize :]
    return cut(torch.empty(0, dtype=base.dtype, device=CPU).set_(span, 0, base.shape, base.stride()), twin)


def start_of_run(handle: Handle, twin: torch.Tensor) -> int | None:
    """The byte of the file at which a view begins whose elements lie there as they read; None for any other view."""
    if (
        handle.recipe is not None
        or handle.composed is not None
        or not twin.is_contiguous()
        or twin.is_conj()
        or twin.is_neg()
    ):
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
    books = books_of(handle)
    pool = (books.pool or POOL).on_devices.get(target)
    if pool is None or handle.owned or handle.recipe is not None or handle.composed is not None:
        return None
    leaving: list[Value] = []
    try:
        with lock():
            copy = books.copies.get(target)
            if type(copy) is not Copy or copy.pool is not pool:
                copy = books.copies[target] = Copy(pool, handle)
                leaving.extend(pool.add([copy]))
            return copy if copy.kept else None
    finally:
        let_go(leaving)


# What stands for a value while it is traced


@final
class Traced:
    """Stands for a handle while a compiler traces: the value is a tensor of the compiler's."""

    __slots__ = ("generation", "inner")
    owned = True
    has_holes = False
    recipe = None
    composed = None

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner
        self.generation = 0

    def base(self) -> torch.Tensor:
        return self.inner

    writable_base = base

    @property
    def twin(self) -> torch.Tensor:
        return self.inner


def as_called_from(frame: FrameType, func: Any) -> Callable[..., Any]:
    """`func`, called so that who looks for its caller finds the line and the variables of `frame`.

    `torch.jit.trace` notes which line calls an op, and what the values are called there. It checks its trace against
    one over plain clones of the arguments, and does not pass another line or name (2.13).
    """
    if isinstance(func, FunctionType):  # calls by itself
        return func
    line = "\n" * (frame.f_lineno - 1) + "_traced(*_args, **_kwargs)"
    code = compile(line, frame.f_code.co_filename, "eval")

    @wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        return eval(code, {"_traced": func, "_args": args, "_kwargs": kwargs}, dict(frame.f_locals))

    return call
