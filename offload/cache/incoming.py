"""Rows to be added to a cache: their columns, and batches of them, from records and other sources.

Always true:
- a batch has a value for each column and each of its rows
- the first record and the caller determine the columns; a later record fits or raises
- a field that is None or absent is missing: False in the column `<field>.present`, with zeros or an empty row in its
  own; in a JSON column it is null
- records are held for one batch only
"""

from __future__ import annotations

import dataclasses
import math
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

from offload.cache.schema import JSON, RAGGED, schema_of
from offload.errors import CacheError
from offload.progress import progress
from offload.storage.folders import private_folder
from offload.system.reasons import some, writing
from offload.system.regular import absolute, is_folder
from offload.tensor.arguments import refuse_unstorable
from offload.tensor.wrapper import guest_of

if TYPE_CHECKING:
    from offload.cache.table import TensorCache

PRESENT = ".present"
_BATCH = 8 << 20  # bytes
_GUESS = 1024  # bytes of a value of varying size
_MOST_ROWS = 1024  # in a batch of records
_MOST_BYTES = 4 << 20  # of tensors in a batch of records; peak memory is four times that
_PLAIN = (bool, int, float, complex)
_TENSORS = (torch.Tensor, np.ndarray)
Batch: TypeAlias = "dict[str, Any]"  # by column: a tensor of all rows, or a list with one tensor or JSON value per row


@dataclass(frozen=True, slots=True)
class Field:
    """A column to be filled.

    Attributes:
        dtype: of a tensor's elements; None for JSON.
        row_shape: of one row; a first size of None varies.
        is_optional: whether a row may have no value.
    """

    dtype: torch.dtype | None
    row_shape: tuple[int | None, ...] = ()
    is_optional: bool = False

    @property
    def is_tensor(self) -> bool:
        return self.dtype is not None

    @property
    def is_ragged(self) -> bool:
        return None in self.row_shape

    @property
    def row_bytes(self) -> int:
        """The size of a row; a guess where it varies."""
        if self.dtype is None or self.is_ragged:
            return _GUESS
        return math.prod(size or 0 for size in self.row_shape) * self.dtype.itemsize

    @property
    def marks_missing(self) -> bool:
        """Whether another column says which rows have a value; JSON has null for that."""
        return self.is_optional and self.is_tensor

    @property
    def column(self) -> Any:
        """In the form that `TensorCache.create` takes."""
        return (self.dtype, self.row_shape) if self.is_tensor else JSON

    @classmethod
    def of(cls, description: object) -> Field:
        """A column as described by the user, as for `TensorCache.create`.

        Raises: CacheError (the description is invalid).
        """
        [column] = schema_of({"schema": description}).values()
        if column.top is not None:
            raise CacheError("records don't hold top log-probabilities: make the cache with `create`, and append them")
        if column.kind == JSON:
            return cls(None)
        return cls(column.dtype, (None, *column.row_shape) if column.kind == RAGGED else column.row_shape)


@dataclass(frozen=True, slots=True)
class Incoming:
    """The columns of incoming rows, and their batches, produced on demand."""

    fields: Mapping[str, Field]
    batches: Iterator[Batch]

    @property
    def schema(self) -> dict[str, Any]:
        """In the form that `TensorCache.create` takes, with the `.present` columns."""
        found: dict[str, Any] = {}
        for name, field in self.fields.items():
            found[name] = field.column
            if field.marks_missing:
                found[name + PRESENT] = (torch.bool, ())
        return found


