"""Tensors of a checkpoint that are being rearranged: recorded as recipes over stored values.

Always true:
- nothing is read before an op needs the numbers
- stacking, joining, slicing, casting, making contiguous, reordering rows or columns, and arithmetic with a number are
  recorded: each result is a tensor on disk, stored or a recipe
- a recipe over a recipe that was recorded here is one over the pieces of that
- nothing is written unless requested; at its first write a value gets a file of its own: its views see each write,
  copies made before do not
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias

import torch

from offload.annotations import Args, Kwargs, Op
from offload.errors import UnsupportedOpError
from offload.storage.handle import Handle
from offload.storage.layout import Layout
from offload.storage.owning import make_writable
from offload.storage.write import layout_of
from offload.system.modes import inside, no_functions, no_grad, no_modes
from offload.system.regular import is_same_folder
from offload.tensor.decoded import Decoded
from offload.tensor.guests import CPU, copied, mapped_value
from offload.tensor.recipes import Joined, Piece, joined
from offload.tensor.registry import Rule
from offload.tensor.rules import written_arguments
from offload.tensor.runs import Decode, Decoder
from offload.tensor.views import handle_of, is_part, meta_of_layout, metadata_of, view_spec_of
from offload.tensor.wrapper import OffloadedTensor, is_offloaded, wrap, wrap_handle
from offload.torch_api import DisableTorchFunctionSubclass, make_wrapper, refuse_pointers, tree_map_only

_MOST_RUNS = 1024  # most runs of rows in another order
_BIG = 1 << 20  # size in bytes from which the result of an op is stored at once
_aten = torch.ops.aten

Cut: TypeAlias = Callable[[torch.Tensor], Any]
Part: TypeAlias = tuple[Piece, tuple[int, ...]]  # of a value, and the index of its first element in it


@dataclass(slots=True)
class Body:
    """The value that a tensor and its views are cut from."""

    whole: OffloadedTensor  # on the CPU
    made: bool = False  # it was created here
    own: bool = False  # it is part of no other value: it may be written to
    is_fixed: bool = False  # its dtype stays, whatever a loader asks for

    def become(self, made: OffloadedTensor) -> None:
        self.whole, self.made, self.own = made, True, True


class DeferredTensor(torch.Tensor):
    """A tensor that is still to be put together from stored ones. Create it with `deferred`.

    It may be passed to code that renames, stacks, joins, splits, transposes and casts the tensors of a checkpoint.
    `stored` then returns the result as a value on disk; other ops read, and return their result.
    """

    _body: Body
    _cuts: tuple[Cut, ...]  # how this tensor is cut from the body's value; empty if it is all of it
    _seen: tuple[OffloadedTensor, OffloadedTensor]  # the body's value, and this tensor's at that time

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        rule: Rule = _RULES.get(func) or (_cut if func.is_view else _compute)
        return rule(func, args, kwargs or {})

    @property
    def source(self) -> OffloadedTensor:
        """The value as a tensor on disk, stored or a recipe, on the CPU."""
        whole = self._body.whole
        if self._seen[0] is not whole:
            source: Any = whole
            for cut in self._cuts:
                source = cut(source)
            self._seen = (whole, source)
        return self._seen[1]

    @property
    def _meta(self) -> torch.Tensor:
        return view_spec_of(self.source)

    @property
    def data(self) -> torch.Tensor:
        """The same values, without a graph."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Torch's C++ setter would change the wrapper and leave the values as they were."""
        layouts = [(one.shape, one.dtype, one.stride()) for one in (self, value)]
        if layouts[0] != layouts[1]:
            raise UnsupportedOpError(
                f"a tensor that is not joined yet is {layouts[0]}; its data can't become {layouts[1]}: do it after "
                "the model is loaded"
            )
        other = _deferred(value.detach())
        self._body, self._cuts, self._seen = other._body, other._cuts, other._seen

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"DeferredTensor({self.form}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def form(self) -> str:
        """What is done to the stored values, in words."""
        return "as it is stored" if self.is_stored else self._recipe().form

    @property
    def is_stored(self) -> bool:
        """Whether it is a whole value on disk already, and will stay there."""
        return not (self._body.made or is_part(self.source))

    @inside(no_grad)
    def stored(
        self, name: str, offload_dir: str | os.PathLike[str] | None = None, device: torch.device = CPU
    ) -> OffloadedTensor:
        """The value on disk: where it is now if it is stored as it is, otherwise as a recipe.

        If its sources are in files of ours, which may be written to, it is put together at once in a named folder.
        """
        if self.is_stored:
            return self.source.to(device)  # type: ignore[return-value]
        recipe = self._recipe()
        written = _in_its_own_file(recipe, name, offload_dir)
        if written is not None:
            written.update_values(self.source, strict_dtype=False)
            return written.to(device)  # type: ignore[return-value]
        ours = [handle for handle in recipe.handles() if handle.owned]
        if any(handle.folder is not None or offload_dir is not None for handle in ours):
            return self.in_file(name, offload_dir, device)
        return wrap_handle(Handle.compose(recipe, name, offload_dir), device)

    def in_file(self, name: str, offload_dir: str | os.PathLike[str] | None, device: torch.device) -> OffloadedTensor:
        """The value in a new file."""
        with no_functions(), no_modes():
            handle = Handle.compose(self._recipe(), name, offload_dir)
            make_writable(handle)
        return wrap_handle(handle, device)

    @inside(no_grad)
    def materialize(self, device: torch.device = CPU) -> torch.Tensor:
        """The value in memory, as a plain tensor, or as a quantized one if it is stored as such."""
        if handle_of(self.source).is_subclass:
            return copied(mapped_value(self.source), device)
        whole = torch.empty_like(self._meta, device=device)
        self._recipe().put_into(whole)
        return whole

    def _recipe(self) -> Joined:
        with no_functions(), no_modes():
            parts, layout = self._parts(), layout_of(self._meta)
            return Joined(layout, [piece for piece, _ in parts], [start for _, start in parts])

    def _parts(self, dtype: torch.dtype | None = None) -> Sequence[Part]:
        """What it is put together from, for a value of this dtype (None: its own): pieces and their places.

        One that narrows its pieces is a piece itself if it is cast again: in two steps, as requested.
        """
        source = self.source
        piece = Piece(handle_of(source), view_spec_of(source))
        if self._body.made and self._cuts:
            piece = piece.alone()
        composed = piece.handle.composed
        if self._body.made and type(composed) is Joined and _is_all(piece):
            now = source.dtype
            if dtype in (None, now) or all(_passes(one.view_spec.dtype, now) for one in composed.pieces):
                return composed.placed
        return [(piece, (0,) * piece.view_spec.dim())]

    @inside(no_grad)
    def _settle(self) -> None:
        """Make the body a value of its own: a recipe until it is written to."""
        recipe = _view(self._body, ())._recipe()
        self._body.become(wrap_handle(Handle.compose(recipe, "deferred"), CPU))

    def alone(self) -> torch.Tensor:
        """The value for code that writes it elsewhere: a plain tensor over a file, in a storage of its own.

        A computed value is given as a separate value on disk, which gets a file when its address is needed.
        """
        is_dense = _aten.is_non_overlapping_and_dense.default(self._meta)
        tensor = self if is_dense else _clone(_aten.clone.default, (self,), {"memory_format": torch.contiguous_format})
        source = tensor.source
        composed = handle_of(source).composed
        if composed is not None and not composed.is_stored_as_is(view_spec_of(source)):
            return tensor.stored("deferred")
        with no_functions(), no_modes():
            value = mapped_value(source)
            start = value.storage_offset() * value.itemsize
            span = value.untyped_storage()[start : start + value.numel() * value.itemsize]
            return torch.empty(0, dtype=value.dtype, device=CPU).set_(span, 0, value.shape, value.stride())


