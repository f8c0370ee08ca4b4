"""What decodes runs, multiplies by them and picks from them: C on the CPU, Triton on a GPU, torch for all else.

Always true:
- all give the same numbers when they decode or pick: torch's chain is the oracle of the others
- what a backend supports follows from the run and a dtype, before anything is read; the functions that pass addresses
  on check all sizes again, and raise

What it supports, a backend does: `decode` puts all rows of a run into `place`, (rows, *row); `multiply` puts
`x @ packed rows.T + bias` there, (rows of x, packed rows); `pick` some of the rows that the pieces give, by number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Literal, NamedTuple, TypeAlias

import torch

from offload.kernels import accelerated, native
from offload.memory import count_freed
from offload.tensor.guests import CPU
from offload.tensor.runs import Decoder, RowRun

BLOCK = 512 << 10  # bytes computed at a time, so that the next step finds them in the cache
ON_DEVICE = 32 << 20  # the same on an accelerator, where each step has its price; decoders take some times as much
_TRIMMED = 8  # what is decoded, over what counts as freed: giving memory back takes some ms

Act: TypeAlias = Literal["decode", "multiply", "pick"]
Values: TypeAlias = "list[torch.Tensor]"  # of the pieces of a run

any_rows: ContextVar[bool] = ContextVar("any_rows", default=False)
"""Whether the kernels multiply any number of rows that they can, also where it is slower than decoding the weight."""


class Compiled:
    """C, for values on the CPU."""

    def supports(self, act: Act, run: RowRun, dtype: torch.dtype, rows: int) -> bool:
        packed = run.packed if native.library() is not None and dtype in native.DTYPES else None
        if packed is None or not run.fits:
            return False
        if act == "multiply":
            return rows <= most_rows_of([run], dtype)
        is_taken = not run.is_turned or (act == "decode" and run.rounds_once(dtype))
        return is_taken and not packed.is_rounded and run.dtypes[0] in native.DTYPES

    def decode(self, run: RowRun, values: Values, place: torch.Tensor) -> None:
        matrix = run.matrix(values)
        if run.is_turned:
            native.decode_turned(matrix, place)
        elif run.rounds_once(place.dtype):
            native.decode(matrix, run.begin, place)
        else:
            step, begin = max(1, BLOCK // (place.shape[1] * run.dtypes[0].itemsize)), run.begin
            for part in place.split(step):  # rounded twice, as a copy of the whole would be
                rounded = torch.empty(part.shape, dtype=run.dtypes[0], device=CPU)
                native.decode(matrix, begin, rounded)
                part.copy_(rounded)
                begin += len(part)

    def multiply(
        self, run: RowRun, values: Values, x: torch.Tensor, bias: torch.Tensor | None, place: torch.Tensor
    ) -> None:
        product_with([run], [values]).into(x, bias, place)

    def pick(self, run: RowRun, values: Values, rows: torch.Tensor, place: torch.Tensor) -> None:
        native.pick(run.matrix(values), rows, place)


class Accelerated:
    """Triton, for values on a GPU."""

    def supports(self, act: Act, run: RowRun, dtype: torch.dtype, rows: int) -> bool:
        if run.packed is None or act == "pick" or (run.is_turned and not run.is_whole):
            return False
        is_taken = rows <= accelerated.MOST_ROWS if act == "multiply" else run.rounds_once(dtype)
        return is_taken and accelerated.supports(run.packed, run.specs(), run.columns, dtype)

    def decode(self, run: RowRun, values: Values, place: torch.Tensor) -> None:
        assert run.packed is not None
        accelerated.decode(run.packed, values, run.begin, place)

    def multiply(
        self, run: RowRun, values: Values, x: torch.Tensor, bias: torch.Tensor | None, place: torch.Tensor
    ) -> None:
        assert run.packed is not None
        accelerated.multiply(run.packed, values, x, place)
        if bias is not None:
            place.add_(bias)


class Chain:
    """The decoder of the run, in torch, on any device. It multiplies nothing: that is left to the dense weight."""

    def decode(self, run: RowRun, values: Values, place: torch.Tensor) -> None:
        """In blocks that fit the processor's cache: the numbers are the same as if all were decoded at once."""
        assert run.decoder is not None, "rows that are stored are not decoded"
        most = BLOCK if place.is_cpu else ON_DEVICE
        most = max(1, most // max(1, math.prod(run.row) * run.dtypes[0].itemsize))
        for low, high, taken, skipped in steps(run.first, run.count, most, run.decoder):
            given = [value if rows is None else value[slice(*rows)] for value, rows in zip(values, taken, strict=True)]
            block = run.decoder.decode(*given)[skipped : skipped + high - low]
            place[low:high].copy_(block if place.dtype == run.dtypes[0] else block.to(run.dtypes[0]))
            del block  # before the next block is computed
        if place.is_cpu:
            count_freed(place.nbytes // _TRIMMED)  # of the blocks, among which settles what stays, as of new experts


class Step(NamedTuple):
    """Some rows, computed by one call of a decoder."""

    low: int  # counted from the first row that is wanted
    high: int
    taken: tuple[tuple[int, int] | None, ...]  # rows of each piece, counted from those of the first granule; None: all
    skipped: int  # rows that the decoder gives before `low`


def steps(start: int, count: int, most: int, decoder: Decoder) -> Iterator[Step]:
    """The steps that compute `count` rows from row `start` on, of one element of a stack: at most `most` at a time."""
    granule, per, is_divisible = decoder.granule, decoder.per, decoder.is_divisible
    end, first, is_inside = start + count, start // granule, is_divisible and most < granule
    span = granule if is_inside else max(1, most // granule) * granule
    low = start
    while low < end:
        begin = low // granule
        high = min(end, begin * granule + span, low + most) if is_inside else min(end, begin * granule + span)
        stop = -(-high // granule)
        is_part = is_divisible and stop - begin == 1
        before = low - begin * granule  # rows of the granule
        taken: list[tuple[int, int] | None] = []
        for rows in per:
            if rows is None:
                taken.append(None)
            elif is_part and rows >= granule:
                at, each = (begin - first) * rows, rows // granule
                taken.append((at + before * each, at + (before + high - low) * each))
            else:
                taken.append(((begin - first) * rows, (stop - first) * rows))
        yield Step(low - start, high - start, tuple(taken), 0 if is_part else before)
        low = high


Backend: TypeAlias = Compiled | Accelerated | Chain
COMPILED, ACCELERATED, CHAIN = Compiled(), Accelerated(), Chain()


def choose(act: Act, device: torch.device, run: RowRun, dtype: torch.dtype, rows: int = 0) -> Backend:
    """C on the CPU and Triton on a GPU, where they support it; else torch. `dtype`: of dense values and activations."""
    own = COMPILED if device == CPU else ACCELERATED if accelerated.is_there(device) else None
    return CHAIN if own is None or not own.supports(act, run, dtype, rows) else own


def decode_runs(runs: Iterable[RowRun], place: torch.Tensor) -> None:
    """Decode runs, one below the other, into `place`: (rows, *row)."""
    begin = 0
    for run in runs:
        part, values = place[begin : begin + run.count], run.values(place.device)
        rows = part.flatten(0, -2) if part.dim() > 2 and part.is_contiguous() else part
        is_of_rows = rows.dim() == 2 and rows.stride(1) == 1
        chosen = choose("decode", place.device, run, place.dtype) if is_of_rows else CHAIN
        chosen.decode(run, values, part if chosen is CHAIN else rows)
        begin += run.count


def most_rows_of(runs: Iterable[RowRun], dtype: torch.dtype) -> int:
    """Up to how many rows of activations of a dtype C multiplies by runs faster than by their dense rows."""
    if any_rows.get():
        return native.MOST_ROWS
    kinds = (run.packed is not None and run.packed.in_integers for run in runs)
    return min((native.most_rows(dtype, in_integers=kind) for kind in kinds), default=native.MOST_ROWS)


def product_with(runs: Iterable[RowRun], values: Iterable[Values]) -> native.Product:
    """Products by C with runs, over their values, side by side."""
    return native.Product([(run.matrix(some), run.outputs) for run, some in zip(runs, values, strict=True)])
