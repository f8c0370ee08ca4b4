"""Values whose rows a function computes from rows of stored pieces.

Always true:
- it is computed in blocks that fit the processor's cache, by the kernels where they take the pieces: the numbers are
  the same as if the whole were decoded at once
- only the rows that are needed are decoded, with those that they share a granule with, straight to where they go
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Sequence

import torch

from offload.annotations import Digest
from offload.prefetch.scratch import scratch_for
from offload.storage.handle import Access, Handle
from offload.storage.layout import Layout, contiguous, contiguous_stride
from offload.tensor.backends import decode_runs
from offload.tensor.boxes import Box, lies_as
from offload.tensor.recipes import Piece, Plain, stored_in
from offload.tensor.runs import Decoder, RowRun


class Decoded(Plain):
    """Rows that a function computes from rows of the pieces.

    Args:
        layout: of the value; row-major, with at least one dimension.
        decoder: how.
        pieces: its arguments, in order.
        stacked: whether value and pieces are stacks, as of experts: rows are counted within one element.
    """

    __slots__ = ("_order", "_row", "decoder", "stacked")

    def __init__(self, layout: Layout, decoder: Decoder, pieces: Sequence[Piece], *, stacked: bool = False) -> None:
        super().__init__(layout, pieces)
        self.decoder = decoder
        self.stacked = stacked
        self._row = layout.shape[1 + stacked :]
        sizes = [piece.view_spec.numel() * piece.view_spec.itemsize for piece in self.pieces]
        self._order = sorted(range(len(sizes)), key=sizes.__getitem__)  # the last one read is used first
        if stacked:
            for handle in self.handles():
                handle.read_apart(Access.PICKED)

    @property
    def form(self) -> str:
        """See `Recipe`: the module with the decoder."""
        module = getattr(self.decoder.decode, "func", self.decoder.decode).__module__
        return f"decoded from {module.rpartition('.')[2]}"

    def part(self, start: tuple[int, ...], shape: tuple[int, ...]) -> Piece | None:
        """See `Recipe`: whole granules and whole rows."""
        dim, granule = int(self.stacked), self.decoder.granule
        first, last = start[dim] // granule, -(-(start[dim] + shape[dim]) // granule)
        begin, end = first * granule, min(last * granule, self.layout.shape[dim])
        pieces = []
        for piece, per in zip(self.pieces, self.decoder.per, strict=True):
            view_spec = piece.view_spec.narrow(0, start[0], shape[0]) if self.stacked else piece.view_spec
            if per is not None:
                low, high = first * per, min(last * per, view_spec.shape[dim])
                view_spec = view_spec.narrow(dim, low, high - low)
            pieces.append(Piece(piece.handle, view_spec).alone())
        rows = (*shape[:dim], end - begin, *self._row)
        recipe = Decoded(contiguous(self.layout.dtype, rows), self.decoder, pieces, stacked=self.stacked)
        recipe.is_exact = self.is_exact
        decoded = Piece(Handle.compose(recipe, self.pieces[0].handle.name))
        view_spec = decoded.view_spec.narrow(dim, start[dim] - begin, shape[dim])
        for column in range(dim + 1, len(shape)):
            view_spec = view_spec.narrow(column, start[column], shape[column])
        return Piece(decoded.handle, view_spec)

    def note(self, digest: Digest) -> None:
        """As `Piece.note`."""
        super().note(digest)
        decoder = self.decoder
        digest.update(pickle.dumps((decoder.decode, decoder.granule, decoder.per), protocol=4))

    def handles(self) -> Iterator[Handle]:
        return stored_in(self.pieces[number].handle for number in self._order)

    def _found_runs(self, view_spec: torch.Tensor) -> list[RowRun]:
        step = max(1, math.prod(self._row))
        (start, left), (count, more) = divmod(int(view_spec.storage_offset()), step), divmod(view_spec.numel(), step)
        is_of_rows = view_spec.shape[-1:] == self._row[-1:] and view_spec.dtype == self.layout.dtype and not left + more
        lies_so = is_of_rows and lies_as(view_spec, contiguous_stride(tuple(view_spec.shape)))
        return self._runs_of(start, count) if lies_so else []

    def _runs_of(self, start: int, count: int) -> list[RowRun]:
        """Some rows, from row `start` of all on: within one element of a stack each."""
        return self._noted_runs((start, count), lambda: list(self._cut_in_runs(start, count)))

    def _cut_in_runs(self, start: int, count: int) -> Iterator[RowRun]:
        height, granule = self.layout.shape[int(self.stacked)], self.decoder.granule
        while count > 0:
            element, row = divmod(start, height) if self.stacked else (0, start)
            some = min(count, height - row)
            first, last = row // granule, -(-(row + some) // granule)
            pieces = []
            for number in self._order:
                per, piece = self.decoder.per[number], self.pieces[number]
                view_spec = piece.view_spec[element] if self.stacked else piece.view_spec
                view_spec = view_spec if per is None else view_spec[first * per : last * per]
                pieces.append((number, Piece(piece.handle, view_spec)))
            begin, dtypes = first * granule, (self.layout.dtype,)
            is_whole = some == min(last * granule, height) - begin
            yield RowRun(tuple(pieces), some, self._row, dtypes, self.decoder, row - begin, is_whole, self.is_exact)
            start, count = start + some, count - some

    def _rows_around(self, box: Box) -> tuple[int, int]:
        """The range of rows that contains a box: first, and end."""
        step = math.prod(self._row)
        return box.first // step, -(-(box.first + math.prod(box.size)) // step)

    def _read_in(self, box: Box) -> Iterator[tuple[Piece, torch.Tensor]]:
        start, end = self._rows_around(box)
        for run in self._runs_of(start, end - start):
            yield from ((piece, piece.view_spec) for _, piece in run.pieces)

    def _computed(self, box: Box, device: torch.device) -> torch.Tensor:
        step = math.prod(self._row)
        start, end = self._rows_around(box)
        whole = scratch_for(contiguous(self.layout.dtype, (end - start, *self._row)), device)
        decode_runs(self._runs_of(start, end - start), whole)
        inside = box.first - start * step
        return whole.view(-1)[inside:] if inside else whole
