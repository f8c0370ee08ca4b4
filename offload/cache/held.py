"""Tensors with one row per index, all of the same length: in memory, or in a file.

Always true:
- all columns have the same number of rows
- a file is read a batch at a time, in place, and never written to; if it is modified, that is an error. If it is
  replaced, the old one stays open, and is read from
- a file that is written is complete or does not exist; only files of ours are replaced
"""

from __future__ import annotations

import errno
import json
import os
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from offload.cache.indexing import Numbers, Out, Rows
from offload.cache.rowfile import Descriptors, RowFile
from offload.cache.schema import Column, Manifest, columns_named, schema_of
from offload.checkpoints.checkpoint import open_checkpoint
from offload.errors import (
    ArgumentTypeError,
    CacheError,
    ChangedFileError,
    CorruptFileError,
    ShapeMismatchError,
    UnsupportedOpError,
)
from offload.storage.file import Identity, TensorFile
from offload.storage.header import VERSION
from offload.storage.layout import contiguous
from offload.storage.pickled import NOTES
from offload.storage.replacing import replacing
from offload.storage.write import from_blocks, put_values, refuse_foreign
from offload.system.modes import no_functions, no_modes
from offload.system.reasons import reading
from offload.tensor.arguments import checked_dense, refuse_unstorable
from offload.tensor.guests import CPU, mapped_value
from offload.tensor.views import handle_of, is_part
from offload.tensor.wrapper import OffloadedTensor, is_offloaded, wrap_handles

_NOTE = "rows"  # the note in a file of ours
_ROOT = "archive"  # the folder inside a file of torch.save that is given a file object


class HeldColumn:
    """An existing column: a plain tensor, or one over a file."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        refuse_unstorable(tensor, name)
        if not tensor.dim():
            raise CacheError(f"column {name!r} is a scalar: a column needs a first dimension, for the rows")
        self.tensor = tensor.detach()
        self._rows: RowFile | torch.Tensor | None = None  # where rows are read from: the file, or its mapping
        self._of: TensorFile | None = None  # the file that `_rows` belongs to

    def read(self, rows: Rows) -> torch.Tensor:
        """(rows, *row_shape): on the tensor's device; for a file, on the CPU."""
        source = self._source()
        if isinstance(source, RowFile):
            return source.read(rows)
        return source[torch.from_numpy(rows.numbers).to(source.device)]

    def whole(self) -> torch.Tensor:
        """All rows, contiguous, on the CPU; those of a file are mapped. `torch.save` writes them and nothing else."""
        source = self._source()
        if isinstance(source, RowFile):
            return source.whole(len(self.tensor))
        values = source.cpu().contiguous().resolve_conj().resolve_neg()
        return values if values.untyped_storage().nbytes() == values.nbytes else values.clone()

    def _source(self) -> RowFile | torch.Tensor:
        if not is_offloaded(self.tensor):
            return self.tensor
        handle = handle_of(self.tensor)
        if handle.owned:
            handle.base()  # switches to a new file if there is one
        if self._rows is None or self._of is not handle.file:
            self.open({})
        assert self._rows is not None
        assert self._of is not None
        if not handle.owned:
            with reading(self._of.path):
                now = Identity.of(os.fstat(self._files.fd))
            if now != self._of.identity:
                raise ChangedFileError(
                    f"{self._of.path} has changed since it was opened (size or modification time): its rows can't be "
                    "trusted any more. Open the cache again."
                )
        return self._rows

    def open(self, opened: dict[TensorFile, Descriptors]) -> None:
        """Keep its file open from now on, if there is one; `opened` are those of other columns, and this is added."""
        if not is_offloaded(self.tensor):
            return
        tensor: OffloadedTensor = self.tensor
        handle = handle_of(tensor)
        file = handle.file
        if file not in opened:
            opened[file] = Descriptors.reopened(file.descriptor(settled=not handle.owned), file.path)
        if is_part(tensor) or handle.layout != contiguous(tensor.dtype, tuple(tensor.shape)):
            self._rows = mapped_value(tensor)
        else:
            row_shape = tuple(tensor.shape[1:])
            self._rows = RowFile(handle.path, handle.extent[0], tensor.dtype, row_shape, files=opened[file])
        self._of, self._files = file, opened[file]

    def __getstate__(self) -> torch.Tensor:
        return self.tensor

    def __setstate__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._rows = self._of = None


