"""A column whose rows have one size: a safetensors file of its own, (room, *row_shape).

Always true:
- what the header says follows from the column and its room: a header that a crash has torn is written again
- the rows begin at the same byte whatever the room
- what is written is a row, and the pages that it lies on; never through a mapping
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from offload.cache.gather import size_of
from offload.cache.indexing import Numbers, Rows
from offload.cache.rowfile import RowFile
from offload.cache.schema import Column
from offload.errors import CorruptFileError, DtypeMismatchError, OffloadError, ShapeMismatchError
from offload.storage.file import Identity, TensorFile, file_status
from offload.storage.header import build
from offload.storage.layout import Entry, contiguous
from offload.storage.names import file_name
from offload.storage.regular import reading
from offload.storage.write import bytes_of, explained, put_file, refuse_foreign, write_all
from offload.tensor.arguments import checked_dense, refuse_unstorable
from offload.tensor.wrapper import is_offloaded

Filled: TypeAlias = "npt.NDArray[np.bool_] | None"
_SHAPE = b'"shape": ['  # of a column; within a name the quotes would have slashes before them
_ROW_SHAPE = re.compile(rb'\d+((?:, \d+)*)\], "data_offsets"')
_MOST = 2**63 - 1  # bytes that torch can count


class FixedColumn:
    """An opened column."""

    def __init__(self, folder: Path, column: Column, *, writes: bool) -> None:
        """
        Raises:
            MissingFileError, CorruptFileError
        """
        self.column = column
        self.path = folder / file_name(column.name)
        self._row_bytes = row_bytes(column)
        self._with_rows: TensorFile | None = None
        self._file = RowFile(self.path, _start(column), column.dtype, column.row_shape, writes=writes)
        try:
            self._is_blank = self._refuse_another()
        except BaseException:
            self._file.close()
            raise

    @staticmethod
    def create(folder: Path, column: Column, room: int) -> None:
        """A file whose rows read as zeros; takes the disk space of its header. On the disk that is with the first row.

        Raises:
            ForeignFileError: a file that offload did not write stands there.
            WriteError
        """
        path = folder / file_name(column.name)
        refuse_foreign(path)
        put_file(path, _head(column, room), _size(column, room), durable=False)

    def table(self, count: int) -> tuple[RowFile, torch.Tensor] | None:
        """The file, and so many of its rows, if it is in memory."""
        words = self._file.table(count)
        return None if words is None else (self._file, words)

    def _refuse_another(self) -> bool:
        """A crash may have torn a header behind the number of rows: what stands before is always the same.

        Returns:
            Whether there is no header: `check` says that it was cut, or a power cut has left nothing of it, and no row.
        """
        wanted = _head(self.column, 0)
        with reading(self.path):
            found = os.pread(self._file.fd, len(wanted), 0)
        if len(found) < len(wanted) or not any(found):
            return True
        rows = wanted.index(_SHAPE) + len(_SHAPE)
        [expected, said] = [_ROW_SHAPE.match(head, rows) for head in (wanted, found)]
        if found[:rows] != wanted[:rows] or (expected and said and expected[1] != said[1]):
            raise CorruptFileError(
                f"column {self.column.name!r}: {self.path} does not hold rows of {self.column.shape_text} "
                f"{self.column.dtype}, and is left as it is. Get the folder again, whole."
            )
        return False

    def refuse_blank(self, filled: Iterator[Rows]) -> None:
        """
        Raises:
            CorruptFileError: there is no header, though rows are filled.
        """
        if self._is_blank and next(filled, None) is not None:
            raise CorruptFileError(
                f"column {self.column.name!r}: {self.path} has filled rows, and no header: it was overwritten. "
                "Get the folder again, whole."
            )

    def check(self, room: int) -> None:
        """
        Raises:
            CorruptFileError: the file has no such room.
        """
        found, expected = size_of(self._file.fd, self.path), _size(self.column, room)
        if found < expected:
            raise CorruptFileError(
                f"column {self.column.name!r}: {self.path} has {found} bytes, and {room} rows of "
                f"{self.column.shape_text} {self.column.dtype} take {expected}: it was cut. "
                "Get the folder again, whole."
            )

    def refuse_cut(self, room: int) -> None:
        """As `check`: what is said under the lock is so."""
        self.check(room)

    def has_room(self, room: int) -> bool:
        return size_of(self._file.fd, self.path) >= _size(self.column, room)

    def _identity(self) -> Identity:
        return Identity.of(file_status(self.path))

    def with_rows(self, rows: int) -> TensorFile:
        """The file as one of so many rows, which it has, whatever its header says. One while it does not change."""
        known, name = self._with_rows, self.column.name
        if known is not None and known.entry(name).layout.shape[0] == rows and known.identity == self._identity():
            return known
        layout = contiguous(self.column.dtype, (rows, *self.column.row_shape))
        self._with_rows = TensorFile.raw(self.path, Entry(name, layout, _start(self.column)))
        return self._with_rows

    def fit(self, room: int, known: int) -> None:
        """Make the file, which has room for as many rows as are `known`, exactly as `room` has it. Under the lock.

        On the disk that is with the next row that is.

        Raises:
            CorruptFileError: it has not: what was cut off would read as zeros.
            WriteError
        """
        self.check(known)
        head, fd = _head(self.column, room), self._file.fd
        with explained(self.path, 0, "folder"):
            if os.fstat(fd).st_size != _size(self.column, room) or os.pread(fd, len(head), 0) != head:
                os.ftruncate(fd, _size(self.column, room))
                write_all(fd, memoryview(head), 0)

    def prepare(self, value: Any, count: int, kept: Numbers | None) -> torch.Tensor:
        """`value` as `count` rows, of which only those at the places `kept` are to be written: their bytes.

        Raises:
            ShapeMismatchError, DtypeMismatchError
        """
        column, wanted = self.column, (count, *self.column.row_shape)
        tensor = as_tensor(value, column, self.path)
        if tuple(tensor.shape) != wanted:
            raise ShapeMismatchError(
                f"column {column.name!r} ({self.path}): {count} rows have the shape {wanted}, "
                f"the values {tuple(tensor.shape)}"
            )
        rows = self._as_bytes(tensor.contiguous().resolve_conj().resolve_neg())
        return rows if kept is None else rows[torch.from_numpy(kept)]

    def write(self, rows: Rows, values: torch.Tensor) -> int:
        """Write what `prepare` gave to rows whose numbers ascend; how many bytes that was.

        Raises:
            OSError
        """
        self._file.write(rows, bytes_of(values))
        return self.nbytes(len(rows))

    def read(
        self, rows: Rows, filled: Filled, out: torch.Tensor | None = None, *, pinned: bool = False
    ) -> torch.Tensor:
        """(rows, *row_shape), plain, on the CPU; zeros for rows that are not `filled`: None where all are.

        Raises:
            CorruptFileError
            ShapeMismatchError: `out` is another.
        """
        if out is not None:
            self._refuse_other(out, (len(rows), *self.column.row_shape))
        if filled is None:
            return self._file.read(rows, out, pinned=pinned)
        if out is None:
            out = torch.empty(
                (len(rows), *self.column.row_shape), dtype=self.column.dtype, device="cpu", pin_memory=pinned
            )
        part = self._file.read(Rows(rows.numbers[filled]))  # a writer may be cutting off room in which no row is filled
        self._as_bytes(out).zero_()[torch.from_numpy(filled)] = self._as_bytes(part)
        return out

    def _refuse_other(self, out: torch.Tensor, shape: tuple[int, ...]) -> None:
        checked_dense(out, f"out[{self.column.name!r}]")
        if tuple(out.shape) != shape or out.dtype != self.column.dtype or not out.is_contiguous() or _is_elsewhere(out):
            raise ShapeMismatchError(
                f"column {self.column.name!r}: `out` is to be contiguous, on the CPU, {shape} {self.column.dtype}, "
                f"and is {tuple(out.shape)} {out.dtype}"
            )

    def _as_bytes(self, rows: torch.Tensor) -> torch.Tensor:
        """(rows, bytes of a row), over the same memory."""
        return rows.view(torch.uint8).view(len(rows), self._row_bytes)

    def nbytes(self, num_rows: int) -> int:
        return num_rows * self._row_bytes

    def sync(self) -> None:
        """
        Raises:
            OSError: what was written is not on the disk.
        """
        os.fdatasync(self._file.fd)

    def close(self) -> None:
        self._file.close()


def _is_elsewhere(out: torch.Tensor) -> bool:
    """Whether memory of this process is not what the tensor says."""
    return out.device.type != "cpu" or is_offloaded(out) or out.is_conj() or out.is_neg()


def row_bytes(column: Column) -> int:
    return math.prod(column.row_shape) * column.dtype.itemsize


def as_tensor(value: Any, column: Column, path: Path) -> torch.Tensor:
    """A plain tensor on the CPU, of the column's dtype.

    Raises:
        DtypeMismatchError: it is of another one; lists and numbers become what the column holds.
    """
    try:
        if isinstance(value, list | tuple) and any(isinstance(part, torch.Tensor) for part in value):
            for part in value:
                if isinstance(part, torch.Tensor):
                    refuse_unstorable(part, column.name)
            value = torch.stack([torch.as_tensor(part) for part in value])
        is_typed = isinstance(value, torch.Tensor) or hasattr(value, "dtype")
        tensor = torch.as_tensor(value, dtype=None if is_typed else column.dtype).detach()
        checked_dense(tensor, column.name)
    except OffloadError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise DtypeMismatchError(
            f"column {column.name!r} ({path}) holds {column.shape_text} {column.dtype}, and no tensor of that can be "
            f"made of the {type(value).__name__} that was given: {error}"
        ) from error
    if tensor.dtype != column.dtype:
        raise DtypeMismatchError(
            f"column {column.name!r} ({path}) holds {column.dtype}, the values are {tensor.dtype}: "
            f"cast them with .to({column.dtype})"
        )
    return tensor.cpu()


def _head(column: Column, room: int) -> bytes:
    head, _ = build({column.name: contiguous(column.dtype, (room, *column.row_shape))}, {"name": column.name})
    length = _start(column) - 8
    return struct.pack("<Q", length) + head[8:].rstrip(b" ").ljust(length)


@cache
def _start(column: Column) -> int:
    """Where the rows begin: where they would with the most room that torch can count."""
    each = math.prod(max(size, 1) for size in column.row_shape) * column.dtype.itemsize
    _, [start] = build(
        {column.name: contiguous(column.dtype, (_MOST // each, *column.row_shape))}, {"name": column.name}
    )
    return start


def _size(column: Column, room: int) -> int:
    return _start(column) + room * row_bytes(column)
