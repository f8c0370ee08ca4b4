"""Rows from TensorDicts, tensorclasses and folders of `TensorDict.memmap`.

Always true:
- a leaf becomes a column, named by its keys joined by dots; per-row data other than tensors becomes JSON
- at most one batch is in memory, and no class is imported by a name in a folder
- what is left out is logged
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from offload.cache.incoming import Batch, Field, Incoming, rows_in_batch
from offload.errors import CacheError
from offload.integrations.log import log
from offload.integrations.numpy import chosen
from offload.integrations.tensordict.reading import INNER, META, load_memmap
from offload.tensor.materialize import materialize


def is_folder(path: Path) -> bool:
    """Whether a folder may have been written by `memmap` of a TensorDict or tensorclass."""
    return (path / META).is_file()


def rows_of_folder(path: Path, columns: Collection[str] | None) -> Incoming:
    """The rows of a folder; for a tensorclass, only its tensors.

    Raises:
        MissingFileError, CorruptFileError, CheckpointError, UnknownTypeError
        CacheError: as `rows_of_tensordict`.
    """
    inner = path / INNER
    if inner.is_dir():
        log.info("%s: fields of the class that are not tensors are left out", path)
    return rows_of_tensordict(load_memmap(inner if inner.is_dir() else path, device="cpu"), columns, str(path))


def rows_of_tensordict(td: Any, columns: Collection[str] | None, place: str = "the TensorDict") -> Incoming:
    """The rows of a TensorDict or tensorclass, along its first batch dimension.

    Raises:
        CacheError: it has no batch dimension, or no such column.
    """
    from tensordict import is_tensorclass

    td = td.to_tensordict() if is_tensorclass(td) else td
    if not td.batch_size:
        raise CacheError(f"{place} has no batch_size, which is the number of rows: set batch_size=[rows]")
    parts = chosen(dict(_parts(td, ())), columns, place)
    if not parts:
        raise CacheError(f"{place} has no tensors")
    fields = {name: _field(td[:1], way) for name, way in parts.items()}
    num_rows = int(td.batch_size[0])
    step = rows_in_batch(field.row_bytes for field in fields.values())
    return Incoming(fields, _batches(td, parts, fields, num_rows, step))


def _parts(td: Any, way: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """For each column name, the keys that lead to it."""
    from tensordict import NonTensorData, NonTensorStack, is_tensor_collection, is_tensorclass

    for key in td.keys():  # noqa: SIM118  a TensorDict goes over its rows
        value, path = td.get(key), (*way, key)
        if isinstance(value, NonTensorData | NonTensorStack):
            yield ".".join(path), path
        elif is_tensor_collection(value):
            yield from _parts(value.to_tensordict() if is_tensorclass(value) else value, path)
        elif value.is_nested:
            log.info("%r is a nested tensor, and is left out: store its rows with TensorCache.create", ".".join(path))
        else:
            yield ".".join(path), path


def _field(row: Any, way: tuple[str, ...]) -> Field:
    value = row.get(way)
    return Field(value.dtype, tuple(value.shape[1:])) if isinstance(value, torch.Tensor) else Field(None)


def _batches(
    td: Any, parts: Mapping[str, tuple[str, ...]], fields: Mapping[str, Field], num_rows: int, step: int
) -> Iterator[Batch]:
    for start in range(0, num_rows, step):
        rows = td[start : start + step]
        batch: Batch = {}
        for name, way in parts.items():
            value = rows.get(way)
            if fields[name].is_tensor:
                batch[name] = materialize(value)
            else:  # for one row, or if it is the same for all, tensordict returns the value itself
                batch[name] = value.tolist() if hasattr(value, "tolist") else [value] * len(rows)
        yield batch
