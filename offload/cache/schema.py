"""What a column is.

Always true:
- a column is of one kind: `tensor` (rows of one shape), `ragged` (rows whose first size differs), `json`, `bytes`
- what is written down of a column is enough to open it
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload.errors import CacheError, CorruptFileError
from offload.storage.dtypes import dtype_name, dtype_named
from offload.storage.names import file_name
from offload.tensor.arguments import refuse_other

JSON, BYTES, TENSOR, RAGGED = "json", "bytes", "tensor", "ragged"
_MOST = 2**63 - 1  # bytes that torch can count
_WORDS = {JSON: JSON, BYTES: BYTES, str: JSON, dict: JSON, list: JSON, bytes: BYTES}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a cache.

    Attributes:
        name: what it is called; the name of its file.
        kind: `tensor`, `ragged`, `json` or `bytes`.
        dtype: of its elements; uint8 for text and bytes.
        row_shape: of one row; of a ragged one, what comes after the size that differs.
    """

    name: str
    kind: str
    dtype: torch.dtype
    row_shape: tuple[int, ...]

    @property
    def shape_text(self) -> str:
        """The shape of a row as users write it."""
        sizes = [*(["None"] if self.kind == RAGGED else []), *map(str, self.row_shape)]
        return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"

    @property
    def row_bytes(self) -> int:
        """Of one row; of one with a size that differs, for each of that."""
        return math.prod(self.row_shape) * self.dtype.itemsize

    @property
    def text(self) -> str:
        return self.kind if self.kind in (JSON, BYTES) else f"{self.kind} {self.shape_text} {self.dtype}"

    def to_json(self) -> dict[str, Any]:
        if self.kind in (JSON, BYTES):
            return {"kind": self.kind}
        return {"kind": self.kind, "dtype": dtype_name(self.dtype), "row_shape": list(self.row_shape)}

    @classmethod
    def from_json(cls, name: str, said: Any) -> Column:
        """
        Raises:
            ValueError: nothing that a column is.
        """
        try:
            kind = said["kind"]
            if kind in (JSON, BYTES):
                return cls(name, kind, torch.uint8, ())
            dtype, shape = dtype_named(said["dtype"]), tuple(map(operator.index, said["row_shape"]))
        except (KeyError, TypeError) as error:
            raise CorruptFileError(f"column {name!r} is described as {said!r}") from error
        if kind not in (TENSOR, RAGGED) or dtype is None or any(size < 0 for size in shape):
            raise CorruptFileError(f"column {name!r} is described as {said!r}")
        return cls(name, kind, dtype, shape)


def schema_of(columns: Mapping[str, Any]) -> dict[str, Column]:
    """What users write, as columns.

    Args:
        columns: by name: `(dtype, row_shape)`, in which a first size of None is one that differs from row to row;
            `"json"`, `str`, `dict` or `list` for what JSON can say; `"bytes"` or `bytes`.

    Raises:
        CacheError: there are none, or something else stands there.
    """
    refuse_other(columns, Mapping, "a dict of columns by name, {name: (dtype, row_shape)},")
    if not columns:
        raise CacheError("a cache needs at least one column: give {name: (dtype, row_shape)}")
    schema = {name: _column(name, said) for name, said in columns.items()}
    for name, column in schema.items():
        _refuse_without_file(name, column)
        if column.kind != TENSOR and f"{name}/index" in schema:
            raise CacheError(
                f"{name}/index can't be a column beside {name!r}, which keeps the places of its rows there"
            )
    return schema


def _refuse_without_file(name: Any, column: Column) -> None:
    try:
        file_name(name)
    except (TypeError, ValueError) as error:
        raise CacheError(f"a column can't be called {name!r} ({error}): give it another name") from error
    if math.prod(max(size, 1) for size in column.row_shape) * column.dtype.itemsize > _MOST:
        raise CacheError(f"column {name!r}: a row of the shape {column.shape_text} is larger than any file")


def _column(name: str, said: Any) -> Column:
    if isinstance(said, Column):
        return Column(name, said.kind, said.dtype, said.row_shape)
    if isinstance(said, str | type) and said in _WORDS:
        return Column(name, _WORDS[said], torch.uint8, ())
    if isinstance(said, tuple | list) and len(said) == 2 and isinstance(said[0], torch.dtype):
        dtype, shape = said
        if dtype_named(dtype_name(dtype)) is None:
            raise CacheError(f"column {name!r}: {dtype} means nothing without its scale: store what dequantize() gives")
        if isinstance(shape, Sequence) and not isinstance(shape, str):
            ragged = len(shape) > 0 and shape[0] is None
            return Column(name, RAGGED if ragged else TENSOR, dtype, _sizes(name, shape[1:] if ragged else shape))
    raise CacheError(
        f"column {name!r}: {said!r} is no column. Give (dtype, row_shape), as (torch.float32, (16,)); "
        '(dtype, (None, 16)) for rows of different lengths; or "json" or "bytes"'
    )


def _sizes(name: str, shape: Sequence[Any]) -> tuple[int, ...]:
    try:
        sizes = tuple(map(operator.index, shape))
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes):
        raise CacheError(f"column {name!r}: no row has the shape {tuple(shape)!r}; only the first size may be None")
    return sizes
