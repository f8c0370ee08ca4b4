"""Products with packed weights, computed from the packed bytes.

Always true:
- a product is accumulated in float32, and the numbers of the weight are rounded to its dtype at the most, as in the
  dense weight: it is never further from the true result
- a row of the result depends neither on the number of threads nor on the rows beside it
- what the kernels do not take, and everything within `exact()`, is computed with the dense weight
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from offload.annotations import Args, Kwargs
from offload.kernels.native import DTYPES, library, most_rows
from offload.kernels.native import multiply as multiply_rows
from offload.kernels.packed import Packed
from offload.storage.modes import no_functions, no_modes
from offload.tensor.guests import CPU
from offload.tensor.recipes import Decoded, Joined, Piece
from offload.tensor.registry import implements, overrides
from offload.tensor.rules import read, read_directly, records_graph
from offload.tensor.views import Traced, handle_of, view_spec_of
from offload.tensor.wrapper import OffloadedTensor, guest_of
from offload.torch_api import DisableTorchFunctionSubclass, modes_are_on, transform_on_top

_exact: ContextVar[bool] = ContextVar("exact", default=False)


@contextmanager
def exact() -> Iterator[None]:
    """Within it, products with packed weights are those with the dense weights, bit for bit.

    Otherwise, products with few rows of activations are computed from the packed bytes and accumulated in an order of
    their own; weights are rounded to their dtype only if the processor multiplies in it. Other threads are not
    concerned: `from_pretrained(..., exact=True)` asks for it wherever the model is used.

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


