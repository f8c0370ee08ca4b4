"""How ops are executed on offloaded tensors, according to their schemas.

Always true:
- an op that returns views reads nothing; every other op runs on guests
- what the schema marks as mutated reaches the file before the op returns, and the argument itself is returned
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from offload.annotations import Args, Kwargs, Op
from offload.errors import UnsupportedOpError
from offload.prefetch.copies import retry_on_oom
from offload.storage.owning import make_writable, writable_base
from offload.storage.subclasses import is_subclass_value
from offload.system.modes import no_functions, no_modes
from offload.tensor.guests import CPU, guest, mapped_value, sent_to
from offload.tensor.registry import BY_SCHEMA, OUT, Rule, implements, overrides
from offload.tensor.replacing import redress, store
from offload.tensor.views import Traced, cut, is_part, metadata_of, view_spec_of, view_with
from offload.tensor.wrapper import OffloadedTensor, accelerator_of, wrap, wrap_traced
from offload.torch_api import (
    DisableTorchFunctionSubclass,
    DispatchKey,
    InferenceMode,
    OpOverload,
    exclude_key,
    has_kernel,
    is_dual_level,
    is_inference,
    is_traced,
    kernel_of,
    keys_kept,
    modes_are_on,
    op_schema,
    transform_on_top,
)


def guests_of(args: Iterable[Any], memo: dict[int, torch.Tensor]) -> list[Any]:
    """`args` with guests for offloaded tensors, also inside lists and tuples; one guest per tensor."""
    guests: list[Any] = []
    for arg in args:
        kind = type(arg)
        if kind is OffloadedTensor:
            its_guest = memo.get(id(arg))
            if its_guest is None:
                its_guest = memo[id(arg)] = guest(arg)
            guests.append(its_guest)
        elif isinstance(arg, (list, tuple)):
            guests.append(guests_of(arg, memo))
        else:
            guests.append(arg)
    return guests


def named_guests(kwargs: Kwargs, memo: dict[int, torch.Tensor]) -> Kwargs:
    return dict(zip(kwargs, guests_of(kwargs.values(), memo), strict=True)) if kwargs else kwargs


def on_guests(func: Op, args: Args, kwargs: Kwargs, memo: dict[int, torch.Tensor]) -> Any:
    """Call `func` with guests for offloaded tensors; `memo` has existing guests, by id."""
    guests = guests_of(args, memo)
    return func(*guests, **named_guests(kwargs, memo)) if kwargs else func(*guests)


def plain_copies(values: Iterable[object]) -> dict[int, torch.Tensor]:
    """Plain copies, by id, of tensors that autograd or a tracer follows: guests would hide them from a function."""
    if not (torch.is_grad_enabled() or is_dual_level() or is_traced()):
        return {}
    with DisableTorchFunctionSubclass():
        return {
            id(tensor): tensor.clone()
            for tensor in tensors_in(*values)
            if type(tensor) is OffloadedTensor and (is_followed(tensor) or is_traced())
        }


_POINTWISE = frozenset({
    torch.add, torch.sub, torch.mul, torch.div, torch.pow, torch.where,
    torch.Tensor.add, torch.Tensor.sub, torch.Tensor.mul, torch.Tensor.div, torch.Tensor.pow,
    torch.Tensor.__add__, torch.Tensor.__sub__, torch.Tensor.__mul__, torch.Tensor.__truediv__,
    torch.Tensor.__radd__, torch.Tensor.__rmul__,
})  # fmt: skip


@overrides(
    *_POINTWISE, F.layer_norm, F.rms_norm, F.group_norm, F.bilinear,
    F.scaled_dot_product_attention, torch.conv1d, torch.conv2d, torch.conv3d,
    torch.bmm, torch.mv, torch.dot, torch.baddbmm, torch.cat, torch.stack, torch.Tensor.bmm,
    # These take another branch, with different last bits, if an argument is a subclass (torch 2.13):
    torch.norm, torch.linalg.cond, torch.linalg.eigvalsh, torch.linalg.matrix_norm,
    torch.linalg.norm, torch.linalg.svdvals,
)  # fmt: skip
def read_directly(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Without a graph to record, the whole function runs on guests: one step instead of one per op inside.

    Only for functions that neither write nor return views.
    """
    with DisableTorchFunctionSubclass():
        if modes_are_on() or records_graph(args, kwargs):
            return func(*args, **kwargs)
        try:
            return on_guests(func, args, kwargs, guests_that_ask_for_grad(args, kwargs, func))
        except torch.OutOfMemoryError:
            pass  # what the op had there is let go with the error
        compute = partial(on_guests, func, args, kwargs)
        return retry_on_oom(accelerator_of(args), lambda: compute(guests_that_ask_for_grad(args, kwargs, func)))


