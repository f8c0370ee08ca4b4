"""Missing rows: shared out among processes, computed, and written.

Always true:
- finished rows are kept, whatever stops the work: after an error or an interrupt all of them, after a kill all but
  those of the last seconds
- a row is computed by one thread or process at a time; rows claimed by a process that died are free at once
- if the file system has no locks, each process computes everything that is missing
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from time import monotonic
from typing import Any, TypeAlias

import numpy as np
import torch

from offload.cache.indexing import Numbers
from offload.cache.rowfile import opened
from offload.cache.store import LOCK, Store
from offload.progress import Bar
from offload.system.locks import lock_range, unlock_range
from offload.tensor.arguments import without_stop

_FLUSH_EVERY = 2.0  # seconds of work that a kill may lose

Made: TypeAlias = "tuple[torch.Tensor, Mapping[str, Any]]"  # rows, and their values by column
Mapper: TypeAlias = "Callable[[Callable[[torch.Tensor], Made], Iterator[torch.Tensor]], Iterable[Made]]"


def fill_missing(
    store: Store,
    columns: Iterable[str] | None,
    count: int,
    make: Callable[[torch.Tensor], Mapping[str, Any]],
    write: Callable[[torch.Tensor, Mapping[str, Any]], None],
    *,
    batch_size: int,
    map_fn: Mapper,
    bar: Bar,
) -> None:
    """Compute the missing rows among the first `count`, and write them; see `TensorCache.fill`.

    `map_fn` applies `make`, which computes a batch of rows, as `map` does. Raises: what `make` and `write` raise.
    """
    claims = Claims(store, columns, count)

    def each(part: torch.Tensor) -> Made:
        return part, without_stop(make, part)

    def made() -> Generator[Made, None, None]:  # closing it closes what `map_fn` returns
        yield from map_fn(each, claims.parts(batch_size))

    try:
        is_more = True
        while is_more:
            due = monotonic() + _FLUSH_EVERY
            with closing(made()) as parts:
                for rows, values in parts:
                    write(rows, values)
                    bar.update(len(rows))
                    if monotonic() > due:
                        store.flush()
                        due = monotonic() + _FLUSH_EVERY
            store.flush()
            is_more = claims.has_more()
    finally:
        try:
            store.flush()
        finally:
            claims.close()


class Claims:
    """Claimed rows: a lock on one byte of a file for each."""

    def __init__(self, store: Store, columns: Iterable[str] | None, count: int) -> None:
        """For so many rows, those that have an input: others may append some. Raises: ReadError, MissingFileError."""
        self._store, self._columns, self._count = store, columns, count
        self._path = store.folder / LOCK
        self._file = opened(self._path, os.O_RDWR)
        self._fd = self._file.fileno()
        self._seen: list[Numbers] = []  # rows that were claimed

    def parts(self, size: int) -> Iterator[torch.Tensor]:
        """Missing rows that nobody else has claimed, up to `size` at a time; each is returned once."""
        rows = self._rest()
        for start in range(0, len(rows), size):
            wanted = rows[start : start + size].tolist()
            part = np.array([row for row in wanted if lock_range(self._fd, self._path, row, 1)], np.int64)
            self._seen.append(part)
            part = part[self._store.are_missing(self._columns, part)]  # some were filled before they were claimed
            if len(part):
                yield torch.from_numpy(part)

    def has_more(self) -> bool:
        """Release the claims, which must be on the disk by now; returns whether others have left anything to do.

        Waits for other processes that compute rows. Call it with nothing in progress here: others may wait for that.
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
        """Release everything for good."""
        self._file.close()
