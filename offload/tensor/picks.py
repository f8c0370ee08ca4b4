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
    """Some rows of a cut of a value, as a new tensor on a device.

    Args:
        rows: their indices, int64, sorted, from 0; on the CPU.

    Raises: as `Piece.value`.
    """
    with no_functions(), no_modes():
        shape, begin, shares = table.view_spec.shape, 0, []
        runs = table.runs()
        for run in runs:
            low, high = torch.searchsorted(rows, torch.tensor([begin, begin + run.count], device="cpu")).tolist()
            begin += run.count
            if low < high:
                shares.append((run, rows[low:high] - (begin - run.count)))
        if not all(run.row == shape[1:] and _is_of_whole_granules(run, some) for run, some in shares):
            shares = []
        found = [_picked_of_run(run, some, device) for run, some in shares] or [_picked_in_parts(table, rows, device)]
        return found[0] if len(found) == 1 else torch.cat(found)


def _picked_in_parts(table: Piece, rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Of a value that is not made of such rows: each stretch of rows that follow one another is computed."""
    view_spec = table.view_spec
    parts = [view_spec[begin:end] for begin, end in runs_of(rows.tolist(), len(view_spec))]
    prefetch(view for part in parts for view in table.reads(part))
    made = torch.empty((len(rows), *view_spec.shape[1:]), dtype=view_spec.dtype, device=device)
    at = 0
    for part in parts:
        made[at : at + len(part)].copy_(table.value(part, device))
        at += len(part)
    return made


def _picked_of_run(run: RowRun, rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    decoder = run.decoder
    if decoder is None:
        found = _sent([(run.pieces[0][1], 1, rows)], device)[0]
    elif choose("pick", device, run, run.dtypes[0]) is COMPILED:
        takes = [(piece, per, (rows + run.first) // decoder.granule) for piece, per in _arguments(run, decoder)]
        values = [piece.value() if per is None else _mapped(piece, per, numbers) for piece, per, numbers in takes]
        found = torch.empty((len(rows), *run.row), dtype=run.dtypes[0], device=CPU)
        COMPILED.pick(run, values, rows, found)
    elif device != CPU and is_left_to_numpy(decoder.decode):
        return sent_to(_picked_of_run(run, rows, CPU), device)
    else:
        found = _decoded(run, decoder, rows + run.first, device)
    for dtype in run.dtypes:
        found = found.to(dtype)
    return found


def _arguments(run: RowRun, decoder: Decoder) -> list[tuple[Piece, int | None]]:
    """The pieces, as the decoder takes them, each with its rows per granule."""
    return [(piece, decoder.per[number]) for number, piece in sorted(run.pieces, key=lambda one: one[0])]


def _is_of_whole_granules(run: RowRun, rows: torch.Tensor) -> bool:
    """Whether the pieces have all of the last granule that is needed: it may be cut off."""
    if run.decoder is None:
        return True
    end, alone = (int(rows[-1]) + run.first) // run.decoder.granule + 1, _decoder_of_single_rows(run.decoder)
    return not any(
        each and (alone is None or each < run.decoder.granule) and end * each > len(piece.view_spec)
        for piece, each in _arguments(run, run.decoder)
    )


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
    """Rows, counted from the first one that the pieces give, by the decoder."""
    alone, pieces = _decoder_of_single_rows(decoder), _arguments(run, decoder)
    made = torch.empty((len(rows), *run.row), dtype=run.dtypes[0], device=device)
    nbytes = made[0].nbytes * (decoder.granule if alone is None else 1)
    at_a_time = max(1, ON_DEVICE // max(nbytes, 1))
    for part, place in zip(rows.split(at_a_time), made.split(at_a_time), strict=True):
        granules, which = torch.unique(part // decoder.granule, return_inverse=True)
        if alone is None:
            found = decoder.decode(*_sent([(piece, per, granules) for piece, per in pieces], device))
            place.copy_(_rows_at(found, which * decoder.granule + part % decoder.granule))
        else:
            place.copy_(alone(*_sent_alone(decoder.granule, pieces, part, granules, which, device)))
    return made


def _sent_alone(
    granule: int,
    pieces: list[tuple[Piece, int | None]],
    rows: torch.Tensor,
    granules: torch.Tensor,
    which: torch.Tensor,
    device: torch.device,
) -> list[torch.Tensor]:
    """Without the other rows of their granules; what these have in common is sent once, and repeated there."""
    shared = [per is not None and per < granule for _, per in pieces]
    takes = [
        (piece, per, granules) if is_shared or per is None else (piece, per // granule, rows)
        for (piece, per), is_shared in zip(pieces, shared, strict=True)
    ]
    return [
        _rows_at(found, which, per or 1) if is_shared else found
        for found, (_, per), is_shared in zip(_sent(takes, device), pieces, shared, strict=True)
    ]


def _decoder_of_single_rows(decoder: Decoder) -> Decode | None:
    """Decodes rows that do not follow one another, each with all that its granule takes of a piece with fewer rows."""
    if decoder.granule == 1 or not decoder.is_divisible or "rows" not in getattr(decoder.decode, "keywords", {}):
        return None
    return partial(decoder.decode, rows=1)


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
    return picked(piece, rows, device)


def _gathered(mapped: torch.Tensor, per: int | None, numbers: torch.Tensor) -> torch.Tensor:
    assert per is not None
    groups: torch.Tensor = mapped[: len(mapped) // per * per].unflatten(0, (-1, per))
    values = groups.view(torch.uint8) if groups.itemsize == 1 else groups  # torch copies bytes of any dtype
    return values.index_select(0, numbers).view(mapped.dtype).flatten(0, 1)