def guests_that_ask_for_grad(args: Args, kwargs: Kwargs, func: Op | None = None) -> dict[int, torch.Tensor]:
    """By id, guests that require grad as their tensors do: `matmul` and others choose a kernel by it, graph or not."""
    memo: dict[int, torch.Tensor] = {}
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if type(arg) is OffloadedTensor and arg.requires_grad and func not in _POINTWISE and transform_on_top() is None:
            memo[id(arg)] = guest(arg).detach().requires_grad_()
    return memo


@implements(BY_SCHEMA)
def rule_of(func: Op, *_: object) -> Rule:
    """The rule that follows from an op's schema: whether it consists of other ops, writes, views or only reads."""
    if not isinstance(func, OpOverload):
        return read
    if is_composite(func):
        return decompose
    if written_arguments(func):
        if func.namespace == "c10d":
            return _communicate
        return _write_inplace_view if torch.Tag.inplace_view in func.tags else write
    return _view if func.is_view or func in _UNANNOTATED_VIEWS else read


@cache
def is_composite(func: OpOverload) -> bool:
    """Whether an op only consists of others. In inference mode such ops arrive whole."""
    return has_kernel(func.name(), "CompositeImplicitAutograd") and not has_kernel(func.name(), "CPU")


def decompose(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Each op that it consists of finds its own rule: the schemas of `to` or `reshape` may or may not return a view.

    `func.decompose` would use Python decompositions if there are any, with different last bits.
    """
    return call(kernel_of(func), (DispatchKey.CompositeImplicitAutograd, *args), kwargs)


@cache
def written_arguments(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an op mutates."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(op_schema(func).arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or position in UNANNOTATED_WRITES.get(func, ())
        or _is_received(func, argument)
    )


@cache
def _returned_arguments(func: OpOverload) -> tuple[int | None, ...]:
    """For each return value, which mutated argument it is; None for a new value."""
    aliases = [op_schema(func).arguments[position].alias_info for position, _ in written_arguments(func)]
    names = [alias.before_set if alias else None for alias in aliases]
    return tuple(
        names.index(returned.alias_info.before_set)
        if returned.alias_info is not None and returned.alias_info.is_write
        else None
        for returned in op_schema(func).returns
    )


def _is_received(func: OpOverload, argument: Any) -> bool:
    """c10d schemas don't say what an op that ends in `_` mutates: all tensors but the inputs (torch 2.13)."""
    return (
        func.namespace == "c10d"
        and func.overloadpacket.__name__.endswith("_")
        and "Tensor" in str(argument.type)
        and not argument.name.startswith("input")
    )


_UNANNOTATED_VIEWS = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.unsafe_split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default,
}
UNANNOTATED_WRITES = {
    # Running mean and variance: the schemas don't say that training updates them (torch 2.13).
    torch.ops.aten.native_batch_norm.default: (3, 4),
    torch.ops.aten.cudnn_batch_norm.default: (3, 4),
    torch.ops.aten.miopen_batch_norm.default: (3, 4),
}


def has_file(tensor: object) -> bool:
    """Whether it is an offloaded tensor, and not one that a compiler traces."""
    return type(tensor) is OffloadedTensor and type(tensor._handle) is not Traced


def call(func: Op, args: Sequence[object], kwargs: Kwargs) -> Any:
    """Run an op on guests, with lazy conjugation, negation and zero tensors handled inside it.

    Below Python dispatch these keys are excluded, and composite kernels that rely on them return wrong values.
    """
    with keys_kept():
        for key in _LAZY_KEYS:
            exclude_key(key, False)
        return func(*args, **kwargs)


_LAZY_KEYS = (DispatchKey.Conjugate, DispatchKey.Negative, DispatchKey.ZeroTensor)


def read(func: Op, args: Args, kwargs: Kwargs, memo: dict[int, torch.Tensor] | None = None) -> Any:
    """Run on guests; the result is plain. `memo` has existing guests, by id."""
    memo = {} if memo is None else memo
    return call(func, guests_of(args, memo), named_guests(kwargs, memo))


