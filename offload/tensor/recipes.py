"""Values that are computed from others when they are read: joined, sliced, cast, rearranged. `decoded` has one more.

Always true:
- their sources are stored values that are never written to; they are read, and read ahead, like any value
- only what an op needs of a value is computed, its rows, its expert; if a piece is stored exactly as needed, a view of
  its mapping is used and nothing is copied
- it is computed in blocks that fit the processor's cache, into memory that is reused once nothing refers to it; what
  several batches need is computed once for all of them
- the numbers are the same as if the whole were computed at once
"""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import pairwise
from typing import Any, TypeAlias

import torch

from offload.annotations import Digest
from offload.prefetch.engine import compute_once, kept_result, prefetch
from offload.prefetch.loads import is_loaded
from offload.prefetch.scratch import LEAST, scratch_for
from offload.storage.file import TensorFile
from offload.storage.handle import Access, Composition, Handle, InBlocks
from offload.storage.layout import Entry, Layout, contiguous, contiguous_stride
from offload.system.modes import no_functions, no_modes
from offload.tensor.backends import decode_runs
from offload.tensor.boxes import Box, first_row, lies_as, recut, rows_in, start_in
from offload.tensor.guests import CPU, stored_on
from offload.tensor.runs import RowRun
from offload.tensor.small import MOST as SMALL
from offload.tensor.small import SmallValue
from offload.tensor.views import meta_of, meta_of_layout, metadata_of

_CAST = 1 << 20  # bytes that are cast at a time
_WRITTEN = 4 << 20  # the same, for blocks written to a file while the next one is computed
_RUNS_KNOWN = 1024  # cuts of a recipe whose runs are noted: experts of a layer
_OF_ROWS = 2  # dimensions
_GENERATION = b"1"  # change it when a decoder's numbers change: stored results are then made again

Inside: TypeAlias = "tuple[Piece, torch.Tensor, Sequence[int]]"  # a piece, its cut in a box, and where that goes


