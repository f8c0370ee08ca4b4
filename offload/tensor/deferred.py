"""Tensors that are still to be put together from stored ones.

Always true:
- nothing is read before the tensor is stored, or an op needs its numbers
- stacking, joining, slicing, casting, making contiguous, reordering rows or columns, arithmetic with a number, and
  setting rows to a number are recorded; parts are offloaded tensors or views of them
- the result is a recipe over stored values: nothing is written unless requested
- at its first other write it gets a file of its own; its views see each write, copies made before do not
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias

import torch

from offload.annotations import Args, Kwargs, Op
from offload.errors import UnsupportedOpError
from offload.storage.handle import Handle
from offload.storage.layout import Layout
from offload.storage.write import layout_of
from offload.system.modes import inside, no_functions, no_grad, no_modes
from offload.system.regular import is_same_folder
from offload.tensor.assembly import Assembly, ValuePart, as_parts
from offload.tensor.decoded import Decoded
from offload.tensor.guests import CPU, mapped_value
from offload.tensor.recipes import Piece, stored_in
from offload.tensor.registry import Rule
from offload.tensor.rules import written_arguments
from offload.tensor.runs import Decode, Decoder
from offload.tensor.views import handle_of, is_part, meta_of_layout, view_spec_of
from offload.tensor.wrapper import OffloadedTensor, is_offloaded, wrap_handle
from offload.torch_api import DisableTorchFunctionSubclass, make_wrapper, refuse_pointers, tree_map_only

_MOST_FILLS = 4  # each makes a recipe over the one before: what it takes to read them multiplies
_MOST_RUNS = 1024  # most runs of rows in another order
_BIG = 1 << 20  # size in bytes from which the result of an op is stored at once
_aten = torch.ops.aten

Cut: TypeAlias = Callable[[torch.Tensor], Any]


@dataclass(slots=True)
class Body:
    """What a tensor and its views are put together from.

    Attributes:
        made: the only part is a value that was created for it.
        own: no other body has this value among its parts: it may be written to.
        is_fixed: its dtype stays, whatever a loader asks for.
        fills: how often rows of it were set to a number by a recipe.
    """

    parts: tuple[ValuePart, ...]
    made: bool = False
    own: bool = False
    is_fixed: bool = False
    fills: int = 0

    def become(self, stored: OffloadedTensor) -> None:
        self.parts, self.made, self.own = as_parts(stored), True, True


class DeferredTensor(torch.Tensor):
    """A tensor that is still to be put together from stored ones. Create it with `deferred`.

    It may be passed to code that renames, stacks, joins, splits, transposes and casts the tensors of a checkpoint.
    `stored` then returns the result as a value on disk; other ops read, and return their result.
    """

    _body: Body
    _root: torch.Tensor  # all of the body, as a meta tensor
    _cuts: tuple[Cut, ...]  # how this tensor is cut from the body's only part; empty if it is all of it
    _seen: tuple[tuple[ValuePart, ...], tuple[ValuePart, ...]]  # parts of the body, and this tensor's at that time
    _meta: torch.Tensor  # a meta tensor with this tensor's own metadata

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        rule: Rule = _RULES.get(func) or (_cut if func.is_view else _compute)
        return rule(func, args, kwargs or {})

    @property
    def _parts(self) -> tuple[ValuePart, ...]:
        """The parts of the body, with the cuts applied."""
        if not self._cuts:
            return self._body.parts
        if self._seen[0] is not self._body.parts:
            source = self._body.parts[0].source
            for cut in self._cuts:
                source = cut(source)
            self._seen = (self._body.parts, as_parts(source))
        return self._seen[1]

    @property
    def assembly(self) -> Assembly:
        """How it is put together, as recorded so far."""
        return Assembly(self._parts, self._meta)

    @property
    def data(self) -> torch.Tensor:
        """The same values, without a graph."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Torch's C++ setter would change the wrapper and leave the values as they were.

        Raises:
            UnsupportedOpError: the new value has another shape, dtype or memory order.
        """
        layouts = [(one.shape, one.dtype, one.stride()) for one in (self, value)]
        if layouts[0] != layouts[1]:
            raise UnsupportedOpError(
                f"a tensor that is not joined yet is {layouts[0]}; its data can't become {layouts[1]}: do it after "
                "the model is loaded"
            )
        other = _deferred(value.detach())
        self._body, self._root, self._cuts, self._seen = other._body, other._root, other._cuts, other._seen

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"DeferredTensor({len(self._parts)} parts, shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def is_stored(self) -> bool:
        """Whether it is a whole value on disk already, and will stay there."""
        source = self.assembly.as_it_is()
        return source is not None and not (is_part(source) or self._body.made)

    @inside(no_grad)
    def stored(
        self, name: str, offload_dir: str | os.PathLike[str] | None = None, device: torch.device = CPU
    ) -> OffloadedTensor:
        """The value on disk: where it is now if it is stored as it is, otherwise as a recipe.

        Its sources may be in files of ours that have been, or may be, written to; with a named folder it is then
        put together at once, in a file of its own.

        Args:
            name: of the value, and of its file once it has one.
            offload_dir: the folder for that file, which stays; None for a private one, removed with the tensor.
            device: where ops on it run.

        Raises:
            WriteError, NameInUseError, ForeignFileError, CorruptFileError
        """
        if self.is_stored:
            return self._parts[0].source.to(device)  # type: ignore[return-value]
        written = self._in_its_own_file(name, offload_dir)
        if written is not None:
            written.update_values(self.settled(), strict_dtype=False)
            return written.to(device)  # type: ignore[return-value]
        assembly = self.assembly
        ours = [handle for handle in (handle_of(part.source) for part in assembly.parts) if handle.owned]
        if any(handle.folder is not None or offload_dir is not None for handle in ours):
            return assembly.in_file(name, offload_dir, device)
        return wrap_handle(Handle.compose(assembly.recipe(), name, offload_dir), device)

    @inside(no_grad)
    def materialize(self, device: torch.device = CPU) -> torch.Tensor:
        """The value in memory, as a plain tensor."""
        return self.assembly.in_memory(device)

    def settled(self) -> OffloadedTensor:
        """The value as one tensor that is on disk now."""
        source = self.assembly.as_it_is()
        if source is None:
            self._settle()
            source = self._parts[0].source
        return source

    @inside(no_grad)
    def _settle(self) -> None:
        """Make the body a single value: a recipe until it is written to."""
        recipe = Assembly(self._body.parts, self._root).recipe()
        self._body.become(wrap_handle(Handle.compose(recipe, "deferred"), CPU))

    def _copied(self) -> tuple[ValuePart, ...]:
        """The parts, for another body: the next write to this one goes to a new file."""
        self._body.own = False
        return self._parts

    def alone(self) -> torch.Tensor:
        """The value for code that writes it elsewhere: a plain tensor over a file, in a storage of its own.

        A computed value is given as a separate value on disk, which gets a file when its address is needed.
        """
        is_dense = _aten.is_non_overlapping_and_dense.default(self._meta)
        tensor = self if is_dense else _clone(_aten.clone.default, (self,), {"memory_format": torch.contiguous_format})
        source = tensor.settled()
        composed = handle_of(source).composed
        if composed is not None and not composed.stands(view_spec_of(source)):
            return tensor.stored("deferred")
        with no_functions(), no_modes():
            value = mapped_value(source)
            start = value.storage_offset() * value.itemsize
            span = value.untyped_storage()[start : start + value.numel() * value.itemsize]
            return torch.empty(0, dtype=value.dtype, device=CPU).set_(span, 0, value.shape, value.stride())

    def _in_its_own_file(self, name: str, offload_dir: str | os.PathLike[str] | None) -> OffloadedTensor | None:
        """The source that this is a cast of, if that is stored and writable where this should be."""
        source = self._parts[0].source
        if len(self._parts) > 1 or is_part(source) or source.shape != self.shape:
            return None
        handle = handle_of(source)
        is_it = handle.owned and handle.name == name and is_same_folder(handle.folder, offload_dir)
        return source if is_it else None


def deferred(source: OffloadedTensor, *, keeps_dtype: bool = False) -> DeferredTensor:
    """A deferred tensor with one part, on the CPU.

    Args:
        keeps_dtype: whether it stays as it is when a loader casts; one of a subclass always does.
    """
    with no_functions():
        meta = meta_of_layout(Layout(source.dtype, tuple(source.shape), source.stride()))
    made = _made(as_parts(source), meta)
    made._body.is_fixed = keeps_dtype or handle_of(source).is_subclass
    return made


def refuse_to_share(tensor: torch.Tensor, name: str) -> None:
    """Raises `UnsupportedOpError` for a tensor subclass, such as torchao's: ranks can't have shards of it."""
    sources: list[torch.Tensor] = (
        [part.source for part in tensor._body.parts] if isinstance(tensor, DeferredTensor) else [tensor]
    )
    if any(is_offloaded(source) and handle_of(source).is_subclass for source in sources):
        raise UnsupportedOpError(
            f"{name!r} is stored as a torchao tensor, which ranks can't share: load them from a dense checkpoint, or "
            "from one in FP8, compressed-tensors, GPTQ..., whose weights are decoded as they are read"
        )


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in a dtype: on disk, it becomes a deferred cast, or for a subclass a newly written value."""
    with DisableTorchFunctionSubclass():
        if tensor.dtype == dtype:
            return tensor
    if is_offloaded(tensor) and handle_of(tensor).is_subclass:
        tensor.update_values(tensor.to(dtype), strict_dtype=False)
        return tensor
    return (deferred(tensor) if is_offloaded(tensor) else tensor).to(dtype)