@overrides(F.linear)
def multiply_by_weight(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A packed weight is not decoded first."""
    if len(args) >= 2 and not kwargs and type(args[1]) is OffloadedTensor and type(args[0]) is not OffloadedTensor:
        with DisableTorchFunctionSubclass():
            if not (modes_are_on() or records_graph(args, kwargs)):
                found = _product(args[0], args[1], args[2] if len(args) > 2 else None)
                if found is not None:
                    return found
    return read_directly(func, args, kwargs)


@implements(torch.ops.aten.mm.default)
def multiply_matrices(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """As for `F.linear`, below autograd: of a weight that is turned around."""
    x, weight = args
    found = None
    if type(weight) is OffloadedTensor and type(x) is not OffloadedTensor and not modes_are_on():
        found = _product(x, weight.t(), None)  # type: ignore[arg-type]
    return read(func, args, kwargs) if found is None else found


@implements(torch.ops.aten.addmm.default)
def multiply_matrices_and_add(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """As for `F.linear`, below autograd: of a weight that is turned around."""
    bias, x, weight = args
    found = None
    if not kwargs and type(weight) is OffloadedTensor and type(x) is not OffloadedTensor and not modes_are_on():
        found = _product(x, weight.t(), bias) if bias.dim() == 1 else None  # type: ignore[arg-type]
    return read(func, args, kwargs) if found is None else found


@dataclass(frozen=True)
class _Rows:
    """Packed rows whose products are part of a product.

    Attributes:
        recipe: whose pieces they are.
        start, read: which of its rows are read: the first, and how many.
        count: of packed rows.
    """

    recipe: Decoded
    packed: Packed
    start: int
    read: int
    count: int


def _product(x: torch.Tensor, weight: OffloadedTensor, bias: Any) -> torch.Tensor | None:
    """`F.linear(x, weight, bias)` from the packed bytes of the weight; None if the kernels do not take it."""
    handle = weight._handle
    if type(handle) is Traced or handle.composed is None or weight._target != CPU or _exact.get():
        return None
    if transform_on_top() is not None:  # of torch.func, whose tensors have no memory of their own
        return None
    if library() is None or x.dtype != weight.dtype or x.dtype not in DTYPES or not x.is_cpu or weight.dim() != 2:
        return None
    if x.dim() == 0 or x.shape[-1] != weight.shape[1] or not 0 < x.numel() <= most_rows(x.dtype) * x.shape[-1]:
        return None
    with no_functions(), no_modes():
        return _multiplied(x, weight, bias)


def _multiplied(x: torch.Tensor, weight: OffloadedTensor, bias: Any) -> torch.Tensor | None:
    parts = _parts(Piece(handle_of(weight), view_spec_of(weight)))
    if parts is None:
        return None
    if bias is not None:
        bias = guest_of(bias).resolve_neg().contiguous()
        if bias.dtype != x.dtype or bias.shape != (len(weight),):
            return None
    flat = x.resolve_neg().reshape(-1, x.shape[-1])
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    out = torch.empty(len(flat), len(weight), dtype=x.dtype)
    begin = 0
    for rows in parts:
        end = begin + rows.count
        pieces = rows.recipe.rows_of_pieces(rows.start, rows.read)
        matrix = rows.packed.matrix(pieces, x.shape[-1])
        if matrix is None:
            return None
        multiply_rows(matrix, flat, None if bias is None else bias[begin:end], out[:, begin:end])
        begin = end
    return out.view(*x.shape[:-1], len(weight))


def _parts(piece: Piece) -> list[_Rows] | None:
    """The recipes whose rows, one after the other, are those of a matrix; None if others are among them."""
    composed, view_spec = piece.handle.composed, piece.view_spec
    if isinstance(composed, Joined):
        return _parts_of_joined(composed, view_spec)
    if not isinstance(composed, Decoded) or composed.packed is None or composed.is_exact:
        return None
    found = _rows_in(composed, view_spec)
    return None if found is None else [found]


def _parts_of_joined(joined: Joined, view_spec: torch.Tensor) -> list[_Rows] | None:
    if not _is_of_rows(joined.layout.shape, view_spec):
        return None
    found: list[_Rows] = []
    for part in joined.parts(view_spec):
        if part.view_spec.dim() < 2 or part.view_spec.shape[-1] != view_spec.shape[1]:
            return None
        some = _parts(part if part.view_spec.dim() == 2 else Piece(part.handle, part.view_spec.flatten(0, -2)))
        if some is None:
            return None
        found.extend(some)
    return found if sum(rows.count for rows in found) == len(view_spec) else None


def _is_of_rows(shape: tuple[int, ...], view_spec: torch.Tensor) -> bool:
    """Whether a cut is whole rows of a row-major value, one after the other."""
    width = shape[-1]
    return view_spec.shape[1] == width and view_spec.stride() == (width, 1) and view_spec.storage_offset() % width == 0


def _rows_in(recipe: Decoded, view_spec: torch.Tensor) -> _Rows | None:
    """The packed rows of a cut; None if it is not whole granules of them."""
    packed, shape = recipe.packed, recipe.layout.shape
    assert packed is not None
    if packed.is_turned:
        return _turned_rows_in(recipe, packed, view_spec)
    if not _is_of_rows(shape, view_spec):
        return None
    first, count = int(view_spec.storage_offset()) // shape[-1], len(view_spec)
    if len(shape) == 3 and not recipe.stacked:  # its rows are matrices
        start, left = divmod(first, shape[1])
        return _Rows(recipe, packed, start, 1, count) if not left and count == shape[1] else None
    height = shape[int(recipe.stacked)]
    inside = first % height
    ends = inside + count
    if len(shape) != 2 + recipe.stacked or inside % recipe.granule or ends > height:
        return None
    return _Rows(recipe, packed, first, count, count) if ends == height or ends % recipe.granule == 0 else None


def _turned_rows_in(recipe: Decoded, packed: Packed, view_spec: torch.Tensor) -> _Rows | None:
    """The same, where the columns of the dense value are the packed rows: one element of a stack, as a whole."""
    _, high, wide = recipe.layout.shape
    element, left = divmod(int(view_spec.storage_offset()), high * wide)
    if left or tuple(view_spec.shape) != (wide, high) or view_spec.stride() != (1, wide):
        return None
    return _Rows(recipe, packed, element * high, high, wide)
