"""Rows of other kinds of data into a cache: arrays, tables, datasets, dicts of tensors, and files of them.

Always true:
- a file is recognised by its content, and opened read-only; nothing in it is executed or unpickled
- at most one batch is in memory
- numbers become tensors, lists of varying size rows of varying size; text, structs and deeper lists become JSON
- a part of a part becomes a column `outer.inner`; an array without fields becomes `values`
- a null is a missing value: `<column>.present` is False, with zeros or an empty row; in a JSON column it is null
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

from offload.cache.incoming import PRESENT, Batch, Incoming, cache_of, rows_in_batch, with_marks
from offload.cache.schema import JSON, RAGGED, TENSOR, Column, column_of
from offload.cache.table import TensorCache
from offload.errors import CacheError, CorruptFileError, MissingFileError, OffloadError
from offload.importing import imported
from offload.integrations.tensordict import INNER, META, load_memmap
from offload.models.loader import load_file
from offload.system.reasons import explained, reading
from offload.system.regular import absolute, as_file, is_file, is_folder, is_there, open_regular
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
    | `.npy` (structured too), `numpy.ndarray` | its fields; `values` for an array without |
    | HDF5, an open `h5py.File` or `h5py.Group` | its arrays, of one length; links and the rest are skipped |
    | Parquet, a folder of it, Arrow, Feather, `pyarrow.Table` | its columns |
    | what `Dataset.save_to_disk` wrote, `datasets.Dataset` | its columns |
    | `.safetensors`, a dict of tensors from `torch.save`, a dict of tensors | its tensors, of one length |
    | `tensordict.TensorDict`, a tensorclass, a folder of `TensorDict.memmap` | its leaves, nested ones `outer.inner` |

    The kind of a file is recognised by its content. Text, structs and objects become JSON columns. A null is missing,
    as in `TensorCache.from_records`: `<column>.present` is False there.

    Args:
        source: see above.
        folder: where the cache goes, as for `TensorCache.create`; None for a temporary one.
        columns: those to take; all if None.
        metadata, device: as for `TensorCache.create`.

    Returns:
        The cache, with one filled row per row of the source.

    Raises:
        MissingFileError, CorruptFileError, ReadError
        UnknownSubclassError: a tensor is of a subclass that can't be stored.
        CacheError: a file that is not whole, columns of several lengths, or one that can't be kept, as pickled objects.
        CheckpointError: a pickle with code in it.

    Example:
        >>> rows = np.array([(1, 0.5), (2, 1.5)], dtype=[("id", "i8"), ("score", "f4")])
        >>> cache_from(rows)[:]
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
        return _rows_of_tensors(source, columns, "the dict")
    raise CacheError(
        f"no rows can be read from {type(source).__name__}: give a path, an array, a dict of tensors, a TensorDict, a "
        "pyarrow.Table, a datasets.Dataset or an h5py.Group; TensorCache.from_records takes records one by one"
    )


def _is_one(source: object, package: str, kind: str) -> bool:
    """Whether it is an instance of a library's class; does not import the library."""
    return any(base.__module__.split(".")[0] == package and base.__name__ == kind for base in type(source).__mro__)


def _rows_of_path(path: Path, columns: Columns) -> Incoming:
    if not is_there(path):
        raise MissingFileError(f"{path} is not there: name a file or folder of rows")
    with _as_read(path):
        rows = _rows_of_folder(path, columns) if is_folder(path) else _rows_of_file(path, columns)

    def batches() -> Iterator[Batch]:
        with _as_read(path):
            yield from rows.batches

    return Incoming(rows.columns, batches())


def _rows_of_file(path: Path, columns: Columns) -> Incoming:
    with reading(path), as_file(open_regular(path)) as file:
        start = file.read(8)
    for mark, rows in _MARKS.items():
        if start.startswith(mark):
            return rows(path, columns)
    return _rows_of_tensors(load_file(path), columns, str(path))


