"""Rows of other kinds of data into a cache: arrays, tables, datasets, dicts of tensors, and files of them.

Always true:
- a file is recognised by its content, and opened read-only; nothing in it is executed or unpickled
- at most one batch is in memory
- numbers become tensors, lists of varying size rows of varying size; text, structs and deeper lists become JSON
- a part of a part becomes a column `outer.inner`; an array without fields becomes `values`
- a null is a missing value: `<column>.present` is False, with zeros or an empty row; in a JSON column it is null
- without named columns, what has no rows, or none of a kind that can be stored, is left out, and logged
- HDF5: a dataset becomes a column for each path that leads to it, through hard, soft and external links. A link that
  leads to nothing, and a virtual dataset whose source is missing, are errors where they are a column
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload.cache.incoming import PRESENT, Batch, Field, Incoming, cache_of, read_in_batches, rows_in_batch
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
    | HDF5, an open `h5py.File` or `h5py.Group` | its arrays, of one length, also through links; the rest is skipped |
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
    if isinstance(source, np.ndarray):
        return _rows_of_array(source, columns)
    is_tensordict = imported("tensordict", "is_tensor_collection")
    if is_tensordict is not None and is_tensordict(source):
        return _rows_of_tensordict(source, columns)
    if isinstance(source, Mapping) and not _is_one(source, "h5py", "Group"):
        return _rows_of_tensors(source, columns, "the dict")
    for package, kind, rows in _KINDS:
        if _is_one(source, package, kind):
            return rows(source, columns)
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

    return Incoming(rows.fields, batches())


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


def _length_of(parts: Mapping[str, Any], place: str, what: str) -> int:
    lengths = {name: part.shape[0] if part.shape else None for name, part in parts.items()}
    if None in lengths.values() or len(set(lengths.values())) != 1:
        each = ", ".join(f"{name!r}: {'a single value' if n is None else n}" for name, n in lengths.items())
        raise CacheError(f"the {what} in {place} differ in length ({each or 'there are none'}): choose with columns=")
    return int(next(iter(lengths.values())) or 0)


# Tensors


def _rows_of_tensors(tensors: Mapping[str, object], columns: Columns, place: str) -> Incoming:
    parts: dict[str, torch.Tensor] = _chosen(tensors, columns, place)
    for name, part in parts.items():
        if not isinstance(part, torch.Tensor):
            raise CacheError(
                f"{name!r} in {place} is a {type(part).__name__}, not a tensor: leave it out with columns=; "
                "TensorCache.from_records takes records one by one"
            )
        refuse_unstorable(part, name)
    num_rows = _length_of(parts, place, "tensors")
    fields = {name: Field(tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in parts.items()}
    return read_in_batches(fields, num_rows, lambda name, rows: materialize(parts[name][rows]))


def _rows_of_tensordict(td: Any, columns: Columns, place: str = "the TensorDict") -> Incoming:
    from tensordict import is_tensorclass

    td = td.to_tensordict() if is_tensorclass(td) else td
    if not td.batch_size:
        raise CacheError(f"{place} has no batch_size, which is the number of rows: set batch_size=[rows]")
    ways = _chosen(dict(_leaves(td, ())), columns, place)
    if not ways:
        raise CacheError(f"{place} has no tensors")
    parts, fields = {name: td.select(way) for name, way in ways.items()}, {}
    for name, way in ways.items():
        first = parts[name][:1].get(way)
        fields[name] = Field(first.dtype, tuple(first.shape[1:])) if isinstance(first, torch.Tensor) else Field(None)

    def read(name: str, rows: slice) -> Any:
        part = parts[name][rows]
        value = part.get(ways[name])
        if fields[name].is_tensor:
            return materialize(value)
        # for one row, or if it is the same for all, tensordict returns the value itself
        return value.tolist() if hasattr(value, "tolist") else [value] * len(part)

    return read_in_batches(fields, int(td.batch_size[0]), read)


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
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise CacheError(
            f"{path} holds pickled objects, which are not loaded, or is incomplete ({error}): save it with "
            "np.save(path, array, allow_pickle=False)"
        ) from error
    return _rows_of_array(array, columns, str(path))


def _rows_of_array(array: np.ndarray[Any, Any], columns: Columns, place: str = "the array") -> Incoming:
    if not array.ndim:
        raise CacheError(f"{place} is a single value, without rows")
    parts = _chosen(dict(_fields(array, "")), columns, place)
    fields = {name: _field_of(name, part.dtype, part.shape[1:], place) for name, part in parts.items()}
    nbytes = sum(part.nbytes for part in parts.values())
    return read_in_batches(fields, len(array), lambda name, rows: _values_of(parts[name][rows], fields[name]), nbytes)


def _fields(array: np.ndarray[Any, Any], prefix: str) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    if array.dtype.names is None:
        yield prefix.removesuffix(".") or "values", array
        return
    for name in array.dtype.names:
        yield from _fields(array[name], f"{prefix}{name}.")


def _field_of(name: str, dtype: np.dtype[Any], row_shape: tuple[int, ...], place: str) -> Field:
    if dtype.kind in "US":
        return Field(None)
    try:
        return Field(torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype, row_shape)
    except TypeError as error:
        raise CacheError(
            f"{name!r} in {place} is of dtype {dtype}, neither torch's nor text: convert or leave it out with columns="
        ) from error


def _values_of(rows: np.ndarray[Any, Any], field: Field) -> Any:
    if not field.is_tensor:
        return (np.char.decode(rows, "utf-8") if rows.dtype.kind == "S" else rows).tolist()
    native = rows.dtype.newbyteorder("=")
    return torch.from_numpy(np.array(rows, dtype=native, order="C", subok=False))


# HDF5


def _rows_of_hdf5(path: Path, columns: Columns) -> Incoming:
    import h5py

    try:
        file = h5py.File(path, "r")
    except OSError as error:
        if error.errno is not None:  # from the system; errors about the content have none
            raise explained(path, error) from error
        raise CacheError(f"{path} can't be opened as HDF5 ({error}): download or copy the file again") from error
    return _rows_of_group(file, columns)


def _rows_of_group(group: Any, columns: Columns) -> Incoming:
    place = f"{group.file.filename}{group.name}"
    found = dict(_members(group))
    if columns is None:
        found = {name: part for name, part in found.items() if _is_array(name, *part, place)}
    parts = _chosen(found, columns, place)
    if not parts:
        raise CacheError(f"{place} has no datasets")
    for name, (dataset, _) in parts.items():
        _refuse_lost(name, dataset, place)
    num_rows = _length_of({name: dataset for name, (dataset, _) in parts.items()}, place, "datasets")
    fields = {name: _field_in(name, dataset, key, place) for name, (dataset, key) in parts.items()}

    def read(name: str, rows: slice) -> Any:
        dataset, key = parts[name]
        return _values_in(dataset, key, rows, fields[name])

    return read_in_batches(fields, num_rows, read, sum(dataset.nbytes for dataset, _ in parts.values()))


def _members(group: Any) -> Iterator[tuple[str, tuple[Any, str | None]]]:
    for name, dataset in _datasets(group):
        for key in getattr(dataset, "dtype", np.dtype("f")).names or (None,):
            yield f"{name}.{key}" if key else name, (dataset, key)


def _datasets(group: Any, path: str = "", above: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The datasets by path, and the links that lead to nothing. A group that contains itself is entered once."""
    import h5py

    for key in group:
        try:
            item = group[key]
        except (KeyError, OSError, RuntimeError):
            item = group.get(key, getlink=True)
        if isinstance(item, h5py.Group):
            if item not in (*above, group):
                yield from _datasets(item, f"{path}{key}/", (*above, group))
        elif not isinstance(item, h5py.Datatype):
            yield path + key, item


