"""Products with packed weights, computed from the packed bytes.

Always true:
- a product is accumulated in float32, and the numbers of the weight are rounded to its dtype at the most, as in the
  dense weight: it is never further from the true result
- a row of the result depends neither on the number of threads nor on the rows beside it
- what the kernels do not take, and everything within `exact()`, is computed with the dense weight
- a dense weight that is larger than the set budget is decoded in parts for it, but not within `exact()`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from offload.annotations import Args, Kwargs, Op
from offload.kernels import accelerated
from offload.kernels.native import DTYPES, MOST_ROWS, Product, library, most_rows
from offload.kernels.packed import NumberRows, Packed
from offload.prefetch.copies import retry_on_oom
from offload.prefetch.engine import POOL
from offload.prefetch.value import page_state_of
from offload.storage.handle import Handle
from offload.system.modes import no_functions, no_modes
from offload.tensor.bound import BoundProduct
from offload.tensor.decoded import Decoded
from offload.tensor.guests import CPU, value_on
from offload.tensor.hybrid import multiplied_where_it_lies
from offload.tensor.locals import local_of
from offload.tensor.recipes import Joined, Piece, Plain, Recipe, stored_in, values_in_order
from offload.tensor.registry import implements, overrides
from offload.tensor.rules import read, read_directly, records_graph
from offload.tensor.views import Traced, handle_of, metadata_of, view_spec_of
from offload.tensor.wrapper import OffloadedTensor, guest_of
from offload.torch_api import DisableTorchFunctionSubclass, is_dual_level, modes_are_on, transform_on_top

_PART = 16 << 20  # bytes of a dense weight that are decoded at a time if the whole is over the budget

_DENSE = {dtype: NumberRows(str(dtype).removeprefix("torch."), ("numbers",)) for dtype in DTYPES}

_MOST_PARTS = 16  # that a matrix is multiplied in

_MOST_NOTED = 1024  # cuts of a recipe whose rows are noted: experts of a layer

_exact: ContextVar[bool] = ContextVar("exact", default=False)
any_rows: ContextVar[bool] = ContextVar("any_rows", default=False)
"""Whether the kernels multiply any number of rows that they can, also where it is slower than decoding the weight."""


@contextmanager
def exact() -> Iterator[None]:
    """Within it, products with packed weights, and experts, are those with the dense weights, bit for bit.

    Otherwise, products with few rows of activations are computed from the packed bytes and accumulated in an order of
    their own, and so are a layer's experts, packed or dense; weights are rounded to their dtype only if the processor
    multiplies in it. Other threads are not concerned: `from_pretrained(..., exact=True)` asks for it wherever the model
    is used.

    Returns:
        A context manager.

    Example:
        >>> weight, x = torch.eye(2), torch.ones(1, 2)  # a weight that is packed, in practice
        >>> with exact():
        ...     F.linear(x, weight)
        tensor([[1., 1.]])
    """
    before = _exact.set(True)
    try:
        yield
    finally:
        _exact.reset(before)


def are_multiplied_packed(model: nn.Module) -> bool:
    """Whether products with some weights of a model are computed from packed bytes."""
    if library() is None or _exact.get():
        return False
    found = (handle_of(local).composed for local in map(local_of, model.parameters()) if type(local) is OffloadedTensor)
    return any(map(_is_multiplied_packed, found))


def _is_multiplied_packed(composed: object) -> bool:
    """Also what is cast, or joined, of such values."""
    if isinstance(composed, Joined):
        return not composed.is_exact and any(_is_multiplied_packed(piece.handle.composed) for piece in composed.pieces)
    return isinstance(composed, Decoded) and composed.packed is not None and not composed.is_exact


def compute_exactly(handle: Handle) -> None:
    """From now on, products with a value are computed with the dense value: see `offload.exact`."""
    composed = handle.composed
    if isinstance(composed, Decoded | Joined):
        composed.is_exact = True
        composed.products.clear()
    for piece in composed.pieces if isinstance(composed, Recipe) else ():
        compute_exactly(piece.handle)


@overrides(F.linear)
def multiply_by_weight(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """A packed weight is not decoded first."""
    if 2 <= len(args) <= 3 and not kwargs and _is_composed(args[1]) and type(args[0]) is not OffloadedTensor:
        x, weight, bias = args if len(args) > 2 else (*args, None)
        if weight._bound is not None:
            found = weight._bound.multiply(x, weight, bias, exactly=_exact.get(), any_rows=any_rows.get())
            if found is not None:
                return found
        with DisableTorchFunctionSubclass():
            if not (modes_are_on() or records_graph(args, kwargs)):
                found = _product_with_rows(x, weight, bias)
                if found is not None:
                    if weight._bound is None or not weight._bound.is_of(weight):
                        weight._bound = _bound(weight)
                    return found
    return read_directly(func, args, kwargs)


def _bound(weight: OffloadedTensor) -> BoundProduct | None:
    """The product with a weight, made ready; None if its pieces are not where they lie for good."""
    parts, dtype = parts_of(Piece(handle_of(weight), view_spec_of(weight))), view_spec_of(weight).dtype
    if weight._target != CPU or parts is None:
        return None
    pieces = [piece for rows in parts for _, piece in rows.pieces]
    sources = [(handle, handle.source) for handle in stored_in(piece.handle for piece in pieces)]
    if any(source.owned for _, source in sources) or not all(map(_is_in_place, pieces)):
        return None
    matrices, values = [], []
    with no_functions(), no_modes():
        reads = [read for piece in pieces for read in piece.reads(piece.view_spec)]
        for rows in parts:
            of_these = values_in_order(rows.pieces, CPU)
            matrix = rows.packed.matrix(of_these, view_spec_of(weight).shape[1])
            if matrix is None:
                return None
            matrices.append((matrix, rows.count))
            values.extend(of_these)
    return BoundProduct(weight, Product(matrices), values, sources, reads, most_rows_of(parts, dtype))


def _is_in_place(piece: Piece) -> bool:
    """Whether the value of a piece is a mapping, or small enough to be kept."""
    composed = piece.handle.composed
    return composed is None or (isinstance(composed, Plain) and composed.small is not None)


@overrides(
    torch.matmul, torch.mm, torch.addmm,
    torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.Tensor.mm,
)  # fmt: skip
def multiply_on_guests(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Not of a weight that is larger than the budget: the ops below decode it in parts."""
    if any(type(arg) is OffloadedTensor and _is_over_budget(arg) for arg in args):
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    return read_directly(func, args, kwargs)


