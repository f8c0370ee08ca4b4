"""Products with packed weights, computed from the packed bytes.

Always true:
- a product is accumulated in float32, and the numbers of the weight are rounded to its dtype at the most, as in the
  dense weight: it is never further from the true result
- a row of the result depends neither on the number of threads nor on the rows beside it
- what the kernels do not take, and everything within `exact()`, is computed with the dense weight
- a dense weight that is larger than the set budget is decoded in parts for it, but not within `exact()`
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from offload.annotations import Args, Kwargs, Op
from offload.kernels.native import DTYPES, MOST_ROWS, library
from offload.prefetch.copies import streams_to
from offload.prefetch.engine import POOL
from offload.prefetch.value import page_state_of
from offload.storage.handle import Handle
from offload.system.modes import no_functions, no_modes
from offload.tensor.backends import CHAIN, Chain, choose
from offload.tensor.bound import BoundWeight
from offload.tensor.bound import exactly as _exact
from offload.tensor.decoded import Decoded
from offload.tensor.guests import CPU, sent_to, value_on
from offload.tensor.hybrid import crosses, wins
from offload.tensor.locals import local_of
from offload.tensor.recipes import Joined, Piece, Plain, Recipe, stored_in
from offload.tensor.registry import implements, overrides
from offload.tensor.rules import read, read_directly, records_graph
from offload.tensor.runs import RowRun
from offload.tensor.views import Traced, handle_of, view_spec_of
from offload.tensor.wrapper import OffloadedTensor, guest_of
from offload.torch_api import DisableTorchFunctionSubclass, is_dual_level, modes_are_on, transform_on_top

_PART = 16 << 20  # bytes of a dense weight that are decoded at a time if the whole is over the budget
_MOST_RUNS = 16  # that a matrix is multiplied in


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
    weights = (local for local in map(local_of, model.parameters()) if type(local) is OffloadedTensor)
    return any(one.decoder.packed is not None for weight in weights for one in _decoded_in(handle_of(weight).composed))


def _decoded_in(composed: object) -> Iterator[Decoded]:
    """The decoded values that a value is computed from, whose products need not be those with the dense value."""
    if isinstance(composed, Decoded) and not composed.is_exact:
        yield composed
    elif isinstance(composed, Joined) and not composed.is_exact:
        for piece in composed.pieces:
            yield from _decoded_in(piece.handle.composed)


def compute_exactly(handle: Handle) -> None:
    """From now on, products with a value are computed with the dense value: see `offload.exact`."""
    composed = handle.composed
    if isinstance(composed, Plain):
        composed.compute_exactly()
    for piece in composed.pieces if isinstance(composed, Recipe) else ():
        compute_exactly(piece.handle)


@overrides(F.linear)
def multiply_by_weight(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """A packed weight is not decoded first."""
    if 2 <= len(args) <= 3 and not kwargs and _is_composed(args[1]) and type(args[0]) is not OffloadedTensor:
        x, weight, bias = args if len(args) > 2 else (*args, None)
        with DisableTorchFunctionSubclass():
            if not (modes_are_on() or records_graph(args, kwargs)):
                product = _product_with_rows(x, weight, bias)
                if product is not None:
                    bind(weight)
                    return product
    return read_directly(func, args, kwargs)


def bind(weight: OffloadedTensor) -> None:
    """Make products with a weight on the CPU ready, and picks of its rows."""
    if weight._target is CPU and (weight._bound is None or not weight._bound.is_of(weight)):
        weight._bound = BoundWeight(weight, runs_of(Piece(handle_of(weight), view_spec_of(weight))))


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


@implements(torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
def multiply_matrices(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """As for `F.linear`, below autograd: of a weight that is turned around."""
    *added, x, weight = args
    bias, product = added[0] if added else None, None
    if not kwargs and _is_composed(weight) and type(x) is not OffloadedTensor and not modes_are_on():
        product = _product_with_rows(x, weight.t(), bias) if bias is None or bias.dim() == 1 else None
        if product is None and bias is None:
            product = _sum_of_parts(x, weight)
    return read(func, args, kwargs) if product is None else product


def _is_composed(weight: object) -> bool:
    """Whether a weight is on disk, and its products need not be those with a mapped value."""
    return type(weight) is OffloadedTensor and weight._handle.composed is not None


def _product_with_rows(x: torch.Tensor, weight: OffloadedTensor, bias: object) -> torch.Tensor | None:
    """`F.linear(x, weight, bias)` without the whole dense weight; None if that is needed, or may be in memory."""
    piece, device, product = Piece(handle_of(weight), view_spec_of(weight)), weight._target, None
    if device == CPU:
        product = multiplied(x, piece, bias)
    elif not _exact.get():
        product = _multiplied_here_or_there(x, piece, bias, device)
    return _product_in_parts(x, weight, bias) if product is None else product


def _multiplied_here_or_there(x: torch.Tensor, weight: Piece, bias: Any, device: torch.device) -> torch.Tensor | None:
    def here() -> torch.Tensor | None:
        product = multiplied(x.cpu(), weight, None if bias is None else bias.cpu())
        return None if product is None else sent_to(product, device)

    def send() -> torch.Tensor:
        product = multiplied(x, weight, bias, device)
        if product is not None:
            return product
        dense = value_on(weight.handle, weight.view_spec, device)
        return F.linear(x, dense, None if bias is None else guest_of(bias))

    is_away = crosses(x, device) and streams_to(device, weight.reads(weight.view_spec))
    product = here() if is_away and wins([weight], x, here, send) else None
    return multiplied(x, weight, bias, device) if product is None else product


def multiplied(x: torch.Tensor, weight: Piece, bias: Any = None, device: torch.device = CPU) -> torch.Tensor | None:
    """`F.linear(x, weight, bias)` on a device, from the packed bytes of a recipe; None if it takes the dense weight."""
    shape, dtype = weight.view_spec.shape, weight.view_spec.dtype
    if not may_be_fused(x, dtype, device) or len(shape) != 2 or x.shape[-1:] != shape[1:] or not x.numel():
        return None
    rows = x.numel() // shape[1]
    if rows > MOST_ROWS:
        return None
    with no_functions(), no_modes():
        runs = runs_of(weight)
        chosen = [(run, choose("multiply", device, run, dtype, rows)) for run in runs]
        if not runs or any(backend is CHAIN for _, backend in chosen):
            return None
        if bias is not None:
            bias = guest_of(bias).resolve_neg().contiguous()
            if not is_plain(bias, device) or bias.dtype != dtype or bias.shape != shape[:1]:
                return None
        flat = x.resolve_neg().reshape(-1, shape[1])
        flat = flat if flat.stride(1) == 1 else flat.contiguous()
        out = torch.empty(rows, shape[0], dtype=dtype, device=device)
        begin = 0
        for run, backend in chosen:  # one after the other: each may have to be read first
            assert not isinstance(backend, Chain)
            end = begin + run.outputs
            backend.multiply(
                run, run.values(device), flat, None if bias is None else bias[begin:end], out[:, begin:end]
            )
            begin = end
        return out.view(*x.shape[:-1], shape[0])


def is_plain(x: torch.Tensor, device: torch.device = CPU) -> bool:
    """Whether a tensor is torch's own, with memory on a device: not a wrapper, sparse or nested."""
    is_own = type(x) in (torch.Tensor, nn.Parameter) and x.layout == torch.strided and not x.is_nested
    return is_own and x.device == device


