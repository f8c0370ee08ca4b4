"""Rules for ops that the general rules do not fit.

Always true:
- each handler says in one line why the general rule does not work
- an op has one handler; a second registration is an error
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from offload.annotations import Args, Kwargs, Op
from offload.errors import UnsupportedOpError
from offload.prefetch.tables import has_rows_here, prefetch_rows
from offload.storage.subclasses import is_subclass_value
from offload.system.modes import no_functions, no_grad, no_modes
from offload.tensor.arguments import checked_device
from offload.tensor.guests import CPU, copied, mapped_value, sent_to
from offload.tensor.picks import picked
from offload.tensor.products import bind
from offload.tensor.recipes import Piece
from offload.tensor.registry import INNER, implements, overrides
from offload.tensor.replacing import become, redress, store
from offload.tensor.rules import (
    call,
    decompose,
    guests_of,
    guests_that_ask_for_grad,
    has_file,
    is_followed,
    named_guests,
    on_guests,
    plain_copies,
    read,
    read_directly,
    records_graph,
    view_of,
    write,
)
from offload.tensor.views import Traced, handle_of, view_spec_of
from offload.tensor.wrapper import OffloadedTensor, guest_of, wrap
from offload.torch_api import (
    TRACER_KEY,
    DisableTorchFunctionSubclass,
    DispatchKey,
    are_swappable,
    dtensor_class,
    exclude_key,
    higher_order_ops,
    is_sharding,
    is_traced,
    is_view,
    kernel_of,
    keys_kept,
    modes_are_on,
    tree_flatten,
    tree_map_only,
    tree_unflatten,
    typed_storage_of,
)

aten = torch.ops.aten


@overrides(torch.tensor_split, torch.Tensor.tensor_split)
def split_at_offloaded_indices(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """torch reads the indices from memory, below every dispatcher."""
    tensor, where, *rest = [
        *args,
        *(kwargs.pop(key) for key in ("indices_or_sections", "tensor_indices_or_sections") if key in kwargs),
    ]
    [where] = guests_of([where], plain_copies([where]))
    with DisableTorchFunctionSubclass():
        return func(tensor, where, *rest, **kwargs)


@overrides(torch.chunk, torch.narrow)
def refuse_to_be_sharded(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """torch.distributed would copy each rank's shard into memory, or send it from one rank to the others."""
    if dtensor_class() is not None and is_sharding():
        tensor = next((one for one in (*args, *kwargs.values()) if type(one) is OffloadedTensor), None)
        name = "a value" if tensor is None else repr(tensor.name)
        raise UnsupportedOpError(
            f"{name} is on disk already, and sharding it now would move it into memory. Shard the empty model first, "
            "then load it: make it on the meta device, call parallelize_module, fully_shard or distribute_tensor, and "
            "then offload.load_checkpoint_and_dispatch(model, checkpoint); a model of transformers is loaded by "
            'offload.from_pretrained(folder, distributed_config=DistributedConfig(tp_plan="auto"))'
        )
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