class Piece:
    """A source of a computed value: a cut of another value."""

    __slots__ = ("handle", "view_spec")

    def __init__(self, handle: Handle, view_spec: torch.Tensor | None = None) -> None:
        self.handle = handle
        self.view_spec = meta_of(handle) if view_spec is None else view_spec

    def value(self, view_spec: torch.Tensor | None = None, device: torch.device = CPU) -> torch.Tensor:
        """The value of `view_spec`, a cut of this piece: on the CPU, mapped if possible."""
        handle, view_spec = self.handle, self.view_spec if view_spec is None else view_spec
        if handle.composed is not None:
            return handle.composed.value(view_spec, device)
        return stored_on(handle, view_spec, device)

    def reads(self, view_spec: torch.Tensor) -> Iterator[tuple[Handle, torch.Tensor]]:
        """The views of stored values that are read to compute `view_spec`, a cut of this piece."""
        composed = self.handle.composed
        return iter([(self.handle, view_spec)]) if composed is None else composed.reads(view_spec)

    def runs(self) -> list[RowRun]:
        """The runs that it consists of, one after the other; none if it is not of whole rows."""
        composed, spec = self.handle.composed, self.view_spec
        if isinstance(composed, Plain):
            return composed.runs(spec)
        if composed is not None or not spec.dim():
            return []
        return [RowRun(((0, self),), len(spec), tuple(spec.shape[1:]), (spec.dtype,))]

    def alone(self) -> Piece:
        """The same numbers, from a part of the file or recipe: the rest is neither counted, read ahead, nor copied."""
        handle, view_spec, layout = self.handle, self.view_spec, self.handle.layout
        if handle.is_subclass or handle.owned:
            return self
        start, whole = start_in(layout, view_spec), rows_in(layout, view_spec)
        if start is None and whole is not None:
            piece = Piece(handle, meta_of(handle).narrow(0, *whole)).alone()
            return Piece(piece.handle, piece.view_spec.view(view_spec.shape))
        if start is None:
            return self
        if isinstance(composed := handle.composed, Recipe):
            return composed.part(start, tuple(view_spec.shape)) or self
        outermost = layout.order[0] if layout.order else 0  # the other dimensions are taken whole, and cut again
        if handle.composed is not None or not layout.order or view_spec.shape[outermost] == layout.shape[outermost]:
            return self
        rows = list(layout.shape)
        rows[outermost] = view_spec.shape[outermost]
        first = handle.extent[0] + start[outermost] * layout.stride[outermost] * layout.dtype.itemsize
        entry = Entry(handle.name, Layout(layout.dtype, tuple(rows), layout.stride), first)
        part = Piece(Handle.reference_part(handle.file, entry))
        for dim, (begin, size) in enumerate(zip(start, view_spec.shape, strict=True)):
            if dim != outermost:
                part.view_spec = part.view_spec.narrow(dim, begin, size)
        return part

    def note(self, digest: Digest) -> None:
        """Add what identifies it to a digest: the state of its file, or its sources; and its cut."""
        if isinstance(composed := self.handle.composed, Recipe):
            composed.note(digest)
        else:
            handle, known = self.handle, self.handle.file.identity
            place = handle.file.path.name, known.size, known.modified, handle.name, handle.extent
            digest.update(repr(place).encode())
        digest.update(repr(metadata_of(self.view_spec)).encode())

    def put(self, place: torch.Tensor, view_spec: torch.Tensor) -> None:
        """Put the value of `view_spec`, a cut of this piece, into `place`, in its dtype; decoded rows straight away."""
        composed = self.handle.composed
        runs = composed.runs(view_spec) if isinstance(composed, Plain) else []
        row = runs[0].row if runs and all(run.decoder is not None and len(run.dtypes) == 1 for run in runs) else None
        if row is None or view_spec.shape[place.dim() - len(row) :] != row or place.dim() == len(row):
            _put(place, self.value(view_spec, place.device))
        elif place.dim() > 1 + len(row):  # a stack, whose elements may be apart there
            for one, part in zip(place, view_spec, strict=True):
                self.put(one, part)
        else:
            decode_runs(runs, place)


