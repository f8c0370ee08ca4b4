"""Packed weights that are bound: one look-up, and one call of C, for a product or for a few picked rows.

Always true:
- a weight is bound to one source and one view of a tensor: whatever gives the tensor another value gives it another
  source, and it is bound anew
- the weight is as resident as without it, and its files are looked at ten times a second at the most
- what is not as usual (modes, gradients, `exact`, other strides) is left to the way that is not bound, which has the
  same bits
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F

from offload.annotations import Args, Kwargs, Op
from offload.errors import ArgumentError
from offload.kernels.native import MOST_ROWS, Product, is_usual, pick
from offload.prefetch.engine import ensure_resident
from offload.prefetch.plan import Value
from offload.prefetch.tables import has_rows_here, prefetch_rows
from offload.system import clock
from offload.system.modes import no_functions, no_modes
from offload.tensor.backends import COMPILED, any_rows, most_rows_of, product_with
from offload.tensor.guests import CPU
from offload.tensor.recipes import Piece, Plain, stored_in
from offload.tensor.runs import RowRun
from offload.tensor.small import SMALL_VALUES
from offload.tensor.views import cut
from offload.tensor.wrapper import OffloadedTensor, guest_of
from offload.torch_api import (
    DisableTorchFunctionSubclass,
    function_modes_are_on,
    is_dual_level,
    is_traced,
    modes_are_on,
    transform_on_top,
)

_OF_LINEAR = 3  # arguments

exactly: ContextVar[bool] = ContextVar("exact", default=False)
"""Whether products are those with the dense weights: `offload.exact`."""


class BoundWeight:
    """`F.linear` and `F.embedding` with one weight that computes on the CPU, and activations of its dtype.

    Args:
        runs: what it is made of; none if it is not multiplied so.
    """

    __slots__ = (
        "_composed", "_dtype", "_is_picked", "_most_rows", "_pieces", "_ranges", "_reads", "_releases",
        "_source", "_view_spec", "_watched", "product",
    )  # fmt: skip

    def __init__(self, weight: OffloadedTensor, runs: list[RowRun]) -> None:
        self._source, self._view_spec, self._releases = weight._handle.source, weight._view_spec, SMALL_VALUES.releases
        self._composed: Any = self._source.composed
        self._dtype = dtype = self._view_spec.dtype
        pieces = [[piece for _, piece in sorted(run.pieces, key=lambda one: one[0])] for run in runs]
        handles = stored_in(piece.handle for some in pieces for piece in some)
        self._watched = [(handle, handle.source, handle.source.file) for handle in handles]
        is_lasting = not any(source.owned for _, source, _ in self._watched)  # what is ours changes in place
        is_taken = all(COMPILED.supports("multiply", run, dtype, 1) for run in runs)
        is_taken = is_taken and all(_is_in_place(piece) for some in pieces for piece in some)
        self.product: Product | None = None
        if not (runs and is_lasting and is_taken):
            return
        with no_functions(), no_modes():
            self._pieces = [[_in_place(piece) for piece in some] for some in pieces]
            self._reads = [read for run in runs for read in run.reads()]
            self.product, self._most_rows = product_with(runs, self._pieces), most_rows_of(runs, dtype)
        self._ranges: list[Value | None] = [None] * len(self._reads)
        self._is_picked = all(part.shape[:1] == self._view_spec.shape[:1] for _, part in self._reads) and all(
            run.rounds_once(dtype) and COMPILED.supports("pick", run, dtype, 1) for run in runs
        )

    def is_of(self, weight: OffloadedTensor) -> bool:
        """Whether it is of what the weight is now."""
        is_same = weight._handle.source is self._source and weight._view_spec is self._view_spec
        return is_same and weight._target is CPU and self._releases == SMALL_VALUES.releases

    def result(self, func: Op, args: Args, kwargs: Kwargs) -> torch.Tensor | None:
        """What a function gives, whose second argument is the weight; None if it is computed otherwise."""
        if torch.compiler.is_compiling():
            return None
        if func is F.linear and not kwargs and len(args) <= _OF_LINEAR:
            return self.multiply(*args)
        if func is F.embedding and len(args) == 2 and kwargs.get("max_norm") is None:
            rows, padding = self._view_spec.shape[0], kwargs.get("padding_idx")
            return self.pick(*args) if padding is None or -rows <= padding < rows else None
        return None

    def multiply(self, x: torch.Tensor, weight: OffloadedTensor, bias: Any = None) -> torch.Tensor | None:
        """`F.linear(x, weight, bias)`; None as for `result`."""
        product = self.product
        if product is None or exactly.get() or self._composed.is_exact or not self._may_be_used(x, weight, bias):
            return None
        now = clock.now()
        for number, known in enumerate(self._ranges):
            if known is None or known.checked_until < now or known.is_picked:
                self._ranges[number] = ensure_resident(*self._reads[number])
        bias = None if bias is None else guest_of(bias)
        return product.times(x, bias, self._dtype, MOST_ROWS if any_rows.get() else self._most_rows)

    def pick(self, rows: torch.Tensor, weight: OffloadedTensor) -> torch.Tensor | None:
        """`F.embedding(rows, weight)`, of few rows; None as for `result`."""
        product, is_few = self.product, is_usual(rows, torch.int64) and rows.numel() <= MOST_ROWS
        if product is None or not (is_few and self._is_picked and self._may_be_used(None, weight, None)):
            return None
        for handle, view_spec in self._reads:
            if not has_rows_here(handle):
                prefetch_rows(handle, view_spec, rows)
        place = rows.new_empty((rows.numel(), product.sizes[1]), dtype=self._dtype)
        try:
            pick(product.matrices[0], rows.view(-1), place)
        except ArgumentError:  # there are no such rows, which torch says better
            return None
        return place.view(*rows.shape, product.sizes[1])

    def _may_be_used(self, x: torch.Tensor | None, weight: OffloadedTensor, bias: Any) -> bool:
        """Whether it is of what the weight is now, and nothing follows, replaces or casts the op."""
        if not self.is_of(weight) or modes_are_on() or function_modes_are_on() or transform_on_top() is not None:
            return False
        if is_dual_level() or is_traced() or torch.is_autocast_enabled("cpu"):
            return False
        if torch.is_grad_enabled():
            with DisableTorchFunctionSubclass():
                if any(getattr(one, "requires_grad", False) for one in (x, weight, bias)):
                    return False
        now = clock.now()
        for handle, source, file in self._watched:
            if handle.source is not source or not (file.looked_at_until >= now or file.is_as_opened()):
                return False
        return True


def _is_in_place(piece: Piece) -> bool:
    """Whether the value of a piece is a mapping, or small enough to be kept."""
    composed = piece.handle.composed
    return composed is None or (isinstance(composed, Plain) and composed.small is not None)


def _in_place(piece: Piece) -> torch.Tensor:
    """Such a value; what is mapped may have to be read."""
    return piece.value() if piece.handle.composed is not None else cut(piece.handle.base(), piece.view_spec)
