"""How ops are carried out on offloaded tensors, as their schemas say.

Always true:
- an op that gives views reads nothing; every other op runs on guests
- what the schema says was mutated reaches the file before the op returns, and the argument itself is returned
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass

from offload.errors import UnsupportedOpError
from offload.storage.handle import plain_world
from offload.tensor.cuts import cut, cut_like, sent_to
from offload.tensor.tables import BY_SCHEMA, FUNCTIONS, OUT, RULES, Rule, registrar
from offload.tensor.traced import Traced
from offload.tensor.wrapper import CPU, OffloadedTensor, current_twin, guest_of, redress, store, wrap, wrap_traced


def guests_of(args: Iterable[Any], memo: dict[int, torch.Tensor]) -> list[Any]:
    """`args` with guests for the offloaded tensors, also inside lists and tuples; one guest a tensor."""
    guests = []
    for arg in args:
        kind = type(arg)
        if kind is OffloadedTensor:
            guest = memo.get(id(arg))
            if guest is None:
                guest = memo[id(arg)] = guest_of(arg)
            guests.append(guest)
        elif isinstance(arg, (list, tuple)):
            guests.append(guests_of(arg, memo))
        else:
            guests.append(arg)
    return guests


def named_guests(kwargs: dict[str, Any], memo: dict[int, torch.Tensor]) -> dict[str, Any]:
    return dict(zip(kwargs, guests_of(kwargs.values(), memo), strict=True)) if kwargs else kwargs


# The rules that a schema implies


@registrar(RULES, BY_SCHEMA)
def rule_of(func: Any) -> Rule:
    if not isinstance(func, torch._ops.OpOverload):
        return read
    if written_arguments(func):
        return _write_inplace_view if torch.Tag.inplace_view in func.tags else write
    return _view if func.is_view or func in _UNANNOTATED_VIEWS else read


def written_arguments(func: torch._ops.OpOverload) -> list[tuple[int, str]]:
    """Position and name of the arguments that an op writes to."""
    unannotated = UNANNOTATED_WRITES.get(func, ())
    return [
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if position in unannotated or (argument.alias_info is not None and argument.alias_info.is_write)
    ]


_UNANNOTATED_VIEWS = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.unsafe_split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default,
}
UNANNOTATED_WRITES = {
    # Running mean and variance: the schemas do not say that training updates them (torch 2.13).
    torch.ops.aten.native_batch_norm.default: (3, 4),
    torch.ops.aten.cudnn_batch_norm.default: (3, 4),
    torch.ops.aten.miopen_batch_norm.default: (3, 4),
}


def call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an op on guests, with lazy conjugation, negation and zeros understood inside it.

    Below Python dispatch these keys are excluded, and composite kernels that rely on them give wrong values.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set() - _LAZY_KEYS
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        return func(*args, **kwargs)


_LAZY_KEYS = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.Conjugate)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.Negative)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.ZeroTensor)
)


def read(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run on guests; the result is plain."""
    memo: dict[int, torch.Tensor] = {}
    return call(func, guests_of(args, memo), named_guests(kwargs, memo))


