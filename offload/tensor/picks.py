"""Rows that are picked from a computed value, as from a packed embedding.

Always true:
- only what the picked rows are computed from is read, and all of these reads are started before the first is waited
  for; on an accelerator, those for 32 MiB of the result
- to an accelerator, what is stored of the rows is sent, each piece in one copy, and decoded there; but for blocks that
  numpy decodes
- the numbers are those of the value
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TypeAlias

import torch

from offload.prefetch.engine import prefetch, span_of
from offload.prefetch.tables import has_rows_here, prefetch_rows, runs_of
from offload.system.modes import no_functions, no_modes
from offload.tensor.backends import COMPILED, ON_DEVICE, choose
from offload.tensor.blocks import is_left_to_numpy
from offload.tensor.guests import CPU, sent_to
from offload.tensor.recipes import Piece
from offload.tensor.runs import Decode, Decoder, RowRun
from offload.tensor.views import cut

Take: TypeAlias = "tuple[Piece, int | None, torch.Tensor]"  # groups of so many rows, by number; None: all of a piece


def picked(table: Piece, rows: torch.Tensor, device: torch.device = CPU) -> torch.Tensor:
    """Some rows of a cut of a value, as a new tensor on a device: by indices from 0, int64, sorted, on the CPU."""
    with no_functions(), no_modes():
        shares, row = list(_shares(table.runs(), rows)), table.view_spec.shape[1:]
        if not shares or not all(run.row == row and _is_taken(run, some, device) for run, some in shares):
            return _picked_in_parts(table, rows, device)
        parts = [_picked_of_run(run, some, device) for run, some in shares]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _shares(runs: list[RowRun], rows: torch.Tensor) -> Iterator[tuple[RowRun, torch.Tensor]]:
    """The runs that some rows are in, and which of theirs these are, counted from the first one of the pieces."""
    begin = 0
    for run in runs:
        some = rows if len(runs) == 1 else rows[(rows >= begin) & (rows < begin + run.count)]
        if len(some):
            yield run, some if begin == run.first else some + (run.first - begin)
        begin += run.count


def _picked_in_parts(table: Piece, rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Of a value that is not made of such rows: each stretch of rows that follow one another is computed."""
    view_spec = table.view_spec
    parts = [view_spec[begin:end] for begin, end in runs_of(rows.tolist(), len(view_spec))]
    prefetch(view for part in parts for view in table.reads(part))
    values = torch.empty((len(rows), *view_spec.shape[1:]), dtype=view_spec.dtype, device=device)
    at = 0
    for part in parts:
        values[at : at + len(part)].copy_(table.value(part, device))
        at += len(part)
    return values


def _picked_of_run(run: RowRun, rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    if run.decoder is None:
        values_of_rows = _sent([(run.pieces[0][1], 1, rows)], device)[0]
    elif choose("pick", device, run, run.dtypes[0]) is COMPILED:
        groups = rows // run.decoder.granule if run.decoder.granule > 1 else rows
        values = [piece.value() if per is None else _mapped(piece, per, groups) for piece, per in _arguments(run)]
        values_of_rows = torch.empty((len(rows), *run.row), dtype=run.dtypes[0], device=CPU)
        COMPILED.pick(run, values, rows, values_of_rows)
    elif device != CPU and is_left_to_numpy(run.decoder.decode):
        return sent_to(_picked_of_run(run, rows, CPU), device)
    else:
        values_of_rows = _decoded(run, run.decoder, rows, device)
    return run.rounded(values_of_rows)


def _arguments(run: RowRun) -> list[tuple[Piece, int | None]]:
    """The pieces, as the decoder takes them, each with its rows per granule."""
    assert run.decoder is not None
    return [(piece, run.decoder.per[number]) for number, piece in sorted(run.pieces, key=lambda one: one[0])]


def _is_taken(run: RowRun, rows: torch.Tensor, device: torch.device) -> bool:
    """Whether rows can be picked alone: not if a decoder needs all of the last granule, which may be cut off."""
    if run.decoder is None or (device == CPU and COMPILED.supports("pick", run, run.dtypes[0], 0)):
        return True
    granule, is_alone = run.decoder.granule, _decoder_of_single_rows(run.decoder) is not None
    needed = [(piece, per) for piece, per in _arguments(run) if per and (per < granule or not is_alone)]
    return all((int(rows[-1]) // granule + 1) * per <= len(piece.view_spec) for piece, per in needed)


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


def _decoded(run: RowRun, decoder: Decoder, rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    alone, granule, pieces = _decoder_of_single_rows(decoder), decoder.granule, _arguments(run)
    result = torch.empty((len(rows), *run.row), dtype=run.dtypes[0], device=device)
    nbytes = result[0].nbytes * (granule if alone is None else 1)
    at_a_time = max(1, ON_DEVICE // max(nbytes, 1))
    for part, place in zip(rows.split(at_a_time), result.split(at_a_time), strict=True):
        numbers = part // granule
        if alone is None:
            granules, which = torch.unique(numbers, return_inverse=True)
            granules_decoded = decoder.decode(*_sent([(piece, per, granules) for piece, per in pieces], device))
            place.copy_(_rows_at(granules_decoded, which * granule + part % granule))
        else:  # without the other rows of the granules
            takes = [
                (piece, per, numbers) if per is None or per < granule else (piece, per // granule, part)
                for piece, per in pieces
            ]
            place.copy_(alone(*_sent(takes, device)))
    return result


def _decoder_of_single_rows(decoder: Decoder) -> Decode | None:
    """Decodes rows that do not follow one another, each with all that its granule takes of a piece with fewer rows."""
    if decoder.granule == 1:
        return decoder.decode
    is_so = decoder.is_divisible and "rows" in getattr(decoder.decode, "keywords", {})
    return partial(decoder.decode, rows=1) if is_so else None


def _rows_at(values: torch.Tensor, places: torch.Tensor, per: int = 1) -> torch.Tensor:
    """Some groups of `per` rows of a tensor on an accelerator, which may be needed more than once."""
    if len(places) * per == len(values) and bool((places.diff() == 1).all()):
        return values
    groups: torch.Tensor = values.unflatten(0, (-1, per))
    return groups.index_select(0, places.to(values.device)).flatten(0, 1)


def _sent(takes: list[Take], device: torch.device) -> list[torch.Tensor]:
    mapped = [
        None if per is None or piece.handle.composed is not None else _mapped(piece, per, numbers)
        for piece, per, numbers in takes
    ]  # all reads are started
    return [
        _rows_of_groups(*take, device) if memory is None else sent_to(_gathered(memory, *take[1:]), device)
        for take, memory in zip(takes, mapped, strict=True)
    ]


def _rows_of_groups(piece: Piece, per: int | None, numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    if per is None:
        return piece.value(device=device)
    numbers, which = torch.unique(numbers, return_inverse=True)
    rows = numbers if per == 1 else (numbers.unsqueeze(1) * per + torch.arange(per, device="cpu")).flatten()
    return _rows_at(picked(piece, rows, device), which, per)


def _gathered(mapped: torch.Tensor, per: int | None, numbers: torch.Tensor) -> torch.Tensor:
    assert per is not None
    groups: torch.Tensor = mapped[: len(mapped) // per * per].unflatten(0, (-1, per))
    values = groups.view(torch.uint8) if groups.itemsize == 1 else groups  # torch copies bytes of any dtype
    return values.index_select(0, numbers).view(mapped.dtype).flatten(0, 1)
