"""Rows to be added to a cache: their columns, and batches of them, from records and other sources.

Always true:
- a batch has a value for each column and each of its rows
- the first records, the annotations of their class and the caller determine the columns; a later record fits or raises
- a field that is None or absent is missing: False in the column `<field>.present`, with zeros or an empty row in its
  own; in a JSON column it is null
- records are held for one batch only
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch

from offload.cache.schema import BYTES, JSON, RAGGED, schema_of
from offload.errors import CacheError
from offload.storage.reasons import some
from offload.tensor.arguments import refuse_unstorable
from offload.tensor.wrapper import guest_of

PRESENT = ".present"
_BATCH = 8 << 20  # bytes
_GUESS = 1024  # bytes of a value of varying size
_LOOK = 64  # records from which the columns are inferred
_MOST_ROWS = 1024  # in a batch of records
_MOST_BYTES = 4 << 20  # of tensors in a batch of records; peak memory is four times that
_PLAIN = (bool, int, float, complex)
_TENSORS = (torch.Tensor, np.ndarray)
Batch: TypeAlias = "dict[str, Any]"  # by column: a tensor of all rows, or a list with one tensor or JSON value per row


@dataclass(frozen=True, slots=True)
class Field:
    """A column to be filled.

    Attributes:
        dtype: of a tensor's elements; None for JSON and bytes.
        row_shape: of one row; a first size of None varies.
        is_optional: whether a row may have no value.
        is_bytes: whether it holds bytes, not JSON.
    """

    dtype: torch.dtype | None
    row_shape: tuple[int | None, ...] = ()
    is_optional: bool = False
    is_bytes: bool = False

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
        return self.is_optional and (self.is_tensor or self.is_bytes)

    @property
    def column(self) -> Any:
        """In the form that `TensorCache.create` takes."""
        return (self.dtype, self.row_shape) if self.is_tensor else BYTES if self.is_bytes else JSON

    @classmethod
    def of(cls, description: object) -> Field:
        """A column as described by the user, as for `TensorCache.create`.

        Raises:
            CacheError: the description is invalid.
        """
        [column] = schema_of({"schema": description}).values()
        if column.kind in (JSON, BYTES):
            return cls(None, is_bytes=column.kind == BYTES)
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
    """Values by column, as users write them, with plain tensors.

    Raises:
        CacheError: it is not a mapping.
        UnknownSubclassError, UnsupportedOpError: a tensor can't be stored.
    """
    if not isinstance(values, Mapping):
        raise CacheError(f"rows are given by column, not as a {type(values).__name__}: cache[rows] = {{name: values}}")
    return {name: _plain(value, name) for name, value in values.items()}


def _plain(value: object, name: str) -> Any:
    """A value that is neither offloaded nor nested.

    Raises:
        UnknownSubclassError: its class can't be stored completely.
        UnsupportedOpError: it is meta or sparse.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if not value.is_nested:
        refuse_unstorable(value, name)
    return list(value.detach().unbind()) if value.is_nested else guest_of(value.detach())


# Records


def rows_of(records: Iterable[object], schema: Mapping[str, Field], optional: Collection[str]) -> Incoming:
    """Records as rows.

    Raises:
        CacheError: there are no records, or a field can't become a column; raised while iterating if a record
            does not fit.
    """
    source = iter(records)
    first = next(source, None)
    if first is None:
        if not schema:
            raise CacheError("there are no records to infer columns from: pass schema=")
        return Incoming(schema, iter(()))
    rows = map(fields_of, chain([first], source))
    seen = next(_chunks(rows, _LOOK))
    fields = _settled(seen, _hints(type(first)), schema, optional)
    return Incoming(fields, _gathered(fields, chain([seen], _chunks(rows, _MOST_ROWS))))


def _chunks(rows: Iterator[dict[str, Any]], most: int) -> Iterator[list[dict[str, Any]]]:
    """Up to `most` records at a time, fewer if their tensors are large."""
    chunk, nbytes = [], 0
    for row in rows:
        chunk.append(row)
        nbytes += sum(value.nbytes for value in row.values() if isinstance(value, _TENSORS))
        if len(chunk) == most or nbytes >= _MOST_BYTES:
            yield chunk
            chunk, nbytes = [], 0
    if chunk:
        yield chunk


# Taking records apart


