"""Rows that are picked from a computed value, as from a packed embedding.

Always true:
- only what the picked rows are computed from is read, and all of these reads are started before the first is waited for
- the numbers are those of the value
"""

from __future__ import annotations

import torch

from offload.kernels.native import DTYPES, pick
from offload.prefetch.engine import coming, span_of
from offload.prefetch.tables import has_rows_here, rows_coming, runs_of
from offload.storage.modes import no_functions, no_modes
from offload.tensor.recipes import Decoded, Joined, Piece
from offload.tensor.views import cut


def picked(table: Piece, rows: torch.Tensor) -> torch.Tensor:
    """Some rows of a cut of a composed value, as a new tensor on the CPU.

    Args:
        rows: their indices, int64, sorted, from 0.

    Raises: as `Piece.value`.
    """
    with no_functions(), no_modes():
        return _picked(table, rows)


def _picked(table: Piece, rows: torch.Tensor) -> torch.Tensor:
    composed, found = table.handle.composed, None
    if isinstance(composed, Joined):
        only = composed.only_cast(table.view_spec)
        if only is not None and only.handle.composed is not None:
            return _picked(only, rows).to(composed.layout.dtype)
    if isinstance(composed, Decoded):
        found = _picked_by_kernel(composed, table.view_spec, rows)
    return _picked_in_runs(table, rows) if found is None else found


def _picked_in_runs(table: Piece, rows: torch.Tensor) -> torch.Tensor:
    view_spec = table.view_spec
    made = torch.empty((len(rows), *view_spec.shape[1:]), dtype=view_spec.dtype, device="cpu")
    runs = [view_spec[begin:end] for begin, end in runs_of(rows.tolist(), len(view_spec))]
    coming(view for run in runs for view in table.reads(run))
    at = 0
    for run in runs:
        made[at : at + len(run)].copy_(table.value(run))
        at += len(run)
    return made


def _picked_by_kernel(recipe: Decoded, view_spec: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
    """None if the kernels do not take it, or the cut is not of whole rows."""
    shape, dtype = recipe.layout.shape, recipe.layout.dtype
    if not recipe.has_kernel() or dtype not in DTYPES or len(shape) != 2 or view_spec.shape[1:] != shape[1:]:
        return None
    first, left = divmod(int(view_spec.storage_offset()), shape[1])
    if left or view_spec.stride() != (shape[1], 1):
        return None
    rows = rows + first
    pieces = [
        piece.value() if per is None else _mapped(piece, per, rows // recipe.granule)
        for piece, per in zip(recipe.pieces, recipe.per, strict=True)
    ]
    assert recipe.packed is not None
    matrix = recipe.packed.matrix(pieces, shape[1])
    if matrix is None:
        return None
    made = torch.empty(len(rows), shape[1], dtype=dtype, device="cpu")
    pick(matrix, rows, made)
    return made


def _mapped(piece: Piece, per: int, numbers: torch.Tensor) -> torch.Tensor:
    """A piece, some of whose groups of `per` rows are needed."""
    handle, view_spec = piece.handle, piece.view_spec
    groups = view_spec[: len(view_spec) // per * per].unflatten(0, (-1, per))
    is_apart = len(groups) and span_of(groups[0]) <= groups.stride(0) * groups.itemsize
    if handle.composed is not None or not is_apart:
        return piece.value()
    base = handle.base()
    if not has_rows_here(handle):
        rows_coming(handle, groups, numbers)
    return cut(base, view_spec)