def _is_all(piece: Piece) -> bool:
    layout, spec = piece.handle.layout, piece.view_spec
    return (tuple(spec.shape), spec.stride(), spec.dtype) == (layout.shape, layout.stride, layout.dtype)


def _passes(dtype: torch.dtype, through: torch.dtype) -> bool:
    return through == dtype or through in _WIDER.get(dtype, ())


def _in_its_own_file(recipe: Joined, name: str, offload_dir: str | os.PathLike[str] | None) -> OffloadedTensor | None:
    """The value that this is a cast of, if that is stored and writable where this should be."""
    [piece, *others] = recipe.pieces
    handle = piece.handle
    if others or not _is_all(piece) or handle.layout.shape != recipe.layout.shape or not handle.owned:
        return None
    is_it = handle.name == name and is_same_folder(handle.folder, offload_dir)
    return wrap_handle(handle, CPU) if is_it else None


def deferred(source: OffloadedTensor, *, keeps_dtype: bool = False) -> DeferredTensor:
    """A deferred tensor over `source`, on the CPU. `keeps_dtype`: a loader does not cast it, nor ever a subclass."""
    return _view(Body(source, is_fixed=keeps_dtype or handle_of(source).is_subclass), ())


def refuse_to_share(tensor: torch.Tensor, name: str) -> None:
    """Raises `UnsupportedOpError` for a tensor subclass, such as torchao's: ranks can't have shards of it."""
    source = tensor.source if isinstance(tensor, DeferredTensor) else tensor
    if is_offloaded(source) and handle_of(source).is_subclass:
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