def _view(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Cut the view spec: nothing is read."""
    base = args[0]
    if type(base) is not OffloadedTensor or base._handle.subclass is not None:
        is_exported = type(base) is OffloadedTensor and type(base._handle) is Traced
        return _view_inside(func, args, kwargs) if is_exported else read(func, args, kwargs)
    if type(base._handle) is Traced:
        with DisableTorchFunctionSubclass():
            view_specs = func(view_spec_of(base), *args[1:], **kwargs)
    elif modes_are_on():
        with no_functions(), no_modes():
            view_specs = func(view_spec_of(base), *args[1:], **kwargs)
    else:
        view_specs = func(view_spec_of(base), *args[1:], **kwargs)
    return (
        view_of(base, view_specs)
        if isinstance(view_specs, torch.Tensor)
        else [view_of(base, view_spec) for view_spec in view_specs]
    )


def _view_inside(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """A view of a value of torchao's class, in a program that is exported: it consists of ops below such classes.

    Most have no `t`, of which `linear` makes use there; that of NF4 gives itself.
    """
    kind = type(args[0]._handle.base())
    try:
        view = read(func, args, kwargs)
    except (NotImplementedError, RuntimeError) as error:
        raise _not_exported(kind) from error
    if func is torch.ops.aten.t.default and view.shape != args[0].shape[::-1]:
        raise _not_exported(kind)
    return view


def _not_exported(kind: type) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"a {kind.__name__} on disk can't be exported, since that class has no `t`: call offload.materialize(model) "
        "first. torch.compile takes it as it is"
    )


def view_of(base: OffloadedTensor, view_spec: torch.Tensor) -> OffloadedTensor:
    """The view of the value of `base` that `view_spec` describes; of a normal tensor it is normal in inference mode."""
    if torch.is_inference_mode_enabled() and not is_inference(base):
        with InferenceMode(False):
            return view_of(base, view_spec)
    return wrap_traced(view_spec) if type(base._handle) is Traced else wrap(base._handle, view_spec, base._target)


def _write_inplace_view(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """`t_`, `squeeze_`...: only the metadata changes."""
    tensor = args[0]
    if type(tensor) is not OffloadedTensor:
        return write(func, args, kwargs)
    view_spec = func(view_spec_of(tensor).detach(), *args[1:], **kwargs)
    if type(tensor._handle) is Traced:
        tensor._handle.inner = view_spec
    redress(tensor, view_spec, tensor._target)
    return tensor


def write(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Run on guests over the writable file; results that the schema marks as mutated are the arguments themselves."""
    changed = [args[place] if place < len(args) else kwargs.get(name) for place, name in written_arguments(func)]
    results = write_into(changed, partial(call, func), args, kwargs)
    _count_writes_to_lists(changed)
    returned = _returned_arguments(func)
    if not isinstance(results, (tuple, list)) or len(returned) == 1:
        return results if not returned or returned[0] is None else changed[returned[0]]
    pairs = zip(returned, results, strict=True)
    return tuple(result if place is None else changed[place] for place, result in pairs)


def _count_writes_to_lists(changed: Iterable[object]) -> None:
    """The dispatcher increments the version of an argument, but not of the tensors in a list."""
    for tensors in changed:
        if isinstance(tensors, (list, tuple)) and not torch.is_inference_mode_enabled():
            torch.autograd.graph.increment_version([tensor for tensor in tensors if type(tensor) is OffloadedTensor])


def _communicate(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Like `write`, but the values may arrive later: they have to go into the mapped file itself."""
    received = [args[place] if place < len(args) else kwargs.get(name) for place, name in written_arguments(func)]
    tensors = [tensor for tensor in tensors_in(*received) if type(tensor) is OffloadedTensor]
    for tensor in tensors:
        if tensor._target != CPU:
            raise UnsupportedOpError(
                f"{func} can't receive into {tensor.name!r}, which computes on {tensor._target}: "
                "receive into a plain tensor, then copy_ it or call update_values"
            )
    results = write(func, args, kwargs)
    torch.autograd.graph.increment_version(tensors)
    return results


@overrides(OUT)
def write_out(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """A call with `out=`: run as for plain tensors (some composite ops never write to the `out` of a subclass)."""
    out = kwargs["out"]
    outs = list(out) if isinstance(out, (tuple, list)) else [out]
    with DisableTorchFunctionSubclass():
        if records_graph(args, kwargs):
            return func(*args, **kwargs)
        results = write_into(outs, lambda guests, named: func(*guests, **named), args, kwargs)
        torch.autograd.graph.increment_version([tensor for tensor in outs if type(tensor) is OffloadedTensor])
    if results is None or isinstance(results, torch.Tensor):
        return None if results is None else out
    return out if type(results) in (tuple, list) else type(results)(outs)


def records_graph(args: Args, kwargs: Kwargs) -> bool:
    """Whether autograd or `torch.jit.trace` needs to see the offloaded tensors among these arguments."""
    if is_traced():
        return True
    if is_dual_level() and any(
        type(tensor) is OffloadedTensor and _has_tangent(tensor) for tensor in tensors_in(*args, *kwargs.values())
    ):
        return True
    return torch.is_grad_enabled() and (_ask_for_grad(args) or _ask_for_grad(kwargs.values()))


def is_followed(tensor: torch.Tensor) -> bool:
    """Whether autograd tracks a tensor, backward or forward."""
    return (tensor.requires_grad and torch.is_grad_enabled()) or (is_dual_level() and _has_tangent(tensor))


def _has_tangent(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def _ask_for_grad(values: Iterable[object]) -> bool:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                return True
        elif isinstance(value, (tuple, list)) and _ask_for_grad(value):
            return True
    return False


def tensors_in(*values: object) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(*value)


def write_into(
    changed: Iterable[object], run: Callable[[list[Any], dict[str, Any]], object], args: Args, kwargs: Kwargs
) -> Any:
    """Run with writable guests for the offloaded tensors in `changed`, then store their new values."""
    targets = [tensor for tensor in tensors_in(*changed) if type(tensor) is OffloadedTensor]
    guests = {id(tensor): _writable_guest(tensor) for tensor in targets}
    before = [None if type(tensor._handle) is Traced else _metadata(guests[id(tensor)]) for tensor in targets]
    try:
        memo = dict(guests)
        results = run(guests_of(args, memo), named_guests(kwargs, memo))
    except RuntimeError as error:
        if "not resizable" not in str(error):
            raise
        guests = {id(tensor): guest(tensor).clone() for tensor in targets}
        before = [None] * len(targets)
        memo = dict(guests)
        results = run(guests_of(args, memo), named_guests(kwargs, memo))
    for tensor, metadata in zip(targets, before, strict=True):
        _settle(tensor, guests[id(tensor)], metadata)
    return results


def _writable_guest(tensor: OffloadedTensor) -> torch.Tensor:
    handle = tensor._handle
    if type(handle) is Traced:
        return handle.inner  # the tensor itself: this is how a compiler sees writes
    make_writable(handle)
    guest = sent_to(mapped_value(tensor), tensor._target)  # the op may not need the old value: it is not prefetched
    return guest.detach() if handle.subclass is None else guest.clone()


def _metadata(guest: torch.Tensor) -> tuple[object, ...]:
    if is_subclass_value(guest):
        return ()
    place = guest.untyped_storage().data_ptr()
    return place, guest.shape, guest.stride(), guest.storage_offset(), guest.is_conj(), guest.is_neg()


def _settle(tensor: OffloadedTensor, guest: torch.Tensor, before: tuple[object, ...] | None) -> None:
    """After a write: nothing to do for a guest over the file; otherwise store its value, or its new shape."""
    handle, view_spec = tensor._handle, tensor._view_spec
    if type(handle) is Traced:
        return
    if handle.subclass is not None:
        store(tensor, guest)
    elif before == _metadata(guest):
        if tensor._target != CPU:
            cut(writable_base(handle), view_spec).copy_(guest)
    elif before is None and guest.shape == view_spec.shape:
        cut(writable_base(handle), view_spec).copy_(guest)
    elif before is not None and before[0] == guest.untyped_storage().data_ptr() and tensor._target == CPU:
        with no_functions(), no_modes():
            redress(tensor, view_with(view_spec, metadata_of(guest)), tensor._target)
    elif is_part(tensor):
        raise UnsupportedOpError(
            f"this op would resize {tensor.name!r} through a view of a part of it: resize the tensor itself"
        )
    else:
        store(tensor, guest)
