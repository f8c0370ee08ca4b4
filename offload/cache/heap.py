"""A column whose rows have no size of their own: tokens, text, what JSON can say, bytes.

Always true:
- values stand one behind the other in a file that only grows; where each row's are stands in a column of its own
- a row that is written again gets a new place: who reads the old one is not disturbed
- nothing is written to a file that was cut: what is put where the values of a row were would be taken for that row's
- what comes back is what went in, or writing it was an error; nothing is unpickled

The files: `NAME.values` (rows of tensors, as bytes), `NAME.jsonl` (a line a row) or `NAME.bytes`; and
`NAME%2findex.safetensors`, int64 (room, 2): first byte, and how many (elements of the first dimension, or bytes).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload.cache.columns import Filled, FixedColumn, as_tensor, row_bytes
from offload.cache.gather import opened, read_parts, size_of
from offload.cache.indexing import Numbers, Rows
from offload.cache.schema import BYTES, JSON, RAGGED, TENSOR, Column
from offload.cache.states import Length
from offload.errors import CorruptFileError, DtypeMismatchError, ForeignFileError, ShapeMismatchError
from offload.storage.names import SUFFIX, file_name
from offload.storage.regular import open_regular
from offload.storage.write import bytes_of, write_all
from offload.tensor.arguments import checked_number

_SUFFIXES = {RAGGED: ".values", JSON: ".jsonl", BYTES: ".bytes"}
_ALIGNED = 64  # bytes at a multiple of which a batch begins


@dataclass(frozen=True, slots=True)
class Batch:
    """Values on their way to the file.

    Attributes:
        counts: how many each row has.
        parts: their bytes, row by row.
    """

    counts: Numbers
    parts: Sequence[memoryview | bytes]


class HeapColumn:
    """An opened column."""

    def __init__(self, folder: Path, column: Column, length: Length, *, writes: bool) -> None:
        """
        Raises:
            MissingFileError, CorruptFileError
        """
        self.column = column
        self.path = _path(folder, column)
        self._length = length
        self._each = row_bytes(column)  # bytes of what is counted
        self._fd = opened(self.path, os.O_RDWR if writes else os.O_RDONLY)
        try:
            self._index = FixedColumn(folder, _index_of(column), writes=writes)
        except BaseException:
            os.close(self._fd)
            raise

    @staticmethod
    def create(folder: Path, column: Column, room: int) -> None:
        """Empty files.

        Raises:
            ForeignFileError: a file that offload did not write stands there.
            OSError
        """
        path = _path(folder, column)
        fd = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            if os.fstat(fd).st_size:
                raise ForeignFileError(f"{path} exists: it is left as it is. Take another folder for the cache.")
        finally:
            os.close(fd)
        FixedColumn.create(folder, _index_of(column), room)

    def check(self, room: int) -> None:
        self._index.check(room)

    def refuse_cut(self, room: int) -> None:
        """Under the lock.

        Raises:
            CorruptFileError: the index has no such room, or the values are not all there.
        """
        self._index.refuse_cut(room)
        end, expected = size_of(self._fd, self.path), self._length.get()
        if end < expected:
            raise self._cut(end, expected)

    def refuse_blank(self, filled: Iterator[Rows]) -> None:
        self._index.refuse_blank(filled)

    def has_room(self, room: int) -> bool:
        return self._index.has_room(room)

    def fit(self, room: int, known: int) -> None:
        self._index.fit(room, known)

    def settle(self, filled: Iterable[Rows]) -> None:
        """Find out how long the file is to be where that is not known, or a power cut took what no row was yet.

        Under the lock.

        Raises:
            CorruptFileError: it took more than that.
        """
        end = size_of(self._fd, self.path)
        if 0 < self._length.get() <= end:
            return
        for rows in filled:
            self._refuse_outside(self._index.read(rows, None).numpy(), end)
        self._length.set(end)

    def prepare(self, value: Any, count: int, kept: Numbers | None) -> Batch:
        """`value` as rows, of which only those at the places `kept` are to be written.

        Raises:
            ShapeMismatchError, DtypeMismatchError
        """
        is_single = isinstance(value, torch.Tensor | np.ndarray) and not value.ndim
        if is_single or isinstance(value, str | bytes | bytearray | Mapping) or not hasattr(value, "__iter__"):
            raise ShapeMismatchError(
                f"column {self.column.name!r} ({self.path}): one {type(value).__name__} is given for {count} rows: "
                "give a list, with a value for each row"
            )
        rows = list(value.unbind()) if isinstance(value, torch.Tensor) else list(value)
        if len(rows) != count:
            raise ShapeMismatchError(f"column {self.column.name!r} ({self.path}): {count} rows, {len(rows)} values")
        if kept is not None:
            rows = [rows[place] for place in kept]
        if self.column.kind == RAGGED:
            return self._prepared_tensors(rows)
        parts = [self._encoded(row) for row in rows]
        return Batch(np.fromiter(map(len, parts), dtype=np.int64, count=len(parts)), parts)

    def write(self, rows: Rows, batch: Batch) -> int:
        """Write what `prepare` gave; how many bytes that was. Under the lock.

        Raises:
            OSError
        """
        sizes = batch.counts * self._each
        at = os.fstat(self._fd).st_size
        if self.column.kind == RAGGED:
            at = -(-at // _ALIGNED) * _ALIGNED
        starts = np.where(sizes > 0, at + np.cumsum(sizes) - sizes, 0)  # the file may end before `at`
        nbytes = write_all(self._fd, memoryview(b"".join(batch.parts)), at)
        if nbytes:
            self._length.set(at + nbytes)
        return nbytes + self._index.write(
            rows, torch.from_numpy(np.stack([starts, batch.counts], axis=1)).view(torch.uint8)
        )

    def lengths(self, rows: Rows, filled: Filled) -> Numbers:
        counts: Numbers = self._index.read(rows, filled).numpy()[:, 1]
        return counts

    def read(
        self, rows: Rows, filled: Filled, out: torch.Tensor | None = None, *, pinned: bool = False
    ) -> list[Any] | Ragged:
        """The rows; of those that are not filled, no values.

        Raises:
            CorruptFileError
        """
        if out is not None:
            raise ShapeMismatchError(
                f"column {self.column.name!r} has rows of different lengths: `out` can't hold them"
            )
        index = self._index.read(rows, filled).numpy()
        starts, counts = index[:, 0], index[:, 1]
        self._refuse_outside(index, size_of(self._fd, self.path))
        sizes = counts * self._each
        flat = torch.empty(int(sizes.sum()), dtype=torch.uint8, device="cpu", pin_memory=pinned)
        places = np.cumsum(sizes) - sizes
        read_parts(self._fd, self.path, starts, sizes, places, flat.numpy().data)
        if self.column.kind == RAGGED:
            values = flat.view(self.column.dtype) if self._each else torch.empty(0, dtype=self.column.dtype)
            return Ragged(values.view(int(counts.sum()), *self.column.row_shape), counts)
        data = flat.numpy().tobytes()
        parts = [data[place : place + size] for place, size in zip(places.tolist(), sizes.tolist(), strict=True)]
        return [self._decoded(part) for part in parts]

    def _refuse_outside(self, index: Numbers, end: int) -> None:
        """
        Args:
            index: (rows, 2)
            end: bytes that the file has.

        Raises:
            CorruptFileError: values of a row are said to be where there are none.
        """
        starts, counts = index[:, 0], index[:, 1]
        most = (end - starts) // self._each if self._each else counts
        if (index < 0).any() or (counts > most).any():
            raise self._cut(end, None)

    def _cut(self, found: int, expected: int | None) -> CorruptFileError:
        return CorruptFileError(
            f"column {self.column.name!r}: {self.path} has {found} bytes, and its rows take "
            f"{'more' if expected is None else expected}: it was cut. Get the folder again, whole."
        )

    def nbytes(self, num_rows: int) -> int:
        return self._index.nbytes(num_rows) + size_of(self._fd, self.path)

    def sync(self) -> None:
        """
        Raises:
            OSError: what was written is not on the disk.
        """
        os.fdatasync(self._fd)
        self._index.sync()

    def close(self) -> None:
        os.close(self._fd)
        self._index.close()

    def _prepared_tensors(self, rows: list[Any]) -> Batch:
        shape = self.column.row_shape
        tensors = [as_tensor(row, self.column, self.path).contiguous().resolve_conj().resolve_neg() for row in rows]
        for tensor in tensors:
            if tensor.ndim != len(shape) + 1 or tuple(tensor.shape[1:]) != shape:
                raise ShapeMismatchError(
                    f"column {self.column.name!r} ({self.path}): a row has the shape {self.column.shape_text}, "
                    f"the value {tuple(tensor.shape)}"
                )
        counts = np.array([len(tensor) for tensor in tensors], dtype=np.int64)
        return Batch(counts, [bytes_of(tensor) for tensor in tensors])

    def _encoded(self, row: Any) -> bytes:
        what = f"column {self.column.name!r} ({self.path})"
        if self.column.kind == BYTES:
            if not isinstance(row, bytes | bytearray | memoryview):
                raise DtypeMismatchError(f"{what} holds bytes, the value is of {type(row).__name__}")
            return bytes(row)
        try:
            return json.dumps(_checked(row), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise DtypeMismatchError(
                f"{what} holds what JSON can say, and a value can't be said in it: {error}"
            ) from error

    def _decoded(self, part: bytes) -> Any:
        if self.column.kind == BYTES:
            return part
        try:
            return json.loads(part) if part else None
        except (ValueError, RecursionError) as error:
            raise CorruptFileError(
                f"{self.path} holds a row that is not JSON: {error}. Get it again, whole."
            ) from error


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different lengths: all their values, one row behind the other, and how many each has."""

    values: torch.Tensor
    counts: Numbers

    def as_list(self) -> list[torch.Tensor]:
        return list(self.values.split(self.counts.tolist()))

    def as_padded(self, padding: complex) -> torch.Tensor:
        """(rows, longest, ...)"""
        counts = torch.from_numpy(self.counts)
        longest = int(self.counts.max()) if len(counts) else 0
        shape = (len(counts), longest, *self.values.shape[1:])
        checked_number(padding, self.values.dtype, "padding")
        padded = torch.full(shape, padding, dtype=self.values.dtype, device=self.values.device)
        padded[(torch.arange(longest, device="cpu") < counts[:, None]).to(padded.device)] = self.values
        return padded

    def as_jagged(self) -> torch.Tensor:
        """A nested tensor, `layout=torch.jagged`, over the values as they are."""
        offsets = torch.from_numpy(np.append(0, np.cumsum(self.counts))).to(self.values.device)
        jagged: torch.Tensor = torch.nested.nested_tensor_from_jagged(self.values, offsets)
        return jagged


def _path(folder: Path, column: Column) -> Path:
    return folder / (file_name(column.name).removesuffix(SUFFIX) + _SUFFIXES[column.kind])


def _index_of(column: Column) -> Column:
    return Column(f"{column.name}/index", TENSOR, torch.int64, (2,))


def _checked(value: Any) -> Any:
    """JSON would turn other keys into text."""
    if isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not text")
            _checked(part)
    elif isinstance(value, list | tuple):
        for part in value:
            _checked(part)
    return value