def _view(body: Body, cuts: tuple[Cut, ...], source: OffloadedTensor | None = None) -> DeferredTensor:
    """A tensor over a body; `source` is the cut of its value, None for all of it."""
    source = body.whole if source is None else source
    spec = view_spec_of(source)
    view: DeferredTensor = make_wrapper(DeferredTensor, spec.shape, strides=spec.stride(), dtype=spec.dtype, device=CPU)
    view._body, view._cuts, view._seen = body, cuts, (body.whole, source)
    refuse_pointers(view)
    return view


def _recorded(parts: Iterable[Part], result: torch.Tensor) -> DeferredTensor:
    """The value that consists of these parts, with the metadata of `result`."""
    with no_functions(), no_modes():
        alike: dict[object, torch.Tensor] = {}  # thousands of experts share their layout
        pieces, places = [], []
        for piece, start in parts:
            spec = piece.view_spec
            key = metadata_of(spec), spec.untyped_storage().nbytes()
            pieces.append(Piece(piece.handle, alike.setdefault(key, spec)))
            places.append(start)
        whole = joined(layout_of(result), pieces, places, "deferred")
        source = wrap(whole.handle, whole.view_spec, CPU)
    is_new = whole is not pieces[0]
    return _view(Body(source, is_new, is_new), ())


# Recorded ops


def _same(_: Op, args: Args, __: Kwargs) -> Any:
    tensor = args[0]
    return _view(tensor._body, tensor._cuts, tensor.source)


def _copied(tensor: DeferredTensor, dtype: torch.dtype | None = None) -> Sequence[Part]:
    """The parts, for another body: the next write to this one goes to a new file."""
    tensor._body.own = False
    return tensor._parts(dtype)


def _clone(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """The same values until one of the two is written to; possibly with other strides."""
    tensor = args[0]
    return _recorded(_copied(tensor), func(tensor._meta, *args[1:], **kwargs))


def _convert(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Another dtype is recorded; another device means reading now."""
    tensor = args[0]
    device = torch.device(kwargs.get("device") or CPU)
    if device.type == "meta":
        return func(tensor._meta, **kwargs)
    if device != CPU or kwargs.get("layout") not in (None, torch.strided):
        return _compute(func, args, kwargs)
    if tensor._body.is_fixed:
        return _same(func, args, {})
    options = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
    return _recorded(_copied(tensor, kwargs.get("dtype")), func(tensor._meta, **options, device="meta"))


def _stack(func: Op, args: Args, kwargs: Kwargs) -> Any:
    tensors, dim = [_deferred(tensor) for tensor in args[0]], (args[1] if len(args) > 1 else kwargs.get("dim", 0))
    layouts = _layouts(tensors)
    meta = _meta_of_many(func, layouts, dim)
    if len({layout.dtype for layout in layouts}) > 1:
        return _compute(func, args, kwargs)
    dim %= len(meta.shape)
    with no_functions(), no_modes():
        parts = [
            (Piece(piece.handle, piece.view_spec.unsqueeze(dim)), (*start[:dim], at, *start[dim:]))
            for at, tensor in enumerate(tensors)
            for piece, start in _copied(tensor)
        ]
    return _recorded(parts, meta)


def _cat(func: Op, args: Args, kwargs: Kwargs) -> Any:
    tensors, dim = [_deferred(tensor) for tensor in args[0]], (args[1] if len(args) > 1 else kwargs.get("dim", 0))
    layouts = _layouts(tensors)
    if len({layout.dtype for layout in layouts}) > 1 or any(not layout.shape for layout in layouts):
        return _compute(func, args, kwargs)
    meta = _meta_of_many(func, layouts, dim)
    rank = len(meta.shape)
    dim %= rank
    parts: list[Part] = []
    at = 0
    for tensor, layout in zip(tensors, layouts, strict=True):
        if len(layout.shape) == rank:  # torch skips tensors of shape (0,)
            moved = ((piece, (*start[:dim], start[dim] + at, *start[dim + 1 :])) for piece, start in _copied(tensor))
            parts.extend(moved)
            at += layout.shape[dim]
    return _recorded(parts, meta)


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
    tensor = args[0]

    def cut(source: torch.Tensor) -> Any:
        return func(source, *args[1:], **kwargs)

    sources = cut(tensor.source)
    if isinstance(sources, torch.Tensor):
        return _view(tensor._body, (*tensor._cuts, cut), sources)  # type: ignore[arg-type]
    return [
        _view(tensor._body, (*tensor._cuts, lambda source, at=at: cut(source)[at]), source)  # type: ignore[misc]
        for at, source in enumerate(sources)
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


def _row_by_row(tensor: DeferredTensor, decode: Decode, meta: torch.Tensor) -> DeferredTensor:
    source = tensor.source
    tensor._body.own = False
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
    args, kwargs = tree_map_only(DeferredTensor, lambda one: one.source, (tuple(args), kwargs))
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
}
