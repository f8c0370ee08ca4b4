"""Replacing what a tensor stands for: its view of a value, and the value itself.

Always true:
- a wrapper's metadata, as torch sees it, is that of its view spec
- a value is replaced whole: on an error, the file holds the old value or the new one
- a replaced value that others still need goes on in the file that they are over
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import lru_cache
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from offload.errors import UnsupportedOpError
from offload.prefetch.engine import UNTRACKED
from offload.storage.handle import Handle
from offload.storage.owning import Notes, create_value, replace_whole
from offload.storage.subclasses import is_subclass_value
from offload.system.modes import no_functions, no_grad, no_modes
from offload.tensor.arguments import refuse_new_value, refuse_other_kind
from offload.tensor.guests import CPU, guest
from offload.tensor.views import Traced, handle_of, is_part, meta_of, view_spec_of, with_bits_of
from offload.torch_api import (
    ConstantIntNode,
    DisableTorchFunctionSubclass,
    is_swapped_in,
    lists_storages,
    make_wrapper,
    refuse_pointers,
    tensor_data,
)

if TYPE_CHECKING:
    from offload.tensor.wrapper import OffloadedTensor

log = logging.getLogger("offload.tensor")
_set_metadata = tensor_data.__set__


def wrapper_over(
    kind: type[OffloadedTensor], handle: Handle | Traced, view_spec: torch.Tensor, target: torch.device
) -> OffloadedTensor:
    """A tensor of that class over `handle`: the view that the meta tensor `view_spec` describes."""
    nbytes = view_spec.untyped_storage().nbytes()
    wrapper: OffloadedTensor = make_wrapper(
        kind,
        view_spec.shape,
        strides=view_spec.stride(),
        storage_offset=view_spec.storage_offset(),
        dtype=view_spec.dtype,
        device=target,
        storage_size=_unread(nbytes) if type(handle) is Handle else nbytes,
    )
    wrapper._handle = handle
    wrapper._view_spec = view_spec
    wrapper._target = CPU if target == CPU else target  # one object: compared by identity
    wrapper._generation = handle.generation
    if type(handle) is Traced:
        wrapper._range = UNTRACKED
    refuse_pointers(wrapper)  # functions that read memory below every dispatcher raise instead of crashing
    if view_spec.is_conj() or view_spec.is_neg():
        with_bits_of(wrapper, view_spec)
    return wrapper


@lru_cache(maxsize=4096)
def _unread(nbytes: int) -> torch.SymInt:
    """A size that raises for code that would copy so many bytes: `torch.jit.save` crashes, or writes zeros (2.13)."""
    return torch.SymInt(ConstantIntNode(nbytes))


def redress(wrapper: OffloadedTensor, view_spec: torch.Tensor, target: torch.device) -> None:
    """Give a wrapper other metadata in place."""
    if view_spec is wrapper._view_spec and target == wrapper._target:
        wrapper._generation, wrapper._range = wrapper._handle.generation, None
    else:
        _take_on(wrapper, wrapper_over(type(wrapper), wrapper._handle, view_spec, target))


def become(wrapper: OffloadedTensor, other: OffloadedTensor) -> None:
    """Turn a wrapper into an alias of `other`."""
    _take_on(wrapper, wrapper_over(type(other), other._handle, view_spec_of(other), other._target))


def _take_on(wrapper: OffloadedTensor, other: OffloadedTensor) -> None:
    _set_metadata(wrapper, other)  # raises if torch can't exchange one device type for another
    wrapper._handle = other._handle
    wrapper._view_spec = other._view_spec
    wrapper._target = other._target
    wrapper._generation = other._generation
    wrapper._range = other._range


def replace_value(
    tensor: OffloadedTensor, values: torch.Tensor, notes: Notes = None, *, strict_shape: bool, strict_dtype: bool
) -> None:
    """Like `OffloadedTensor.update_values`; `notes` go into the file's header."""
    handle = handle_of(tensor)
    with DisableTorchFunctionSubclass():
        refuse_new_value(tensor, values, handle.name)
        if is_part(tensor):
            raise UnsupportedOpError(
                f"update_values replaces a whole value, and this is a view of a part of {handle.name!r}: "
                "use copy_ on the view, or update_values on the tensor that it was cut from"
            )
        refuse_other_kind(tensor, values, handle.name, strict_shape=strict_shape, strict_dtype=strict_dtype)
        before = handle.source
        try:
            store(tensor, values, notes)
        finally:
            if handle.source is not before:
                torch.autograd.graph.increment_version(tensor)


def store(tensor: OffloadedTensor, values: torch.Tensor, notes: Notes = None) -> None:
    """Make `values` the whole stored value, and `tensor` the whole of it; on an error it may have been replaced."""
    handle = handle_of(tensor)
    before = handle.source
    with DisableTorchFunctionSubclass(), no_grad():
        try:
            replace_whole(handle, _plain(values, tensor), notes)
        finally:
            if handle.source is not before:
                redress(tensor, meta_of(handle), tensor._target)
    log.debug("%s: replaced in %s by %s", handle.name, handle.source.file.path, handle.source.layout)


def _plain(values: torch.Tensor, tensor: OffloadedTensor) -> torch.Tensor:
    """`values`, without autograd, or the guest of these; `tensor` is an offloaded one."""
    plain = values.detach()
    return guest(plain) if type(plain) is type(tensor) else plain


def store_alone(tensor: OffloadedTensor, values: torch.Tensor) -> None:
    """Like `store`, but other tensors over the value keep the old one."""
    if _holders(tensor) <= _ONE_HOLDER:
        store(tensor, values)
        return
    handle = handle_of(tensor)
    if handle.owned and handle.folder is not None and not is_part(tensor):
        store(tensor, values)  # one name, one file: the others can't keep the old value, and will raise
        handle.generation += 1
        tensor._generation = handle.generation
    else:
        log.debug("%s: assigned again; others keep the value in %s", handle.name, handle.path)
        folder = None if is_part(tensor) else handle.folder
        created = create_value(_plain(values, tensor), handle.name, folder)
        with no_functions(), no_modes():
            _take_on(tensor, wrapper_over(type(tensor), created, meta_of(created), tensor._target))


def _holders(tensor: Any) -> int:
    """How many tensors are over the same value, plus a constant."""
    return sys.getrefcount(tensor._handle)


_ONE_HOLDER = _holders(SimpleNamespace(_handle=object()))


class unless_swapped:
    """A method that some callers do not find: those that would swap a parameter because it has that method.

    `nn.Module.to`, `float`, `share_memory`... would swap an unchanged parameter for a copy, which fails while a graph
    holds it; without the method they set its `data` to itself. Parametrizations would swap it for a plain one; without
    it they call `set_`, which is stored (2.13). The compiler would refuse it where it looks for what `while_loop`
    changes.
    """

    def __init__(self, method: Callable[..., object]) -> None:
        self.method = method

    def __get__(self, tensor: object, kind: type) -> Any:
        asks: FrameType | None = sys._getframe(1)
        between = (is_subclass_value.__module__, "torch.export._trace")  # these ask for others
        while asks is not None and asks.f_globals.get("__name__") in between:
            asks = asks.f_back
        if asks is not None and (is_swapped_in(asks, tensor) or lists_storages(asks)):
            raise AttributeError(self.method.__name__)
        return self.method.__get__(tensor, kind)
