"""Rows that are missing, shared out among those who compute them.

Always true:
- a row is computed by one at a time, thread or process; what one that died had taken is free at once
- where the file system knows no locks, each computes all that is missing
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from offload.cache.indexing import Numbers
from offload.cache.rowfile import opened
from offload.cache.store import LOCK, Store
from offload.storage.locks import lock_range, unlock_range


class Claims:
    """The rows that somebody is about to compute: for each, a lock on a byte of a file."""

    def __init__(self, store: Store, columns: Iterable[str] | None, count: int) -> None:
        """
        Args:
            store: the folder.
            columns: those that are to be filled; all if None.
            count: of the rows that there is an input for; others may have appended some since.

        Raises:
            ReadError, MissingFileError
        """
        self._store, self._columns, self._count = store, columns, count
        self._path = store.folder / LOCK
        self._fd = opened(self._path, os.O_RDWR)
        self._seen: list[Numbers] = []  # rows that were taken

    def parts(self, size: int) -> Iterator[torch.Tensor]:
        """The missing rows that nobody else has taken, so many at a time; each is given once."""
        rows = self._rest()
        for start in range(0, len(rows), size):
            wanted = rows[start : start + size].tolist()
            part = np.array([row for row in wanted if lock_range(self._fd, self._path, row, 1)], np.int64)
            self._seen.append(part)
            part = part[self._store.are_missing(self._columns, part)]  # some were filled before they were taken
            if len(part):
                yield torch.from_numpy(part)

    def has_more(self) -> bool:
        """Give back what was taken, which is on the disk; whether others have left something to do.

        Waits for one who computes a row. To be called when nothing is under way here: others may wait for it.
        """
        unlock_range(self._fd, self._path, 0, 0)
        rest = self._rest()
        if not len(rest):
            return False
        lock_range(self._fd, self._path, int(rest[0]), 1, wait=True)
        unlock_range(self._fd, self._path, int(rest[0]), 1)
        return True

    def _rest(self) -> Numbers:
        missing = self._store.missing(self._columns)
        return np.setdiff1d(missing[missing < self._count], np.concatenate([*self._seen, np.empty(0, np.int64)]))

    def close(self) -> None:
        """Give everything back, for good."""
        os.close(self._fd)