def fields_of(record: object) -> dict[str, Any]:
    """Its fields by name; those of a nested record as `outer.inner`. A dict without tensors is a value.

    Raises:
        CacheError: it is not a record.
        UnsupportedOpError, UnknownSubclassError: a tensor in it has no dense value, or can't be stored completely.
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


# Inferring columns


def _hints(kind: type, *, is_optional: bool = False) -> dict[str, tuple[Any, bool]]:
    """Field annotations: the type (None for a union of several), and whether None is allowed."""
    if not dataclasses.is_dataclass(kind) and not _is_named_tuple(kind):
        return {}
    try:
        annotations = typing.get_type_hints(kind)
    except (NameError, TypeError):  # names that only a type checker knows
        return {}
    found: dict[str, tuple[Any, bool]] = {}
    for name, annotation in annotations.items():
        is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
        options = set(typing.get_args(annotation)) if is_union else {annotation}
        may_be_none = is_optional or type(None) in options
        plain = [option for option in options if option is not type(None)]
        only = plain[0] if len(plain) == 1 else None
        inside = _hints(only, is_optional=may_be_none) if isinstance(only, type) else {}
        found.update({f"{name}.{inner}": hint for inner, hint in inside.items()})
        found[name] = (only, may_be_none)
    return found


def _settled(
    rows: list[dict[str, Any]],
    hints: Mapping[str, tuple[object, bool]],
    schema: Mapping[str, Field],
    optional: Collection[str],
) -> dict[str, Field]:
    names = [*dict.fromkeys(chain.from_iterable(rows))]
    nests = {name for name in names if any(other.startswith(f"{name}.") for other in (*names, *hints))}
    names = [*dict.fromkeys([*(name for name in names if name not in nests), *_below(nests, names, hints), *schema])]
    unknown = set(optional) - set(names)
    if unknown:
        strange, known = (some(map(repr, sorted(each))) for each in (unknown, names))
        raise CacheError(f"optional= has the unknown fields {strange}: the records have {known}")
    found = {}
    for name in names:
        values = [row.get(name) for row in rows]
        hint, may_be_none = hints.get(name, (None, False))
        field = schema.get(name) or _inferred(name, [value for value in values if value is not None], hint)
        is_optional = may_be_none or name in optional or any(value is None for value in values)
        found[name] = dataclasses.replace(field, is_optional=field.is_optional or is_optional)
    return found


def _below(nests: Collection[str], names: Collection[str], hints: Mapping[str, tuple[object, bool]]) -> Iterator[str]:
    """The fields of nested records that are sometimes None, in the order of their class."""
    for nest in nests:
        if any(name.startswith(f"{nest}.") for name in names):
            continue
        inside = [name for name in hints if name.startswith(f"{nest}.")]
        yield from (name for name in inside if not any(other.startswith(f"{name}.") for other in inside))


def _inferred(name: str, values: Sequence[object], hint: object) -> Field:
    if not values:
        if hint in _PLAIN:
            return Field(torch.tensor(hint()).dtype)
        if (typing.get_origin(hint) or hint) in (str, list, dict, tuple, bytes):
            return Field(None, is_bytes=hint is bytes)
        raise CacheError(
            f"the field {name!r} is None in all of the first records: describe it, as in "
            f"schema={{{name!r}: (torch.float32, ())}}"
        )
    tensors = [_as_tensor(value) for value in values]
    found = [tensor for tensor in tensors if tensor is not None]
    if not found:
        return Field(None, is_bytes=isinstance(values[0], bytes))
    if len(found) < len(values):
        other = next(value for value, tensor in zip(values, tensors, strict=True) if tensor is None)
        raise CacheError(f"the field {name!r} is a tensor in some records and of {type(other).__name__} in others")
    return Field(_common_dtype(name, values, found), _common_shape(name, found))


def _common_dtype(name: str, values: Sequence[object], tensors: Sequence[torch.Tensor]) -> torch.dtype:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) == 1:
        return tensors[0].dtype
    if not all(isinstance(value, _PLAIN) for value in values):
        several = some(sorted(map(str, dtypes)))
        raise CacheError(f"the field {name!r} is of several dtypes, {several}: cast them to one, or pass schema=")
    return reduce(torch.promote_types, dtypes)


def _common_shape(name: str, tensors: Sequence[torch.Tensor]) -> tuple[int | None, ...]:
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) == 1:
        return shapes.pop()
    rests = {(len(shape), shape[1:]) for shape in shapes}
    if len(rests) > 1:
        raise CacheError(
            f"the field {name!r} has shapes {some(sorted(shapes), 3)}: only the first size may differ. Pad them, "
            "or save lists"
        )
    return (None, *next(iter(shapes))[1:])


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
                f"record {number} has a field {name!r} that the first ones did not have: pass schema=, with all fields"
            )


def _column(name: str, field: Field, values: Sequence[object], start: int) -> Any:
    if not field.is_optional and any(value is None for value in values):
        number = start + next(at for at, value in enumerate(values) if value is None)
        raise CacheError(
            f"the field {name!r} is None in record {number}, but not in the first ones: pass optional=[{name!r}]"
        )
    if field.is_bytes:
        return [_bytes(name, value, start + at) for at, value in enumerate(values)]
    if not field.is_tensor:
        return [value.tolist() if isinstance(value, np.ndarray | np.generic) else value for value in values]
    tensors = [_fitting(name, field, value, start + at) for at, value in enumerate(values)]
    return tensors if field.is_ragged else torch.stack(tensors)


def _bytes(name: str, value: object, number: int) -> bytes:
    if not isinstance(value, bytes | None):
        raise CacheError(
            f"the field {name!r} of record {number} is a {type(value).__name__}, but its column holds bytes"
        )
    return value or b""


def _fitting(name: str, field: Field, value: object, number: int) -> torch.Tensor:
    """The value as a row of its column; zeros or an empty row for None."""
    assert field.dtype is not None
    if value is None:
        return torch.zeros([size or 0 for size in field.row_shape], dtype=field.dtype)
    tensor = _as_tensor(value)
    if tensor is None:
        raise CacheError(
            f"the field {name!r} of record {number} is a {type(value).__name__}, but its column holds "
            f"{_described(field)}"
        )
    if isinstance(value, _PLAIN) and torch.can_cast(tensor.dtype, field.dtype):
        try:
            tensor = torch.tensor(value, dtype=field.dtype)
        except (ValueError, RuntimeError, OverflowError) as error:
            raise CacheError(
                f"the field {name!r} of record {number} is {value!r}, too large for {field.dtype}"
            ) from error
    if tensor.dtype != field.dtype or not _fits(tensor.shape, field.row_shape):
        raise CacheError(
            f"the field {name!r} of record {number} is {tensor.dtype} of shape {tuple(tensor.shape)}, but its column "
            f"holds {_described(field)}: pass schema=, with a first size of None for any length"
        )
    return tensor.cpu()


def _fits(shape: Sequence[int], row_shape: tuple[int | None, ...]) -> bool:
    return len(shape) == len(row_shape) and all(
        wanted in (None, size) for size, wanted in zip(shape, row_shape, strict=True)
    )


def _described(field: Field) -> str:
    return f"{field.dtype} of shape {field.row_shape}"
