"""Rows that are picked from a computed value, as from a packed embedding.

Always true:
- only what the picked rows are computed from is read, and all of these reads are started before the first is waited
  for; on an accelerator, those for 32 MiB of the result
- to an accelerator, what is stored of the rows is sent, each piece in one copy, and decoded there; but for blocks that
  numpy decodes
- the numbers are those of the value
"""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

import torch

from offload.kernels.native import DTYPES, pick
from offload.prefetch.engine import prefetch, span_of
from offload.prefetch.tables import has_rows_here, prefetch_rows, runs_of
from offload.system.modes import no_functions, no_modes
from offload.tensor.blocks import is_left_to_numpy
from offload.tensor.decoded import ON_DEVICE, Decode, Decoded
from offload.tensor.guests import CPU, sent_to
from offload.tensor.recipes import Joined, Piece
from offload.tensor.views import cut

Take: TypeAlias = "tuple[Piece, int | None, torch.Tensor]"  # groups of so many rows, by number; None: all of a piece


def picked(table: Piece, rows: torch.Tensor, device: torch.device = CPU) -> torch.Tensor:
    """Some rows of a cut of a composed value, as a new tensor on a device.

    Args:
        rows: their indices, int64, sorted, from 0; on the CPU.

    Raises: as `Piece.value`.
    """
    with no_functions(), no_modes():
        return _picked(table, rows) if device == CPU else _picked_there(table, rows, device)


def _picked(table: Piece, rows: torch.Tensor) -> torch.Tensor:
    composed, found = table.handle.composed, None
    if isinstance(composed, Joined):
        only = composed.only_cast(table.view_spec)
        if only is not None and only.handle.composed is not None:
            return _picked(only, rows).to(composed.layout.dtype)
    if isinstance(composed, Decoded):
        found = _picked_by_kernel(composed, table.view_spec, rows)
    return _picked_in_runs(table, rows, CPU) if found is None else found


