"""Rows of other kinds of data into a cache: arrays, tables, datasets, dicts of tensors, and files of Parquet.

Always true:
- files are opened read-only; nothing in them is executed or unpickled
- at most one batch is in memory
- numbers become tensors, lists of varying size rows of varying size; text, structs and deeper lists become JSON
- a part of a part becomes a column `outer.inner`; an array becomes `values`
- a null is an error, except in a JSON column
- in HDF5 no link is followed, and a dataset whose values are in other files, for which HDF5 may give zeros, is refused
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload.cache.incoming import Batch, Incoming, cache_of, rows_in_batch
from offload.cache.schema import JSON, RAGGED, TENSOR, Column, column_of
from offload.cache.table import TensorCache
from offload.errors import CacheError, CorruptFileError, OffloadError
from offload.importing import imported
from offload.models.loader import load_file
from offload.system.reasons import explained, reading
from offload.system.regular import absolute, as_file, is_folder, open_regular
from offload.tensor.arguments import as_names, refuse_unstorable
from offload.tensor.materialize import materialize

log = logging.getLogger("offload.integrations")

_MOST_ROWS = 4096  # of a table in a batch
_BUFFER = 1 << 20  # bytes per read of a Parquet column
_GUESS = 1024  # bytes of a value of varying size
Columns = Collection[str] | None


def cache_from(
    source: object,
    folder: str | os.PathLike[str] | None = None,
    *,
    columns: Collection[str] | None = None,
    metadata: Mapping[str, object] | None = None,
    device: torch.device | str | int = "cpu",
) -> TensorCache:
    """A cache with the rows of a file or table of another kind, which are streamed into it.

    | source | columns |
    | --- | --- |
    | the path of a Parquet file, or of a folder of such | its columns |
    | `pyarrow.Table`, `datasets.Dataset` | its columns |
    | an open `h5py.File` or `h5py.Group` | its datasets, of one length; links are skipped |
    | `numpy.ndarray`, as of `np.load("x.npy", mmap_mode="r")` | `values` |
    | a dict of tensors or arrays, the path of a file of tensors (see `load_file`) | its values, of one length |
    | `tensordict.TensorDict` | its leaves, nested ones `outer.inner`; other data has to be left out |

    Text and structs become JSON columns.

    Args:
        source: see above. What can be read in parts is, as a memory-mapped table or array.
        folder: where the cache goes, as for `TensorCache.create`; None for a temporary one.
        columns: those to take; all if None.
        metadata, device: as for `TensorCache.create`.

    Returns:
        The cache, with one filled row per row of the source.

    Raises:
        MissingFileError, CorruptFileError, ReadError
        UnknownSubclassError: a tensor is of a subclass that can't be stored.
        CacheError: columns of several lengths, or one that can't be kept, as one of objects or with nulls.
        CheckpointError: a pickle with code in it.

    Example:
        >>> cache_from({"id": np.array([1, 2]), "score": torch.tensor([0.5, 1.5])})[:]
        {'id': tensor([1, 2]), 'score': tensor([0.5000, 1.5000])}
    """
    return cache_of(rows_of(source, columns), folder, partial(TensorCache.create, metadata=metadata, device=device))


def rows_of(source: object, columns: Columns = None) -> Incoming:
    """The rows of a file, a folder, an array, a table, a dataset, or a dict of tensors."""
    columns = as_names(columns)
    if isinstance(source, str | os.PathLike):
        return _rows_of_path(absolute(source), columns)
    is_tensordict = imported("tensordict", "is_tensor_collection")
    if is_tensordict is not None and is_tensordict(source):
        return _rows_of_tensordict(source, columns)
    for package, kind, rows in _KINDS:
        if _is_one(source, package, kind):
            return rows(source, columns)
    if isinstance(source, Mapping):
        return _rows_of_dict(source, columns, "the dict")
    raise CacheError(
        f"no rows can be read from {type(source).__name__}: give a path, an array, a dict of tensors or arrays, a "
        "TensorDict, a pyarrow.Table, a datasets.Dataset or an h5py.Group; TensorCache.from_records takes records"
    )


def _is_one(source: object, package: str, kind: str) -> bool:
    """Whether it is an instance of a library's class; does not import the library."""
    return any(base.__module__.split(".")[0] == package and base.__name__ == kind for base in type(source).__mro__)


def _rows_of_path(path: Path, columns: Columns) -> Incoming:
    shards = sorted(path.glob("*.parquet")) if is_folder(path) else [path]
    if not shards:
        raise CacheError(f"{path} has no .parquet files: name a file in it")
    with reading(shards[0]), as_file(open_regular(shards[0])) as file:
        is_parquet = file.read(4) == b"PAR1"
    if not is_parquet and not is_folder(path):
        return _rows_of_dict(load_file(path), columns, str(path))
    with _as_read(path):
        rows = _rows_of_parquet(shards, columns)

    def batches() -> Iterator[Batch]:
        with _as_read(path):
            yield from rows.batches

    return Incoming(rows.columns, batches())


