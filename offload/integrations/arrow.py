"""Rows from Arrow tables, files and datasets.

Always true:
- at most one batch of a file is in memory
- numbers, and lists of one size, become tensors; lists of varying size become rows of varying size; text, structs and
  deeper lists become JSON
- a null is a missing value: `<column>.present` is False, with zeros or an empty row; in a JSON column it is null
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from offload.cache.incoming import PRESENT, Batch, Field, Incoming
from offload.errors import CacheError
from offload.integrations.numpy import chosen

_MOST_ROWS = 4096
_BATCH = 8 << 20  # bytes
_BUFFER = 1 << 20  # bytes per read of a Parquet column


def rows_of_parquet(paths: Collection[Path], columns: Collection[str] | None) -> Incoming:
    """The rows of Parquet files, one after another.

    Raises:
        CacheError: one can't be read, their columns differ, or a column can't be stored.
    """
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
    names = list(chosen(dict.fromkeys(schema.names), columns, place))
    nulls = {name for file in files for name in _with_nulls(file.metadata, names)}

    def batches() -> Iterator[Any]:
        for file in filter(lambda file: file.metadata.num_rows, files):
            row = file.metadata.row_group(0).total_byte_size // max(file.metadata.row_group(0).num_rows, 1)
            yield from file.iter_batches(batch_size=_rows_at_once(row), columns=names)

    return _rows(schema, names, nulls, batches(), place)


def rows_of_ipc(path: Path, columns: Collection[str] | None) -> Incoming:
    """The rows of an Arrow or Feather file, or of a file with an Arrow stream.

    Raises: as `rows_of_parquet`.
    """
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
    return rows_of_table(table, columns, str(path))


def rows_of_table(table: Any, columns: Collection[str] | None, place: str = "the table") -> Incoming:
    """The rows of a `pyarrow.Table`.

    Raises:
        CacheError: a column can't be stored.
    """
    names, nulls, step = _taken(table, table.column_names, columns, place)
    return _rows(table.schema, names, nulls, table.select(names).to_batches(step), place)


def rows_of_dataset(dataset: Any, columns: Collection[str] | None) -> Incoming:
    """The rows of a `datasets.Dataset`, in its own order.

    Raises: as `rows_of_table`.
    """
    table = dataset.data.table
    names, nulls, step = _taken(table, dataset.column_names, columns, "the dataset")
    tables = dataset.select_columns(names).with_format("arrow").iter(step)
    return _rows(table.schema, names, nulls, (part for found in tables for part in found.to_batches()), "the dataset")


def _taken(
    table: Any, available: Collection[str], columns: Collection[str] | None, place: str
) -> tuple[list[str], set[str], int]:
    """The columns to read, those of them with nulls, and the number of rows per batch."""
    _refuse_malformed(table, place)
    names = list(chosen(dict.fromkeys(available), columns, place))
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
    """Validate offsets and lengths in a file: pyarrow follows them unchecked, even out of its memory.

    Raises:
        CacheError: some are invalid; with `full` values are validated, too.
    """
    import pyarrow as pa

    try:
        data.validate(full=full)
    except pa.ArrowException as error:
        raise CacheError(f"{place} is not valid Arrow ({error}): download or copy it again") from error


def _rows_at_once(nbytes: int) -> int:
    return max(min(_BATCH // max(nbytes, 1), _MOST_ROWS), 1)


def _rows(schema: Any, names: Collection[str], nulls: Collection[str], batches: Iterable[Any], place: str) -> Incoming:
    fields = {name: _field(name, schema.field(name).type, name in nulls, place) for name in names}
    return Incoming(fields, (_batch(batch, fields, place) for batch in batches))


# Types


def _field(name: str, kind: Any, has_nulls: bool, place: str) -> Field:
    import pyarrow as pa

    dtype, sizes = _layout(kind)
    if dtype is None or None in sizes[1:]:
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            return Field(torch.uint8, (None,), is_optional=has_nulls)
        if not _is_json(kind):
            raise CacheError(
                f"{name!r} in {place} is of type {kind}, which is neither numbers nor text nor bytes: cast it, or "
                "leave it out with columns="
            )
        return Field(None)
    assert not pa.types.is_null(kind)
    return Field(dtype, sizes, is_optional=has_nulls)


def _layout(kind: Any) -> tuple[torch.dtype | None, tuple[int | None, ...]]:
    """The dtype (None if torch has none) and the sizes of a row."""
    import pyarrow as pa

    if hasattr(kind, "shape") and hasattr(kind, "value_type") and isinstance(kind, pa.ExtensionType):  # from datasets
        return getattr(torch, str(kind.value_type), None), tuple(kind.shape)
    if pa.types.is_fixed_size_list(kind):
        dtype, sizes = _layout(kind.value_type)
        return dtype, (kind.list_size, *sizes)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        dtype, sizes = _layout(kind.value_type)
        return dtype, (None, *sizes)
    if pa.types.is_boolean(kind):
        return torch.bool, ()
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return getattr(torch, str(kind.to_pandas_dtype().__name__)), ()
    return None, ()


def _is_json(kind: Any) -> bool:
    import pyarrow as pa

    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if is_list or pa.types.is_dictionary(kind):
        return _is_json(kind.value_type)
    if pa.types.is_struct(kind):
        return all(_is_json(kind.field(at).type) for at in range(kind.num_fields))
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return bool(is_text or is_number or pa.types.is_null(kind))


# Values


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
    """All numbers of an array of nested lists, flat."""
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
