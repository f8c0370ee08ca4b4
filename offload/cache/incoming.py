"""Rows to be added to a cache: their columns, and batches of them, from records and other sources.

Always true:
- a batch has a value for each column and each of its rows
- the first record and the caller determine the columns; a later record fits or raises
- a field that is None or absent is null in a JSON column, and an error in any other
- records are held for one batch only
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from offload.cache.schema import JSON, RAGGED, Column, column_of
from offload.errors import CacheError
from offload.progress import progress
from offload.storage.folders import private_folder
from offload.system.reasons import writing
from offload.system.regular import absolute, is_folder
from offload.tensor.arguments import refuse_unstorable
from offload.tensor.wrapper import guest_of

if TYPE_CHECKING:
    from offload.cache.table import TensorCache

_BATCH = 8 << 20  # bytes
_MOST_ROWS = 1024  # in a batch of records
_MOST_BYTES = 4 << 20  # of tensors in a batch of records; peak memory is four times that
_PLAIN = (bool, int, float, complex)
_TENSORS = (torch.Tensor, np.ndarray)
Batch: TypeAlias = "dict[str, Any]"  # by column: a tensor of all rows, or a list with one tensor or JSON value per row


@dataclass(frozen=True, slots=True)
class Incoming:
    """The columns of incoming rows, and their batches, produced on demand."""

    columns: Mapping[str, Column]
    batches: Iterator[Batch]


def rows_in_batch(nbytes: Iterable[int]) -> int:
    """Rows per batch, if a row takes the sum of these bytes."""
    return max(_BATCH // max(sum(nbytes), 1), 1)


def plain_values(values: Mapping[str, object]) -> dict[str, Any]:
    """Values by column, as users write them, with plain tensors in place of offloaded ones."""
    if not isinstance(values, Mapping):
        raise CacheError(f"rows are given by column, not as a {type(values).__name__}: cache[rows] = {{name: values}}")
    plain: dict[str, Any] = dict(values)
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            refuse_unstorable(value, name)
            plain[name] = guest_of(value.detach())
    return plain


def rows_of(records: Iterable[object], schema: Mapping[str, object]) -> Incoming:
    """Records as rows. Raises: CacheError (there are none, a field is no column, or later a record does not fit)."""
    described = {name: column_of(name, column) for name, column in schema.items()}
    if any(column.top for column in described.values()):
        raise CacheError("records don't hold top log-probabilities: make the cache with `create`, and append them")
    source = iter(records)
    first = next(source, None)
    if first is None:
        if not described:
            raise CacheError("there are no records to infer columns from: pass schema=")
        return Incoming(described, iter(()))
    row = fields_of(first)
    names = dict.fromkeys([*row, *described])
    columns = {name: described.get(name) or _column_of(name, row.get(name)) for name in names}
    return Incoming(columns, _gathered(columns, _chunks(chain([row], map(fields_of, source)))))


def _chunks(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Some records at a time, fewer if their tensors are large."""
    chunk, nbytes = [], 0
    for row in rows:
        chunk.append(row)
        nbytes += sum(value.nbytes for value in row.values() if isinstance(value, _TENSORS))
        if len(chunk) == _MOST_ROWS or nbytes >= _MOST_BYTES:
            yield chunk
            chunk, nbytes = [], 0
    if chunk:
        yield chunk


def fields_of(record: object) -> dict[str, Any]:
    """Its fields by name."""
    fields = dict(_items(record))
    for name, value in fields.items():
        if isinstance(value, torch.Tensor):
            refuse_unstorable(value, name)
    return fields


def _items(record: Any) -> Iterable[tuple[str, Any]]:
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return [(field.name, getattr(record, field.name)) for field in dataclasses.fields(record)]
    if isinstance(record, tuple) and hasattr(record, "_fields"):
        return zip(record._fields, record, strict=True)
    if hasattr(record, "keys"):
        return [(str(name), record[name]) for name in record.keys()]  # noqa: SIM118  tensordict's iterates over rows
    raise CacheError(f"{type(record).__name__} is not a record: give dataclasses, NamedTuples, dicts or tensorclasses")


