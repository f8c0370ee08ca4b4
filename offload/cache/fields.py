"""What fills a column, and rows of several columns on their way into a cache.

Always true:
- a batch has a value for each column and each of its rows
- what may be missing has a column of its own that says where it is there
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from offload.cache.schema import BYTES, JSON, RAGGED, schema_of

PRESENT = ".present"
_BATCH = 8 << 20  # bytes
Batch: TypeAlias = "dict[str, Any]"  # by column: a tensor of all rows, or a list of one tensor or JSON value a row


@dataclass(frozen=True, slots=True)
class Field:
    """A column to be filled.

    Attributes:
        dtype: of a tensor's elements; None for what JSON says, and for bytes.
        row_shape: of a tensor in it; a first size of None differs from row to row.
        is_optional: whether a row may have no value.
        is_bytes: whether it is of bytes, and not of JSON.
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
    def marks_missing(self) -> bool:
        """Whether a column beside it says which rows have a value; JSON has a word for none."""
        return self.is_optional and (self.is_tensor or self.is_bytes)

    @property
    def column(self) -> Any:
        """As `TensorCache.create` takes it."""
        return (self.dtype, self.row_shape) if self.is_tensor else BYTES if self.is_bytes else JSON

    @classmethod
    def of(cls, said: Any) -> Field:
        """What a user says of a column, as `TensorCache.create` takes it.

        Raises:
            CacheError: it is none.
        """
        [column] = schema_of({"schema": said}).values()
        if column.kind in (JSON, BYTES):
            return cls(None, is_bytes=column.kind == BYTES)
        return cls(column.dtype, (None, *column.row_shape) if column.kind == RAGGED else column.row_shape)


@dataclass(frozen=True, slots=True)
class Incoming:
    """Rows on their way: what columns they have, and their batches, which are made as they are asked for."""

    fields: Mapping[str, Field]
    batches: Iterator[Batch]

    @property
    def columns(self) -> dict[str, Any]:
        """As `TensorCache.create` takes them, with those that say what is there."""
        found: dict[str, Any] = {}
        for name, field in self.fields.items():
            found[name] = field.column
            if field.marks_missing:
                found[name + PRESENT] = (torch.bool, ())
        return found


def rows_in_batch(nbytes: Iterable[int]) -> int:
    """How many rows make a batch, if a row is the sum of these bytes."""
    return max(_BATCH // max(sum(nbytes), 1), 1)


def list_of(folder: Path) -> list[str] | None:
    """What is in a folder; None if it is not there."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return None


def remove_others(folder: Path, kept: Collection[str] | None) -> None:
    """Remove a cache that could not be filled: all that was not there before, and the folder if it was not."""
    if kept is None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    with suppress(OSError):
        for name in set(os.listdir(folder)) - set(kept):
            with suppress(OSError):
                (folder / name).unlink()