@contextmanager
def _as_read(path: Path) -> Iterator[None]:
    """pyarrow can raise anything for a damaged file: blame the file (`CorruptFileError`, `ReadError`)."""
    try:
        yield
    except (OffloadError, ImportError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:  # without, it is about the content
            raise explained(path, error) from error
        raise CorruptFileError(f"{path} can't be read ({error}): is it complete? Download or copy it again.") from error


def _chosen(available: Mapping[str, object], columns: Columns, place: str) -> dict[str, Any]:
    for name in columns or ():
        if name not in available:
            raise CacheError(f"{place} has no column {name!r}; it has {', '.join(map(repr, available))}")
    return {name: available[name] for name in (available if columns is None else columns)}


# What has a length and slices


@dataclass(frozen=True, slots=True)
class Part:
    """What becomes a column.

    Attributes:
        column: its description, as for `TensorCache.create`.
        shape: rows first; () for a single value.
        read: the rows of a slice, as `TensorCache.append` takes them.
        width: bytes of a row of text, if that is known.
    """

    column: object
    shape: Sequence[int]
    read: Callable[[slice], Any]
    width: int = 0


def _rows_of_parts(parts: Mapping[str, Part], place: str) -> Incoming:
    lengths = {name: part.shape[0] if part.shape else None for name, part in parts.items()}
    if None in lengths.values() or len(set(lengths.values())) != 1:
        each = ", ".join(f"{name!r}: {'a single value' if n is None else n}" for name, n in lengths.items())
        raise CacheError(f"the columns of {place} differ in length ({each or 'there are none'}): choose with columns=")
    [num_rows] = {rows for rows in lengths.values() if rows is not None}
    columns = {name: column_of(name, part.column) for name, part in parts.items()}
    step = rows_in_batch(c.row_bytes if c.kind == TENSOR else max(parts[n].width, _GUESS) for n, c in columns.items())
    slices = (slice(start, start + step) for start in range(0, num_rows, step))
    return Incoming(columns, ({name: part.read(rows) for name, part in parts.items()} for rows in slices))


def _rows_of_dict(values: Mapping[str, object], columns: Columns, place: str) -> Incoming:
    chosen = _chosen(values, columns, place)
    return _rows_of_parts({name: _part_of(name, value, place) for name, value in chosen.items()}, place)


def _part_of(name: str, value: object, place: str) -> Part:
    if isinstance(value, np.ndarray):
        return _part_of_array(name, value, place)
    if not isinstance(value, torch.Tensor):
        raise CacheError(
            f"{name!r} in {place} is a {type(value).__name__}, neither tensor nor array: leave it out with columns=; "
            "TensorCache.from_records takes records one by one"
        )
    refuse_unstorable(value, name)
    return Part((value.dtype, tuple(value.shape[1:])), value.shape, lambda rows: materialize(value[rows]))


def _rows_of_tensordict(td: Any, columns: Columns, place: str = "the TensorDict") -> Incoming:
    if not td.batch_size:
        raise CacheError(f"{place} has no batch_size, which is the number of rows: set batch_size=[rows]")
    return _rows_of_dict(dict(td.flatten_keys(".").items()), columns, place)


# Arrays of NumPy, and datasets of HDF5


def _rows_of_array(array: np.ndarray[Any, Any], columns: Columns, place: str = "the array") -> Incoming:
    return _rows_of_dict({"values": array}, columns, place)


def _part_of_array(name: str, array: Any, place: str, *, is_text: bool = False) -> Part:
    shape = array.shape or ()
    column = JSON if is_text or array.dtype.kind in "US" else (_dtype_of(name, array.dtype, place), shape[1:])
    return Part(column, shape, lambda rows: _values_of(array[rows]), array.dtype.itemsize * int(np.prod(shape[1:])))


def _dtype_of(name: str, dtype: np.dtype[Any], place: str) -> torch.dtype:
    try:
        return torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    except TypeError as error:
        raise CacheError(
            f"{name!r} in {place} is of dtype {dtype}, neither torch's nor text: convert or leave it out with columns="
        ) from error


def _values_of(rows: np.ndarray[Any, Any]) -> Any:
    if rows.dtype.kind in "USO":
        as_text = np.vectorize(lambda one: one.decode() if isinstance(one, bytes) else str(one), otypes=[object])
        return as_text(rows).tolist()
    return torch.from_numpy(np.array(rows, dtype=rows.dtype.newbyteorder("="), order="C", subok=False))


def _rows_of_group(group: Any, columns: Columns) -> Incoming:
    import h5py

    datasets: dict[str, Any] = {}
    group.visititems(lambda name, item: datasets.update({name: item} if isinstance(item, h5py.Dataset) else {}))
    place, parts = f"{group.file.filename}{group.name}", dict[str, Part]()
    for name, dataset in _chosen(datasets, columns, place).items():
        if dataset.is_virtual or dataset.external:
            raise CacheError(f"the values of {name!r} in {place} are in other files: read those, or name columns=")
        is_text = h5py.check_string_dtype(dataset.dtype) is not None
        parts[name] = _part_of_array(name, dataset, place, is_text=is_text)
    return _rows_of_parts(parts, place)


# Arrow


def _rows_of_parquet(paths: Collection[Path], columns: Columns) -> Incoming:
    import pyarrow.parquet as pq

    files = [pq.ParquetFile(path, memory_map=True, buffer_size=_BUFFER, pre_buffer=False) for path in paths]
    schema, place = files[0].schema_arrow, str(next(iter(paths)))
    for file, path in zip(files, paths, strict=True):
        if not file.schema_arrow.equals(schema):
            raise CacheError(f"{path} has other columns or types than {place}: read the files one by one")
    names = list(_chosen(dict.fromkeys(schema.names), columns, place))

    def batches() -> Iterator[Any]:
        for file in filter(lambda file: file.metadata.num_rows, files):
            row = file.metadata.row_group(0).total_byte_size // max(file.metadata.row_group(0).num_rows, 1)
            yield from file.iter_batches(batch_size=_rows_at_once(row), columns=names)

    return _rows(schema, names, batches(), place)


def _rows_of_table(table: Any, columns: Columns, place: str = "the table") -> Incoming:
    names, step = _taken(table, table.column_names, columns, place)
    return _rows(table.schema, names, table.select(names).to_batches(step), place)


def _rows_of_dataset(dataset: Any, columns: Columns) -> Incoming:
    table = dataset.data.table
    names, step = _taken(table, dataset.column_names, columns, "the dataset")
    tables = dataset.select_columns(names).with_format("arrow").iter(step)
    return _rows(table.schema, names, (batch for part in tables for batch in part.to_batches()), "the dataset")


def _taken(table: Any, available: Collection[str], columns: Columns, place: str) -> tuple[list[str], int]:
    """The columns, and rows per batch."""
    table.validate()  # pyarrow follows offsets and lengths unchecked, even out of its memory
    names = list(_chosen(dict.fromkeys(available), columns, place))
    return names, _rows_at_once(table.select(names).get_total_buffer_size() // max(len(table), 1))


def _rows_at_once(nbytes: int) -> int:
    return min(rows_in_batch([nbytes]), _MOST_ROWS)


def _rows(schema: Any, names: Collection[str], batches: Iterable[Any], place: str) -> Incoming:
    columns = {name: column_of(name, _described(schema.field(name).type)) for name in names}
    return Incoming(columns, (_batch(batch, columns, place) for batch in batches))


def _described(kind: Any) -> object:
    dtype, sizes = _layout(kind)
    return JSON if dtype is None or None in sizes[1:] else (dtype, sizes)


def _layout(kind: Any) -> tuple[torch.dtype | None, tuple[int | None, ...]]:
    """The dtype (None if torch has none) and the sizes of a row."""
    import pyarrow as pa

    if hasattr(kind, "shape") and hasattr(kind, "value_type") and isinstance(kind, pa.ExtensionType):  # from datasets
        return getattr(torch, str(kind.value_type), None), tuple(kind.shape)
    is_fixed = pa.types.is_fixed_size_list(kind)
    if is_fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        dtype, sizes = _layout(kind.value_type)
        return dtype, (kind.list_size if is_fixed else None, *sizes)
    if pa.types.is_boolean(kind):
        return torch.bool, ()
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return getattr(torch, str(kind.to_pandas_dtype().__name__)), ()
    return None, ()


def _batch(batch: Any, columns: Mapping[str, Column], place: str) -> Batch:
    batch.validate(full=True)
    arrays = {name: (batch.column(name), column) for name, column in columns.items()}
    return {
        name: array.to_pylist() if column.kind == JSON else _tensors_of(array, column, place)
        for name, (array, column) in arrays.items()
    }


def _tensors_of(array: Any, column: Column, place: str) -> Any:
    import pyarrow.compute as pc

    array = getattr(array, "storage", array)  # of an extension type
    values = _flat(array, column, place).view(-1, *column.row_shape)
    return list(values.split(pc.list_value_length(array).to_pylist())) if column.kind == RAGGED else values


def _flat(array: Any, column: Column, place: str) -> torch.Tensor:
    import pyarrow as pa

    array = getattr(array, "storage", array)
    if array.null_count:
        raise CacheError(f"{column.name!r} in {place} has a null: fill it, or leave the column out with columns=")
    if pa.types.is_nested(array.type):
        return _flat(array.flatten(), column, place)
    values = torch.from_numpy(array.to_numpy(zero_copy_only=False).copy())
    assert values.dtype == column.dtype
    return values


_KINDS: tuple[tuple[str, str, Callable[[Any, Columns], Incoming]], ...] = (
    ("numpy", "ndarray", _rows_of_array),
    ("h5py", "Group", _rows_of_group),
    ("pyarrow", "Table", _rows_of_table),
    ("datasets", "Dataset", _rows_of_dataset),
)
