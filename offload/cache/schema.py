"""What a column is, and the manifest of a folder of rows, `manifest.json`.

Always true:
- a column has one kind: `tensor` (rows of one shape), `ragged` (rows whose first size varies), `json`
- the manifest's description of a column is enough to open it
- a folder is a cache once it has a manifest, which is written last, and only ever replaced as a whole
- a requested cache is compared with the existing one, and differences are reported
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from offload.annotations import Json
from offload.cache.topk import TopK
from offload.errors import ArgumentTypeError, CacheError, ColumnError, CorruptFileError
from offload.storage.folders import file_name
from offload.storage.layout import dtype_name, dtype_named
from offload.storage.state_file import Kind, read_state, write_state
from offload.system.reasons import short
from offload.tensor.arguments import as_names

JSON, TENSOR, RAGGED = "json", "tensor", "ragged"
_MOST = 2**63 - 1  # most bytes that torch can count
_WORDS = (JSON, str, dict, list)
MANIFEST = "manifest.json"
_KIND = Kind(
    what="the manifest of a cache of offload",
    stamp={"format": "offload.TensorCache", "version": 1},
    missing="there is no complete cache in this folder: TensorCache.create creates one",
    later=CacheError,
    indent=1,
)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a cache.

    Attributes:
        name: the name of the column and of its file.
        kind: `tensor`, `ragged` or `json`.
        dtype: the dtype of its elements; uint8 for JSON.
        row_shape: the shape of one row; of a ragged one, without the first size.
        top: what its bytes are, where they are packed log-probabilities.
    """

    name: str
    kind: str
    dtype: torch.dtype
    row_shape: tuple[int, ...]
    top: TopK | None = None

    @property
    def shape_text(self) -> str:
        """The shape of a row in the user's notation."""
        sizes = [*(["None"] if self.kind == RAGGED else []), *map(str, self.row_shape)]
        return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"

    @property
    def row_bytes(self) -> int:
        """The size of one row; of a ragged one, per element of the first dimension."""
        return math.prod(self.row_shape) * self.dtype.itemsize

    @property
    def text(self) -> str:
        packed = "" if self.top is None else f" {self.top.text}"
        return JSON if self.kind == JSON else f"{self.kind} {self.shape_text} {self.dtype}{packed}"

    def stored(self, value: Any) -> Any:
        """A value as it is stored: packed, if the column holds packed log-probabilities."""
        if self.top is None:
            return value
        is_list = self.kind == RAGGED and isinstance(value, list)
        return [self.top.packed(row, self.name) for row in value] if is_list else self.top.packed(value, self.name)

    def to_json(self) -> dict[str, Any]:
        if self.kind == JSON:
            return {"kind": JSON}
        packed = {} if self.top is None else {"topk": self.top.to_json()}
        return {"kind": self.kind, "dtype": dtype_name(self.dtype), "row_shape": list(self.row_shape), **packed}

    @classmethod
    def from_json(cls, name: str, described: Json) -> Column:
        """Raises: ValueError (it does not describe a column)."""
        try:
            kind = described["kind"]
            if kind == JSON:
                return cls(name, kind, torch.uint8, ())
            dtype, shape = dtype_named(described["dtype"]), tuple(map(operator.index, described["row_shape"]))
            top = TopK.from_json(described["topk"]) if "topk" in described else None
        except (KeyError, TypeError, CacheError) as error:
            raise CorruptFileError(f"column {name!r} is described as {described!r}") from error
        is_packed = top is None or (dtype == torch.uint8 and shape[-1:] == (top.row_bytes,))
        if kind not in (TENSOR, RAGGED) or dtype is None or any(size < 0 for size in shape) or not is_packed:
            raise CorruptFileError(f"column {name!r} is described as {described!r}")
        return cls(name, kind, dtype, shape, top)


def schema_of(columns: Mapping[str, object]) -> dict[str, Column]:
    """The user's description, as columns.

    Args:
        columns: by name: `(dtype, row_shape)`, where a first size of None varies from row to row; `"json"`, `str`,
            `dict` or `list` for JSON values; `topk(...)`.

    Raises: CacheError (there are no columns, or a description is invalid).
    """
    if not columns:
        raise CacheError("a cache needs at least one column: give {name: (dtype, row_shape)}")
    schema = {name: column_of(name, description) for name, description in columns.items()}
    for name, column in schema.items():
        try:
            file_name(name)
        except (TypeError, ValueError) as error:
            raise CacheError(f"a column can't be called {name!r} ({error}): give it another name") from error
        if math.prod(max(size, 1) for size in column.row_shape) * column.dtype.itemsize > _MOST:
            raise CacheError(f"column {name!r}: a row of the shape {column.shape_text} is larger than any file")
        if column.kind != TENSOR and f"{name}/index" in schema:
            raise CacheError(f"{name}/index can't be a column: column {name!r} keeps its index there")
    return schema


def columns_named(columns: Iterable[str] | None, schema: Mapping[str, Column], place: object) -> list[str]:
    """The names of some columns of the cache at a place; of all if None. Raises: ColumnError."""
    named = as_names(columns)
    for name in named or ():
        if name not in schema:
            raise ColumnError(f"the cache in {place} has no column {name!r}: it has {', '.join(schema)}")
    return list(schema) if named is None else named