def _refuse_lost(name: str, dataset: Any, place: str) -> None:
    """HDF5 itself leaves such a dataset out, or gives zeros."""
    import h5py

    if isinstance(dataset, h5py.Dataset):
        sources = {(one.file_name, one.dset_name) for one in dataset.virtual_sources()} if dataset.is_virtual else ()
        one_by_one = (source for source in sources if "%" not in "".join(source))  # a pattern: as many as there are
        lost = [source for source in one_by_one if _is_lost(dataset.file, *source)]
    else:
        lost = [(getattr(dataset, "filename", "."), getattr(dataset, "path", "?"))]
    for file, path in lost:
        where = path if file == "." else f"{path} in {file}"
        raise CacheError(f"{name!r} in {place} refers to {where}, which is not there: restore it, or name columns=")


def _is_lost(file: Any, filename: str, path: str) -> bool:
    import h5py

    if filename == ".":
        return path not in file
    for place in filter(is_file, (Path(file.filename).parent / filename, Path(filename))):
        with suppress(OSError), h5py.File(place, "r") as source:  # one that is open for writing can't be opened again
            return path not in source
        return False
    return True


def _is_array(name: str, dataset: Any, key: str | None, place: str) -> bool:
    import h5py

    if not isinstance(dataset, h5py.Dataset):  # a lost link
        return True
    dtype = (dataset.dtype[key] if key else dataset.dtype).base
    why = None
    if dataset.shape is None:
        why = "is empty"
    elif not dataset.shape:
        why = "is a single value"
    elif dtype.kind == "V" or h5py.check_ref_dtype(dtype) is not None:
        why = f"is of dtype {dtype}"
    if why:
        log.info("%r in %s is skipped: it %s", name, place, why)
    return why is None