def may_be_fused(x: torch.Tensor, dtype: torch.dtype, device: torch.device = CPU) -> bool:
    """Whether a tensor may be multiplied by packed weights of a dtype, which are computed on a device."""
    if _exact.get() or transform_on_top() is not None or is_dual_level():  # tensors without memory, or with a tangent
        return False
    if torch.is_autocast_enabled(device.type):  # it casts the operands of products
        return False
    return x.dtype == dtype and dtype in DTYPES and is_plain(x, device)


def runs_of(weight: Piece, *, dense_too: bool = False) -> list[RowRun]:
    """The runs whose packed rows are those of a matrix, one after the other; none if it is not multiplied so.

    `dense_too`: rows that are not packed are taken, too, in place of being joined first.
    """
    composed, spec = weight.handle.composed, weight.view_spec
    if composed is None and not dense_too:
        return []
    is_turned = spec.stride(1) != 1
    runs = Piece(weight.handle, spec.t()).runs() if is_turned else weight.runs()
    is_taken = len(runs) <= (1 if is_turned else _MOST_RUNS) and not getattr(composed, "is_exact", False)
    are_rows = all(run.is_turned == is_turned and run.is_whole and not run.is_exact for run in runs)
    are_packed = all(run.packed is not None and (dense_too or run.decoder is not None) for run in runs)
    return runs if is_taken and are_rows and are_packed else []


def _product_in_parts(x: torch.Tensor, weight: OffloadedTensor, bias: Any) -> torch.Tensor | None:
    """`F.linear(x, weight, bias)` with some rows of the weight at a time; None if all of it may be in memory."""
    step = _rows_at_a_time(x, weight)
    if step is None or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    with no_functions(), no_modes():
        bias = None if bias is None else guest_of(bias)
        out: torch.Tensor | None = None
        for part, rows in _parts(weight, step):
            product = F.linear(x, rows, None if bias is None else bias[part])
            out = product.new_empty(*product.shape[:-1], len(weight)) if out is None else out
            out[..., part] = product
        return out


def _sum_of_parts(x: torch.Tensor, weight: OffloadedTensor) -> torch.Tensor | None:
    """`x @ weight` with some rows of the weight at a time, as in backward; None if all of it may be in memory."""
    step = _rows_at_a_time(x, weight)
    if step is None or x.dtype != weight.dtype or x.shape[-1] != len(weight):
        return None
    wide = torch.promote_types(x.dtype, torch.float32)  # a sum of rounded parts would be less exact
    with no_functions(), no_modes():
        out: torch.Tensor | None = None
        for part, rows in _parts(weight, step):
            product = x[:, part].to(wide) @ rows.to(wide)
            out = product if out is None else out.add_(product)
        return None if out is None else out.to(x.dtype)


def _parts(weight: OffloadedTensor, step: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Some rows at a time, where the product is computed."""
    for begin in range(0, len(weight), step):
        part = slice(begin, min(begin + step, len(weight)))
        yield part, value_on(handle_of(weight), view_spec_of(weight)[part], weight._target)


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
    return budget is not None and nbytes > budget and any(True for _ in _decoded_in(handle.composed))
