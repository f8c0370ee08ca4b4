"""What rows that can be read by index can do: come in batches, be a dataset, go to one file.

Always true:
- each of these reads rows through `get` and in no other way
- a dataset that goes to another process takes the path along, and not the data
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from offload.cache.batches import consecutive, read_ahead
from offload.cache.columns import row_bytes
from offload.cache.fields import rows_in_batch
from offload.cache.held import write_file
from offload.cache.schema import TENSOR, Column
from offload.cache.states import FILE as STATES
from offload.cache.tensors import Tensors
from offload.errors import CacheError
from offload.memory import count_freed
from offload.storage.paths import absolute
from offload.storage.regular import is_there
from offload.tensor.arguments import checked_count, checked_names, iterated


class ReadByIndex(ABC):
    """The part of `TensorCache` that follows from reading rows."""

    @property
    @abstractmethod
    def columns(self) -> Mapping[str, Column]:
        """What each column holds, by name."""

    @property
    @abstractmethod
    def metadata(self) -> Mapping[str, Any]:
        """What the rows are of."""

    @property
    @abstractmethod
    def folder(self) -> Path | None:
        """Where the rows are."""

    @property
    @abstractmethod
    def mode(self) -> str:
        """`"r"` or `"r+"`."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until what was written is on the disk."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of rows."""

    @abstractmethod
    def get(
        self,
        rows: Any,
        columns: Iterable[str] | None = None,
        *,
        device: torch.device | str | int | None = None,
        pin_memory: bool = False,
        ragged: str = "list",
        padding: complex = 0,
    ) -> dict[str, Any]:
        """Rows of some columns."""

    @abstractmethod
    def column(self, name: str) -> torch.Tensor:
        """A column as one tensor."""

    @abstractmethod
    def put_column(self, name: str, tensor: torch.Tensor | None) -> None:
        """Have a tensor as a column, or none of that name."""

    @abstractmethod
    def _was_saved(self, path: Path, names: Iterable[str]) -> None:
        """These columns stand in a file now."""

    @abstractmethod
    def require_complete(self, columns: Iterable[str] | None = None) -> None:
        """Raises if rows are missing."""

    def batches(
        self,
        sampler: int | Iterable[Any],
        *,
        columns: Iterable[str] | None = None,
        prefetch: int = 2,
        pin_memory: bool = False,
        device: torch.device | str | int | None = None,
        ragged: str = "list",
        padding: complex = 0,
    ) -> Iterator[dict[str, Any]]:
        """Batches one after another, read by a thread before they are asked for.

        Args:
            sampler: how many rows a batch has, for all rows in order; or what names the rows of each batch, as
                `torch.utils.data.BatchSampler` does.
            columns, pin_memory, device, ragged, padding: as for `get`.
            prefetch: how many batches are read ahead; 0 for no thread.

        Raises:
            CacheError: a batch of no rows.
            As `get`, where the batch would have come.

        Example:
            >>> from offload import TensorCache
            >>> cache = TensorCache(tensors={"x": torch.arange(5)})
            >>> [batch["x"].tolist() for batch in cache.batches(2)]
            [[0, 1], [2, 3], [4]]
            >>> [batch["x"].tolist() for batch in cache.batches([[4, 0], [2]])]
            [[4, 0], [2]]
        """
        if isinstance(sampler, int) and sampler < 1:
            raise CacheError(f"a batch can't have {sampler} rows")
        items = consecutive(len(self), sampler) if isinstance(sampler, int) else iterated(sampler, "sampler")
        items = map(_kept, items)
        names, prefetch = checked_names(columns, "columns"), checked_count(prefetch, "prefetch", least=0)
        form: dict[str, Any] = {"pin_memory": pin_memory, "device": device, "ragged": ragged, "padding": padding}
        read = partial(self.get, columns=names, **form)
        return read_ahead(items, read, prefetch)

    def as_dataset(self, columns: Iterable[str] | None = None) -> RowDataset:
        """A map-style dataset of torch: a dict a row; a `DataLoader` reads the rows of a batch together.

        What was written is flushed, as worker processes see no other rows; rows written later, when they are flushed.
        With `DataLoader(dataset, batch_size=None, sampler=BatchSampler(...))` batches come as they are read, without
        being taken apart and collated again.

        Example:
            >>> from offload import TensorCache
            >>> data = TensorCache(tensors={"x": torch.arange(4)}).as_dataset()
            >>> data[1], len(data)
            ({'x': tensor(1)}, 4)
            >>> [batch["x"].tolist() for batch in torch.utils.data.DataLoader(data, batch_size=2)]
            [[0, 1], [2, 3]]
        """
        if self.mode == "r+":
            self.flush()
        return RowDataset(self, checked_names(columns, "columns"))

    def to_disk(self, path: str | os.PathLike[str], columns: Iterable[str] | None = None) -> None:
        """Write all rows to one file, a batch at a time; `from_disk` opens it.

        Folders are made. A file that was there stays, whole, until the new one is; then it is replaced. It may be the
        one that this cache is from.

        Args:
            path: the file. With the suffix .pt, .pth, .bin or .ckpt it is one that `torch.load` opens, a dict of
                tensors; else safetensors.
            columns: those to write; all if None.

        Raises:
            ColumnError, MissingRowsError: there is no such column, or rows are not filled.
            CacheError: there are columns of JSON, of bytes, or of rows of any length: such a cache is its folder. Or
                `path` is in the folder of a cache.
            ForeignFileError: a file that offload did not write stands there.
            WriteError
        """
        named = checked_names(columns, "columns")
        names = list(self.columns) if named is None else named
        if not names:
            raise CacheError(f"{path}: columns= names none, and a file without columns is no cache: name some")
        self.require_complete(names)
        shapes = {name: (self.columns[name].dtype, (len(self), *self.columns[name].row_shape)) for name in names}
        others = [name for name in names if self.columns[name].kind != TENSOR]
        if others:
            raise CacheError(
                f"columns {', '.join(map(repr, others))} have no rows of one size: copy {self.folder} instead"
            )
        target = absolute(path)
        if is_there(target.parent / STATES):
            raise CacheError(f"{target} would be among the files of a cache: take another folder")
        values = {name: self._blocks(name) for name in shapes}
        write_file(target, shapes, values, self.metadata)
        self._was_saved(target, names)

    def _blocks(self, name: str) -> Iterator[torch.Tensor]:
        step = rows_in_batch([row_bytes(self.columns[name])])
        for batch in self.batches(step, columns=[name], device="cpu", prefetch=1):
            block = batch.pop(name).contiguous().resolve_conj().resolve_neg()
            nbytes = block.nbytes
            yield block
            del block
            count_freed(nbytes)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The columns as tensors, as `column` gives them."""
        return Tensors({name: self.column(name) for name in self.columns}, self.put_column)


def _kept(rows: Any) -> Any:
    """Rows that are read later: a sampler may use its tensor or list again for the next batch."""
    if isinstance(rows, torch.Tensor):
        return rows.clone()
    return rows.copy() if isinstance(rows, np.ndarray | list) else rows


class RowDataset(Dataset[dict[str, Any]]):
    """Rows of a cache as dicts. Use `TensorCache.as_dataset`."""

    def __init__(self, cache: ReadByIndex, columns: Sequence[str] | None) -> None:
        self.cache = cache
        self.columns = columns

    def __len__(self) -> int:
        return len(self.cache)

    def __getitem__(self, rows: Any) -> dict[str, Any]:
        """A row; of several rows, the batch, for a `DataLoader` with `batch_size=None` and a batch sampler."""
        return self.cache.get(rows, columns=self.columns)

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Rows one by one, read together."""
        batch = self.cache.get(list(rows), columns=self.columns)
        return [{name: values[at] for name, values in batch.items()} for at in range(len(rows))]