def _field_in(name: str, dataset: Any, key: str | None, place: str) -> Field:
    import h5py

    dtype = dataset.dtype[key] if key else dataset.dtype
    base, row_shape = dtype.base, (*dataset.shape[1:], *dtype.shape)
    if h5py.check_string_dtype(base) is not None:
        return Field(None)
    values = h5py.check_vlen_dtype(base)
    if values is None:
        return _field_of(name, base, row_shape, place)
    if row_shape:
        raise CacheError(f"{name!r} in {place} has several variable-length values per row: leave it out with columns=")
    return Field(_field_of(name, values, (), place).dtype, (None,))


def _values_in(dataset: Any, key: str | None, rows: slice, field: Field) -> Any:
    import h5py

    source = dataset.fields(key) if key else dataset
    base = (dataset.dtype[key] if key else dataset.dtype).base
    if not field.is_tensor and h5py.check_string_dtype(base) is not None:
        read = source[rows] if key else dataset.asstr()[rows]
        as_text = np.vectorize(lambda one: one.decode() if isinstance(one, bytes) else str(one), otypes=[object])
        return as_text(read).tolist() if len(read) else []
    if field.is_ragged:
        return [_values_of(row, field) for row in source[rows]]
    return _values_of(source[rows], field)


# Arrow


def _rows_of_parquet(paths: Collection[Path], columns: Columns) -> Incoming:
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = []
    for path in paths:
        try:
            files.append(pq.ParquetFile(path, memory_map=True, buffer_size=_BUFFER, pre_buffer=False))
        except pa.ArrowException as error:
            raise CacheError(f"{path} can't be read as Parquet ({error}): download or copy the file again") from error
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
        try:
            table = pa.ipc.open_file(source).read_all()  # mapped, except compressed ones
        except pa.ArrowInvalid:
            source.seek(0)
            table = pa.ipc.open_stream(source).read_all()
    except pa.ArrowException as error:
        raise CacheError(f"{path} can't be read as Arrow ({error}): download or copy the file again") from error
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
    _refuse_malformed(table, place)
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


def _refuse_malformed(data: Any, place: str, *, full: bool = False) -> None:
    """Validate offsets and lengths in a file: pyarrow follows them unchecked, even out of its memory."""
    import pyarrow as pa

    try:
        data.validate(full=full)
    except pa.ArrowException as error:
        raise CacheError(f"{place} is not valid Arrow ({error}): download or copy it again") from error


def _rows_at_once(nbytes: int) -> int:
    return min(rows_in_batch([nbytes]), _MOST_ROWS)


