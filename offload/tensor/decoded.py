"""Values whose rows a function computes from rows of stored pieces.

Always true:
- it is computed in blocks that fit the processor's cache, by the kernels where they take the pieces: the numbers are
  the same as if the whole were decoded at once
- only the rows that are needed are decoded, with those that they share a granule with, straight to where they go
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch

from offload.annotations import Digest
from offload.kernels import accelerated, native
from offload.kernels.packed import Packed
from offload.memory import count_freed
from offload.prefetch.scratch import scratch_for
from offload.storage.handle import Access, Handle
from offload.storage.layout import Layout, contiguous
from offload.tensor.boxes import Box, lies_as
from offload.tensor.guests import CPU
from offload.tensor.recipes import Noted, Piece, Plain, stored_in, values_in_order
from offload.tensor.steps import Unit, steps

BLOCK = 512 << 10  # bytes computed at a time, so that the next step finds them in the cache
ON_DEVICE = 32 << 20  # the same on an accelerator, where each step has its price; decoders take some times as much
_TRIMMED = 8  # what is decoded, over what counts as freed: giving memory back takes some ms

Decode: TypeAlias = Callable[..., torch.Tensor]


class Decoded(Plain):
    """Rows that a function computes from rows of the pieces.

    Args:
        layout: of the value; row-major, with at least one dimension.
        decode: computes some rows from the pieces' rows, as a tensor of any dtype that can be copied to the layout's.
            It is pure and picklable.
        pieces: its arguments, in order.
        granule: number of rows that have to be computed together, such as blocks that share a scale.
        per: for each piece, its rows per granule; None if all of it is always needed.
        is_divisible: whether some rows of a granule can be computed alone: from a proportional number of rows of
            each piece, or from all that a granule takes if a piece has fewer rows per granule than it. If a granule
            has several rows, `decode` is then a partial function with `rows`: how many share what a granule takes.
        stacked: whether value and pieces are stacks, as of experts: rows are counted within one element.
        packed: how the kernels take the pieces, if they do; they give the same numbers as `decode`.

    Attributes:
        is_exact: whether products are always computed with the dense value.
        products: how cuts of it are multiplied, for `products`.
    """

    __slots__ = (
        "_order", "_row", "decode", "granule", "is_divisible", "is_exact", "packed", "per", "products", "stacked"
    )  # fmt: skip

    def __init__(
        self,
        layout: Layout,
        decode: Decode,
        pieces: Sequence[Piece],
        *,
        granule: int = 1,
        per: Sequence[int | None],
        is_divisible: bool = False,
        stacked: bool = False,
        packed: Packed | None = None,
    ) -> None:
        super().__init__(layout, pieces)
        self.decode = decode
        self.granule = granule
        self.is_divisible = is_divisible
        self.per = tuple(per)
        self.stacked = stacked
        self.packed = packed
        self.is_exact = False
        self.products = Noted()
        self._row = layout.shape[1 + stacked :]
        sizes = [piece.view_spec.numel() * piece.view_spec.itemsize for piece in self.pieces]
        self._order = sorted(range(len(sizes)), key=sizes.__getitem__)  # the last one read is used first
        if stacked:
            for handle in self.handles():
                handle.read_apart(Access.PICKED)

    @property
    def form(self) -> str:
        """As in all recipes: the module with the decoder."""
        module = getattr(self.decode, "func", self.decode).__module__
        return f"decoded from {module.rpartition('.')[2]}"

    def part(self, start: tuple[int, ...], shape: tuple[int, ...]) -> Piece | None:
        """As in all recipes: whole granules and whole rows."""
        dim = int(self.stacked)
        first, last = start[dim] // self.granule, -(-(start[dim] + shape[dim]) // self.granule)
        begin, end = first * self.granule, min(last * self.granule, self.layout.shape[dim])
        pieces = []
        for piece, per in zip(self.pieces, self.per, strict=True):
            view_spec = piece.view_spec.narrow(0, start[0], shape[0]) if self.stacked else piece.view_spec
            if per is not None:
                low, high = first * per, min(last * per, view_spec.shape[dim])
                view_spec = view_spec.narrow(dim, low, high - low)
            pieces.append(Piece(piece.handle, view_spec).alone())
        rows = (*shape[:dim], end - begin, *self._row)
        recipe = Decoded(
            contiguous(self.layout.dtype, rows),
            self.decode,
            pieces,
            granule=self.granule,
            per=self.per,
            is_divisible=self.is_divisible,
            stacked=self.stacked,
            packed=self.packed,
        )
        recipe.is_exact = self.is_exact
        made = Piece(Handle.compose(recipe, self.pieces[0].handle.name))
        view_spec = made.view_spec.narrow(dim, start[dim] - begin, shape[dim])
        for column in range(dim + 1, len(shape)):
            view_spec = view_spec.narrow(column, start[column], shape[column])
        return Piece(made.handle, view_spec)

    def note(self, digest: Digest) -> None:
        """As `Piece.note`."""
        super().note(digest)
        digest.update(pickle.dumps((self.decode, self.granule, self.per), protocol=4))

    def handles(self) -> Iterator[Handle]:
        return stored_in(self.pieces[number].handle for number in self._order)

    def _rows_of(self, box: Box) -> tuple[int, int]:
        """The range of rows that contains a box: first, and end."""
        step = math.prod(self._row)
        return box.first // step, -(-(box.first + math.prod(box.size)) // step)

    def _read_in(self, box: Box) -> Iterator[tuple[Piece, torch.Tensor]]:
        start, end = self._rows_of(box)
        rows = self.layout.shape[1] if self.stacked else end  # of one element of the stack
        while start < end:
            count = min(end, (start // rows + 1) * rows) - start
            yield from ((self.pieces[number], part) for number, part in self.parts_of_pieces(start, count))
            start += count

    def parts_of_pieces(self, start: int, count: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The cuts of the pieces, by number, that give these rows; whole granules, within one element of a stack."""
        only, start = divmod(start, self.layout.shape[1]) if self.stacked else (0, start)
        first, last = start // self.granule, -(-(start + count) // self.granule)
        for number in self._order:
            per, view_spec = self.per[number], self.pieces[number].view_spec
            view_spec = view_spec[only] if self.stacked else view_spec
            yield number, view_spec if per is None else view_spec[first * per : last * per]

    def _computed(self, box: Box, device: torch.device) -> torch.Tensor:
        step = math.prod(self._row)
        start, end = self._rows_of(box)
        whole = scratch_for(contiguous(self.layout.dtype, (end - start, *self._row)), device)
        self._into(whole, start)
        inside = box.first - start * step
        return whole.view(-1)[inside:] if inside else whole

    def put(self, place: torch.Tensor, view_spec: torch.Tensor) -> None:
        """As `Piece.put`: whole rows are decoded straight to their place, also those of one expert in a stack."""
        while view_spec.dim() > len(self.layout.shape) and len(view_spec) == 1:
            place, view_spec = place[0], view_spec[0]
        step = math.prod(self._row)
        offset = int(view_spec.storage_offset())
        first = max(0, len(self.layout.shape) - view_spec.dim())
        is_rows = view_spec.dim() > len(self._row) and view_spec.shape[1:] == self.layout.shape[first + 1 :]
        lies_so = is_rows and lies_as(view_spec, self.layout.stride[first:])
        if lies_so and view_spec.dtype == self.layout.dtype and offset % step == 0:
            self._into(place, offset // step)
        else:
            place.copy_(self.value(view_spec, place.device))

    def _into(self, place: torch.Tensor, start: int) -> None:
        """Compute the rows that `place` has room for, beginning with row `start`."""
        for part, first in self._within_elements(place, start):
            self._decode_into(part, first)

    def _within_elements(self, place: torch.Tensor, start: int) -> Iterator[tuple[torch.Tensor, int]]:
        """`place`, and its first row, in parts that lie within one element of a stack each."""
        rows = self.layout.shape[1] if self.stacked else 0
        if not self.stacked:
            yield place, start
        elif place.dim() > 1 + len(self._row):
            yield from ((element, start + number * rows) for number, element in enumerate(place))
        else:
            while len(place):
                left = rows - start % rows
                yield place[:left], start
                place, start = place[left:], start + left

    def _decode_into(self, place: torch.Tensor, start: int) -> None:
        """Compute rows within one element, block by block."""
        parts, device = self.parts_of_pieces(start, len(place)), place.device
        found = values_in_order(((number, Piece(self.pieces[number].handle, part)) for number, part in parts), device)
        first = start % self.layout.shape[1] if self.stacked else start
        if self._decoded_by_kernel(found, first % self.granule, place):
            return
        most = BLOCK if device == CPU else ON_DEVICE
        most = max(1, most // max(1, math.prod(self._row) * self.layout.dtype.itemsize))
        unit = Unit(self.granule, self.per, self.is_divisible)
        for low, high, taken, skipped in steps(first, len(place), most, unit):
            given = [value if rows is None else value[slice(*rows)] for value, rows in zip(found, taken, strict=True)]
            _put_rows(place[low:high], self.decode(*given), skipped, self.layout.dtype)
        if device == CPU:
            count_freed(place.nbytes // _TRIMMED)  # of the blocks, among which settles what stays, as of new experts

    def has_kernel(self) -> bool:
        """Whether the kernels give its numbers, row by row."""
        packed = self.packed
        return packed is not None and not packed.is_turned and not packed.is_rounded and native.library() is not None

    def _decoded_by_kernel(self, pieces: Sequence[torch.Tensor], first: int, place: torch.Tensor) -> bool:
        """Whether the kernels have decoded rows of the pieces, beginning with row `first`, into `place`."""
        known = self.layout.dtype in (torch.float32, place.dtype)
        if place.device != CPU:
            return known and accelerated.decode(self.packed, pieces, first, place)
        if not self.has_kernel():
            return self.packed is not None and self.packed.is_turned and self._turned_by_kernel(pieces, first, place)
        assert self.packed is not None
        if place.dim() == 3 and place.is_contiguous():
            place, first = place.flatten(0, 1), first * place.shape[1]
        if place.dim() != 2 or place.stride(1) != 1 or place.dtype not in native.DTYPES or not place.is_cpu:
            return False
        matrix = self.packed.matrix(pieces, place.shape[1])
        if known and matrix is not None:
            native.decode(matrix, first, place)
        if known or matrix is None:
            return matrix is not None
        step = max(1, BLOCK // (place.shape[1] * self.layout.dtype.itemsize))
        for begin in range(0, len(place), step):  # rounded twice, as a copy of the whole would be
            part = place[begin : begin + step]
            rounded = torch.empty(part.shape, dtype=self.layout.dtype, device="cpu")
            native.decode(matrix, first + begin, rounded)
            part.copy_(rounded)
        return True

    def _turned_by_kernel(self, pieces: Sequence[torch.Tensor], first: int, place: torch.Tensor) -> bool:
        """The same where the packed rows are columns of the value: only all rows of the pieces."""
        rows = max(len(piece) * self.granule // per for piece, per in zip(pieces, self.per, strict=True) if per)
        is_whole = place.dim() == 2 and place.stride(1) == 1 and place.is_cpu and not first and len(place) == rows
        if not is_whole or native.library() is None or place.dtype not in native.DTYPES:
            return False
        assert self.packed is not None
        known = self.layout.dtype in (torch.float32, place.dtype) and not self.packed.is_rounded
        matrix = self.packed.matrix(pieces, rows) if known else None
        if matrix is not None:
            native.decode_turned(matrix, place)
        return matrix is not None


def _put_rows(place: torch.Tensor, made: torch.Tensor, first: int, dtype: torch.dtype) -> None:
    """Copy rows to their place through a dtype: no block of them is alive while the next one is computed."""
    rows = made[first : first + len(place)]
    place.copy_(rows if place.dtype == dtype else rows.to(dtype))
