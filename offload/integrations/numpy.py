"""Rows from NumPy arrays and files.

Always true:
- at most one batch of a file is in memory, and nothing is unpickled
- a field of a structured array becomes a column, nested ones `outer.inner`; an array without fields becomes `values`
- text becomes JSON
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload.cache.incoming import Field, Incoming, read_in_batches
from offload.errors import CacheError


def rows_of_file(path: Path, columns: Collection[str] | None) -> Incoming:
    """The rows of an `.npy` file.

    Raises:
        CacheError: it contains pickled objects, is incomplete, or has no rows.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise CacheError(
            f"{path} holds pickled objects, which are not loaded, or is incomplete ({error}): save it with "
            "np.save(path, array, allow_pickle=False)"
        ) from error
    return rows_of_array(array, columns, str(path))


def rows_of_array(array: np.ndarray[Any, Any], columns: Collection[str] | None, place: str = "the array") -> Incoming:
    """The rows of an array, structured or not, in memory or mapped.

    Raises:
        CacheError: it has no rows, or values that are neither numbers nor text.
    """
    if not array.ndim:
        raise CacheError(f"{place} is a single value, without rows")
    parts = chosen(dict(_parts(array, "")), columns, place)
    fields = {name: field_of(name, part.dtype, part.shape[1:], place) for name, part in parts.items()}
    nbytes = sum(part.nbytes for part in parts.values())
    return read_in_batches(fields, len(array), lambda name, rows: values_of(parts[name][rows], fields[name]), nbytes)


def _parts(array: np.ndarray[Any, Any], prefix: str) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    if array.dtype.names is None:
        yield prefix.removesuffix(".") or "values", array
        return
    for name in array.dtype.names:
        yield from _parts(array[name], f"{prefix}{name}.")


# Also used for h5py's arrays


def chosen(found: Mapping[str, object], columns: Collection[str] | None, place: str) -> dict[str, Any]:
    """The requested columns, in that order; all if None.

    Raises:
        CacheError: there is no column of that name.
    """
    for name in columns or ():
        if name not in found:
            raise CacheError(f"{place} has no column {name!r}; it has {', '.join(map(repr, found))}")
    return {name: found[name] for name in (found if columns is None else columns)}


def field_of(name: str, dtype: np.dtype[Any], row_shape: tuple[int, ...], place: str) -> Field:
    """The column for values of a dtype.

    Raises:
        CacheError: it can't be stored.
    """
    if dtype.kind in "US":
        return Field(None)
    try:
        return Field(torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype, row_shape)
    except TypeError as error:
        raise CacheError(
            f"{name!r} in {place} is of dtype {dtype}, which is neither a number of torch's nor text: convert it, or "
            "leave it out with columns="
        ) from error


def values_of(rows: np.ndarray[Any, Any], field: Field) -> Any:
    """A batch of a column, in new memory."""
    if not field.is_tensor:
        return (np.char.decode(rows, "utf-8") if rows.dtype.kind == "S" else rows).tolist()
    native = rows.dtype.newbyteorder("=")
    return torch.from_numpy(np.array(rows, dtype=native, order="C", subok=False))