def _view(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Cut the twin: nothing is read."""
    base = args[0]
    if type(base) is not OffloadedTensor or (base._handle.recipe is not None and func not in _SAME_VALUE):
        return read(func, args, kwargs)
    twins = func(current_twin(base), *args[1:], **kwargs)
    with _normal_unless_inference(base):
        if isinstance(twins, torch.Tensor):
            return _view_of(base, twins)
        return [_view_of(base, twin) for twin in twins]


_SAME_VALUE = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


def _view_of(base: OffloadedTensor, twin: torch.Tensor) -> OffloadedTensor:
    return wrap_traced(twin) if type(base._handle) is Traced else wrap(base._handle, twin, base._target)


def _normal_unless_inference(base: OffloadedTensor) -> Any:
    """A view of a normal tensor is a normal tensor, also in inference mode."""
    if torch.is_inference_mode_enabled() and not torch._C.TensorBase.is_inference(base):
        return torch.inference_mode(False)
    return DisableTorchFunctionSubclass()


def _write_inplace_view(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`t_`, `squeeze_`...: only the metadata change."""
    tensor = args[0]
    if type(tensor) is not OffloadedTensor:
        return write(func, args, kwargs)
    twin = func(current_twin(tensor).detach(), *args[1:], **kwargs)
    if type(tensor._handle) is Traced:
        tensor._handle.inner = twin
    redress(tensor, twin, tensor._target)
    return tensor


def write(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run on guests over the writable file; what the schema returns as mutated is the argument itself."""
    written = written_arguments(func)
    names = [name for _, name in written]
    changed = [args[place] if place < len(args) else kwargs.get(name) for place, name in written]
    results = write_into(changed, lambda guests, named: call(func, guests, named), args, kwargs)
    returns = func._schema.returns
    if not isinstance(results, (tuple, list)) or len(returns) == 1:
        return _argument_for(func, returns[0], names, changed, results) if returns else results
    pairs = zip(returns, results, strict=True)
    return tuple(_argument_for(func, returned, names, changed, result) for returned, result in pairs)


def _argument_for(func: Any, returned: Any, names: list[str], changed: list[Any], result: Any) -> Any:
    """The argument that a return value stands for, else the value."""
    if returned.alias_info is None or not returned.alias_info.is_write:
        return result
    aliased = returned.alias_info.before_set
    for argument in func._schema.arguments:
        if argument.name in names and argument.alias_info and argument.alias_info.before_set == aliased:
            return changed[names.index(argument.name)]
    return result


@registrar(FUNCTIONS, OUT)
def write_out(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A call with `out=`: run as for plain tensors (some composite ops never write the `out` of a subclass)."""
    out = kwargs["out"]
    outs = list(out) if isinstance(out, (tuple, list)) else [out]
    with DisableTorchFunctionSubclass():
        if records_graph(args, kwargs):
            return func(*args, **kwargs)
        results = write_into(outs, lambda guests, named: func(*guests, **named), args, kwargs)
        for tensor in outs:
            if type(tensor) is OffloadedTensor:
                torch.autograd.graph.increment_version(tensor)
    if results is None or isinstance(results, torch.Tensor):
        return None if results is None else out
    return type(results)(outs) if type(results) in (tuple, list) else results.__class__(outs)


def records_graph(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether autograd follows a call with these arguments."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(args, *kwargs.values()))


def _tensors(*values: Any) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(*value)


def write_into(
    changed: Iterable[Any], run: Callable[[list[Any], dict[str, Any]], Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Run with writable guests for the offloaded tensors in `changed`, then store what became of them."""
    targets = [tensor for tensor in _tensors(*changed) if type(tensor) is OffloadedTensor]
    guests = {id(tensor): _writable_guest(tensor) for tensor in targets}
    before = [_metadata(guests[id(tensor)]) for tensor in targets]
    try:
        memo = dict(guests)
        results = run(guests_of(args, memo), named_guests(kwargs, memo))
    except RuntimeError as error:
        if "not resizable" not in str(error):
            raise
        guests = {id(tensor): guest_of(tensor).clone() for tensor in targets}
        before = [None] * len(targets)  # type: ignore[list-item]
        memo = dict(guests)
        results = run(guests_of(args, memo), named_guests(kwargs, memo))
    for tensor, metadata in zip(targets, before, strict=True):
        _settle(tensor, guests[id(tensor)], metadata)
    return results


def _writable_guest(tensor: OffloadedTensor) -> torch.Tensor:
    twin = current_twin(tensor)
    base = tensor._handle.writable_base()
    if tensor._handle.recipe is not None:
        return guest_of(tensor).clone()
    guest = sent_to(cut(base, twin), tensor._target)
    return guest.detach() if guest is base else guest


def _metadata(guest: torch.Tensor) -> tuple[Any, ...]:
    place = guest.untyped_storage().data_ptr()
    return place, guest.shape, guest.stride(), guest.storage_offset(), guest.is_conj(), guest.is_neg()


def _settle(tensor: OffloadedTensor, guest: torch.Tensor, before: tuple[Any, ...] | None) -> None:
    """After a write: nothing to do for a guest over the file; else bring its value, or its new shape, home."""
    handle, twin = tensor._handle, tensor._twin
    if type(handle) is Traced:
        return
    if handle.recipe is not None:
        store(tensor, guest)
    elif before == _metadata(guest):
        if tensor._target != CPU:
            cut(handle.writable_base(), twin).copy_(guest)
    elif before is None and guest.shape == twin.shape:
        cut(handle.writable_base(), twin).copy_(guest)
    elif before is not None and before[0] == guest.untyped_storage().data_ptr() and tensor._target == CPU:
        with plain_world():
            redress(tensor, cut_like(twin, guest), tensor._target)
    elif tensor._is_part():
        raise UnsupportedOpError(
            f"this op would resize {tensor.name!r} through a view of a part of it: resize the tensor itself"
        )
    else:
        store(tensor, guest)
