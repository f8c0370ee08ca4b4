"""What a folder of rows says of itself: `manifest.json`.

Always true:
- a folder is a cache once its manifest is there, and that is there last
- it is replaced whole, or not at all
- what opening asks for is compared with what stands there, and told where it differs
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offload.cache.schema import Column, schema_of
from offload.errors import CacheError, CorruptFileError
from offload.storage.reasons import short
from offload.storage.state_file import Kind, read_state, write_state
from offload.tensor.arguments import refuse_other

FILE = "manifest.json"
_KIND = Kind(
    what="the manifest of a cache of offload",
    stamp={"format": "offload.TensorCache", "version": 1},
    missing="no cache is here, or it was not made to its end: TensorCache.create makes one",
    later=CacheError,
    indent=1,
)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is written down of a cache.

    Attributes:
        columns: by name.
        num_rows: how many rows there are whatever happens; rows appended since are counted beside the bitmap.
        metadata: the user's.
    """

    columns: Mapping[str, Column]
    num_rows: int
    metadata: Mapping[str, Any]

    def with_rows(self, num_rows: int) -> Manifest:
        return replace(self, num_rows=num_rows)

    def write(self, folder: Path) -> None:
        """
        Raises:
            WriteError
            CacheError: JSON has no words for the metadata.
        """
        columns = {name: column.to_json() for name, column in self.columns.items()}
        said = {"num_rows": self.num_rows, "columns": columns, "metadata": dict(self.metadata)}
        write_state(folder / FILE, _KIND, said)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """
        Raises:
            MissingFileError: there is no cache.
            CorruptFileError: something else stands there.
            ReadError: it can't be read now.
            CacheError: one of another version.
        """
        path = folder / FILE
        said = read_state(path, _KIND)
        try:
            columns = schema_of({name: Column.from_json(name, column) for name, column in said["columns"].items()})
            rows, metadata = said["num_rows"], said["metadata"]
            if type(rows) is not int or rows < 0 or not isinstance(metadata, dict):
                raise ValueError(f"{short(repr(rows))} rows, metadata {short(repr(metadata))}")
        except (KeyError, AttributeError, ValueError, CacheError) as error:
            raise CorruptFileError(f"{path} is malformed: {error}") from error
        return cls(columns, rows, metadata)

    def check(self, expect: Mapping[str, Any] | None, folder: Path) -> None:
        """
        Raises:
            CacheError: the metadata are others than expected; says which.
        """
        wrong = self._others(as_json(expect, "expect"))
        if wrong:
            raise CacheError(
                f"the cache in {folder} was made for something else: {'; '.join(wrong)}. "
                "Open it without `expect`, or make another one."
            )

    def refuse_other(self, wanted: Manifest, folder: Path) -> None:
        """
        Raises:
            CacheError: the columns or rows, or the metadata that are wanted, are others; says which.
        """
        wrong = [f"it has no column {name!r}" for name in wanted.columns if name not in self.columns]
        for name, column in self.columns.items():
            if name not in wanted.columns:
                wrong.append(f"it has a column {name!r} as well")
            elif column != wanted.columns[name]:
                wrong.append(f"column {name!r} is {column.text}, expected {wanted.columns[name].text}")
        if wanted.num_rows and wanted.num_rows != self.num_rows:
            wrong.append(f"it has {self.num_rows} rows, expected {wanted.num_rows}")
        wrong += self._others(wanted.metadata)
        if wrong:
            raise CacheError(
                f"the cache in {folder} is another one: {'; '.join(wrong)}. Open it as it is with TensorCache.open, "
                "or take another folder."
            )

    def _others(self, expect: Mapping[str, Any]) -> list[str]:
        """What of the metadata is other than expected."""
        return [
            f"{key!r} is {self.metadata[key]!r}, expected {value!r}"
            if key in self.metadata
            else f"{key!r} is not there, expected {value!r}"
            for key, value in expect.items()
            if key not in self.metadata or self.metadata[key] != value
        ]


def as_json(metadata: Mapping[str, Any] | None, what: str = "metadata") -> dict[str, Any]:
    """Metadata as they come back from JSON.

    Raises:
        ArgumentTypeError: they are no dict.
        CacheError: JSON has no words for them.
    """
    if metadata is None:
        return {}
    refuse_other(metadata, Mapping, f"{what}: a dict")
    try:
        back: dict[str, Any] = json.loads(json.dumps(dict(metadata), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise CacheError(f"{what}: metadata are written as JSON, and these can't be: {error}") from error
    return back
