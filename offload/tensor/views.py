"""Views of stored values: which part of which value a tensor is.

Always true:
- a view is described by a meta tensor, its view spec: shape, strides, offset, dtype, lazy conjugation and negation
- cutting reads nothing
- a value traced by a compiler has no file, it is the compiler's tensor; `torch.jit.trace` sees offloaded tensors
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, final

import torch

from offload.errors import StaleViewError, UnsupportedOpError
from offload.storage.handle import Handle
from offload.storage.layout import Layout
from offload.storage.subclasses import is_subclass_value
from offload.system.modes import no_functions, no_modes
from offload.torch_api import set_conj, set_neg

if TYPE_CHECKING:
    from offload.tensor.wrapper import OffloadedTensor


def handle_of(tensor: OffloadedTensor) -> Handle:
    """The stored value that it is a view of; raises `UnsupportedOpError` if a compiler is tracing it."""
    handle = tensor._handle
    if type(handle) is not Handle:
        raise UnsupportedOpError("a tensor that is being traced has no file: call this outside compile or export")
    return handle


def view_spec_of(tensor: OffloadedTensor) -> torch.Tensor:
    """The view spec of `tensor`, if it still fits the stored value."""
    if tensor._generation != tensor._handle.generation:
        raise StaleViewError(
            f"the value {handle_of(tensor).name!r} was replaced (by one of another shape or dtype, or in a "
            "tensor's .data), and this tensor is an old view of it: cut the view again"
        )
    return tensor._view_spec


def target_of(tensor: OffloadedTensor) -> torch.device:
    """The device on which its ops compute."""
    return tensor._target


def is_part(tensor: OffloadedTensor) -> bool:
    """Whether it is a view of a part of its value, not the whole."""
    layout, view_spec = handle_of(tensor).layout, tensor._view_spec
    return (tuple(view_spec.shape), view_spec.dtype) != (layout.shape, layout.dtype) or (
        view_spec.stride() != layout.stride and view_spec.numel() > 1
    )


def is_stale(tensor: OffloadedTensor) -> bool:
    """Whether its value has been replaced by one of another layout since the view was made."""
    return tensor._generation != tensor._handle.generation


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


def cut(base: torch.Tensor, view_spec: torch.Tensor) -> torch.Tensor:
    """A tensor over the storage of `base`, a plain tensor, cut like `view_spec`."""
    if base is view_spec:
        return base
    if base.dtype != view_spec.dtype:
        return view_with(base, metadata_of(view_spec))
    guest = base.as_strided(view_spec.shape, view_spec.stride(), view_spec.storage_offset())
    return with_bits_of(guest, view_spec) if view_spec.is_conj() or view_spec.is_neg() else guest


def uncut(base: torch.Tensor, view_spec: torch.Tensor, name: str) -> torch.Tensor:
    """`base`, of a subclass, for a view spec of the whole value; any other is a cut of the plain one that was there."""
    if (view_spec.shape, view_spec.stride(), view_spec.dtype) != (base.shape, base.stride(), base.dtype):
        raise StaleViewError(
            f"the value {name!r} was replaced by a {type(base).__name__}, and this tensor is an old view of a part: "
            "cut the view again"
        )
    return base


@final
class Traced:
    """Stands in for a handle while a compiler traces: the value is one of the compiler's tensors."""

    __slots__ = ("generation", "inner", "subclass")
    owned = True
    composed = None

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner
        self.subclass: dict[str, Any] | None = {} if is_subclass_value(inner) else None
        self.generation = 0

    def base(self) -> torch.Tensor:
        return self.inner

    @property
    def source(self) -> Traced:
        return self

    @property
    def meta(self) -> torch.Tensor:
        return self.inner