def column_of(name: str, description: object) -> Column:
    """The column that a user describes, as for `schema_of`. Raises: CacheError (the description is invalid)."""
    if isinstance(description, Column):
        return replace(description, name=name)
    if isinstance(description, TopK):
        sizes = (*description.shape, description.row_bytes)
        return replace(column_of(name, (torch.uint8, sizes)), top=replace(description, shape=()))
    if isinstance(description, str | type) and description in _WORDS:
        return Column(name, JSON, torch.uint8, ())
    if isinstance(description, tuple | list) and len(description) == 2 and isinstance(description[0], torch.dtype):
        dtype, shape = description
        if dtype_named(dtype_name(dtype)) is None:
            raise CacheError(
                f"column {name!r}: {dtype} means nothing without its scale: store the result of dequantize()"
            )
        if isinstance(shape, Sequence) and not isinstance(shape, str):
            ragged = len(shape) > 0 and shape[0] is None
            return Column(name, RAGGED if ragged else TENSOR, dtype, _sizes(name, shape[1:] if ragged else shape))
    raise CacheError(
        f"column {name!r}: {description!r} is not a column. Give (dtype, row_shape), as (torch.float32, (16,)); "
        '(dtype, (None, 16)) for rows of different lengths; or "json"; bytes are (torch.uint8, (None,))'
    )


def _sizes(name: str, shape: Sequence[Any]) -> tuple[int, ...]:
    try:
        sizes = tuple(map(operator.index, shape))
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes):
        raise CacheError(f"column {name!r}: no row has the shape {tuple(shape)!r}; only the first size may be None")
    return sizes


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a cache on disk.

    Attributes:
        columns: its columns by name.
        num_rows: the least number of rows; rows appended later are counted in the state file.
        metadata: what the user has noted.
    """

    columns: Mapping[str, Column]
    num_rows: int
    metadata: Mapping[str, Any]

    def with_rows(self, num_rows: int) -> Manifest:
        return replace(self, num_rows=num_rows)

    def write(self, folder: Path) -> None:
        """Raises: WriteError; CacheError (the metadata can't be expressed in JSON)."""
        columns = {name: column.to_json() for name, column in self.columns.items()}
        data = {"num_rows": self.num_rows, "columns": columns, "metadata": dict(self.metadata)}
        write_state(folder / MANIFEST, _KIND, data)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises: MissingFileError (there is no cache); CorruptFileError; ReadError; CacheError (its version)."""
        path = folder / MANIFEST
        data = read_state(path, _KIND)
        try:
            columns = schema_of({name: Column.from_json(name, column) for name, column in data["columns"].items()})
            rows, metadata = data["num_rows"], data["metadata"]
            if type(rows) is not int or rows < 0 or not isinstance(metadata, dict):
                raise ValueError(f"{short(repr(rows))} rows, metadata {short(repr(metadata))}")
        except (KeyError, AttributeError, ValueError, CacheError) as error:
            raise CorruptFileError(f"{path} is malformed: {error}") from error
        return cls(columns, rows, metadata)

    def check(self, expect: Mapping[str, object] | None, folder: Path) -> None:
        """Raises: CacheError (the metadata differs from what is expected; says where)."""
        if wrong := self._others(as_json(expect, "expect")):
            raise CacheError(
                f"the cache in {folder} has other metadata than expected: {'; '.join(wrong)}. "
                "Open it without `expect`, or make another one."
            )

    def refuse_other(self, wanted: Manifest, folder: Path) -> None:
        """Raises: CacheError (columns, the number of rows or metadata differ from what is wanted; says where)."""
        wrong = [f"it has no column {name!r}" for name in wanted.columns if name not in self.columns]
        for name, column in self.columns.items():
            if name not in wanted.columns:
                wrong.append(f"it has a column {name!r} as well")
            elif column != wanted.columns[name]:
                wrong.append(f"column {name!r} is {column.text}, expected {wanted.columns[name].text}")
        if wanted.num_rows and wanted.num_rows != self.num_rows:
            wrong.append(f"it has {self.num_rows} rows, expected {wanted.num_rows}")
        wrong += self._others(wanted.metadata)
        wrong += [f"it has metadata {key!r} as well" for key in self.metadata if key not in wanted.metadata]
        if wrong:
            raise CacheError(
                f"the cache in {folder} is not as requested: {'; '.join(wrong)}. Open it as it is with "
                "TensorCache.open, or choose another folder."
            )

    def _others(self, expect: Mapping[str, object]) -> list[str]:
        """Differences between the metadata and what is expected."""
        wrong = [key for key, value in expect.items() if key not in self.metadata or self.metadata[key] != value]
        here = {key: repr(value) for key, value in self.metadata.items()}
        return [f"{key!r} is {here.get(key, 'missing')}, expected {expect[key]!r}" for key in wrong]


def as_json(metadata: Mapping[str, object] | None, what: str = "metadata") -> dict[str, Any]:
    """Metadata as it comes back from JSON. Raises: ArgumentTypeError, CacheError."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):  # a list of pairs would become one
        raise ArgumentTypeError(f"{what} should be a dict, not {repr(metadata)[:80]}")
    try:
        back: dict[str, Any] = json.loads(json.dumps(dict(metadata), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise CacheError(f"{what}: the metadata can't be written as JSON: {error}") from error
    return back
