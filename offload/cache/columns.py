"""The columns of a folder: rows of fixed size, and rows of varying size (tokens, bytes, text, JSON).

Fixed-size rows are in a safetensors file, (rows, *row_shape). Other values are in `NAME.values` (rows of tensors,
as bytes) or `NAME.jsonl` (one line per row), with their places in `NAME%2findex.safetensors`, int64
(rows, 2): first byte, and length (elements of the first dimension, or bytes).

Always true:
- a header follows from the column and the number of rows: one torn by a crash is written again
- the rows begin at the same byte for any number of rows
- a write touches a row and the pages it is on; it never goes through a mapping
- varying-size values are appended to a file that only grows; a rewritten row gets a new place, so that readers of the
  old one are not disturbed
- a truncated file is never written to: new data in place of lost values would be taken for these
- what is read is what was written, or writing it was an error; nothing is unpickled
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from offload.cache.indexing import Numbers, Rows
from offload.cache.rowfile import RowFile, size_of
from offload.cache.schema import JSON, RAGGED, TENSOR, Column
from offload.cache.states import States
from offload.cache.topk import TopK, TopLogps
from offload.errors import (
    CacheError,
    CorruptFileError,
    DtypeMismatchError,
    ForeignFileError,
    OffloadError,
    ShapeMismatchError,
)
from offload.storage.file import Identity, TensorFile, file_status
from offload.storage.folders import SUFFIX, file_name
from offload.storage.header import build
from offload.storage.layout import Entry, contiguous
from offload.storage.replacing import put_file, write_all
from offload.storage.write import bytes_of, refuse_foreign
from offload.system.reasons import reading, writing
from offload.system.regular import open_regular, read_all
from offload.tensor.arguments import checked_dense, refuse_unstorable

_SHAPE = b'"shape": ['  # of a column; inside a name the quotes would be escaped
_OFFSETS = b'"data_offsets": [0, '
_ROW_SHAPE = re.compile(rb'\d+((?:, \d+)*)\], "data_offsets"')
_MOST = 2**63 - 1  # most bytes that torch can count
_SUFFIXES = {RAGGED: ".values", JSON: ".jsonl"}
_ALIGNED = 64  # alignment of a batch of values in bytes


class FixedColumn:
    """An open column of fixed-size rows."""

    def __init__(self, folder: Path, column: Column, *, writes: bool) -> None:
        """Raises: MissingFileError, CorruptFileError."""
        self.column = column
        self.path = folder / file_name(column.name)
        self._row_bytes = column.row_bytes
        self._start = _start(column)
        self._with_rows: TensorFile | None = None
        self.rowfile = RowFile(self.path, self._start, column.dtype, column.row_shape, writes=writes)

    @staticmethod
    def create(folder: Path, column: Column, rows: int) -> None:
        """A file whose rows read as zeros; takes disk space for its header only. Durable with the first row."""
        path = folder / file_name(column.name)
        refuse_foreign(path)
        put_file(path, _head(column, rows), _start(column) + rows * column.row_bytes, durable=False)

    @property
    def index(self) -> FixedColumn:
        """The file with a row of one size for each row."""
        return self

    def refuse_another(self, filled: Iterator[Rows]) -> None:
        """Check that the header is of this column; a crash may have torn it after the row count, but not before.

        `filled`: rows; a power cut may have left no header if there are none. Raises: CorruptFileError.
        """
        wanted = _head(self.column, 0)
        with reading(self.path):
            stored = read_all(self.rowfile.fd, len(wanted), 0)
        if len(stored) < len(wanted) or not any(stored):
            if next(filled, None) is not None:
                raise CorruptFileError(
                    f"column {self.column.name!r}: {self.path} has filled rows but no header: it was overwritten. "
                    "Copy the complete folder again."
                )
            return
        rows = wanted.index(_SHAPE) + len(_SHAPE)
        [expected, actual] = [_ROW_SHAPE.match(head, rows) for head in (wanted, stored)]
        if stored[:rows] != wanted[:rows] or (expected and actual and expected[1] != actual[1]):
            raise CorruptFileError(
                f"column {self.column.name!r}: {self.path} does not hold rows of {self.column.shape_text} "
                f"{self.column.dtype}, and is left as it is. Copy the complete folder again."
            )

    def check(self, rows: int) -> None:
        """Raises: CorruptFileError (the file lacks some of these rows; under the lock, it was truncated)."""
        actual, expected = size_of(self.rowfile.fd, self.path), self._size(rows)
        if actual < expected:
            raise CorruptFileError(
                f"column {self.column.name!r}: {self.path} has {actual} bytes, and {rows} rows of "
                f"{self.column.shape_text} {self.column.dtype} take {expected}: it was truncated. "
                "Copy the complete folder again."
            )

    @property
    def descriptors(self) -> dict[Path, int]:
        """One of each open file."""
        return {self.path: self.rowfile.fd}

    def has(self, rows: int) -> bool:
        return size_of(self.rowfile.fd, self.path) >= self._size(rows)

    def _size(self, rows: int) -> int:
        return self._start + rows * self._row_bytes

    def with_rows(self, rows: int) -> TensorFile:
        """The file as one with this number of rows (which it has), whatever its header says. Cached while unchanged."""
        known, name = self._with_rows, self.column.name
        is_known = known is not None and known.entry(name).layout.shape[0] == rows
        if known is None or not is_known or known.identity != Identity.of(file_status(self.path)):
            layout = contiguous(self.column.dtype, (rows, *self.column.row_shape))
            known = self._with_rows = TensorFile.raw(self.path, Entry(name, layout, _start(self.column)))
        return known

    def fit(self, rows: int, known: int) -> None:
        """Resize the file, which has `known` rows, to exactly `rows`; durable with the next row. Under the lock.

        Raises: CorruptFileError (it lacks known rows: they would read as zeros); WriteError.
        """
        self.check(known)
        head, fd = _head(self.column, rows), self.rowfile.fd
        with writing(self.path):
            if os.fstat(fd).st_size != self._size(rows) or read_all(fd, len(head), 0) != head:
                os.ftruncate(fd, self._size(rows))
                self.write_head(rows)

    def write_head(self, rows: int) -> None:
        """Say how many rows there are. Under the lock. Raises: OSError."""
        write_all(self.rowfile.fd, memoryview(_head(self.column, rows)), 0)

    def prepare(self, value: object, count: int, positions: Numbers | None) -> torch.Tensor:
        """`value` as `count` rows, reduced to those at these positions.

        Raises: ShapeMismatchError, DtypeMismatchError.
        """
        column, wanted = self.column, (count, *self.column.row_shape)
        tensor = as_tensor(value, column, self.path)
        if tuple(tensor.shape) != wanted:
            raise ShapeMismatchError(
                f"column {column.name!r} ({self.path}): {count} rows have the shape {wanted}, "
                f"the values {tuple(tensor.shape)}"
            )
        rows = tensor.contiguous().resolve_conj().resolve_neg().view(torch.uint8).view(count, self._row_bytes)
        return rows if positions is None else rows[torch.from_numpy(positions)]

    def write(self, rows: Rows, values: torch.Tensor) -> int:
        """Write what `prepare` returned to rows in ascending order; returns the number of bytes. Raises: OSError."""
        self.rowfile.write(rows, values.numpy().reshape(-1).data)
        return self.nbytes(len(rows))

    def read(self, rows: Rows) -> torch.Tensor:
        """(rows, *row_shape), plain, on the CPU."""
        return self.rowfile.read(rows)

    def nbytes(self, num_rows: int) -> int:
        return num_rows * self._row_bytes

    def sync(self) -> None:
        """Raises: OSError (written data is not on the disk)."""
        os.fdatasync(self.rowfile.fd)

    def close(self) -> None:
        self.rowfile.close()


def as_tensor(value: object, column: Column, path: Path) -> torch.Tensor:
    """A plain CPU tensor of the column's dtype. Raises: DtypeMismatchError."""
    try:
        if isinstance(value, list | tuple) and any(isinstance(part, torch.Tensor) for part in value):
            for part in value:
                if isinstance(part, torch.Tensor):
                    refuse_unstorable(part, column.name)
            value = torch.stack([torch.as_tensor(part) for part in value])
        is_typed = isinstance(value, torch.Tensor) or hasattr(value, "dtype")
        if isinstance(value, bytes | bytearray | memoryview) and column.dtype == torch.uint8:
            value = np.frombuffer(bytearray(value), dtype=np.uint8)
        tensor = torch.as_tensor(value, dtype=None if is_typed else column.dtype).detach()
        checked_dense(tensor, column.name)
    except OffloadError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise DtypeMismatchError(
            f"column {column.name!r} ({path}) holds {column.shape_text} {column.dtype}, and the "
            f"{type(value).__name__} can't be converted to that: {error}"
        ) from error
    if tensor.dtype != column.dtype:
        raise DtypeMismatchError(
            f"column {column.name!r} ({path}) holds {column.dtype}, the values are {tensor.dtype}: "
            f"cast them with .to({column.dtype})"
        )
    return tensor.cpu()