def _made(parts: Sequence[ValuePart], meta: torch.Tensor) -> DeferredTensor:
    body = Body(tuple(parts))
    return _wrapped(body, meta, (), meta, body.parts)


def _wrapped(
    body: Body, root: torch.Tensor, cuts: tuple[Cut, ...], meta: torch.Tensor, parts: tuple[ValuePart, ...]
) -> DeferredTensor:
    made: DeferredTensor = make_wrapper(DeferredTensor, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=CPU)
    made._body = body
    made._root = root
    made._cuts = cuts
    made._seen = (body.parts, parts)
    made._meta = meta
    refuse_pointers(made)
    return made


# Recorded ops


def _same(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Another tensor over the same values."""
    tensor = args[0]
    meta = func(tensor._meta, *args[1:], **kwargs)
    return _wrapped(tensor._body, tensor._root, tensor._cuts, meta, tensor._parts)


def _clone(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """The same values until one of the two is written to; possibly with other strides."""
    tensor = args[0]
    return _made(tensor._copied(), func(tensor._meta, *args[1:], **kwargs))


def _convert(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Another dtype is recorded; another device means reading now."""
    tensor = args[0]
    device = torch.device(kwargs.get("device") or CPU)
    if device.type == "meta":
        return func(tensor._meta, **kwargs)
    if device != CPU or kwargs.get("layout") not in (None, torch.strided):
        return _compute(func, args, kwargs)
    if tensor._body.is_fixed:
        return _same(_aten.alias.default, (tensor,), {})
    parts = tensor._copied()
    with DisableTorchFunctionSubclass():
        stored = {part.source.dtype for part in parts}
        was_narrowed = any(tensor.dtype not in (one, *_WIDER.get(one, ())) for one in stored)
    dtype = kwargs.get("dtype") or tensor.dtype
    if was_narrowed and dtype != tensor.dtype:  # in two steps, as requested
        tensor.settled()
        parts = tensor._copied()
    options = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
    return _made(parts, func(tensor._meta, **options, device="meta"))


def _stack(func: Op, args: Args, kwargs: Kwargs) -> Any:
    tensors, dim = [_deferred(tensor) for tensor in args[0]], (args[1] if len(args) > 1 else kwargs.get("dim", 0))
    layouts = _layouts(tensors)
    meta = _meta_of_many(func, layouts, dim)
    if len({layout.dtype for layout in layouts}) > 1:
        return _compute(func, args, kwargs)
    dim %= len(meta.shape)
    parts = []
    for at, tensor in enumerate(tensors):
        for part in tensor._copied():
            raised = _aten.unsqueeze.default(part.source, dim)
            parts.append(ValuePart(raised, (*part.start[:dim], at, *part.start[dim:])))
    return _made(parts, meta)


def _cat(func: Op, args: Args, kwargs: Kwargs) -> Any:
    tensors, dim = [_deferred(tensor) for tensor in args[0]], (args[1] if len(args) > 1 else kwargs.get("dim", 0))
    layouts = _layouts(tensors)
    if len({layout.dtype for layout in layouts}) > 1 or any(not layout.shape for layout in layouts):
        return _compute(func, args, kwargs)
    meta = _meta_of_many(func, layouts, dim)
    rank = len(meta.shape)
    dim %= rank
    parts: list[ValuePart] = []
    at = 0
    for tensor, layout in zip(tensors, layouts, strict=True):
        if len(layout.shape) == rank:  # torch skips tensors of shape (0,)
            parts.extend(part.moved(dim, at) for part in tensor._copied())
            at += layout.shape[dim]
    return _made(parts, meta)


def _layouts(tensors: Sequence[DeferredTensor]) -> tuple[Layout, ...]:
    with no_functions():
        return tuple(Layout(meta.dtype, tuple(meta.shape), meta.stride()) for meta in (one._meta for one in tensors))


@lru_cache(maxsize=32)
def _meta_of_many(func: Op, layouts: tuple[Layout, ...], dim: int) -> torch.Tensor:
    """The result for tensors with these layouts, the same in every layer of a model. Do not change it."""
    with no_functions(), no_modes():
        meta: torch.Tensor = func([meta_of_layout(layout) for layout in layouts], dim)
        return meta


def _deferred(tensor: torch.Tensor) -> DeferredTensor:
    """A deferred tensor; one in memory is put on disk first."""
    if isinstance(tensor, DeferredTensor):
        return tensor
    return deferred(tensor if is_offloaded(tensor) else OffloadedTensor.from_original_tensor(tensor, "deferred"))


def _cut(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """A view of the only part: an existing one, or the recipe that joins the parts."""
    tensor = args[0]
    if len(tensor._parts) > 1 or (func not in _FOR_ANY_STRIDES and tensor.assembly.as_it_is() is None):
        tensor._settle()

    def cut(source: torch.Tensor) -> Any:
        return func(source, *args[1:], **kwargs)

    def view(meta: torch.Tensor, source: OffloadedTensor, cut: Cut) -> DeferredTensor:
        return _wrapped(tensor._body, tensor._root, (*tensor._cuts, cut), meta, as_parts(source))

    metas, sources = cut(tensor._meta), cut(tensor._parts[0].source)
    if isinstance(metas, torch.Tensor):
        return view(metas, sources, cut)
    return [
        view(meta, source, lambda source, at=at: cut(source)[at])  # type: ignore[misc]
        for at, (meta, source) in enumerate(zip(metas, sources, strict=True))
    ]


def _pad(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Padding by nothing is a copy: transformers pads each head's bias to its table."""
    tensor, pad = args[0], args[1] if len(args) > 1 else kwargs["pad"]
    return _compute(func, args, kwargs) if any(pad) else _clone(_aten.clone.default, (tensor,), {})


def _like(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """A tensor of its shape and dtype in memory: models create initial values like this, even if they are not used."""
    return func(args[0]._meta, *args[1:], **{**kwargs, "device": kwargs.get("device") or CPU})


def _index(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Reordered rows become joined runs; columns are reordered row by row."""
    tensor, (*before, order) = args
    dim = len(before)
    is_order = (
        isinstance(order, torch.Tensor) and order.dim() == 1 and order.dtype == torch.int64 and order.device == CPU
    )
    is_recorded = is_order and before in ([], [None]) and tensor.dim() > dim and order.numel() > 0
    if not is_recorded or not 0 <= int(order.min()) <= int(order.max()) < tensor.shape[dim]:
        return _compute(func, args, kwargs)
    if dim == 1 and tensor.dim() == 2:
        return _row_by_row(tensor, partial(_columns, order=order), func(tensor._meta, [None, order.to("meta")]))
    runs = _runs(order.tolist())
    if dim == 1 or len(runs) > _MOST_RUNS:
        return _compute(func, args, kwargs)
    return _cat(_aten.cat.default, ([_cut(_aten.slice.Tensor, (tensor, 0, *run), {}) for run in runs],), {})


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """The first and end of each run of consecutive numbers."""
    begins = [at for at, number in enumerate(numbers) if at == 0 or number != numbers[at - 1] + 1]
    return [(numbers[at], numbers[end - 1] + 1) for at, end in zip(begins, [*begins[1:], len(numbers)], strict=True)]


def _each(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Ops that work on each number by itself."""
    tensor, *others = args
    if not isinstance(tensor, DeferredTensor) or any(isinstance(other, torch.Tensor) for other in others) or kwargs:
        return _compute(func, args, kwargs)
    meta = func(tensor._meta, *others)
    if tensor.dim() == 0 or not meta.is_contiguous():
        return _compute(func, args, kwargs)
    return _row_by_row(tensor, partial(_applied, name=func.name(), others=tuple(others)), meta)


def _fill(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Setting rows to a number, as some models do to the padding row: they are joined with the other rows."""
    tensor, *values = args
    rows = _rows_in_root(tensor) if isinstance(tensor, DeferredTensor) and not kwargs else None
    if rows is None or not all(map(_is_number, values)):
        return _compute(func, args, kwargs)
    body, root = tensor._body, tensor._root
    is_written = any(handle.owned for handle in stored_in(handle_of(part.source) for part in body.parts))
    if is_written or body.fills == _MOST_FILLS:
        return _compute(func, args, kwargs)
    number = func(torch.empty((), dtype=tensor.dtype), *values).item()
    whole = _wrapped(body, root, (), root, body.parts)
    before, old, after = (
        _cut(_aten.slice.Tensor, (whole, 0, *run), {}) for run in ((0, rows[0]), rows, (rows[1], len(root)))
    )
    new = _row_by_row(old, partial(_applied, name="aten::fill.Scalar", others=(number,)), old._meta)
    joined = _cat(_aten.cat.default, ([before, new, after],), {})
    body.become(wrap_handle(Handle.compose(joined.assembly.recipe(), "deferred"), CPU))
    body.fills += 1
    return tensor


def _rows_in_root(tensor: DeferredTensor) -> tuple[int, int] | None:
    """The range of rows of its body that it consists of; None if it is not a range of whole rows."""
    root, meta = tensor._root, tensor._meta
    is_plain = root.dtype == meta.dtype and not (meta.is_conj() or meta.is_neg())
    if not (is_plain and root.dim() and meta.numel() and root.is_contiguous() and meta.is_contiguous()):
        return None
    step = root.numel() // len(root)
    (first, left), (count, more) = divmod(int(meta.storage_offset()), step), divmod(meta.numel(), step)
    return None if left or more else (first, first + count)


def _is_number(value: object) -> bool:
    """Whether it is a number, or a scalar tensor in memory."""
    return isinstance(value, (bool, int, float)) or (
        type(value) is torch.Tensor and value.dim() == 0 and value.device == CPU
    )


def _row_by_row(tensor: DeferredTensor, decode: Decode, meta: torch.Tensor) -> DeferredTensor:
    """The result of a function of rows."""
    source = tensor.settled()
    tensor._copied()
    with no_functions(), no_modes():
        piece = Piece(handle_of(source), view_spec_of(source))
        recipe = Decoded(layout_of(meta), Decoder(decode, (1,)), [piece])
    return deferred(wrap_handle(Handle.compose(recipe, "deferred"), CPU))


def _columns(rows: torch.Tensor, *, order: torch.Tensor) -> torch.Tensor:
    return rows.index_select(1, order.to(rows.device))


def _applied(rows: torch.Tensor, *, name: str, others: tuple[object, ...]) -> torch.Tensor:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    result: torch.Tensor = getattr(getattr(_aten, packet), overload or "default")(rows, *others)
    return result


# Other ops


def _compute(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Other ops read; large results are put on disk again. Writes go to a file of the tensor's own."""
    for position, name in written_arguments(func):
        tensor = kwargs.get(name) if name in kwargs or position >= len(args) else args[position]
        if not isinstance(tensor, DeferredTensor):
            continue
        if torch.Tag.inplace_view in func.tags:
            raise UnsupportedOpError(
                f"{func} would change the shape of a tensor that is not joined yet: do it after the model is loaded"
            )
        if not tensor._body.own:
            tensor._settle()
    args, kwargs = tree_map_only(DeferredTensor, DeferredTensor.settled, (tuple(args), kwargs))
    return tree_map_only(torch.Tensor, _back_on_disk, func(*args, **kwargs))


def _back_on_disk(result: torch.Tensor) -> torch.Tensor:
    is_small = result.device != CPU or result.numel() * result.itemsize < _BIG
    return result if is_small and not is_offloaded(result) else _deferred(result)


_WIDER = {  # dtypes through which a value of this one passes unchanged
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}
_RULES: dict[object, Rule] = {
    **dict.fromkeys((_aten.detach.default, _aten.alias.default), _same),
    _aten.clone.default: _clone,
    _aten._to_copy.default: _convert,
    _aten.stack.default: _stack,
    _aten.cat.default: _cat,
    _aten.constant_pad_nd.default: _pad,
    **dict.fromkeys((_aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default), _like),
    _aten.index.Tensor: _index,
    **dict.fromkeys((_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor), _each),
    **dict.fromkeys((_aten.neg.default, _aten.log.default, _aten.exp.default), _each),
    **dict.fromkeys((_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default, _aten.copy_.default), _fill),
}
_FOR_ANY_STRIDES = {
    *(_aten.expand.default, _aten.permute.default, _aten.t.default, _aten.transpose.int),
    *(_aten.select.int, _aten.slice.Tensor, _aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int),
    *(_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.unsqueeze.default),
}
