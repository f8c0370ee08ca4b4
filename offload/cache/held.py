"""Tensors with one row per index, all of the same length: in memory, or in a file.

Always true:
- all columns have the same number of rows
- a file is read a batch at a time, in place, and never written to; if it is modified, that is an error. If it is
  replaced, the old one stays open, and is read from
- a file that is written is complete or does not exist; only files of ours are replaced
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from offload.cache.archive import SUFFIXES, notes_in, write_archive
from offload.cache.indexing import Numbers, Rows
from offload.cache.rowfile import Descriptors, RowFile
from offload.cache.schema import Manifest, schema_of
from offload.checkpoints.checkpoint import open_checkpoint
from offload.errors import (
    CacheError,
    ChangedFileError,
    ColumnError,
    CorruptFileError,
    ShapeMismatchError,
    UnsupportedOpError,
)
from offload.storage.file import Identity, TensorFile
from offload.storage.layout import contiguous
from offload.storage.reasons import reading
from offload.storage.replacing import made_folder
from offload.storage.write import write_values
from offload.tensor.arguments import checked_dense, checked_names, refuse_other, refuse_unstorable
from offload.tensor.guests import CPU
from offload.tensor.wrapper import OffloadedTensor, handle_of, is_offloaded, is_part, mapped_value, wrap_handles

_NOTE = "rows"  # the note in a file of ours


class HeldColumn:
    """An existing column: a plain tensor, or one over a file."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        refuse_unstorable(tensor, name)
        if not tensor.dim():
            raise CacheError(f"column {name!r} is a single value, and a column has rows: give it a first dimension")
        self.tensor = tensor.detach()
        self._rows: RowFile | torch.Tensor | None = None  # where rows are read from: the file, or its mapping
        self._of: TensorFile | None = None  # the file that `_rows` belongs to

    def read(self, rows: Rows, *, pinned: bool = False) -> torch.Tensor:
        """(rows, *row_shape): on the tensor's device; for a file, on the CPU.

        Raises:
            MissingFileError, ChangedFileError, CorruptFileError
        """
        if is_offloaded(self.tensor):
            return self._from_file(self.tensor, rows, pinned=pinned)
        values = self.tensor[torch.from_numpy(rows.numbers).to(self.tensor.device)]
        return values.pin_memory() if pinned and values.device.type == "cpu" else values

    def _from_file(self, tensor: OffloadedTensor, rows: Rows, *, pinned: bool) -> torch.Tensor:
        handle = handle_of(tensor)
        if handle.owned:
            handle.base()  # switches to a new file if there is one
        if self._rows is None or self._of is not handle.file:
            self.keep(Kept())
        if not handle.owned:
            self._refuse_changed()
        if isinstance(self._rows, RowFile):
            return self._rows.read(rows, pinned=pinned)
        assert self._rows is not None
        return self._rows[torch.from_numpy(rows.numbers)]

    def keep(self, kept: Kept) -> None:
        """Keep its file open from now on, if there is one, shared with the file's other columns.

        Raises:
            MissingFileError, ChangedFileError, CorruptFileError, ReadError
        """
        if not is_offloaded(self.tensor):
            return
        tensor: OffloadedTensor = self.tensor
        handle = handle_of(tensor)
        files = kept.of(handle.file, is_settled=not handle.owned)
        if is_part(tensor) or handle.layout != contiguous(tensor.dtype, tuple(tensor.shape)):
            self._rows = mapped_value(tensor)
        else:
            self._rows = RowFile(handle.path, handle.extent[0], tensor.dtype, tuple(tensor.shape[1:]), files=files)
        self._of, self._files = handle.file, files

    def _refuse_changed(self) -> None:
        """
        Raises:
            ChangedFileError: the opened file has been modified.
        """
        assert self._of is not None
        with reading(self._of.path):
            now = Identity.of(os.fstat(self._files.fd))
        if now != self._of.identity:
            raise ChangedFileError(
                f"{self._of.path} has changed since it was opened (size or modification time): its rows can't be "
                "trusted any more. Open the cache again."
            )

    def __getstate__(self) -> torch.Tensor:
        return self.tensor

    def __setstate__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._rows = self._of = None