def _head(column: Column, rows: int) -> bytes:
    """The header of a file with so many rows: only two numbers differ from that of an empty one."""
    empty = _empty_head(column).replace(_SHAPE + b"0", _SHAPE + b"%d" % rows, 1)
    head = empty.replace(_OFFSETS + b"0]", _OFFSETS + b"%d]" % (rows * column.row_bytes), 1)
    return head.ljust(_start(column))


@cache
def _empty_head(column: Column) -> bytes:
    """Without the spaces that follow."""
    data = build({column.name: contiguous(column.dtype, (0, *column.row_shape))}, {"name": column.name}).data
    return struct.pack("<Q", _start(column) - 8) + data[8:].rstrip(b" ")


@cache
def _start(column: Column) -> int:
    """The first byte of the rows: where it would be with as many as torch can count."""
    each = math.prod(max(size, 1) for size in column.row_shape) * column.dtype.itemsize
    layouts = {column.name: contiguous(column.dtype, (_MOST // each, *column.row_shape))}
    return build(layouts, {"name": column.name}).header.entries[column.name].start


Prepared: TypeAlias = "tuple[Numbers, Sequence[memoryview | bytes]]"
"""Rows to be written: the length of each, and its bytes."""


class HeapColumn:
    """An open column of varying-size rows."""

    def __init__(self, folder: Path, column: Column, states: States, number: int, *, writes: bool) -> None:
        """`number` is that of its length in `states`. Raises: MissingFileError, CorruptFileError."""
        self.column = column
        self.path = _path(folder, column)
        self._states, self._number = states, number
        self._each = column.row_bytes  # bytes per counted element
        self._values = RowFile(self.path, 0, torch.uint8, (), writes=writes)  # a row per byte
        with ExitStack() as on_error:
            on_error.callback(self._values.close)
            self.index = FixedColumn(folder, _index_of(column), writes=writes)
            on_error.pop_all()

    @staticmethod
    def create(folder: Path, column: Column, rows: int) -> None:
        """Empty files. Raises: ForeignFileError (there is a file that offload did not write); OSError."""
        path = _path(folder, column)
        with open_regular(path, os.O_RDWR | os.O_CREAT) as new:
            if os.fstat(new.fileno()).st_size:
                raise ForeignFileError(f"{path} exists, and is left as it is: choose another folder for the cache")
        FixedColumn.create(folder, _index_of(column), rows)

    @property
    def descriptors(self) -> dict[Path, int]:
        """One of each open file."""
        return {self.path: self._values.fd, **self.index.descriptors}

    def check(self, rows: int) -> None:
        """Raises: CorruptFileError (the index lacks rows; under the lock, if values are missing, too)."""
        self.index.check(rows)
        end, expected = self._values.size, self._states.length(self._number)
        if end < expected:
            raise self._cut(end, expected)

    def settle(self, filled: Iterable[Rows]) -> None:
        """Find the length of the file if it is unknown, or if a power cut took values of no row. Under the lock.

        Raises: CorruptFileError (it took more than that).
        """
        end = self._values.size
        if 0 < self._states.length(self._number) <= end:
            return
        for rows in filled:
            self._refuse_outside(self.index.read(rows).numpy(), end)
        self._states.set_length(self._number, end)

    def prepare(self, value: object, count: int, positions: Numbers | None) -> Prepared:
        """`value` as rows, reduced to those at these positions. Raises: ShapeMismatchError, DtypeMismatchError."""
        is_single = isinstance(value, torch.Tensor | np.ndarray) and not value.ndim
        if is_single or isinstance(value, str | bytes | bytearray | Mapping) or not hasattr(value, "__iter__"):
            raise ShapeMismatchError(
                f"column {self.column.name!r} ({self.path}): a single {type(value).__name__} for {count} rows: "
                "give a list with one value per row"
            )
        rows = list(value.unbind()) if isinstance(value, torch.Tensor) else list(value)
        if len(rows) != count:
            raise ShapeMismatchError(f"column {self.column.name!r} ({self.path}): {count} rows, {len(rows)} values")
        if positions is not None:
            rows = [rows[place] for place in positions]
        if self.column.kind == RAGGED:
            return self._prepared_tensors(rows)
        parts = [self._encoded(row) for row in rows]
        return np.fromiter(map(len, parts), dtype=np.int64, count=len(parts)), parts

    def write(self, rows: Rows, prepared: Prepared) -> int:
        """Write what `prepare` returned; returns the number of bytes. Under the lock. Raises: OSError."""
        counts, parts = prepared
        sizes = counts * self._each
        at, data = self._values.size, memoryview(b"".join(parts))
        if self.column.kind == RAGGED:
            at = -(-at // _ALIGNED) * _ALIGNED
        starts = np.where(sizes > 0, at + np.cumsum(sizes) - sizes, 0)  # the file may end before `at`
        self._values.write(Rows.run(at, at + len(data)), data)
        if data:
            self._states.set_length(self._number, at + len(data))
        index = torch.from_numpy(np.stack([starts, counts], axis=1))
        return len(data) + self.index.write(rows, index.view(torch.uint8))

    def read(self, rows: Rows) -> list[Any] | Ragged:
        """Raises: CorruptFileError."""
        index = self.index.read(rows).numpy()
        starts, counts = index[:, 0], index[:, 1]
        self._refuse_outside(index, self._values.size)
        sizes = counts * self._each
        flat = torch.empty(int(sizes.sum()), dtype=torch.uint8, device="cpu")
        self._values.read_runs(starts, sizes, flat, are_picked=not rows.span)
        if self.column.kind == RAGGED:
            values = flat.view(self.column.dtype) if self._each else torch.empty(0, dtype=self.column.dtype)
            return Ragged(values.view(int(counts.sum()), *self.column.row_shape), counts)
        data, places = flat.numpy().tobytes(), np.cumsum(sizes) - sizes
        parts = [data[place : place + size] for place, size in zip(places.tolist(), sizes.tolist(), strict=True)]
        return [self._decoded(part) for part in parts]

    def _refuse_outside(self, index: Numbers, end: int) -> None:
        """Raises: CorruptFileError (the index, (rows, 2), points outside the file, of `end` bytes)."""
        starts, counts = index[:, 0], index[:, 1]
        most = (end - starts) // self._each if self._each else counts
        if (index < 0).any() or (counts > most).any():
            raise self._cut(end, None)

    def _cut(self, actual: int, expected: int | None) -> CorruptFileError:
        return CorruptFileError(
            f"column {self.column.name!r}: {self.path} has {actual} bytes, and its rows take "
            f"{'more' if expected is None else expected}: it was truncated. Copy the complete folder again."
        )

    def nbytes(self, num_rows: int) -> int:
        return self.index.nbytes(num_rows) + self._values.size

    def sync(self) -> None:
        """Raises: OSError (written data is not on the disk)."""
        os.fdatasync(self._values.fd)
        self.index.sync()

    def close(self) -> None:
        self._values.close()
        self.index.close()

    def _prepared_tensors(self, rows: list[Any]) -> Prepared:
        shape = self.column.row_shape
        tensors = [as_tensor(row, self.column, self.path).contiguous().resolve_conj().resolve_neg() for row in rows]
        for tensor in tensors:
            if tensor.ndim != len(shape) + 1 or tuple(tensor.shape[1:]) != shape:
                raise ShapeMismatchError(
                    f"column {self.column.name!r} ({self.path}): a row has the shape {self.column.shape_text}, "
                    f"the value {tuple(tensor.shape)}"
                )
        counts = np.array([len(tensor) for tensor in tensors], dtype=np.int64)
        return counts, [bytes_of(tensor) for tensor in tensors]

    def _encoded(self, row: object) -> bytes:
        try:
            return json.dumps(_checked(row), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            what = f"column {self.column.name!r} ({self.path}) holds JSON"
            raise DtypeMismatchError(f"{what}, and a value can't be written as JSON: {error}") from error

    def _decoded(self, part: bytes) -> Any:
        try:
            return json.loads(part) if part else None
        except (ValueError, RecursionError) as error:
            said = f"{self.path} holds a row that is not JSON: {error}. Download or copy all of it again."
            raise CorruptFileError(said) from error


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different lengths: all values, row by row, and the length of each row."""

    values: torch.Tensor
    counts: Numbers

    def formed(self, form: str, padding: complex, top: TopK | None = None) -> Any:
        """As a list, or padded; of unpacked log-probabilities, a list of pairs, or a pair.

        Raises: CacheError (`form` is unknown).
        """
        if top is not None:
            both = [Ragged(values, self.counts).formed(form, padding) for values in top.read(self.values)]
            return list(map(TopLogps, *both)) if form == "list" else TopLogps(*both)
        if form == "list":
            return list(self.values.split(self.counts.tolist()))
        if form == "padded":
            counts, longest = torch.from_numpy(self.counts), int(self.counts.max(initial=0))
            padded = self.values.new_full((len(counts), longest, *self.values.shape[1:]), padding)
            padded[(torch.arange(longest, device="cpu") < counts[:, None]).to(padded.device)] = self.values
            return padded
        raise CacheError(f"unknown ragged={form!r}: use 'list' or 'padded'")


def _path(folder: Path, column: Column) -> Path:
    return folder / (file_name(column.name).removesuffix(SUFFIX) + _SUFFIXES[column.kind])


def _index_of(column: Column) -> Column:
    return Column(f"{column.name}/index", TENSOR, torch.int64, (2,))


def _checked(value: object) -> Any:
    """Refuse keys that JSON would turn into text."""
    for key in value if isinstance(value, dict) else ():
        if not isinstance(key, str):
            raise TypeError(f"the key {key!r} is not text")
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        _checked(part)
    return value


def sent(value: Any, device: torch.device, *, pinned: bool) -> Any:
    """What was read of a column, on a device: a tensor, or rows of different lengths; others as they are."""
    if isinstance(value, Ragged):
        return Ragged(sent(value.values, device, pinned=pinned), value.counts)
    if not isinstance(value, torch.Tensor):
        return value
    if pinned and value.device.type == "cpu":
        value = value.pin_memory()
    return value if value.device == device else value.to(device, non_blocking=pinned)