def _put(place: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a tensor; on the CPU, a cast is faster in blocks than as a whole (torch 2.13)."""
    if place.dtype == value.dtype or place.dim() == 0 or place.nbytes <= _CAST or not place.is_cpu:
        place.copy_(value)
        return
    rows = max(1, _CAST * len(place) // place.nbytes)
    for part, some in zip(place.split(rows), value.split(rows), strict=True):
        part.copy_(some)


class Recipe(Composition):
    """What all kinds have in common.

    Attributes:
        layout: the layout of the value.
        subclass: see `Composition`.
        pieces: all values that it is computed from.
    """

    __slots__ = ("layout", "pieces")

    layout: Layout
    subclass: dict[str, Any] | None = None
    pieces: tuple[Piece, ...]

    @property
    def file(self) -> TensorFile:
        return self.pieces[0].handle.file

    def handles(self) -> Iterator[Handle]:
        """The handles of the stored values at the bottom, in the order in which they are read."""
        return stored_in(piece.handle for piece in self.pieces)

    def part(self, _: tuple[int, ...], __: tuple[int, ...], /) -> Piece | None:
        """A box, by start and shape, of no more than it needs, or a cut of a larger one; None if it needs all."""
        return None

    @property
    @abstractmethod
    def form(self) -> str:
        """What is done to the stored values, in words."""

    @property
    def mark(self) -> str:
        """Differs between recipes that may give different numbers; the same in every process."""
        digest = sha256(_GENERATION)
        self.note(digest)
        return digest.hexdigest()

    def note(self, digest: Digest) -> None:
        """As `Piece.note`."""
        digest.update(repr((type(self).__name__, self.layout, len(self.pieces))).encode())
        for piece in self.pieces:
            piece.note(digest)

    def reads(self, _: torch.Tensor, /) -> Iterator[tuple[Handle, torch.Tensor]]:
        """See `Composition`: all of its pieces, whichever cut is read."""
        for piece in self.pieces:
            yield from piece.reads(piece.view_spec)


class Plain(Recipe, InBlocks):
    """A recipe whose value is a plain tensor: what these kinds have in common.

    Attributes:
        small: the value in memory, if it is a small one.
        is_exact: whether products are always computed with the dense value.
    """

    __slots__ = ("_runs", "is_exact", "small")

    def __init__(self, layout: Layout, pieces: Iterable[Piece]) -> None:
        self.layout = layout
        self.pieces = tuple(pieces)
        self.is_exact = False
        self._runs: dict[object, list[RowRun]] = Noted()
        self.small = SmallValue() if 0 < layout.nbytes <= SMALL else None

    def value(self, view_spec: torch.Tensor | None = None, device: torch.device = CPU) -> torch.Tensor:
        """See `Composition`."""
        small = self.small if device == CPU else None
        if small is not None:
            view = small.view(view_spec)
            return small.computed(self._value, self.handles(), view_spec) if view is None else view
        return self._value(view_spec, device)

    def _value(self, view_spec: torch.Tensor | None = None, device: torch.device = CPU) -> torch.Tensor:
        with no_functions(), no_modes():
            layout = self.layout
            view_spec = meta_of_layout(layout) if view_spec is None else view_spec
            if view_spec.numel() == 0:
                return torch.empty_strided(view_spec.shape, view_spec.stride(), dtype=view_spec.dtype, device=device)
            box = Box.around(layout, view_spec)
            return recut(self._in_box(box, device), box.first * layout.dtype.itemsize, view_spec)

    def reads(self, view_spec: torch.Tensor) -> Iterator[tuple[Handle, torch.Tensor]]:
        """See `Composition`: only what `view_spec` needs."""
        if self.small is not None and self.small.is_known:
            return
        with no_functions(), no_modes():
            box = Box.around(self.layout, view_spec) if view_spec.numel() else None
            if box is not None and kept_result((self, box)) is None:
                yield from self._views(box)

    def _views(self, box: Box) -> Iterator[tuple[Handle, torch.Tensor]]:
        for piece, part in self._read_in(box):
            yield from piece.reads(part)

    def _in_box(self, box: Box, device: torch.device) -> torch.Tensor:
        """A tensor whose elements are in the same memory order as those of the box in the whole value."""
        if device != CPU or math.prod(box.size) * self.layout.dtype.itemsize < LEAST:
            return self._computed(box, device)
        return compute_once((self, box), partial(self._computed, box, CPU), partial(self._views, box))

    @abstractmethod
    def _computed(self, box: Box, device: torch.device) -> torch.Tensor:
        """Such a tensor, in memory of its own."""

    @abstractmethod
    def _read_in(self, box: Box) -> Iterator[tuple[Piece, torch.Tensor]]:
        """The pieces that a box is computed from, and the cut of each that it needs."""

    def runs(self, view_spec: torch.Tensor) -> list[RowRun]:
        """The runs that a cut consists of, one after the other; none if it is not of whole rows."""
        return self._noted_runs(metadata_of(view_spec), partial(self._found_runs, view_spec))

    def _noted_runs(self, key: object, find: Callable[[], list[RowRun]]) -> list[RowRun]:
        known = self._runs.get(key)
        if known is None:
            with no_functions(), no_modes():
                runs = find()
            if len(self._runs) >= _RUNS_KNOWN:
                self._runs.clear()
            known = self._runs[key] = runs
        return known

    @abstractmethod
    def _found_runs(self, view_spec: torch.Tensor) -> list[RowRun]:
        """As `runs`, found for the first time."""

    def compute_exactly(self) -> None:
        """From now on, products are those with the dense value."""
        self.is_exact = True
        self._runs.clear()

    def blocks(self) -> Iterator[torch.Tensor]:
        """See `Composition`."""
        layout = self.layout
        meta = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta").permute(layout.order)
        for part in _cuts(meta) if meta.numel() else ():
            yield self.value(part).contiguous()


def _cuts(spec: torch.Tensor) -> Iterator[torch.Tensor]:
    """A cut split into blocks of rows, recursively, until they are small."""
    nbytes = spec.numel() * spec.itemsize
    if nbytes <= _WRITTEN:
        yield spec
    elif nbytes > _WRITTEN * len(spec):
        for row in spec.unbind():
            yield from _cuts(row)
    else:
        yield from spec.split(_WRITTEN * len(spec) // nbytes)


class Noted(dict[Any, Any]):
    """What was found about a recipe, and can be found again. A copy, or an unpickled one, begins empty."""

    def __reduce__(self) -> tuple[type[Noted], tuple[()]]:
        return Noted, ()


class Joined(Plain):
    """Pieces that cover a value, each put in its place, converted to the value's dtype and memory order.

    Args:
        layout: of the value; dense.
        places: for each piece, the index of its first element in the value, which has as many dimensions.
    """

    __slots__ = ("_places", "_rows")

    def __init__(self, layout: Layout, pieces: Sequence[Piece], places: Sequence[tuple[int, ...]]) -> None:
        order = layout.order
        turned = list(zip(places, pieces, strict=True))
        turned = [one for one in turned if one[1].view_spec.numel()] or turned[:1]
        if order != tuple(range(len(order))):
            turned = [
                (tuple(place[dim] for dim in order), Piece(piece.handle, piece.view_spec.permute(order)))
                for place, piece in turned
            ]
        turned.sort(key=lambda one: one[0])
        super().__init__(layout, (piece for _, piece in turned))
        self._places = [place for place, _ in turned]
        rows = [(place[0], place[0] + piece.view_spec.shape[0]) for place, piece in turned] if order else []
        in_rows = all(one == other or one[1] <= other[0] for one, other in pairwise(rows))
        self._rows = [begin for begin, _ in rows] if in_rows else []  # that pieces begin with, if they do not overlap
        if len(order) > 2 and len(turned) > 1:  # a stack of matrices
            for handle in self.handles():
                handle.read_apart(Access.PICKED)

    @property
    def form(self) -> str:
        """See `Recipe`."""
        composed = (piece.handle.composed for piece in self.pieces)
        parts = sorted({one.form for one in composed if isinstance(one, Recipe)})
        parts += ["joined"] if len(self.pieces) > 1 else []
        parts += ["cast"] if any(piece.view_spec.dtype != self.layout.dtype for piece in self.pieces) else []
        return ", ".join(parts) or "laid out anew"

    @property
    def placed(self) -> list[tuple[Piece, tuple[int, ...]]]:
        """Its pieces, each with the index of its first element."""
        order = self.layout.order
        if order == tuple(range(len(order))):
            return list(zip(self.pieces, self._places, strict=True))
        back = [order.index(dim) for dim in range(len(order))]
        return [
            (Piece(piece.handle, piece.view_spec.permute(back)), tuple(place[dim] for dim in back))
            for piece, place in zip(self.pieces, self._places, strict=True)
        ]

    def note(self, digest: Digest) -> None:
        """As `Piece.note`."""
        super().note(digest)
        digest.update(repr(self._places).encode())

    def is_stored_as_is(self, view_spec: torch.Tensor, /) -> bool:
        """See `Composition`."""
        only = self._only_one(self._inside(Box.around(self.layout, view_spec))) if view_spec.numel() else None
        if only is None:
            return False
        piece, view_spec = only
        return piece.handle.composed is None or piece.handle.composed.is_stored_as_is(view_spec)

    def _only_one(self, inside: list[Inside]) -> tuple[Piece, torch.Tensor] | None:
        """The piece that contains the whole box, in the value's memory order; None if there is none."""
        if len(inside) == 1:
            [(piece, view_spec, _)] = inside
            turned = tuple(self.layout.shape[dim] for dim in self.layout.order)
            if view_spec.dtype == self.layout.dtype and lies_as(view_spec, contiguous_stride(turned)):
                return piece, view_spec
        return None

    def _read_in(self, box: Box) -> Iterator[tuple[Piece, torch.Tensor]]:
        return ((piece, view_spec) for piece, view_spec, _ in self._inside(box))

    def _in_box(self, box: Box, device: torch.device) -> torch.Tensor:
        if device == CPU and (result := kept_result((self, box))) is not None:
            return result
        only = self._only_one(self._inside(box))
        if only is None:
            return super()._in_box(box, device)
        piece, view_spec = only
        return piece.value(view_spec, device)

    def _computed(self, box: Box, device: torch.device) -> torch.Tensor:
        inside = self._inside(box)
        whole = scratch_for(contiguous(self.layout.dtype, box.size), device)
        if len(inside) > 1 and not is_loaded():
            prefetch(view for piece, view_spec, _ in inside for view in piece.reads(view_spec))
        _put_in_places(whole, inside)
        return whole

    def rows_of(self, view_spec: torch.Tensor) -> Iterator[tuple[Piece, int | None]]:
        """The pieces of a cut, and its row that each begins with; None if rows of a piece do not follow one another."""
        with no_functions(), no_modes():
            if view_spec.numel():
                box = Box.around(self.layout, view_spec)
                for piece, part, at in self._inside(box):
                    yield Piece(piece.handle, part), first_row(part.shape, at, box.size)

    def _found_runs(self, view_spec: torch.Tensor) -> list[RowRun]:
        if view_spec.dtype != self.layout.dtype or not view_spec.numel():
            return []
        only = self._only_cast(view_spec)
        if only is not None:
            return [self._cast(run) for run in only.runs()]
        shape, strides = self.layout.shape, contiguous_stride(tuple(view_spec.shape))
        is_of_rows = shape and view_spec.shape[-1:] == shape[-1:] and not view_spec.storage_offset() % shape[-1]
        if not is_of_rows or not lies_as(view_spec, strides):
            return []
        runs_found: list[RowRun] = []
        count = 0
        for piece, begin in self.rows_of(view_spec):
            if begin != count or piece.view_spec.shape[-1] != shape[-1]:
                return []
            for matrix in _matrices_of(piece.view_spec):
                runs = Piece(piece.handle, matrix).runs()
                if not runs:
                    return []
                runs_found.extend(map(self._cast, runs))
                count += len(matrix)
        return runs_found if count * shape[-1] == view_spec.numel() else []

    def _cast(self, run: RowRun) -> RowRun:
        dtype = self.layout.dtype
        return run if run.dtypes[-1] == dtype else replace(run, dtypes=(*run.dtypes, dtype))

    def _only_cast(self, view_spec: torch.Tensor) -> Piece | None:
        """The cut of the only piece, if its numbers lie as in the value; None for other values."""
        [first, *others] = self.pieces
        if others or first.view_spec.shape != self.layout.shape or not lies_as(first.view_spec, self.layout.stride):
            return None
        offset = int(first.view_spec.storage_offset()) + int(view_spec.storage_offset())
        return Piece(first.handle, first.view_spec.as_strided(view_spec.shape, view_spec.stride(), offset))

    def put_into(self, place: torch.Tensor) -> None:
        """Put the whole value into a tensor on any device, piece by piece."""
        with no_functions(), no_modes():
            inside = [(piece, piece.view_spec, at) for piece, at in zip(self.pieces, self._places, strict=True)]
            _put_in_places(place.permute(self.layout.order), inside)

    def part(self, start: tuple[int, ...], shape: tuple[int, ...]) -> Piece | None:
        """See `Recipe`."""
        if self.layout.order != tuple(range(len(shape))):
            return None
        pieces, places = [], []
        for piece, place in zip(self.pieces, self._places, strict=True):
            low = [max(one, other) for one, other in zip(place, start, strict=True)]
            ends = zip(place, piece.view_spec.shape, start, shape, strict=True)
            high = [min(begin + has, first + size) for begin, has, first, size in ends]
            if all(one < other for one, other in zip(low, high, strict=True)):
                view_spec = piece.view_spec
                for dim, (begin, end) in enumerate(zip(low, high, strict=True)):
                    view_spec = view_spec.narrow(dim, begin - place[dim], end - begin)
                pieces.append(Piece(piece.handle, view_spec).alone())
                places.append(tuple(one - first for one, first in zip(low, start, strict=True)))
        whole = joined(contiguous(self.layout.dtype, shape), pieces, places, self.pieces[0].handle.name)
        if isinstance(whole.handle.composed, Joined):
            whole.handle.composed.is_exact = self.is_exact
        return whole

    def _inside(self, box: Box) -> list[Inside]:
        """The cut of each piece that is in a box, and where in the box it goes."""
        inside: list[Inside] = []
        first, end, rows = 0, len(self.pieces), self._rows
        if rows:
            first = bisect_left(rows, rows[bisect_right(rows, box.start[0]) - 1])
            end = bisect_right(rows, box.start[0] + box.size[0] - 1)
        for piece, place in zip(self.pieces[first:end], self._places[first:end], strict=True):
            view_spec, at = piece.view_spec, []
            for dim, begin in enumerate(place):
                low = max(begin, box.start[dim])
                high = min(begin + view_spec.shape[dim], box.start[dim] + box.size[dim])
                if low >= high:
                    break
                at.append(low - box.start[dim])
                if high - low < view_spec.shape[dim]:
                    view_spec = view_spec.narrow(dim, low - begin, high - low)
            else:
                inside.append((piece, view_spec, at))
        return inside


def _put_in_places(whole: torch.Tensor, inside: Iterable[Inside]) -> None:
    for piece, view_spec, at in inside:
        place = whole
        for dim, size in enumerate(view_spec.shape):
            place = place.narrow(dim, at[dim], size)
        piece.put(place, view_spec)


def joined(layout: Layout, pieces: Sequence[Piece], places: Sequence[tuple[int, ...]], name: str) -> Piece:
    """Pieces that cover a value, as one piece: the only one itself, if its layout is the value's."""
    [first, *others] = pieces
    if not others and first.view_spec.dtype == layout.dtype and lies_as(first.view_spec, layout.stride):
        return first
    return Piece(Handle.compose(Joined(layout, pieces, places), name))


def _matrices_of(view_spec: torch.Tensor) -> Iterator[torch.Tensor]:
    """The cuts (rows, columns) of a cut of more dimensions, in the order of its rows: as few as its strides allow."""
    if view_spec.dim() <= _OF_ROWS:
        yield view_spec
    elif len(view_spec) > 1 and _rows_follow(view_spec):
        yield view_spec.flatten(0, -2)
    else:
        for part in view_spec.unbind():
            yield from _matrices_of(part)


def _rows_follow(view_spec: torch.Tensor) -> bool:
    steps = list(zip(view_spec.shape[1:-1], view_spec.stride()[1:-1], view_spec.stride()[:-2], strict=True))
    return all(size * step == outer for size, step, outer in steps)


def files_in(handle: Handle) -> list[TensorFile]:
    """The file of a value; for a composed one, each file that it is computed from."""
    return list({one.file.path: one.file for one in stored_in([handle])}.values())


def stored_in(handles: Iterable[Handle]) -> Iterator[Handle]:
    """The stored values that these are computed from; values that are not composed stand for themselves."""
    for handle in handles:
        if isinstance(handle.composed, Recipe):
            yield from handle.composed.handles()
        else:
            yield handle
