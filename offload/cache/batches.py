"""Batches of rows, read before they are asked for.

Always true:
- batches come in the order of the sampler, which is asked in the thread that uses them
- at most `prefetch` batches wait beside the one in use
- an error of a read is raised where its batch would have come
- nothing is read any more once the one who asks has left
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def consecutive(num_rows: int, batch_size: int) -> Iterator[slice]:
    """All rows in batches of so many; the last one may be smaller."""
    return (slice(start, min(start + batch_size, num_rows)) for start in range(0, num_rows, batch_size))


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
