"""Rows that are all filled and all in memory, as most batches of a warm cache are: given with little else done.

Always true:
- what is given is what `Store.read` would give; where that is not certain, nothing is
- nothing is certain any more when a row is added or begins to be written, or when some are not in memory
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from offload.cache.rowfile import RowFile
from offload.cache.states import States
from offload.storage.modes import is_plain_world

_LOOKS = 4  # at rows that were picked, to tell whether all are in memory
_STILL = 0.01  # seconds for which the states are taken to be whole after they were
_NEVER = -1


class HotRows:
    """The rows that there were at so many changes of the states."""

    def __init__(
        self, states: States, changes: int, count: int, tables: Mapping[str, tuple[RowFile, torch.Tensor]]
    ) -> None:
        """
        Args:
            count: of the rows.
            tables: by column, its file, and these rows of it as `RowFile.table` gives them.
        """
        self.changes = changes
        self._states = states
        self._whole_until = 0.0
        self._count = count
        self._tables = tables
        self._all = [(name, *table) for name, table in tables.items()]

    def take(self, index: Any, columns: Iterable[str] | None) -> dict[str, torch.Tensor] | None:
        """Rows by a slice of some behind each other, or a tensor of numbers from 0 on; of any other form nothing."""
        now = time.monotonic()
        if now > self._whole_until:  # seldom, as it takes a call: what was cut off would end the process
            self._states.refuse_cut()
            self._whole_until = now + _STILL
        if self._states.changes != self.changes or self._states.last_num_rows != self._count or not is_plain_world():
            return None
        rows = self._plain(index)
        if rows is None or not isinstance(columns, list | tuple | None):  # an iterator would be used up
            return None
        try:
            tables = self._all if columns is None else [(name, *self._tables[name]) for name in columns]
            for _, file, _ in tables:
                if now > file.in_memory_until:
                    file.look(_some(rows))
            if isinstance(rows, slice):
                found = {name: file.copied(words[rows]) for name, file, words in tables}
            else:
                found = {name: file.picked(words, rows) for name, file, words in tables}
        except (KeyError, IndexError):  # there is no such column; they count from the end, or are out of range
            return None
        except OSError:
            self.changes = _NEVER  # until `Store.read` has seen whether the files are still mapped
            return None
        return found if self._states.changes == self.changes else None

    def _plain(self, index: Any) -> slice | torch.Tensor | None:
        if type(index) is torch.Tensor:
            return index if index.dtype == torch.int64 and index.ndim == 1 and index.is_cpu else None
        if type(index) is slice:
            start, stop, step = index.indices(self._count)
            return slice(start, stop) if step == 1 else None
        return None


def _some(rows: slice | torch.Tensor) -> Iterable[int]:
    if isinstance(rows, slice):
        return {rows.start, rows.stop - 1} if rows.start < rows.stop else ()
    some: list[int] = rows[:: -(-len(rows) // _LOOKS) or 1].tolist()
    return some