@overrides(torch.sparse.mm)
def read_above_autograd(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """With a reduction, torch reads the dense factor from memory, below every dispatcher."""
    return on_guests(func, args, kwargs, plain_copies((*args, *kwargs.values())))


_CONTROL_FLOW = (
    "associative_scan", "cond", "flex_attention", "flex_attention_backward", "foreach_map", "hints_wrapper",
    "invoke_subgraph", "map_impl", "scan", "strict_mode", "while_loop", "while_loop_stack_output",
)  # fmt: skip


@overrides(*(higher_order_ops[name] for name in _CONTROL_FLOW if name in higher_order_ops))
def read_for_functions(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """The functions that they are given take plain tensors alone."""
    leaves, structure = tree_flatten((args, kwargs))
    memo = plain_copies(leaves)
    if torch.compiler.is_exporting():  # which records ops, and what is inside of a tensor is a constant to it
        with DisableTorchFunctionSubclass():
            memo = {id(one): one.clone() for one in leaves if type(one) is OffloadedTensor}
    args, kwargs = tree_unflatten(guests_of(leaves, memo), structure)
    return func(*args, **kwargs)


@overrides(
    torch.linalg.pinv, torch.pinverse, torch.Tensor.pinverse, torch.linalg.lstsq, torch.linalg.vecdot,
    torch.fft.hfft, torch.fft.hfft2, torch.fft.hfftn,
)  # fmt: skip
def read_resolved(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """A lazily conjugated argument is resolved first: torch would do it, and then exclude keys needed here (2.13)."""
    return read_directly(func, tuple(map(_resolved, args)), kwargs)


def _resolved(arg: object) -> Any:
    return arg.clone() if type(arg) is OffloadedTensor and arg.is_conj() else arg


@implements(aten._fused_sdp_choice.default)
def choose_attention(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """The kernel depends on whether the arguments require grad, which guests don't."""
    memo = guests_that_ask_for_grad(args, kwargs)
    return read(func, args, kwargs, memo)


@overrides(F.embedding)
def embed(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Like `read_directly`, but reads rows instead of the table; unless it writes to the table (`max_norm`)."""
    table = args[1] if len(args) > 1 else kwargs["weight"]
    writes = len(args) > 3 or kwargs.get("max_norm") is not None
    with DisableTorchFunctionSubclass():
        is_plain_on_cpu = has_file(table) and table._target == CPU and not table._handle.is_subclass
        is_here = is_plain_on_cpu and not (writes or modes_are_on() or records_graph(args, kwargs))
        if not is_here or table._handle.composed is not None:
            rows = func(*args, **kwargs)
            if is_here:
                bind(table)
            return rows
        memo = {id(table): mapped_value(table)}
        if not has_rows_here(table._handle):
            _announce_rows(table, guest_of(args[0] if args else kwargs["input"]))
        return on_guests(func, args, kwargs, memo)


@implements(aten.convolution.default)
def convolve(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """`torch.jit.trace`, re-enabled here, records the op that it decomposes into, not this one."""
    if not is_traced():
        return read(func, args, kwargs)
    with keys_kept():
        exclude_key(TRACER_KEY, False)
        return kernel_of(func)(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


@implements(aten.linear.default, aten.matmul.default)
def multiply(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """In inference mode they arrive whole, and use another kernel if a weight requires grad: views know of it here."""
    with keys_kept():
        exclude_key(DispatchKey.ADInplaceOrView, False)
        return decompose(func, args, kwargs)


# Ops that need a tensor's metadata, not its value


@implements(aten.detach.default, aten.alias.default)
def same_value(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Another tensor over the same value: the same view spec serves both, and no subclass is called."""
    base = args[0]
    view_spec = func(base._handle.inner) if type(base._handle) is Traced else view_spec_of(base)
    return view_of(base, view_spec)


@implements(
    aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.rand_like.default, aten.rand_like.generator, aten.randn_like.default, aten.randn_like.generator,
    aten.randint_like.default, aten.randint_like.generator,
    aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype,
    aten.new_empty.default, aten.new_empty_strided.default, aten.new_zeros.default, aten.new_ones.default,
    aten.new_full.default,
)  # fmt: skip
def like_without_reading(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Needs only shape, strides and dtype: the file stays closed."""
    tensor = args[0]
    if not has_file(tensor) or tensor._handle.is_subclass:
        return read(func, args, kwargs)
    device = kwargs.get("device") or tensor._target
    return func(view_spec_of(tensor), *args[1:], **{**kwargs, "device": device})


@implements(aten._nested_view_from_jagged.default)
def read_into_nested(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Its schema promises a view, but it returns a writable copy: run it on a copy in memory."""
    values, *rest = args
    values = values.materialize() if has_file(values) else values
    return func(values, *guests_of(rest, {}), **named_guests(kwargs, {}))


@implements(aten._to_copy.default)
def move_or_cast(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Only another device needs no value: same file, another target. On `meta` there are no values."""
    tensor, device = args[0], kwargs.get("device")
    if device is None or not has_file(tensor):
        return read(func, args, kwargs)
    if torch.device(device).type == "meta":
        return func(view_spec_of(tensor), **kwargs)
    target = checked_device(device)
    if target == tensor._target or _changes_more_than_device(tensor, kwargs):
        return read(func, args, kwargs)
    return wrap(tensor._handle, view_spec_of(tensor), target)


def _changes_more_than_device(tensor: torch.Tensor, options: dict[str, Any]) -> bool:
    return (
        options.get("dtype") not in (None, tensor.dtype)
        or options.get("layout") not in (None, tensor.layout)
        or options.get("memory_format") not in (None, torch.preserve_format)
        or bool(options.get("pin_memory"))
    )


@overrides(torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda)
def move_with_version(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """A moved tensor writes to the same file: without a graph, it shares the version counter, as a view does."""
    with DisableTorchFunctionSubclass():
        moved = func(*args, **kwargs)
        if type(moved) is not OffloadedTensor or moved is args[0] or is_followed(moved):
            return moved
        if moved._handle is not args[0]._handle or not are_swappable(args[0], moved):  # a cast has a file of its own
            return moved
        alias = args[0].detach()
        redress(alias, moved._view_spec, moved._target)
        return alias


@implements(aten._has_compatible_shallow_copy_type.default)
def compare_kinds(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Needs only the types of two tensors; torch calls it when a wrapper gets other metadata."""
    return func.decompose(*args, **kwargs)


# Ops that need some rows of the value


@implements(aten.embedding.default, aten.index_select.default, aten.index.Tensor, aten.gather.default)
def pick_where_the_file_is(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Only the picked rows are read, not the whole table, and only these are sent to another device."""
    table, *picks = args
    if not has_file(table) or table._handle.is_subclass:
        return read(func, args, kwargs)
    if table._handle.composed is not None:
        return _pick_what_is_carried_out(func, args, kwargs)
    mapped = mapped_value(table)
    if not has_rows_here(table._handle) and func in _PICKS and not modes_are_on() and _is_of_rows(func, args):
        _announce_rows(table, _row_numbers(func, args[_PICKS[func]]))
    if table._target == CPU:
        return read(func, args, kwargs, {id(table): mapped})
    memo: dict[int, torch.Tensor] = {}
    given = [mapped, *guests_of(picks, memo)], named_guests(kwargs, memo)
    return sent_to(call(func, *tree_map_only(torch.Tensor, lambda one: one.to(CPU), given)), table._target)


def _announce_rows(table: OffloadedTensor, rows: torch.Tensor | None) -> None:
    """Start reading all of the rows, and nothing around them, before waiting for the first."""
    if rows is None or rows.dtype not in _NUMBERS:  # torch says what is wrong with it
        return
    if rows.device == CPU and table.dim() > 1 and table.numel():
        prefetch_rows(handle_of(table), view_spec_of(table), rows)


def _pick_what_is_carried_out(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Of a recipe, only the picked rows are computed, each once, and picked from these."""
    table, place = args[0], _PICKS.get(func)
    if place is None or modes_are_on():
        return read(func, args, kwargs)
    numbers = _row_numbers(func, args[place])
    if numbers is None or not _is_of_rows(func, args):
        return read(func, args, kwargs)
    rows, again = torch.unique(numbers, return_inverse=True)
    if len(rows) == 0 or rows[0] < 0 or rows[-1] >= len(table) or 2 * len(rows) > len(table):
        return read(func, args, kwargs)  # also for torch's error when an index is out of range
    few = picked(Piece(handle_of(table), view_spec_of(table)), rows, table._target)
    again = again.view(numbers.shape).to(table._target)
    given = [few, *args[1:]]
    given[place] = [again, *args[place][1:]] if func is aten.index.Tensor else again
    if func is aten.embedding.default:  # the rest is the padding index and so on, which only backward needs
        return call(func, guests_of(given[:2], {}), {})
    return call(func, guests_of(given, {}), named_guests(kwargs, {}))


def _is_of_rows(func: Op, args: Args) -> bool:
    """Whether a picking op works along the first dimension."""
    return func is not aten.index_select.default or args[1] % max(args[0].dim(), 1) == 0


def _row_numbers(func: Op, picks: Any) -> torch.Tensor | None:
    """The rows that an op picks, on the CPU, counted from 0; None if it picks something else."""
    numbers = picks[0] if func is aten.index.Tensor else picks
    if not isinstance(numbers, torch.Tensor) or numbers.dtype not in _NUMBERS or numbers.is_meta:
        return None
    return guest_of(numbers).to(CPU)


_NUMBERS = (torch.int64, torch.int32)
_PICKS = {aten.embedding.default: 1, aten.index_select.default: 2, aten.index.Tensor: 1}  # which argument has the rows


# Ops that change which memory a tensor is over


# Tagged as views, but may need another storage, and so another file
implements(aten.resize_.default, aten.resize_as_.default)(write)


@implements(
    aten.set_.default, aten.set_.source_Tensor, aten.set_.source_Tensor_storage_offset,
    aten.set_.source_Storage, aten.set_.source_Storage_storage_offset,
)  # fmt: skip
def become_another(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Tagged as a view, but of another tensor: becomes an alias of an offloaded one; a plain one's value is stored."""
    tensor, *source = args
    if type(tensor) is not OffloadedTensor:
        raise UnsupportedOpError(
            f"set_ would make a plain tensor a view of the file of {source[0].name!r}: "
            "use copy_ for its value, or detach() for another tensor over the file"
        )
    if source and type(source[0]) is OffloadedTensor:
        other, *cut = source
        become(tensor, other.as_strided(cut[1], cut[2], cut[0]) if cut else other)  # cut: offset, size, stride
    else:
        with no_functions(), no_modes():
            values = func(torch.empty(0, dtype=tensor.dtype), *source, **kwargs)
        store(tensor, values)
    return tensor


@overrides(torch.ops.aten.set_data, torch.ops.aten.set_data.default)
def refuse_set_data(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """torch swaps metadata below every dispatcher, so that the file would keep the old value."""
    names = [repr(arg.name) for arg in (*args, *kwargs.values()) if type(arg) is OffloadedTensor]
    raise UnsupportedOpError(
        f"aten.set_data can't be followed on {names[0]}: assign to its .data, or use update_values"
    )


# Methods of the class, called through `torch.Tensor`


@overrides(
    torch.Tensor.data_ptr, torch.Tensor.untyped_storage, typed_storage_of, torch.Tensor.storage,
    torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.share_memory_, torch.Tensor.is_shared,
)  # fmt: skip
def method_of_the_class(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """They read memory below every dispatcher."""
    return getattr(OffloadedTensor, func.__name__)(*args, **kwargs)


# Values of a tensor subclass, such as quantized weights


_OF_THE_TENSOR = {
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "__len__"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg", "is_inference"),
    *("is_same_size", "is_set_to", is_view.__name__, "__hash__", "get_device", "to", "cpu", "cuda", "detach"),
    *("alias", "requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook", "backward"),
    *("detach_", "grad", "data_ptr", "untyped_storage", "numpy", "tolist"),
}  # fmt: skip
_NOT_INPLACE = {"__invert__", "__index__", "__int__"}
_ACCESSORS = {"__get__", "__set__", "__delete__"}
_VALUE_PROPERTIES = {"T", "mT", "H", "mH", "real", "imag"}


@overrides(INNER)
def call_on_values(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Below torch functions, autograd would decompose `linear` into ops that the inner class lacks."""
    if _is_of_the_tensor(func, args, kwargs):
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if _is_inplace(func):
        return _call_inplace(func, args, kwargs)
    memo = plain_copies((*args, *kwargs.values()))
    results = on_guests(_as_the_class_has_it(func, args), args, kwargs, memo)
    return _independent(results, {place for guest in memo.values() for place in _places(guest)})


def _is_of_the_tensor(func: Any, args: Args, kwargs: Kwargs) -> bool:
    name = getattr(func, "__name__", "")
    if name == "to" and _casts(*args, *kwargs.values()):
        return False
    if name in _ACCESSORS:
        return func.__self__.__name__ not in _VALUE_PROPERTIES
    return name in _OF_THE_TENSOR


def _casts(tensor: torch.Tensor, *given: object) -> bool:
    """Whether `tensor.to` with these arguments changes the dtype."""
    dtypes = (one if isinstance(one, torch.dtype) else getattr(one, "dtype", None) for one in given)
    return any(dtype not in (None, tensor.dtype) for dtype in dtypes)


def _is_inplace(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_INPLACE)
    return name.endswith("_") and not name.startswith("_")


def _as_the_class_has_it(func: Op, args: Args) -> Any:
    """For a method of `torch.Tensor`, the one that the value's class has under this name."""
    name = getattr(func, "__name__", "")
    if not args or type(args[0]) is not OffloadedTensor or getattr(torch.Tensor, name, None) is not func:
        return func
    return getattr(type(args[0]._handle.base()), name, func)


def _call_inplace(func: Op, args: Args, kwargs: Kwargs) -> Any:
    changed = next(iter((*args, *kwargs.values())))
    memo: dict[int, torch.Tensor] = {}
    if type(changed) is not OffloadedTensor:
        return on_guests(func, args, kwargs, memo)
    with no_grad():
        copy = memo[id(changed)] = changed.materialize()
        on_guests(func, args, kwargs, memo)
        store(changed, copy)
    torch.autograd.graph.increment_version(changed)
    return changed


def _independent(results: object, files: set[int]) -> Any:
    """Copies of those results that would share memory with a file."""
    if isinstance(results, (list, tuple)):
        return type(results)([_independent(result, files) for result in results])
    if isinstance(results, torch.Tensor) and not files.isdisjoint(_places(results)):
        return results.clone() if results.requires_grad else copied(results, results.device)
    return results


def _places(tensor: torch.Tensor) -> Iterator[int]:
    """The storage addresses of the plain tensors inside `tensor`."""
    if is_subclass_value(tensor):
        attributes, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for attribute in attributes:
            yield from _places(getattr(tensor, attribute))
    elif tensor.layout == torch.strided and tensor.untyped_storage().nbytes():
        yield tensor.untyped_storage().data_ptr()