class HeldStore:
    """Existing columns, with the interface of `Store`. Rows can't be written."""

    is_closed = False
    writes = False

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, object], folder: Path | None = None
    ) -> None:
        """Raises: as `TensorCache`; MissingFileError, ChangedFileError, CorruptFileError, ReadError."""
        if not isinstance(tensors, Mapping):
            raise ArgumentTypeError(f"tensors is a {type(tensors).__name__}: give a dict of names and tensors")
        self.folder = folder
        self._columns = {name: HeldColumn(name, tensor) for name, tensor in tensors.items()}
        lengths = {name: len(column.tensor) for name, column in self._columns.items()}
        if len(set(lengths.values())) != 1:
            each = ", ".join(f"{name!r} has {length}" for name, length in lengths.items())
            differ = f"the tensors differ in length ({each}): all columns must have the same number of rows"
            raise CacheError(differ if each else "there are no tensors: a cache has at least one column")
        [self.num_rows] = set(lengths.values())
        self.schema = schema_of({name: (value.dtype, value.shape[1:]) for name, value in self.tensors.items()})
        self.manifest = Manifest(self.schema, self.num_rows, metadata)
        self.device = next(iter(self.tensors.values())).device
        opened: dict[TensorFile, Descriptors] = {}
        for column in self._columns.values() if folder else ():
            column.open(opened)  # stays open, even if the file is replaced

    @property
    def place(self) -> str:
        return str(self.folder or "memory")

    @property
    def nbytes(self) -> int:
        return sum(column.tensor.nbytes for column in self._columns.values())

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: column.tensor for name, column in self._columns.items()}

    def names(self, columns: Iterable[str] | None) -> list[str]:
        """Raises: ColumnError (there is no such column)."""
        return columns_named(columns, self.schema, self.place)

    def missing(self, columns: Iterable[str] | None) -> Numbers:
        self.names(columns)
        return np.empty(0, dtype=np.int64)

    def count(self, columns: Iterable[str] | None) -> int:
        self.names(columns)
        return self.num_rows

    def tensor(self, name: str, device: torch.device) -> torch.Tensor:
        [name] = self.names([name])
        tensor = self._columns[name].tensor
        return tensor.to(device) if is_offloaded(tensor) else tensor

    def read(self, rows: Rows, columns: Iterable[str] | None, *, out: Out, **_: object) -> dict[str, Any]:
        """Like `Store.read`; no rows are missing here."""
        found = {name: self._columns[name].read(rows) for name in self.names(columns)}
        return {name: _into(out[name], name, value) if out and name in out else value for name, value in found.items()}

    def taken(self, *_: object) -> None:
        """`read` is fast enough."""

    @contextmanager
    def whole(self, columns: Collection[str]) -> Iterator[dict[str, torch.Tensor]]:
        """As `Store.whole`; rows are not written here."""
        yield {name: self._columns[name].whole() for name in self.names(columns)}

    def lengths(self, column: str, _: Rows) -> NoReturn:
        self.names([column])
        raise UnsupportedOpError(f"column {column!r} has rows of one shape: {tuple(self.schema[column].row_shape)}")

    def write(self, *_: object) -> NoReturn:
        raise CacheError(
            f"the cache in {self.place} is read-only, as it is over existing tensors: write into these, or create a "
            "cache with TensorCache.create"
        )

    append = write

    def flush(self) -> None:
        """Nothing to write."""

    def close(self) -> None:
        self.is_closed = True


def _into(out: torch.Tensor, name: str, value: torch.Tensor) -> torch.Tensor:
    checked_dense(out, f"out[{name!r}]")
    if (out.shape, out.dtype) != (value.shape, value.dtype):
        raise ShapeMismatchError(
            f"column {name!r}: `out` must be {tuple(value.shape)} {value.dtype}, and is {tuple(out.shape)} {out.dtype}"
        )
    return out.copy_(value)


def read_file(path: Path) -> HeldStore:
    """The tensors in a file of any origin, in place, with the metadata that `write_file` wrote."""
    found = open_checkpoint(path)
    handles = [(value.handle(name), CPU) for name, value in found.items()]
    tensors: dict[str, torch.Tensor] = dict(zip(found, wrap_handles(handles), strict=True))
    file = next((value.file for value in found.values()), None)
    notes = {} if file is None else file.notes.get(_NOTE, {})
    names, metadata = notes.get("columns", list(tensors)), notes.get("metadata", {})
    if not isinstance(metadata, dict) or not isinstance(names, list) or set(names) != set(tensors):
        raise CorruptFileError(f"{path} has metadata that contradict its tensors: download or copy the file again")
    return HeldStore({name: tensors[name] for name in names}, metadata, path)


def write_file(
    path: Path,
    columns: Mapping[str, Column],
    num_rows: int,
    blocks: Mapping[str, Iterable[torch.Tensor]],
    metadata: Mapping[str, object],
) -> None:
    """Put a safetensors file of columns at `path`, atomically. `blocks`: by column, its rows in order."""
    by_size = sorted(columns, key=lambda name: -columns[name].dtype.itemsize)  # keeps every element aligned
    layouts = {name: contiguous(columns[name].dtype, (num_rows, *columns[name].row_shape)) for name in by_size}
    notes = {_NOTE: _notes(columns, metadata)}
    put_values(path, layouts, from_blocks(blocks), notes, durable=True)


def save_file(
    path: Path, columns: AbstractContextManager[Mapping[str, torch.Tensor]], metadata: Mapping[str, object]
) -> None:
    """Put a file of `torch.save` at `path`, atomically.

    `columns` are plain tensors that cover their storages; it is left before the file is there.
    """
    refuse_foreign(path)
    with replacing(path) as new, columns as tensors, open(new.fd, "r+b", closefd=False) as file:
        with no_functions(), no_modes(), _disk_errors():
            torch.save(dict(tensors), file)
        with zipfile.ZipFile(file, "a") as archive:
            if not archive.namelist():  # where the file can't be read, a second archive would follow the first
                raise OSError(errno.EIO, "what was written can't be read back")
            notes = {"version": VERSION, _NOTE: _notes(tensors, metadata)}
            archive.writestr(f"{_ROOT}/{NOTES}", json.dumps(notes))


def _notes(columns: Iterable[str], metadata: Mapping[str, object]) -> dict[str, Any]:
    return {"columns": list(columns), "metadata": dict(metadata)}


@contextmanager
def _disk_errors() -> Iterator[None]:
    """After a failed write, torch tries to complete the archive, and raises what comes of that."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