def _picked_in_runs(table: Piece, rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    view_spec = table.view_spec
    made = torch.empty((len(rows), *view_spec.shape[1:]), dtype=view_spec.dtype, device=device)
    runs = [view_spec[begin:end] for begin, end in runs_of(rows.tolist(), len(view_spec))]
    prefetch(view for run in runs for view in table.reads(run))
    at = 0
    for run in runs:
        made[at : at + len(run)].copy_(table.value(run, device))
        at += len(run)
    return made


def _picked_by_kernel(recipe: Decoded, view_spec: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
    """None if the kernels do not take it, or the cut is not of whole rows."""
    shape, dtype, first = recipe.layout.shape, recipe.layout.dtype, _first_row(recipe, view_spec)
    if not recipe.has_kernel() or dtype not in DTYPES or first is None:
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


def _first_row(recipe: Decoded | Joined, view_spec: torch.Tensor) -> int | None:
    """The row of a matrix that a cut of whole rows begins with; None for other values and cuts."""
    shape = recipe.layout.shape
    if len(shape) != 2 or view_spec.shape[1:] != shape[1:] or view_spec.stride() != (shape[1], 1):
        return None
    first, left = divmod(int(view_spec.storage_offset()), max(shape[1], 1))
    return None if left else first


def _mapped(piece: Piece, per: int, numbers: torch.Tensor) -> torch.Tensor:
    """A piece, some of whose groups of `per` rows are needed."""
    handle, view_spec = piece.handle, piece.view_spec
    groups = view_spec[: len(view_spec) // per * per].unflatten(0, (-1, per))
    is_apart = len(groups) and span_of(groups[0]) <= groups.stride(0) * groups.itemsize
    if handle.composed is not None or not is_apart:
        return piece.value()
    base = handle.base()
    if not has_rows_here(handle):
        prefetch_rows(handle, groups, numbers)
    return cut(base, view_spec)


# On an accelerator


def _picked_there(table: Piece, rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    composed, found = table.handle.composed, None
    if composed is None:
        return _sent([(table, 1, rows)], device)[0]
    if isinstance(composed, Decoded) and is_left_to_numpy(composed.decode):
        return sent_to(_picked(table, rows), device)
    if isinstance(composed, Joined):
        found = _picked_of_pieces(composed, table.view_spec, rows, device)
    elif isinstance(composed, Decoded):
        found = _decoded_there(composed, table.view_spec, rows, device)
    return _picked_in_runs(table, rows, device) if found is None else found


def _picked_of_pieces(
    recipe: Joined, view_spec: torch.Tensor, rows: torch.Tensor, device: torch.device
) -> torch.Tensor | None:
    """None unless the cut is of whole rows, and so is each piece."""
    parts = list(recipe.rows_of(view_spec))
    if _first_row(recipe, view_spec) is None or any(
        at is None or piece.view_spec.shape[1:] != view_spec.shape[1:] for piece, at in parts
    ):
        return None
    made = torch.empty((len(rows), *view_spec.shape[1:]), dtype=view_spec.dtype, device=device)
    for piece, at in parts:
        assert at is not None
        begin, end = torch.searchsorted(rows, torch.tensor([at, at + len(piece.view_spec)], device="cpu")).tolist()
        if begin < end:
            made[begin:end].copy_(_picked_there(piece, rows[begin:end] - at, device))
    return made


def _decoded_there(
    recipe: Decoded, view_spec: torch.Tensor, rows: torch.Tensor, device: torch.device
) -> torch.Tensor | None:
    """None if the cut is not of whole rows, or the last granule is needed and is not a whole one."""
    first, granule, alone = _first_row(recipe, view_spec), recipe.granule, _decoder_of_single_rows(recipe)
    if first is None or recipe.stacked:
        return None
    rows, pieces = rows + first, zip(recipe.pieces, recipe.per, strict=True)
    end = int(rows[-1]) // granule + 1
    if any(per and (alone is None or per < granule) and end * per > len(piece.view_spec) for piece, per in pieces):
        return None
    made = torch.empty((len(rows), *view_spec.shape[1:]), dtype=view_spec.dtype, device=device)
    nbytes = view_spec.shape[1] * view_spec.itemsize * (granule if alone is None else 1)
    at_a_time = max(1, ON_DEVICE // max(nbytes, 1))
    for part, place in zip(rows.split(at_a_time), made.split(at_a_time), strict=True):
        place.copy_(
            _decoded_with_their_granules(recipe, part, device)
            if alone is None
            else _decoded_alone(recipe, alone, part, device)
        )
    return made


def _decoded_with_their_granules(recipe: Decoded, rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    granules, which = torch.unique(rows // recipe.granule, return_inverse=True)
    given = _sent([(piece, per, granules) for piece, per in zip(recipe.pieces, recipe.per, strict=True)], device)
    return _rows_at(recipe.decode(*given), which * recipe.granule + rows % recipe.granule)


def _decoded_alone(recipe: Decoded, decode: Decode, rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Without the other rows of their granules; what these have in common is sent once, and repeated there."""
    granules, which = torch.unique(rows // recipe.granule, return_inverse=True)
    shared = [per is not None and per < recipe.granule for per in recipe.per]
    takes = [
        (piece, per, granules) if is_shared or per is None else (piece, per // recipe.granule, rows)
        for piece, per, is_shared in zip(recipe.pieces, recipe.per, shared, strict=True)
    ]
    return decode(
        *(
            _rows_at(found, which, per or 1) if is_shared else found
            for found, per, is_shared in zip(_sent(takes, device), recipe.per, shared, strict=True)
        )
    )


def _decoder_of_single_rows(recipe: Decoded) -> Decode | None:
    """Decodes rows that do not follow one another, each with all that its granule takes of a piece with fewer rows."""
    if recipe.granule == 1 or not recipe.is_divisible or "rows" not in getattr(recipe.decode, "keywords", {}):
        return None
    return partial(recipe.decode, rows=1)


def _rows_at(values: torch.Tensor, places: torch.Tensor, per: int = 1) -> torch.Tensor:
    """Some groups of `per` rows of a tensor on an accelerator, which may be needed more than once."""
    if len(places) * per == len(values) and bool((places.diff() == 1).all()):
        return values
    groups: torch.Tensor = values.unflatten(0, (-1, per))
    return groups.index_select(0, places.to(values.device)).flatten(0, 1)


def _sent(takes: list[Take], device: torch.device) -> list[torch.Tensor]:
    """What is taken of some pieces, one group after the other."""
    mapped = [
        None if per is None or piece.handle.composed is not None else _mapped(piece, per, numbers)
        for piece, per, numbers in takes
    ]  # all reads are started
    return [
        _rows_of_groups(*take, device) if found is None else sent_to(_gathered(found, *take[1:]), device)
        for take, found in zip(takes, mapped, strict=True)
    ]


def _rows_of_groups(piece: Piece, per: int | None, numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    if per is None:
        return piece.value(device=device)
    rows = numbers if per == 1 else (numbers.unsqueeze(1) * per + torch.arange(per, device="cpu")).flatten()
    return _picked_there(piece, rows, device)


def _gathered(mapped: torch.Tensor, per: int | None, numbers: torch.Tensor) -> torch.Tensor:
    assert per is not None
    groups: torch.Tensor = mapped[: len(mapped) // per * per].unflatten(0, (-1, per))
    values = groups.view(torch.uint8) if groups.itemsize == 1 else groups  # torch copies bytes of any dtype
    return values.index_select(0, numbers).view(mapped.dtype).flatten(0, 1)
