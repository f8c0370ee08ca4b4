"""Whether a cache is whole.

Always true:
- nothing is written
- the manifest, the file of states and the length of each file are looked at; of text, JSON, bytes and rows of any
  length every filled one is read, as what they say can be wrong
- a row that is not filled is no error
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.cache.schema import TENSOR
from offload.cache.table import TensorCache
from offload.errors import OffloadError
from offload.progress import progress

_STEP = 1024  # rows that are looked at at a time


@dataclass(frozen=True, slots=True)
class RowFinding:
    """The first row, of some that were read together, that can't be read; others of them may be so too."""

    column: str
    row: int
    what: str


def row_findings(cache: TensorCache) -> list[RowFinding]:
    """What is wrong with the rows of an opened cache; opening it has looked at the rest."""
    names = [name for name, column in cache.columns.items() if column.kind != TENSOR]
    steps = [(name, start) for name in names for start in range(0, len(cache), _STEP)]
    found = (_first(cache, name, start, min(start + _STEP, len(cache))) for name, start in progress(steps, "rows"))
    return [finding for finding in found if finding]


def _first(cache: TensorCache, name: str, start: int, end: int) -> RowFinding | None:
    try:
        cache.get(slice(start, end), columns=[name], device="cpu", missing="zeros")
    except OffloadError as error:
        if end - start == 1:
            return RowFinding(name, start, str(error))
        middle = (start + end) // 2
        return _first(cache, name, start, middle) or _first(cache, name, middle, end)
    return None