@implements(torch.ops.aten.mm.default)
def multiply_matrices(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """As for `F.linear`, below autograd: of a weight that is turned around."""
    x, weight = args
    found = None
    if _is_composed(weight) and type(x) is not OffloadedTensor and not modes_are_on():
        found = _product_with_rows(x, weight.t(), None)
        if found is None:
            found = _sum_of_parts(x, weight)
    return read(func, args, kwargs) if found is None else found


@implements(torch.ops.aten.addmm.default)
def multiply_matrices_and_add(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """As for `F.linear`, below autograd: of a weight that is turned around."""
    bias, x, weight = args
    found = None
    if not kwargs and _is_composed(weight) and type(x) is not OffloadedTensor and not modes_are_on():
        found = _product_with_rows(x, weight.t(), bias) if bias.dim() == 1 else None
    return read(func, args, kwargs) if found is None else found


@dataclass(frozen=True)
class Rows:
    """Packed rows whose products are part of a product.

    Attributes:
        count: of packed rows.
        pieces: that they are packed in, and the number of each, in the order in which they are read.
    """

    packed: Packed
    count: int
    pieces: Sequence[tuple[int, Piece]]


def _is_composed(weight: object) -> bool:
    """Whether a weight is on disk, and its products need not be those with a mapped value."""
    return type(weight) is OffloadedTensor and weight._handle.composed is not None


def _product_with_rows(x: torch.Tensor, weight: OffloadedTensor, bias: object) -> torch.Tensor | None:
    """`F.linear(x, weight, bias)` without the whole dense weight; None if that is needed, or may be in memory."""
    piece, device = Piece(handle_of(weight), view_spec_of(weight)), weight._target
    found = None
    if device == CPU:
        found = multiplied(x, piece, bias)
    elif not _exact.get():
        found = _multiplied_here_or_there(x, piece, device, bias)
    return _product_in_parts(x, weight, bias) if found is None else found


def _multiplied_here_or_there(x: torch.Tensor, weight: Piece, device: torch.device, bias: Any) -> torch.Tensor | None:
    """The product for an accelerator, wherever it is computed faster."""

    def multiply(rows: torch.Tensor) -> torch.Tensor | None:
        return multiplied(rows, weight, None if bias is None else bias.cpu())

    def send() -> torch.Tensor:
        found = multiplied_there(x, weight, device, bias)
        if found is not None:
            return found
        dense = value_on(weight.handle, weight.view_spec, device)
        return F.linear(x, dense, None if bias is None else guest_of(bias))

    found = multiplied_where_it_lies(x, weight, device, multiply, send)
    return multiplied_there(x, weight, device, bias) if found is None else found


def multiplied_there(x: torch.Tensor, weight: Piece, device: torch.device, bias: Any = None) -> torch.Tensor | None:
    """As `multiplied`, on an accelerator, where its kernels take all of the weight."""
    shape, dtype = weight.view_spec.shape, weight.view_spec.dtype
    if _exact.get() or transform_on_top() is not None or is_dual_level() or not accelerated.is_there(device):
        return None
    if x.device != device or x.dtype != dtype or len(shape) != 2 or x.dim() == 0 or x.shape[-1] != shape[1]:
        return None
    if torch.is_autocast_enabled(device.type):
        return None
    if not 0 < x.numel() <= accelerated.MOST_ROWS * x.shape[-1]:
        return None
    with no_functions(), no_modes():
        flat, made = x.resolve_neg().reshape(-1, x.shape[-1]), []
        parts = parts_of(weight) or []
        if not parts or not all(accelerated.takes(rows.packed, dtype) for rows in parts):
            return None
        for rows in parts:
            pieces = retry_on_oom(device, partial(values_in_order, rows.pieces, device))
            found = accelerated.multiply(cast("accelerated.Rows", rows.packed), pieces, flat, rows.count)
            if found is None:
                return None
            made.append(found)
        out = made[0] if len(made) == 1 else torch.cat(made, 1)
        if bias is not None:
            out = out + guest_of(bias)
        return out.view(*x.shape[:-1], len(weight.view_spec))


def multiplied(x: torch.Tensor, weight: Piece, bias: object = None) -> torch.Tensor | None:
    """`F.linear(x, weight, bias)` from the packed bytes of a cut of a recipe; None if the kernels do not take it.

    Args:
        x: a tensor in memory.
    """
    shape = weight.view_spec.shape
    if not may_be_fused(x, weight.view_spec.dtype):
        return None
    if len(shape) != 2 or x.dim() == 0 or x.shape[-1] != shape[1]:
        return None
    if not 0 < x.numel() <= MOST_ROWS * x.shape[-1]:
        return None
    with no_functions(), no_modes():
        return _multiplied(x, weight, bias)


def most_rows_of(parts: Iterable[Rows], dtype: torch.dtype) -> int:
    """Up to how many rows of activations of a dtype are multiplied by such rows from their packed bytes."""
    if any_rows.get():
        return MOST_ROWS
    return min((most_rows(dtype, in_integers=rows.packed.in_integers) for rows in parts), default=MOST_ROWS)


def is_plain(x: torch.Tensor) -> bool:
    """Whether a tensor is torch's own, with memory that the kernels can read: not a wrapper, sparse or nested."""
    return type(x) in (torch.Tensor, nn.Parameter) and x.is_cpu and x.layout == torch.strided and not x.is_nested


def may_be_fused(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels may multiply a tensor by weights of that dtype."""
    if _exact.get() or transform_on_top() is not None or is_dual_level():  # tensors without memory, or with a tangent
        return False
    if torch.is_autocast_enabled("cpu"):  # it casts the operands of products
        return False
    return library() is not None and x.dtype == dtype and dtype in DTYPES and is_plain(x)


def _multiplied(x: torch.Tensor, weight: Piece, bias: Any) -> torch.Tensor | None:
    parts, height = parts_of(weight), len(weight.view_spec)
    if parts is None or x.numel() > most_rows_of(parts, x.dtype) * x.shape[-1]:
        return None
    if bias is not None:
        bias = guest_of(bias).resolve_neg().contiguous()
        if not is_plain(bias) or bias.dtype != x.dtype or bias.shape != (height,):
            return None
    flat = x.resolve_neg().reshape(-1, x.shape[-1])
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    out = torch.empty(len(flat), height, dtype=x.dtype)
    begin = 0
    for rows in parts:  # one after the other: each may have to be read first
        end = begin + rows.count
        pieces = values_in_order(rows.pieces, CPU)
        matrix = rows.packed.matrix(pieces, x.shape[-1])
        if matrix is None:
            return None
        Product([(matrix, rows.count)]).into(flat, None if bias is None else bias[begin:end], out[:, begin:end])
        begin = end
    return out.view(*x.shape[:-1], height)


def parts_of(piece: Piece, *, dense_too: bool = False) -> list[Rows] | None:
    """The rows that are those of a matrix, one after the other; None if the kernels do not take some of them.

    Args:
        dense_too: whether rows that are not packed are taken, too, in place of being joined first.
    """
    composed, view_spec = piece.handle.composed, piece.view_spec
    if composed is None:
        return [_dense_rows(piece)] if dense_too and view_spec.dtype in _DENSE and view_spec.stride(1) == 1 else None
    if not isinstance(composed, Joined | Decoded):
        return None
    cut = (dense_too, *metadata_of(view_spec))
    if cut not in composed.products:
        if len(composed.products) >= _MOST_NOTED:
            composed.products.clear()
        composed.products[cut] = _found_parts(composed, view_spec, dense_too)
    return cast("list[Rows] | None", composed.products.get(cut))


def _found_parts(composed: Joined | Decoded, view_spec: torch.Tensor, dense_too: bool) -> list[Rows] | None:
    if isinstance(composed, Joined):
        return None if dense_too and composed.is_exact else _parts_of_joined(composed, view_spec, dense_too)
    if composed.packed is None or composed.is_exact:
        return None
    found = _rows_in(composed, view_spec)
    return None if found is None else [found]


def _dense_rows(piece: Piece) -> Rows:
    return Rows(_DENSE[piece.view_spec.dtype], len(piece.view_spec), [(0, piece)])


def _parts_of_joined(joined: Joined, view_spec: torch.Tensor, dense_too: bool) -> list[Rows] | None:
    only = joined.only_cast(view_spec)
    if only is not None:
        return parts_of(only, dense_too=dense_too)
    if not _is_of_rows(joined.layout.shape, view_spec):
        return None
    found: list[Rows] = []
    count = 0
    for piece, begin in joined.rows_of(view_spec):
        if begin != count or piece.view_spec.shape[-1] != view_spec.shape[1]:
            return None
        for matrix in _matrices_of(piece.view_spec):
            some = parts_of(Piece(piece.handle, matrix), dense_too=dense_too)
            if some is None or len(found) + len(some) > _MOST_PARTS:
                return None
            found.extend(some)
            count += len(matrix)
    return found if count == len(view_spec) else None


def _matrices_of(view_spec: torch.Tensor) -> Iterator[torch.Tensor]:
    """The cuts (rows, columns) of a cut of more dimensions, in the order of its rows: as few as its strides allow."""
    if view_spec.dim() == 2:
        yield view_spec
    elif len(view_spec) > 1 and _rows_follow(view_spec):
        yield view_spec.flatten(0, -2)
    else:
        for part in view_spec.unbind():
            yield from _matrices_of(part)


def _rows_follow(view_spec: torch.Tensor) -> bool:
    """Whether the rows of a cut are at equal distances."""
    steps = list(zip(view_spec.shape[1:-1], view_spec.stride()[1:-1], view_spec.stride()[:-2], strict=True))
    return all(size * step == outer for size, step, outer in steps)


def _is_of_rows(shape: tuple[int, ...], view_spec: torch.Tensor) -> bool:
    """Whether a cut is whole rows of a row-major value, one after the other."""
    width = shape[-1]
    return view_spec.shape[1] == width and view_spec.stride() == (width, 1) and view_spec.storage_offset() % width == 0


def _rows_in(recipe: Decoded, view_spec: torch.Tensor) -> Rows | None:
    """The packed rows of a cut; None if it is not whole granules of them."""
    packed, shape = recipe.packed, recipe.layout.shape
    assert packed is not None
    if packed.is_turned:
        return _turned_rows_in(recipe, view_spec)
    if not _is_of_rows(shape, view_spec):
        return None
    first, count = int(view_spec.storage_offset()) // shape[-1], len(view_spec)
    if len(shape) == 3 and not recipe.stacked:  # its rows are matrices
        start, left = divmod(first, shape[1])
        is_one = not left and count == shape[1]
        return _rows_of(recipe, start, 1, count) if is_one else None
    height = shape[int(recipe.stacked)]
    inside = first % height
    ends = inside + count
    if len(shape) != 2 + recipe.stacked or inside % recipe.granule or ends > height:
        return None
    is_whole = ends == height or ends % recipe.granule == 0
    return _rows_of(recipe, first, count, count) if is_whole else None


def _rows_of(recipe: Decoded, start: int, read: int, count: int) -> Rows:
    """The rows in `read` of a recipe's rows, from row `start` on: `count` packed ones."""
    assert recipe.packed is not None
    parts = recipe.parts_of_pieces(start, read)
    pieces = [(number, Piece(recipe.pieces[number].handle, part)) for number, part in parts]
    return Rows(recipe.packed, count, pieces)


def _turned_rows_in(recipe: Decoded, view_spec: torch.Tensor) -> Rows | None:
    """The same, where the columns of the dense value are the packed rows: one element of a stack, as a whole."""
    _, high, wide = recipe.layout.shape
    element, left = divmod(int(view_spec.storage_offset()), high * wide)
    if left or tuple(view_spec.shape) != (wide, high) or view_spec.stride() != (1, wide):
        return None
    return _rows_of(recipe, element * high, high, wide)


# Of a weight that is larger than the budget


def _product_in_parts(x: torch.Tensor, weight: OffloadedTensor, bias: Any) -> torch.Tensor | None:
    """`F.linear(x, weight, bias)` with some rows of the weight at a time; None if all of it may be in memory."""
    step = _rows_at_a_time(x, weight)
    if step is None or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    with no_functions(), no_modes():
        bias = None if bias is None else guest_of(bias)
        out: torch.Tensor | None = None
        for begin in range(0, len(weight), step):
            end = min(begin + step, len(weight))
            part = F.linear(x, _decoded(weight, begin, end), None if bias is None else bias[begin:end])
            out = part.new_empty(*part.shape[:-1], len(weight)) if out is None else out
            out[..., begin:end] = part
        return out


def _sum_of_parts(x: torch.Tensor, weight: OffloadedTensor) -> torch.Tensor | None:
    """`x @ weight` with some rows of the weight at a time, as in backward; None if all of it may be in memory."""
    step = _rows_at_a_time(x, weight)
    if step is None or x.dtype != weight.dtype or x.shape[-1] != len(weight):
        return None
    wide = torch.promote_types(x.dtype, torch.float32)  # a sum of rounded parts would be less exact
    with no_functions(), no_modes():
        out: torch.Tensor | None = None
        for begin in range(0, len(weight), step):
            end = min(begin + step, len(weight))
            rows = _decoded(weight, begin, end)
            part = x[:, begin:end].to(wide) @ rows.to(wide)
            out = part if out is None else out.add_(part)
        return None if out is None else out.to(x.dtype)


def _decoded(weight: OffloadedTensor, begin: int, end: int) -> torch.Tensor:
    """Some rows, where the product is computed."""
    handle, part = handle_of(weight), view_spec_of(weight)[begin:end]
    if weight._target != CPU:
        return value_on(handle, part, weight._target)
    rows: torch.Tensor = handle.composed.value(part)  # type: ignore[union-attr]
    return rows


def _rows_at_a_time(x: torch.Tensor, weight: OffloadedTensor) -> int | None:
    """How many rows of a weight are decoded at a time; None for all."""
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or transform_on_top() is not None or is_dual_level():
        return None
    if weight.dim() != 2 or weight.stride(1) != 1 or not _is_over_budget(weight):
        return None
    return max(1, _PART * len(weight) // (weight.numel() * weight.itemsize))


def _is_over_budget(weight: OffloadedTensor) -> bool:
    """Whether a packed weight is larger than the set budget when it is dense, and need not be so for a product."""
    handle = weight._handle
    nbytes = weight.numel() * weight.itemsize
    if nbytes <= _PART or type(handle) is Traced or handle.composed is None or _exact.get():
        return False
    budget = (page_state_of(next(stored_in([handle_of(weight)]))).pool or POOL).max_memory
    return budget is not None and nbytes > budget and is_packed(handle.composed)


def is_packed(composed: object) -> bool:
    """Whether a value is decoded, and products with it need not be those with the dense value."""
    if isinstance(composed, Decoded):
        return not composed.is_exact
    return isinstance(composed, Joined) and any(is_packed(piece.handle.composed) for piece in composed.pieces)