class Kept:
    """Files that are kept open, each shared by its columns."""

    def __init__(self) -> None:
        self._known: dict[int, Descriptors] = {}

    def of(self, file: TensorFile, *, is_settled: bool) -> Descriptors:
        """
        Raises:
            MissingFileError, ChangedFileError, CorruptFileError, ReadError
        """
        if id(file) not in self._known:
            self._known[id(file)] = Descriptors.kept(file.descriptor(settled=is_settled), file.path)
        return self._known[id(file)]


class HeldStore:
    """Existing columns, with the interface of `Store`. Rows can't be written."""

    is_closed = False
    writes = False

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any], folder: Path | None = None
    ) -> None:
        """
        Raises:
            CacheError: there are no tensors, they differ in length, or one can't be a column.
        """
        refuse_other(tensors, Mapping, "a dict of tensors by column")
        self.folder = folder
        self._metadata = metadata
        self._take({name: HeldColumn(name, tensor) for name, tensor in tensors.items()})
        self.device = next(iter(self._columns.values())).tensor.device

    def _take(self, columns: dict[str, HeldColumn]) -> None:
        """Replace the columns; they must have the same length."""
        lengths = {name: len(column.tensor) for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            told = ", ".join(f"{name!r} has {length}" for name, length in lengths.items())
            raise CacheError(
                f"the tensors differ in length ({told or 'there are none'}): all columns must have the same number of "
                "rows"
            )
        self.schema = schema_of({name: (held.tensor.dtype, held.tensor.shape[1:]) for name, held in columns.items()})
        [self.num_rows] = set(lengths.values())
        self._columns = columns
        self.manifest = Manifest(self.schema, self.num_rows, self._metadata)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Set a tensor as a column, new or existing.

        Raises:
            CacheError: its length differs from the others', or it can't be a column.
            UnsupportedOpError
        """
        self._take({**self._columns, name: HeldColumn(name, tensor)})

    def drop(self, name: str) -> None:
        """
        Raises:
            ColumnError: there is no such column.
            CacheError: it is the last column.
        """
        self.names([name])
        self._take({other: column for other, column in self._columns.items() if other != name})

    def keep(self) -> None:
        """Keep the files of all columns open from now on, even if they are replaced.

        Raises:
            MissingFileError, ChangedFileError, CorruptFileError, ReadError
        """
        kept = Kept()
        for column in self._columns.values():
            column.keep(kept)

    def was_saved(self, path: Path, names: Iterable[str]) -> None:
        """These columns were written to `path`: if they came from that file, switch to the new one."""
        if path == self.folder:
            new = read_file(path)._columns
            self._take({name: new[name] if name in set(names) else column for name, column in self._columns.items()})

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
        """
        Raises:
            ColumnError: there is no such column.
            ArgumentTypeError: they are not names.
        """
        named = checked_names(columns, "columns")
        names = list(self.schema) if named is None else named
        for name in names:
            if name not in self.schema:
                raise ColumnError(f"the cache in {self.place} has no column {name!r}: it has {', '.join(self.schema)}")
        return names

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

    def read(
        self,
        rows: Rows,
        columns: Iterable[str] | None,
        *,
        out: Mapping[str, torch.Tensor] | None,
        pinned: bool,
        **_: Any,
    ) -> dict[str, Any]:
        """Like `Store.read`; no rows are missing here."""
        found = {name: self._columns[name].read(rows, pinned=pinned) for name in self.names(columns)}
        return {name: _into(out[name], name, value) if out and name in out else value for name, value in found.items()}

    def read_hot(self, *_: Any) -> None:
        """Nothing: `read` is fast enough."""

    def lengths(self, column: str, _: Rows) -> NoReturn:
        self.names([column])
        raise UnsupportedOpError(f"column {column!r} has rows of one shape: {tuple(self.schema[column].row_shape)}")

    def write(self, *_: Any) -> NoReturn:
        raise CacheError(
            f"the rows of the cache in {self.place} are not written one by one: change cache.tensors if they are in "
            "memory, or make a cache with TensorCache.create"
        )

    append = write

    def flush(self) -> None:
        """Nothing to write."""

    def close(self) -> None:
        self.is_closed = True


class Tensors(dict[str, torch.Tensor]):
    """Tensors by column, returned by `TensorCache.tensors`: assignments and deletions are passed on to the cache.

    It is pickled, also by `torch.save`, as a plain dict.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], put: Callable[[str, torch.Tensor | None], None]) -> None:
        super().__init__(tensors)
        self._put = put

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        self._put(name, tensor)
        super().__setitem__(name, tensor)

    def __delitem__(self, name: str) -> None:
        self._put(name, None)
        super().__delitem__(name)

    def __ior__(self, other: Any) -> Tensors:  # type: ignore[misc, override]
        self.update(other)
        return self

    update = MutableMapping.update
    setdefault = MutableMapping.setdefault
    pop = MutableMapping.pop
    popitem = MutableMapping.popitem

    def clear(self) -> None:
        raise CacheError("a cache has at least one column: drop the cache, or remove some of its columns")

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (list(self.items()),)


