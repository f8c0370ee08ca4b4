"""Tensors with one row per index, all of the same length: in memory, or in a file.

Always true:
- all columns have the same number of rows
- a file is read a batch at a time, in place, and never written to; if it is modified, that is an error. If one of
  `write_file` is replaced, a cache that `read_file` opened reads the old one; anything else over it is an error
- a file that is written is complete or does not exist; only files of ours are replaced
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from offload.cache.indexing import Numbers, Rows
from offload.cache.rowfile import Descriptors, RowFile
from offload.cache.schema import Column, Manifest, columns_named, schema_of
from offload.checkpoints.checkpoint import open_checkpoint
from offload.errors import ArgumentTypeError, CacheError, ChangedFileError, CorruptFileError
from offload.storage.file import Identity, TensorFile
from offload.storage.layout import contiguous
from offload.storage.write import from_blocks, put_values
from offload.system.reasons import reading
from offload.tensor.arguments import refuse_unstorable
from offload.tensor.guests import CPU, mapped_value
from offload.tensor.views import handle_of, is_part
from offload.tensor.wrapper import OffloadedTensor, is_offloaded, wrap_handles

_NOTE = "rows"  # the note in a file of ours


class HeldColumn:
    """An existing column: a plain tensor, or one over a file."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        refuse_unstorable(tensor, name)
        if not tensor.dim():
            raise CacheError(f"column {name!r} is a scalar: a column needs a first dimension, for the rows")
        self.tensor = tensor.detach()
        self.opened: tuple[RowFile, TensorFile] | None = None

    def open(self, files: dict[Path, Descriptors]) -> None:
        """Keep its file open from now on, if its rows are one after the other there; `files`: of other columns, too."""
        tensor: OffloadedTensor = self.tensor  # type: ignore[assignment]
        handle = handle_of(tensor)
        if not is_part(tensor) and handle.layout == contiguous(tensor.dtype, tuple(tensor.shape)):
            file = files[handle.path] = files.get(handle.path) or Descriptors(handle.path, writes=False)
            rows = RowFile(handle.path, handle.extent[0], tensor.dtype, tuple(tensor.shape[1:]), files=file)
            self.opened = rows, handle.file

    def read(self, rows: Rows) -> torch.Tensor:
        """(rows, *row_shape): on the tensor's device; for an open file, on the CPU."""
        opened = self.opened  # another thread may close it
        if opened is None:
            source = mapped_value(self.tensor) if is_offloaded(self.tensor) else self.tensor
            return source[torch.from_numpy(rows.numbers).to(source.device)]
        rowfile, file = opened
        with reading(file.path):
            now = Identity.of(os.fstat(rowfile.fd))
        if now != file.identity:
            raise ChangedFileError(f"{file.path} has changed since it was opened (size or time): open the cache again")
        return rowfile.read(rows)

    def __getstate__(self) -> torch.Tensor:
        return self.tensor

    def __setstate__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.opened = tensor, None


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
        files: dict[Path, Descriptors] = {}
        for column in self._columns.values() if folder else ():
            column.open(files)  # stays open, even if the file is replaced

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

    def read(self, rows: Rows, columns: Iterable[str] | None) -> dict[str, Any]:
        """Like `Store.read`; no rows are missing here."""
        return {name: self._columns[name].read(rows) for name in self.names(columns)}

    def taken(self, *_: object) -> None:
        """`read` is fast enough."""

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
        for column in self._columns.values():
            column.opened = None


def read_file(path: Path) -> HeldStore:
    """The tensors in a file of any origin, in place, with the metadata that `write_file` wrote."""
    source = open_checkpoint(path)
    handles = [(value.handle(name), CPU) for name, value in source.items()]
    tensors: dict[str, torch.Tensor] = dict(zip(source, wrap_handles(handles), strict=True))
    file = next((value.file for value in source.values()), None)
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
    notes = {_NOTE: {"columns": list(columns), "metadata": dict(metadata)}}
    put_values(path, layouts, from_blocks(blocks), notes, durable=True)
