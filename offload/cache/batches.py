"""Batches of rows, read before they are asked for; and rows as a dataset of torch.

Always true:
- batches come in the order of the sampler, which is asked in the thread that uses them
- at most `prefetch` batches wait beside the one in use
- an error of a read is raised where its batch would have come
- nothing is read any more once the one who asks has left
- a dataset that goes to another process takes the path along, and not the data
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset

from offload.errors import CacheError
from offload.tensor.arguments import iterated

S = TypeVar("S")
T = TypeVar("T")


def rows_of_each(sampler: int | Iterable[Any], num_rows: int) -> Iterable[Any]:
    """What names the rows of each batch: as a sampler says, or so many behind each other; the last may be fewer.

    Raises:
        CacheError: a batch of no rows.
    """
    if not isinstance(sampler, int):
        return map(_kept, iterated(sampler, "sampler"))
    if sampler < 1:
        raise CacheError(f"a batch can't have {sampler} rows")
    return (slice(start, min(start + sampler, num_rows)) for start in range(0, num_rows, sampler))


def _kept(rows: Any) -> Any:
    """Rows that are read later: a sampler may use its tensor or list again for the next batch."""
    if isinstance(rows, torch.Tensor):
        return rows.clone()
    return rows.copy() if isinstance(rows, np.ndarray | list) else rows


def read_ahead(items: Iterable[S], read: Callable[[S], T], prefetch: int) -> Iterator[T]:
    """`read(item)` of each item, in order; a thread is up to `prefetch` reads ahead, with 0 there is none.

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


class Readable(Protocol):
    """What a dataset asks of a cache."""

    def __len__(self) -> int: ...

    def get(self, rows: Any, columns: Sequence[str] | None = None) -> dict[str, Any]: ...


class RowDataset(Dataset[dict[str, Any]]):
    """Rows of a cache as dicts. Use `TensorCache.as_dataset`."""

    def __init__(self, cache: Readable, columns: Sequence[str] | None) -> None:
        self.cache = cache
        self.columns = columns

    def __len__(self) -> int:
        return len(self.cache)

    def __getitem__(self, rows: Any) -> dict[str, Any]:
        """A row; of several rows, the batch, for a `DataLoader` with `batch_size=None` and a batch sampler."""
        return self.cache.get(rows, columns=self.columns)

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Rows one by one, read together."""
        batch = self.cache.get(list(rows), columns=self.columns)
        return [{name: values[at] for name, values in batch.items()} for at in range(len(rows))]
