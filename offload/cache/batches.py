"""Batches of rows, read ahead of use; and a torch dataset of rows.

Always true:
- batches come in the order of the sampler, which is iterated in the consumer's thread
- at most `prefetch` batches wait in addition to the one in use
- a read error is raised where its batch would have come
- reading stops when the consumer stops
- a dataset sent to another process contains the path, not the data
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset

from offload.errors import CacheError

if TYPE_CHECKING:
    from offload.cache.table import TensorCache

S = TypeVar("S")
T = TypeVar("T")


def rows_of_each(sampler: int | Iterable[object], num_rows: int) -> Iterable[Any]:
    """The rows of each batch: given by a sampler, or consecutive ones of a given number; the last batch may be smaller.

    Raises:
        CacheError: the batch size is not positive.
    """
    if not isinstance(sampler, int):
        return map(_copied, sampler)
    if sampler < 1:
        raise CacheError(f"a batch can't have {sampler} rows")
    return (slice(start, min(start + sampler, num_rows)) for start in range(0, num_rows, sampler))


def _copied(rows: object) -> Any:
    """A copy of indices that are used later: a sampler may reuse its tensor or list for the next batch."""
    if isinstance(rows, torch.Tensor):
        return rows.clone()
    return rows.copy() if isinstance(rows, np.ndarray | list) else rows


def read_ahead(items: Iterable[S], read: Callable[[S], T], prefetch: int) -> Iterator[T]:
    """`read(item)` for each item, in order, from a thread up to `prefetch` reads ahead; with 0 there is no thread.

    Example:
        >>> list(read_ahead([3, 1, 2], lambda item: item * 10, prefetch=2))
        [30, 10, 20]
    """
    if not prefetch:
        yield from map(read, items)
        return
    source, reads = iter(items), deque[Future[T]]()
    with ThreadPoolExecutor(1, thread_name_prefix="offload-batches") as reader:
        try:
            reads.extend(reader.submit(read, item) for item in islice(source, prefetch))
            while reads:
                reads.extend(reader.submit(read, item) for item in islice(source, 1))
                yield reads.popleft().result()
        finally:
            for left in reads:
                left.cancel()


class RowDataset(Dataset[dict[str, Any]]):
    """Rows of a cache as dicts. Use `TensorCache.as_dataset`."""

    def __init__(
        self, cache: TensorCache, columns: Sequence[str] | None, ragged: str = "list", padding: complex = 0
    ) -> None:
        self.cache = cache
        self.columns = columns
        self.ragged = ragged
        self.padding = padding

    def __len__(self) -> int:
        return len(self.cache)

    def __getitem__(self, rows: object) -> dict[str, Any]:
        """One row; for several, a batch, for a `DataLoader` with `batch_size=None` and a batch sampler."""
        return self.cache.get(rows, columns=self.columns, ragged=self.ragged, padding=self.padding)

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Separate rows, read together."""
        batch = self[list(rows)]
        return [{name: values[at] for name, values in batch.items()} for at in range(len(rows))]