def _rows(schema: Any, names: Collection[str], nulls: Collection[str], batches: Iterable[Any], place: str) -> Incoming:
    fields = {name: _field_at(name, schema.field(name).type, name in nulls, place) for name in names}
    return Incoming(fields, (_batch(batch, fields, place) for batch in batches))


def _field_at(name: str, kind: Any, has_nulls: bool, place: str) -> Field:
    import pyarrow as pa

    dtype, sizes = _layout(kind)
    if dtype is None or None in sizes[1:]:
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            return Field(torch.uint8, (None,), is_optional=has_nulls)
        if not _is_json(kind):
            raise CacheError(
                f"{name!r} in {place} is of type {kind}, no numbers, text or bytes: cast or leave it out with columns="
            )
        return Field(None)
    return Field(dtype, sizes, is_optional=has_nulls)


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


def _is_json(kind: Any) -> bool:
    import pyarrow as pa

    of = pa.types
    if any(is_kind(kind) for is_kind in (of.is_list, of.is_large_list, of.is_fixed_size_list, of.is_dictionary)):
        return _is_json(kind.value_type)
    if of.is_struct(kind):
        return all(_is_json(kind.field(at).type) for at in range(kind.num_fields))
    kinds = (of.is_string, of.is_large_string, of.is_integer, of.is_floating, of.is_boolean, of.is_null)
    return any(is_kind(kind) for is_kind in kinds)


def _batch(batch: Any, fields: dict[str, Field], place: str) -> Batch:
    _refuse_malformed(batch, place, full=True)
    found: Batch = {}
    for name, field in fields.items():
        array = batch.column(name)
        if field.is_tensor:
            found[name] = _ragged(name, array, field, place) if field.is_ragged else _dense(name, array, field, place)
        else:
            found[name] = array.to_pylist()
        if field.marks_missing:
            found[name + PRESENT] = _present(array)
    return found


def _dense(name: str, array: Any, field: Field, place: str) -> torch.Tensor:
    sizes = [size or 0 for size in field.row_shape]
    values = _flat(name, array.drop_null(), field, place).view(-1, *sizes)
    if not array.null_count:
        return values
    whole = torch.zeros(len(array), *sizes, dtype=field.dtype)
    whole[_present(array)] = values
    return whole


def _present(array: Any) -> torch.Tensor:
    return torch.from_numpy(array.is_valid().to_numpy(zero_copy_only=False).copy())


def _ragged(name: str, array: Any, field: Field, place: str) -> list[Any]:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type):
        return [value or b"" for value in array.to_pylist()]
    rest = [size or 0 for size in field.row_shape[1:]]
    storage = array.storage if isinstance(array, pa.ExtensionArray) else array
    lengths = pc.list_value_length(storage).fill_null(0).to_pylist()
    return list(_flat(name, storage.drop_null(), field, place).view(-1, *rest).split(lengths))


def _flat(name: str, array: Any, field: Field, place: str) -> torch.Tensor:
    import pyarrow as pa

    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    if hasattr(array, "flatten") and pa.types.is_nested(array.type):
        return _flat(name, array.flatten(), field, place)
    if array.null_count:
        raise CacheError(f"{name!r} in {place} has a null inside a row: fill it, or leave the column out with columns=")
    values = torch.from_numpy(array.to_numpy(zero_copy_only=False).copy())
    assert values.dtype == field.dtype
    return values


_MARKS: Mapping[bytes, Callable[[Path, Columns], Incoming]] = {
    b"\x89HDF\r\n\x1a\n": _rows_of_hdf5,
    np.lib.format.MAGIC_PREFIX: _rows_of_npy,
    b"PAR1": lambda path, columns: _rows_of_parquet([path], columns),
    b"ARROW1": _rows_of_ipc,
    b"\xff\xff\xff\xff": _rows_of_ipc,  # a stream
}
_KINDS: tuple[tuple[str, str, Callable[[Any, Columns], Incoming]], ...] = (
    ("h5py", "Group", _rows_of_group),
    ("pyarrow", "Table", _rows_of_table),
    ("datasets", "Dataset", _rows_of_dataset),
)
