"""Values that are themselves of a tensor subclass, such as a quantized weight.

Always true:
- a function is called on the value, of its own class, so that the class decides what the function means
- what needs the tensor and not its value (shape, grad, moves...) is asked of the offloaded tensor
- an in-place function runs on a copy, which then becomes the value
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass

from offload.storage.modes import no_grad
from offload.storage.subclasses import is_subclass_value
from offload.tensor.cuts import copied
from offload.tensor.rules import guests_of, named_guests, plain_copies
from offload.tensor.tables import FUNCTIONS, INNER, registrar
from offload.tensor.wrapper import OffloadedTensor, store

_OF_THE_TENSOR = {
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "__len__"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg", "is_inference"),
    *("is_same_size", "is_set_to", "_is_view", "__hash__", "get_device", "to", "cpu", "cuda", "detach", "detach_"),
    *("alias", "requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook", "backward"),
    *("grad", "data_ptr", "untyped_storage", "numpy", "tolist"),
}  # fmt: skip
_NOT_INPLACE = {"__invert__", "__index__", "__int__"}
_ACCESSORS = {"__get__", "__set__", "__delete__"}
_VALUE_PROPERTIES = {"T", "mT", "H", "mH", "real", "imag"}


@registrar(FUNCTIONS, INNER)
def call_on_values(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Below torch functions, autograd would take `linear` apart into ops that the inner class lacks."""
    if _is_of_the_tensor(func, args, kwargs):
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if _is_inplace(func):
        return _call_inplace(func, args, kwargs)
    memo = plain_copies((*args, *kwargs.values()))
    results = _as_the_class_has_it(func, args)(*guests_of(args, memo), **named_guests(kwargs, memo))
    return _independent(results, {place for guest in memo.values() for place in _places(guest)})


def _is_of_the_tensor(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name == "to" and _casts(*args, *kwargs.values()):
        return False
    if name in _ACCESSORS:
        return func.__self__.__name__ not in _VALUE_PROPERTIES
    return name in _OF_THE_TENSOR


def _casts(tensor: torch.Tensor, *given: Any) -> bool:
    """Whether `tensor.to` of these arguments gives another dtype."""
    dtypes = (one if isinstance(one, torch.dtype) else getattr(one, "dtype", None) for one in given)
    return any(dtype not in (None, tensor.dtype) for dtype in dtypes)


def _is_inplace(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_INPLACE)
    return name.endswith("_") and not name.startswith("_")


def _as_the_class_has_it(func: Any, args: Sequence[Any]) -> Any:
    """The method that the value's class has under this name, for a method of `torch.Tensor`."""
    name = getattr(func, "__name__", "")
    if not args or type(args[0]) is not OffloadedTensor or getattr(torch.Tensor, name, None) is not func:
        return func
    return getattr(type(args[0]._handle.base()), name, func)


def _call_inplace(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    changed = next(iter((*args, *kwargs.values())))
    memo: dict[int, torch.Tensor] = {}
    if type(changed) is not OffloadedTensor:
        return func(*guests_of(args, memo), **named_guests(kwargs, memo))
    with no_grad():
        copy = memo[id(changed)] = changed.materialize()
        func(*guests_of(args, memo), **named_guests(kwargs, memo))
        store(changed, copy)
    torch.autograd.graph.increment_version(changed)
    return changed


def _independent(results: Any, files: set[int]) -> Any:
    """Results that would share memory with a file, copied."""
    if isinstance(results, (list, tuple)):
        return type(results)([_independent(result, files) for result in results])
    if isinstance(results, torch.Tensor) and not files.isdisjoint(_places(results)):
        return results.clone() if results.requires_grad else copied(results, results.device)
    return results


def _places(tensor: torch.Tensor) -> Iterator[int]:
    """Where the storages of the plain tensors inside `tensor` begin."""
    if is_subclass_value(tensor):
        attributes, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for attribute in attributes:
            yield from _places(getattr(tensor, attribute))
    elif tensor.layout == torch.strided and tensor.untyped_storage().nbytes():
        yield tensor.untyped_storage().data_ptr()