def _into(out: torch.Tensor, name: str, value: torch.Tensor) -> torch.Tensor:
    checked_dense(out, f"out[{name!r}]")
    if (out.shape, out.dtype) != (value.shape, value.dtype):
        raise ShapeMismatchError(
            f"column {name!r}: `out` must be {tuple(value.shape)} {value.dtype}, and is {tuple(out.shape)} {out.dtype}"
        )
    return out.copy_(value)


def read_file(path: Path) -> HeldStore:
    """The tensors in a file of any origin, in place, with the metadata that `write_file` wrote.

    Raises:
        MissingFileError, CorruptFileError, CheckpointError
        CacheError: they are not columns of the same length.
    """
    found = open_checkpoint(path)
    handles = [(value.handle(name), CPU) for name, value in found.items()]
    tensors: dict[str, torch.Tensor] = dict(zip(found, wrap_handles(handles), strict=True))
    file = next((value.file for value in found.values()), None)
    said = {} if file is None else file.notes.get(_NOTE) or notes_in(file) or {}
    names, metadata = said.get("columns", list(tensors)), said.get("metadata", {})
    if not isinstance(metadata, dict) or not isinstance(names, list) or set(names) != set(tensors):
        raise CorruptFileError(f"{path} has metadata that contradict its tensors: download or copy the file again")
    store = HeldStore({name: tensors[name] for name in names}, metadata, path)
    store.keep()
    return store


def write_file(
    path: Path,
    columns: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    values: Mapping[str, torch.Tensor | Iterable[torch.Tensor]],
    metadata: Mapping[str, Any],
) -> None:
    """Put a file of columns, given by (dtype, shape), at `path`, atomically; creates parent folders.

    The suffix decides the format: one that `torch.load` opens, or safetensors.

    Raises:
        ForeignFileError: there is a file that offload did not write.
        WriteError
    """
    by_size = sorted(columns, key=lambda name: -columns[name][0].itemsize)  # keeps every element aligned
    layouts = {name: contiguous(*columns[name]) for name in by_size}
    made_folder(path.parent)
    said = {"columns": list(columns), "metadata": dict(metadata)}
    if path.suffix in SUFFIXES:
        write_archive(path, {name: layouts[name] for name in columns}, values, said)
    else:
        write_values(path, {name: values[name] for name in by_size}, layouts, {_NOTE: said}, durable=True)