def _column_of(name: str, value: object) -> Column:
    if value is None:
        raise CacheError(f"{name!r} is None in the first record: give all a value, or pass schema={{{name!r}: 'json'}}")
    tensor = _as_tensor(value)
    if tensor is None:
        return column_of(name, JSON)
    return column_of(name, (tensor.dtype, (None,) if isinstance(value, bytes) else tuple(tensor.shape)))


def _as_tensor(value: object) -> torch.Tensor | None:
    """A tensor, if the value is stored as one; None if it is stored as JSON."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.kind not in "biufc":
            return None
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    if isinstance(value, bytes):
        return torch.from_numpy(np.frombuffer(bytearray(value), dtype=np.uint8))
    with suppress(ValueError, RuntimeError, OverflowError):  # an int of more than 64 bits
        return torch.tensor(value) if isinstance(value, _PLAIN) else None
    return None


def _gathered(columns: Mapping[str, Column], chunks: Iterable[list[dict[str, Any]]]) -> Iterator[Batch]:
    start = 0
    for rows in chunks:
        for at, row in enumerate(rows):
            for name in row.keys() - columns.keys():
                raise CacheError(
                    f"record {start + at} has a field {name!r} that the first one does not have: give every record "
                    f"a value, or pass schema={{{name!r}: 'json'}}"
                )
        yield {name: _values_of(column, [row.get(name) for row in rows], start) for name, column in columns.items()}
        start += len(rows)


def _values_of(column: Column, values: Sequence[object], start: int) -> Any:
    if column.kind == JSON:
        return [value.tolist() if isinstance(value, np.ndarray | np.generic) else value for value in values]
    tensors = [_fitting(column, value, start + at) for at, value in enumerate(values)]
    return tensors if column.kind == RAGGED else torch.stack(tensors)


def _fitting(column: Column, value: object, number: int) -> torch.Tensor:
    """The value as a row of its column."""
    is_ragged = column.kind == RAGGED
    tensor = _as_tensor(value)
    what = f"the field {column.name!r} of record {number}"
    holds = f"its column holds {column.dtype} of shape {column.shape_text}"
    if tensor is None:
        raise CacheError(f"{what} is a {type(value).__name__}, but {holds}")
    if isinstance(value, _PLAIN) and torch.can_cast(tensor.dtype, column.dtype):
        try:
            tensor = torch.tensor(value, dtype=column.dtype)
        except (ValueError, RuntimeError, OverflowError) as error:
            raise CacheError(f"{what} is {value!r}, too large for {column.dtype}") from error
    is_row = tensor.ndim >= is_ragged and tensor.shape[is_ragged:] == column.row_shape
    if tensor.dtype != column.dtype or not is_row:
        raise CacheError(
            f"{what} is {tensor.dtype} of shape {tuple(tensor.shape)}, but {holds}: pass schema=, with a first size of "
            "None for any length"
        )
    return tensor.cpu()


def cache_of(
    rows: Incoming, folder: str | os.PathLike[str] | None, create: Callable[[Path, Mapping[str, Column]], TensorCache]
) -> TensorCache:
    """A cache of incoming rows, for `from_records` and `offload.integrations.cache_from`; `create` makes it."""
    root = private_folder() if folder is None else absolute(folder)
    with writing(root):
        path = Path(tempfile.mkdtemp(dir=root)) if folder is None else root
        before = set(os.listdir(path)) if is_folder(path) else None
    cache = create(path, rows.columns)
    try:
        for batch in progress(rows.batches, "rows"):
            cache.append(batch)
        cache.flush()
    except BaseException:
        cache.close()
        _remove_others(path, before)
        raise
    return cache


def _remove_others(folder: Path, before: Collection[str] | None) -> None:
    """Remove a cache that could not be filled: all files that are new, and the folder if it is new."""
    if before is None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    names: set[str] = set()
    with suppress(OSError):
        names = set(os.listdir(folder)) - set(before)
    for name in names:
        with suppress(OSError):
            (folder / name).unlink()