@contextmanager
def _as_read(path: Path) -> Iterator[None]:
    """Third-party readers can raise anything for a damaged file: blame the file (`CorruptFileError`, `ReadError`)."""
    try:
        yield
    except (OffloadError, ImportError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:  # without, it is a library's, about the content
            raise explained(path, error) from error
        raise CorruptFileError(f"{path} can't be read ({error}): is it complete? Download or copy it again.") from error


def _rows_of_folder(path: Path, columns: Columns) -> Incoming:
    if is_there(path / "dataset_info.json") and is_there(path / "state.json"):
        import datasets

        return _rows_of_dataset(datasets.load_from_disk(str(path)), columns)
    if is_file(path / META):
        inner = path / INNER
        if is_folder(inner):
            log.info("%s: fields of the class that are not tensors are left out", path)
        return _rows_of_tensordict(load_memmap(inner if is_folder(inner) else path, "cpu"), columns, str(path))
    shards = sorted(path.glob("*.parquet"))
    if not shards:
        raise CacheError(f"{path} has no saved dataset, TensorDict or .parquet files: name a file in it")
    return _rows_of_parquet(shards, columns)


def _chosen(found: Mapping[str, object], columns: Columns, place: str) -> dict[str, Any]:
    for name in columns or ():
        if name not in found:
            raise CacheError(f"{place} has no column {name!r}; it has {', '.join(map(repr, found))}")
    return {name: found[name] for name in (found if columns is None else columns)}


# What has a length and slices


@dataclass(frozen=True, slots=True)
class Part:
    """What becomes a column.

    Attributes:
        column: its description, as for `TensorCache.create`.
        shape: rows first; () for a single value.
        read: the rows of a slice, as `TensorCache.append` takes them.
        nbytes: of all rows, where the description does not tell.
    """

    column: object
    shape: Sequence[int]
    read: Callable[[slice], Any]
    nbytes: int = 0


def _rows_of_parts(parts: Mapping[str, Part], place: str) -> Incoming:
    lengths = {name: part.shape[0] if part.shape else None for name, part in parts.items()}
    if None in lengths.values() or len(set(lengths.values())) != 1:
        each = ", ".join(f"{name!r}: {'a single value' if n is None else n}" for name, n in lengths.items())
        raise CacheError(f"the columns of {place} differ in length ({each or 'there are none'}): choose with columns=")
    [num_rows] = {rows for rows in lengths.values() if rows is not None}
    columns = {name: column_of(name, part.column) for name, part in parts.items()}
    known = sum(column.row_bytes if column.kind == TENSOR else _GUESS for column in columns.values())
    step = rows_in_batch([max(known, sum(part.nbytes for part in parts.values()) // max(num_rows, 1))])
    slices = (slice(start, start + step) for start in range(0, num_rows, step))
    return Incoming(columns, ({name: part.read(rows) for name, part in parts.items()} for rows in slices))


# Tensors


def _rows_of_tensors(tensors: Mapping[str, object], columns: Columns, place: str) -> Incoming:
    chosen = _chosen(tensors, columns, place)
    return _rows_of_parts({name: _part_of_tensor(name, tensor, place) for name, tensor in chosen.items()}, place)


def _part_of_tensor(name: str, tensor: object, place: str) -> Part:
    if not isinstance(tensor, torch.Tensor):
        raise CacheError(
            f"{name!r} in {place} is a {type(tensor).__name__}, not a tensor: leave it out with columns=; "
            "TensorCache.from_records takes records one by one"
        )
    refuse_unstorable(tensor, name)
    return Part((tensor.dtype, tuple(tensor.shape[1:])), tensor.shape, lambda rows: materialize(tensor[rows]))


def _rows_of_tensordict(td: Any, columns: Columns, place: str = "the TensorDict") -> Incoming:
    from tensordict import is_tensorclass

    td = td.to_tensordict() if is_tensorclass(td) else td
    if not td.batch_size:
        raise CacheError(f"{place} has no batch_size, which is the number of rows: set batch_size=[rows]")
    ways = _chosen(dict(_leaves(td, ())), columns, place)
    return _rows_of_parts({name: _part_of_leaf(td.select(way), way) for name, way in ways.items()}, place)


def _part_of_leaf(td: Any, way: tuple[str, ...]) -> Part:
    def read(rows: slice) -> Any:
        part = td[rows]
        value = part.get(way)
        if isinstance(value, torch.Tensor):
            return materialize(value)
        # for one row, or if it is the same for all, tensordict returns the value itself
        return value.tolist() if hasattr(value, "tolist") else [value] * len(part)

    first = td[:1].get(way)
    column = (first.dtype, tuple(first.shape[1:])) if isinstance(first, torch.Tensor) else JSON
    return Part(column, td.batch_size, read)


def _leaves(td: Any, way: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    from tensordict import NonTensorData, NonTensorStack, is_tensor_collection, is_tensorclass

    for key in td.keys():  # noqa: SIM118  a TensorDict goes over its rows
        value, path = td.get(key), (*way, key)
        if isinstance(value, NonTensorData | NonTensorStack):
            yield ".".join(path), path
        elif is_tensor_collection(value):
            yield from _leaves(value.to_tensordict() if is_tensorclass(value) else value, path)
        elif value.is_nested:
            log.info("%r is a nested tensor, and is left out: store its rows with TensorCache.create", ".".join(path))
        else:
            yield ".".join(path), path


# Arrays


def _rows_of_npy(path: Path, columns: Columns) -> Incoming:
    return _rows_of_array(np.load(path, mmap_mode="r", allow_pickle=False), columns, str(path))


def _rows_of_array(array: np.ndarray[Any, Any], columns: Columns, place: str = "the array") -> Incoming:
    chosen = _chosen(dict(_fields(array, "")), columns, place)
    return _rows_of_parts({name: _part_of_array(name, part, place) for name, part in chosen.items()}, place)


def _fields(array: np.ndarray[Any, Any], prefix: str) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    if array.dtype.names is None:
        yield prefix.removesuffix(".") or "values", array
        return
    for name in array.dtype.names:
        yield from _fields(array[name], f"{prefix}{name}.")


def _part_of_array(name: str, array: np.ndarray[Any, Any], place: str) -> Part:
    column = JSON if array.dtype.kind in "US" else (_dtype_of(name, array.dtype, place), array.shape[1:])
    return Part(column, array.shape, lambda rows: _values_of(array[rows]), array.nbytes)


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


# HDF5


def _rows_of_hdf5(path: Path, columns: Columns) -> Incoming:
    import h5py

    return _rows_of_group(h5py.File(path, "r"), columns)


def _rows_of_group(group: Any, columns: Columns) -> Incoming:
    import h5py

    place = f"{group.file.filename}{group.name}"
    found: dict[str, tuple[Any, str | None]] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found.update({f"{name}.{field}" if field else name: (item, field) for field in item.dtype.names or (None,)})

    group.visititems(visit)
    if columns is None:
        found = {name: part for name, part in found.items() if _is_array(name, *part, place)}
    chosen = _chosen(found, columns, place)
    return _rows_of_parts(
        {name: _part_of_dataset(name, dataset, field, place) for name, (dataset, field) in chosen.items()}, place
    )


def _is_array(name: str, dataset: Any, field: str | None, place: str) -> bool:
    import h5py

    dtype = (dataset.dtype[field] if field else dataset.dtype).base
    is_array = bool(dataset.shape) and dtype.kind != "V" and h5py.check_ref_dtype(dtype) is None
    if not is_array:
        log.info("%r in %s is skipped: it has no rows of numbers or text", name, place)
    return is_array


def _part_of_dataset(name: str, dataset: Any, field: str | None, place: str) -> Part:
    import h5py

    if dataset.is_virtual or dataset.external:
        raise CacheError(f"the values of {name!r} in {place} are in other files: read those, or name columns=")
    source, dtype = (dataset.fields(field), dataset.dtype[field]) if field else (dataset, dataset.dtype)
    shape, base = dataset.shape or (), dtype.base
    is_text = h5py.check_string_dtype(base) is not None
    values = None if is_text else h5py.check_vlen_dtype(base)
    if values is None:
        column = JSON if is_text else (_dtype_of(name, base, place), (*shape[1:], *dtype.shape))
        return Part(column, shape, lambda rows: _values_of(source[rows]), dataset.nbytes)
    if shape[1:] or dtype.shape:
        raise CacheError(f"{name!r} in {place} has several variable-length values per row: leave it out with columns=")
    column = (_dtype_of(name, values, place), (None,))
    return Part(column, shape, lambda rows: [_values_of(row) for row in source[rows]], dataset.nbytes)


# Arrow


def _rows_of_parquet(paths: Collection[Path], columns: Columns) -> Incoming:
    import pyarrow.parquet as pq

    files = [pq.ParquetFile(path, memory_map=True, buffer_size=_BUFFER, pre_buffer=False) for path in paths]
    schema, place = files[0].schema_arrow, str(next(iter(paths)))
    for file, path in zip(files, paths, strict=True):
        if not file.schema_arrow.equals(schema):
            raise CacheError(f"{path} has other columns or types than {place}: read the files one by one")
    names = list(_chosen(dict.fromkeys(schema.names), columns, place))
    nulls = {name for file in files for name in _with_nulls(file.metadata, names)}

    def batches() -> Iterator[Any]:
        for file in filter(lambda file: file.metadata.num_rows, files):
            row = file.metadata.row_group(0).total_byte_size // max(file.metadata.row_group(0).num_rows, 1)
            yield from file.iter_batches(batch_size=_rows_at_once(row), columns=names)

    return _rows(schema, names, nulls, batches(), place)


def _rows_of_ipc(path: Path, columns: Columns) -> Incoming:
    import pyarrow as pa

    source = pa.memory_map(str(path))
    try:
        table = pa.ipc.open_file(source).read_all()  # mapped, except compressed ones
    except pa.ArrowInvalid:
        source.seek(0)
        table = pa.ipc.open_stream(source).read_all()
    return _rows_of_table(table, columns, str(path))


def _rows_of_table(table: Any, columns: Columns, place: str = "the table") -> Incoming:
    names, nulls, step = _taken(table, table.column_names, columns, place)
    return _rows(table.schema, names, nulls, table.select(names).to_batches(step), place)


def _rows_of_dataset(dataset: Any, columns: Columns) -> Incoming:
    table = dataset.data.table
    names, nulls, step = _taken(table, dataset.column_names, columns, "the dataset")
    tables = dataset.select_columns(names).with_format("arrow").iter(step)
    return _rows(table.schema, names, nulls, (part for found in tables for part in found.to_batches()), "the dataset")


def _taken(table: Any, available: Collection[str], columns: Columns, place: str) -> tuple[list[str], set[str], int]:
    table.validate()  # pyarrow follows offsets and lengths unchecked, even out of its memory
    names = list(_chosen(dict.fromkeys(available), columns, place))
    nbytes = table.select(names).get_total_buffer_size() // max(len(table), 1)
    return names, {name for name in names if table[name].null_count}, _rows_at_once(nbytes)


def _with_nulls(metadata: Any, names: Collection[str]) -> set[str]:
    """The columns that have, or may have, nulls: for lists, the file also counts empty ones, or nothing."""
    found = set()
    for group in range(metadata.num_row_groups):
        for at in range(metadata.num_columns):
            column = metadata.row_group(group).column(at)
            known = column.statistics
            if known is None or not known.has_null_count or known.null_count:
                found |= {name for name in names if f"{column.path_in_schema}.".startswith(f"{name}.")}
    return found


def _rows_at_once(nbytes: int) -> int:
    return min(rows_in_batch([nbytes]), _MOST_ROWS)


def _rows(schema: Any, names: Collection[str], nulls: Collection[str], batches: Iterable[Any], place: str) -> Incoming:
    columns = {name: column_of(name, _described(schema.field(name).type)) for name in names}
    marked = {name for name in nulls if columns[name].kind != JSON}
    return Incoming(with_marks(columns, marked), (_batch(batch, columns, marked, place) for batch in batches))


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
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return torch.uint8, (None,)
    return None, ()


def _batch(batch: Any, columns: Mapping[str, Column], marked: Collection[str], place: str) -> Batch:
    batch.validate(full=True)
    found: Batch = {}
    for name, column in columns.items():
        array = batch.column(name)
        found[name] = array.to_pylist() if column.kind == JSON else _tensors_of(array, column, place)
        if name in marked:
            found[name + PRESENT] = _present(array)
    return found


def _present(array: Any) -> torch.Tensor:
    return torch.from_numpy(array.is_valid().to_numpy(zero_copy_only=False).copy())


def _tensors_of(array: Any, column: Column, place: str) -> Any:
    """Rows of an array: zeros, or empty ones, for nulls."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type):
        return [value or b"" for value in array.to_pylist()]
    values = _flat(array.drop_null(), column, place).view(-1, *column.row_shape)
    if column.kind == RAGGED:
        storage = array.storage if isinstance(array, pa.ExtensionArray) else array
        return list(values.split(pc.list_value_length(storage).fill_null(0).to_pylist()))
    if not array.null_count:
        return values
    whole = torch.zeros(len(array), *column.row_shape, dtype=column.dtype)
    whole[_present(array)] = values
    return whole


def _flat(array: Any, column: Column, place: str) -> torch.Tensor:
    import pyarrow as pa

    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    if hasattr(array, "flatten") and pa.types.is_nested(array.type):
        return _flat(array.flatten(), column, place)
    if array.null_count:
        raise CacheError(
            f"{column.name!r} in {place} has a null inside a row: fill it, or leave the column out with columns="
        )
    values = torch.from_numpy(array.to_numpy(zero_copy_only=False).copy())
    assert values.dtype == column.dtype
    return values


_MARKS: Mapping[bytes, Callable[[Path, Columns], Incoming]] = {
    b"\x89HDF\r\n\x1a\n": _rows_of_hdf5,
    np.lib.format.MAGIC_PREFIX: _rows_of_npy,
    b"PAR1": lambda path, columns: _rows_of_parquet([path], columns),
    b"ARROW1": _rows_of_ipc,
    b"\xff\xff\xff\xff": _rows_of_ipc,  # a stream
}
_KINDS: tuple[tuple[str, str, Callable[[Any, Columns], Incoming]], ...] = (
    ("numpy", "ndarray", _rows_of_array),
    ("h5py", "Group", _rows_of_group),
    ("pyarrow", "Table", _rows_of_table),
    ("datasets", "Dataset", _rows_of_dataset),
)