def rows_in_batch(nbytes: Iterable[int]) -> int:
    """Rows per batch, if a row takes the sum of these bytes."""
    return max(_BATCH // max(sum(nbytes), 1), 1)


def read_in_batches(
    fields: Mapping[str, Field], num_rows: int, read: Callable[[str, slice], Any], nbytes: int = 0
) -> Incoming:
    """Rows of which `read` gives those in a slice, of the column of a name; all of them have `nbytes`, or more."""
    known = sum(field.row_bytes for field in fields.values())
    step = rows_in_batch([max(known, nbytes // max(num_rows, 1))])
    parts = (slice(start, start + step) for start in range(0, num_rows, step))
    return Incoming(fields, ({name: read(name, rows) for name in fields} for rows in parts))


def plain_values(values: Mapping[str, object]) -> dict[str, Any]:
    """Values by column, as users write them, with plain tensors: neither offloaded nor nested.

    Raises: CacheError (it is not a mapping); UnknownSubclassError, UnsupportedOpError (a tensor can't be stored).
    """
    if not isinstance(values, Mapping):
        raise CacheError(f"rows are given by column, not as a {type(values).__name__}: cache[rows] = {{name: values}}")
    plain: dict[str, Any] = dict(values)
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.is_nested:
            plain[name] = list(value.detach().unbind())
        elif isinstance(value, torch.Tensor):
            refuse_unstorable(value, name)
            plain[name] = guest_of(value.detach())
    return plain


# Records


def rows_of(records: Iterable[object], schema: Mapping[str, Field], optional: Collection[str]) -> Incoming:
    """Records as rows. Raises: CacheError (there are none, a field is no column, or later a record does not fit)."""
    source = iter(records)
    first = next(source, None)
    if first is None:
        if not schema:
            raise CacheError("there are no records to infer columns from: pass schema=")
        return Incoming(schema, iter(()))
    row = fields_of(first)
    fields = _settled(row, schema, optional)
    return Incoming(fields, _gathered(fields, _chunks(chain([row], map(fields_of, source)))))


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


# Taking records apart


def fields_of(record: object) -> dict[str, Any]:
    """Its fields by name; those of a nested record as `outer.inner`. A dict without tensors is a value.

    Raises: CacheError (it is not a record); UnsupportedOpError, UnknownSubclassError (a tensor can't be stored).
    """
    found: dict[str, Any] = {}
    for name, value in _items(record):
        if _is_record(value):
            found.update({f"{name}.{inner}": part for inner, part in fields_of(value).items()})
        else:
            if isinstance(value, torch.Tensor):
                refuse_unstorable(value, name)
            found[name] = value
    return found


def _items(record: Any) -> Iterable[tuple[str, Any]]:
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return [(field.name, getattr(record, field.name)) for field in dataclasses.fields(record)]
    if isinstance(record, tuple) and hasattr(record, "_fields"):
        return zip(record._fields, record, strict=True)
    if hasattr(record, "keys"):
        return [(str(name), record[name]) for name in record.keys()]  # noqa: SIM118  tensordict's iterates over rows
    raise CacheError(f"{type(record).__name__} is not a record: give dataclasses, NamedTuples, dicts or tensorclasses")


def _is_record(value: Any) -> bool:
    if isinstance(value, type):
        return False
    if dataclasses.is_dataclass(value) or _is_named_tuple(type(value)):
        return True
    return hasattr(value, "keys") and any(isinstance(part, _TENSORS) or _is_record(part) for part in value.values())


def _is_named_tuple(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


# Columns


def _settled(first: dict[str, Any], schema: Mapping[str, Field], optional: Collection[str]) -> dict[str, Field]:
    """The fields of all records, from those of the first one; `schema` comes before it."""
    nests = {name for name in first if any(other.startswith(f"{name}.") for other in schema)}
    names = [*dict.fromkeys([*(name for name in first if name not in nests), *schema])]
    unknown = set(optional) - set(names)
    if unknown:
        strange, known = (some(map(repr, sorted(each))) for each in (unknown, names))
        raise CacheError(f"optional= has the unknown fields {strange}: the records have {known}")
    fields = {}
    for name in names:
        value = first.get(name)
        field = schema.get(name) or _field_of(name, value)
        fields[name] = dataclasses.replace(field, is_optional=name in optional or (name in schema and value is None))
    return fields


def _field_of(name: str, value: object) -> Field:
    if value is None:
        how = f"schema={{{name!r}: (torch.float32, ())}}"
        raise CacheError(f"the field {name!r} is None in the first record: describe it, as in {how}")
    tensor = _as_tensor(value)
    if tensor is None:
        return Field(None)
    return Field(tensor.dtype, (None,) if isinstance(value, bytes) else tuple(tensor.shape))


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


# Batches


def _gathered(fields: Mapping[str, Field], chunks: Iterable[list[dict[str, Any]]]) -> Iterator[Batch]:
    start = 0
    for rows in chunks:
        batch: Batch = {}
        for at, row in enumerate(rows):
            _refuse_strangers(fields, row, start + at)
        for name, field in fields.items():
            values = [row.get(name) for row in rows]
            batch[name] = _column(name, field, values, start)
            if field.marks_missing:
                batch[name + PRESENT] = torch.tensor([value is not None for value in values])
        yield batch
        start += len(rows)


def _refuse_strangers(fields: Mapping[str, Field], row: Mapping[str, object], number: int) -> None:
    for name in row.keys() - fields.keys():
        if row[name] is not None or not any(other.startswith(f"{name}.") for other in fields):
            raise CacheError(
                f"record {number} has a field {name!r} that the first one does not have: pass schema=, with all fields"
            )


def _column(name: str, field: Field, values: Sequence[object], start: int) -> Any:
    if not field.is_tensor:
        return [value.tolist() if isinstance(value, np.ndarray | np.generic) else value for value in values]
    if not field.is_optional and any(value is None for value in values):
        number = start + next(at for at, value in enumerate(values) if value is None)
        raise CacheError(
            f"the field {name!r} is None in record {number}, but not in the first one: pass optional=[{name!r}]"
        )
    tensors = [_fitting(name, field, value, start + at) for at, value in enumerate(values)]
    return tensors if field.is_ragged else torch.stack(tensors)


def _fitting(name: str, field: Field, value: object, number: int) -> torch.Tensor:
    """The value as a row of its column; zeros or an empty row for None."""
    assert field.dtype is not None
    if value is None:
        return torch.zeros([size or 0 for size in field.row_shape], dtype=field.dtype)
    tensor = _as_tensor(value)
    what, holds = f"the field {name!r} of record {number}", f"its column holds {field.dtype} of shape {field.row_shape}"
    if tensor is None:
        raise CacheError(f"{what} is a {type(value).__name__}, but {holds}")
    if isinstance(value, _PLAIN) and torch.can_cast(tensor.dtype, field.dtype):
        try:
            tensor = torch.tensor(value, dtype=field.dtype)
        except (ValueError, RuntimeError, OverflowError) as error:
            raise CacheError(f"{what} is {value!r}, too large for {field.dtype}") from error
    shape = (None, *tensor.shape[1:]) if field.is_ragged and tensor.ndim else tuple(tensor.shape)
    if (tensor.dtype, shape) != (field.dtype, field.row_shape):
        raise CacheError(
            f"{what} is {tensor.dtype} of shape {tuple(tensor.shape)}, but {holds}: pass schema=, with a first size of "
            "None for any length"
        )
    return tensor.cpu()


# Into a cache


def cache_of(
    rows: Incoming, folder: str | os.PathLike[str] | None, create: Callable[[Path, dict[str, Any]], TensorCache]
) -> TensorCache:
    """A cache of incoming rows, for `from_records` and `offload.integrations.cache_from`; `create` makes it.

    Raises: as `TensorCache.create`, and what the batches raise; then nothing is left in `folder`.
    """
    root = private_folder() if folder is None else absolute(folder)
    with writing(root):
        path = Path(tempfile.mkdtemp(dir=root)) if folder is None else root
        before = set(os.listdir(path)) if is_folder(path) else None
    cache = create(path, rows.schema)
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
