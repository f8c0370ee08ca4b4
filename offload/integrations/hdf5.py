"""Rows from HDF5 datasets, with h5py.

Always true:
- the file is opened read-only; at most one batch of it is in memory
- a dataset becomes a column named by its path without the leading slash, one for each path that leads to it, through
  hard, soft and external links; a compound one becomes a column per field
- a link that leads to nothing, and a virtual dataset whose source is missing, are errors where they are a column
- without named columns, non-arrays (scalars, empty datasets, references, opaque data) are skipped, and logged
- vlen values become rows of varying size; text becomes JSON
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from offload.cache.incoming import Field, Incoming, read_in_batches
from offload.errors import CacheError
from offload.integrations.log import log
from offload.integrations.numpy import chosen, field_of, values_of
from offload.storage.reasons import explained
from offload.storage.regular import is_file


def rows_of_file(path: Path, columns: Collection[str] | None) -> Incoming:
    """The rows of an HDF5 file, which stays open until the last one has been read.

    Raises:
        CacheError: it can't be opened, has no datasets, or they differ in length or have an unsupported type.
        MissingFileError, ReadError: it can't be read at the moment.
    """
    import h5py

    try:
        file = h5py.File(path, "r")
    except OSError as error:
        if error.errno is not None:  # from the system; errors about the content have none
            raise explained(path, error) from error
        raise CacheError(f"{path} can't be opened as HDF5 ({error}): download or copy the file again") from error
    return rows_of_group(file, columns)


def rows_of_group(group: Any, columns: Collection[str] | None) -> Incoming:
    """The rows of an open file or group.

    Raises: as `rows_of_file`.
    """
    place = f"{group.file.filename}{group.name}"
    found = dict(_parts(group))
    if columns is None:
        found = {name: part for name, part in found.items() if _is_array(name, *part, place)}
    parts = chosen(found, columns, place)
    if not parts:
        raise CacheError(f"{place} has no datasets")
    for name, (dataset, _) in parts.items():
        _refuse_lost(name, dataset, place)
    num_rows = _length(parts, place)
    fields = {name: _field(name, dataset, key, place) for name, (dataset, key) in parts.items()}

    def read(name: str, rows: slice) -> Any:
        dataset, key = parts[name]
        return _values(dataset, key, rows, fields[name])

    return read_in_batches(fields, num_rows, read, sum(dataset.nbytes for dataset, _ in parts.values()))


def _parts(group: Any) -> Iterator[tuple[str, tuple[Any, str | None]]]:
    """For each column name, its dataset, and the field of it for a compound one."""
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
    """HDF5 itself leaves such a dataset out, or gives zeros.

    Raises:
        CacheError: its data is not where the file says.
    """
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
    """Whether its rows can be stored; if not, that is logged."""
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


def _length(parts: Mapping[str, tuple[Any, str | None]], place: str) -> int:
    lengths = {name: len(dataset) if dataset.shape else None for name, (dataset, _) in parts.items()}
    if None in lengths.values() or len(set(lengths.values())) > 1:
        each = ", ".join(f"{name!r}: {'a single value' if n is None else n}" for name, n in lengths.items())
        raise CacheError(f"the datasets in {place} differ in length ({each}): choose with columns=")
    return next(iter(lengths.values())) or 0


def _field(name: str, dataset: Any, key: str | None, place: str) -> Field:
    import h5py

    dtype = dataset.dtype[key] if key else dataset.dtype
    base, row_shape = dtype.base, (*dataset.shape[1:], *dtype.shape)
    if h5py.check_string_dtype(base) is not None:
        return Field(None)
    values = h5py.check_vlen_dtype(base)
    if values is None:
        return field_of(name, base, row_shape, place)
    if row_shape:
        raise CacheError(f"{name!r} in {place} has several variable-length values per row: leave it out with columns=")
    return Field(field_of(name, values, (), place).dtype, (None,))


def _values(dataset: Any, key: str | None, rows: slice, field: Field) -> Any:
    import h5py

    source = dataset.fields(key) if key else dataset
    base = (dataset.dtype[key] if key else dataset.dtype).base
    if not field.is_tensor and h5py.check_string_dtype(base) is not None:
        read = source[rows] if key else dataset.asstr()[rows]
        return np.vectorize(_text, otypes=[object])(read).tolist() if len(read) else []
    if field.is_ragged:
        return [values_of(row, field) for row in source[rows]]
    return values_of(source[rows], field)


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
