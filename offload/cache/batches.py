"""Batches of rows, read ahead of use, which can be stopped and resumed; and a torch dataset of rows.

Always true:
- the order of an epoch is a function of the seed, the epoch and the number of rows: of no generator and no release
- a step takes the next rows of that order, and each rank its share of them: each row comes once per epoch
- a state is where the batches that were given end: what was read ahead is read again
- a sampler is iterated in the consumer's thread; resumed, it gives the rows that it gave, or an error is raised
- at most `prefetch` batches wait in addition to the one in use
- a read error is raised where its batch would have come; iterating again tries that batch again, unless the sampler is
  an iterator, which has gone on
- reading stops when the consumer stops
- a dataset sent to another process contains the path, not the data
"""

from __future__ import annotations

import operator
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count, islice
from math import isqrt
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from offload.cache.indexing import Numbers
from offload.cache.topk import row_at
from offload.errors import CacheError
from offload.tensor.arguments import checked_count

if TYPE_CHECKING:
    from offload.cache.table import TensorCache

_AT_ONCE = 64  # batches whose rows are shuffled together
_ROUNDS = 6  # with fewer, orders of five rows are not equally likely
_SPREAD, _HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)
_Words: TypeAlias = "npt.NDArray[np.uint64]"
S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Order:
    """Which rows each batch of an epoch has.

    Attributes:
        num_rows: how many rows the cache has.
        batch_size: how many rows a batch of one rank has.
        seed: the seed of a shuffled order; None for the order of the cache.
        drop_last: whether the rows that don't make a whole batch for each rank are left out.
        rank, world_size: whose batches these are, and of how many ranks.
    """

    num_rows: int
    batch_size: int
    seed: int | None = None
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1

    @property
    def step(self) -> int:
        """The rows that all ranks take in a step."""
        return self.batch_size * self.world_size

    def __len__(self) -> int:
        whole, rest = divmod(self.num_rows, self.step)
        start, end = self._share(0, rest)
        return whole + (start < end and not self.drop_last)

    def batches(self, epoch: int, first: int, steps: Iterable[int]) -> Iterator[Any]:
        """The rows of these steps, counted from the place `first` in the order, until there are no more."""
        spans = self._spans(first, steps)
        if self.seed is None:
            yield from (slice(start, end) for start, end in spans)
            return
        while some := list(islice(spans, _AT_ONCE)):
            places = np.concatenate([np.arange(start, end) for start, end in some])
            ends = np.cumsum([end - start for start, end in some])
            yield from np.split(shuffled(places, self.num_rows, self.seed, epoch), ends[:-1])

    def _spans(self, first: int, steps: Iterable[int]) -> Iterator[tuple[int, int]]:
        for step in steps:
            at = first + step * self.step
            left = min(self.num_rows - at, self.step)
            start, end = self._share(at, left)
            if left <= 0 or start == end or (self.drop_last and left < self.step):
                return
            yield start, end

    def _share(self, at: int, rows: int) -> tuple[int, int]:
        """This rank's part of so many rows; all parts are of one size, or differ by one row."""
        return at + rows * self.rank // self.world_size, at + rows * (self.rank + 1) // self.world_size


@dataclass(slots=True)
class Given:
    """Batches whose rows a sampler gives: their places are counted in batches.

    Attributes:
        marks: a checksum of the rows that came before each place in this epoch, or in that of a loaded state.
    """

    sampler: Iterable[object]
    marks: dict[int, int] = field(default_factory=dict)
    num_rows = seed = None
    step = 1

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def batches(self, _: int, first: int, steps: Iterator[int]) -> Iterator[Any]:
        """Those that come after so many, and the next step.

        Raises:
            CacheError: several workers would share them, or those before are not what they were.
        """
        if _worker()[1] > 1:
            raise CacheError("a sampler may differ from worker to worker: give a number of rows, and shuffle=")
        source = iter(self.sampler)
        skipped = 0 if source is self.sampler else first + next(steps)  # an iterator goes on by itself
        mark, known, self.marks = 0, self.marks.get(skipped), {0: 0}
        for at, rows in enumerate(source):
            if at == skipped and known not in (None, mark):
                raise CacheError(
                    "the sampler gives other rows than before, as one at random does: keep a list of its batches, seed "
                    "its generator, or give a number of rows, and shuffle="
                )
            mark = crc32(repr(rows.tolist() if hasattr(rows, "tolist") else rows).encode(), mark)
            self.marks[at + 1] = mark
            if at >= skipped:
                yield _copied(rows)


def order_of(
    sampler: int | Iterable[object], num_rows: int, *, shuffle: int | None, drop_last: bool, rank: int, world_size: int
) -> Order | Given:
    """See `TensorCache.batches`. Raises: CacheError (no rows, no such rank, or a sampler to be shuffled or shared)."""
    seed = None if shuffle is None or shuffle is False else checked_count(int(shuffle), "shuffle", least=0)
    if not 0 <= rank < world_size:
        raise CacheError(f"rank={rank} of world_size={world_size}: ranks go from 0 to {world_size - 1}")
    if isinstance(sampler, int):
        if sampler < 1:
            raise CacheError(f"a batch can't have {sampler} rows")
        return Order(num_rows, sampler, seed, drop_last, rank, world_size)
    if seed is not None or drop_last or world_size > 1:
        raise CacheError(
            "a sampler says which rows come, and when: shuffle=, drop_last= and ranks go with a number of rows"
        )
    return Given(sampler)


def _copied(rows: object) -> Any:
    """A copy of indices that are used later: a sampler may reuse its tensor or list for the next batch."""
    if isinstance(rows, torch.Tensor):
        return rows.clone()
    return rows.copy() if isinstance(rows, np.ndarray | list) else rows


def shuffled(places: Numbers, size: int, seed: int, epoch: int) -> Numbers:
    """The rows at these places of a shuffled order of `size` rows: computed for each place, nothing is kept.

    A Feistel network over pairs of numbers (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002); a place
    that it takes out of the rows is taken further, until it is back.

    Example:
        >>> sorted(shuffled(np.arange(5), 5, seed=0, epoch=1).tolist())
        [0, 1, 2, 3, 4]
    """
    wide, rows = isqrt(max(size - 1, 0)) + 1, places.astype(np.uint64)
    high = -(-size // wide)
    keys = np.arange(2 * _ROUNDS, dtype=np.uint64)
    for number in (seed, epoch):
        keys = (keys + _hashed(keys + np.uint64(number))) * _SPREAD
    at: Any = slice(None)
    while len(outside := rows[at]):
        first, second = np.divmod(outside, np.uint64(wide))
        for key, other in keys.reshape(_ROUNDS, 2):
            first = _stepped(first, second ^ key, high)
            second = _stepped(second, first ^ other, wide)
        rows[at] = first * np.uint64(wide) + second
        at = np.flatnonzero(rows >= size)
    return rows.astype(np.int64)


def _stepped(numbers: _Words, by: _Words, size: int) -> _Words:
    """Numbers below `size`, moved on by hashes of others."""
    moved = numbers + (_hashed(by) * np.uint64(size) >> _HALF)
    return moved - np.uint64(size) * (moved >= size)


def _hashed(words: _Words) -> _Words:
    """32 bits of each, in which all of its bits count."""
    for _ in range(2):
        words = words * _SPREAD
        words = words ^ words >> _HALF
    return words * _SPREAD >> _HALF


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


class Batches(IterableDataset[dict[str, Any]]):
    """Batches of rows, one after another. Use `TensorCache.batches`.

    An iterator over the rest of an epoch; iterating again begins the next one. A `DataLoader` with `batch_size=None`
    takes it, too; each of its workers then gives its share of the steps, in turn.

    Attributes:
        epoch: the epoch that is read, or comes next.
    """

    def __init__(self, order: Order | Given, read: Callable[[Any], dict[str, Any]], prefetch: int) -> None:
        self.epoch = 0
        self._order, self._read, self._prefetch = order, read, prefetch
        self._first = self._steps = 0  # a place in the order; how many batches this process has given since
        self._reads: Iterator[dict[str, Any]] | None = None
        self._pid = 0
        self._is_over = False

    def __len__(self) -> int:
        """The batches of an epoch."""
        return len(self._order)

    def __iter__(self) -> Self:
        self._is_over = False
        return self

    def __next__(self) -> dict[str, Any]:
        if self._is_over:
            return next(iter(()))
        if self._reads is None or self._pid != os.getpid():  # threads do not survive a fork
            worker, workers = _worker()
            steps = count(worker + self._steps * workers, workers)
            rows = self._order.batches(self.epoch, self._first, steps)
            self._reads, self._pid = read_ahead(rows, self._read, self._prefetch), os.getpid()
        try:
            batch = next(self._reads)
        except BaseException as error:
            self._reads, self._is_over = None, True
            if isinstance(error, StopIteration):
                self.set_epoch(self.epoch + 1)
            raise
        self._steps += 1
        return batch

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; where it is the one that is read, stay.

        A loop over a `DataLoader` with workers calls it before each epoch: they are copies, and this one does not move.
        """
        if epoch != self.epoch:
            self.epoch = checked_count(epoch, "epoch", least=0)
            self._first = self._steps = 0
            self._reads = None

    def state_dict(self, steps: int | None = None) -> dict[str, Any]:
        """Where the batches that were given end, for `load_state_dict`. All ranks have the same after as many steps.

        Args:
            steps: how many were given since the epoch began, or since a state was loaded; if workers of a `DataLoader`
                give them, only the loop knows. Those that this object has given if None.

        Returns:
            Numbers, as JSON takes them. Those of a worker (torchdata's loader collects them) go on in such a worker.

        Raises:
            CacheError: an iterator was given as the sampler, and it can't be started again.
        """
        if isinstance(self._order, Given) and iter(self._order.sampler) is self._order.sampler:
            raise CacheError("a sampler that is an iterator has no state: give a BatchSampler, or a number of rows")
        order, (_, workers) = self._order, _worker()
        state = {"epoch": self.epoch, "row": self._first, "rows": order.num_rows, "seed": order.seed}
        if workers > 1:
            return {**state, "steps": self._steps, "workers": workers, "step": order.step}
        row = self._first + (self._steps if steps is None else steps) * order.step
        if isinstance(order, Given):
            return {**state, "row": row, "mark": order.marks.get(row)}
        return {**state, "row": min(row, order.num_rows)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state was taken. The batch size and the number of ranks and of workers may be others.

        Raises:
            CacheError: it is of other rows or of another seed; or of a worker, and there is another number of them now.
        """
        here: dict[str, object] = {"rows": self._order.num_rows, "seed": self._order.seed}
        if "workers" in state:
            here |= {"workers": _worker()[1], "step": self._order.step}
        try:
            differs = [name for name, value in here.items() if state[name] != value]
            epoch, row, steps = map(operator.index, (state["epoch"], state["row"], state.get("steps", 0)))
        except (KeyError, TypeError, AttributeError) as error:
            raise CacheError(f"this is no state of batches: {repr(state)[:80]}") from error
        if differs or min(epoch, row, steps) < 0:
            wrong = ", ".join(f"{name} is {state[name]}, and here {here[name]}" for name in differs)
            raise CacheError(
                f"this state is of other batches: {wrong or 'it has negative numbers'}. One that workers have given "
                "goes with as many workers and ranks; `state_dict(steps)` of the batches themselves with any number"
            )
        if isinstance(self._order, Given):
            self._order.marks = {row: mark} if isinstance(mark := state.get("mark"), int) else {}
        self.epoch, self._first, self._steps, self._reads, self._is_over = epoch, row, steps, None, False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_reads": None}


def _worker() -> tuple[int, int]:
    """Which worker of a `DataLoader` this is, and of how many; the only one in any other process."""
    worker = get_worker_info()
    return (0, 1) if worker is None else (worker.id, worker.num_workers)


class RowDataset(Dataset[dict[str, Any]]):
    """Rows of a cache as dicts. Use `TensorCache.as_dataset`."""

    def __init__(self, cache: TensorCache, read: Callable[[Any], dict[str, Any]]) -> None:
        self.cache, self._read = cache, read

    def __len__(self) -> int:
        return len(self.cache)

    def __getitem__(self, rows: object) -> dict[str, Any]:
        """One row; for several, a batch, for a `DataLoader` with `batch_size=None` and a batch sampler."""
        return self._read(rows)

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Separate rows, read together."""
        batch = self[list(rows)]
        return [{name: row_at(values, at) for name, values in batch.items()} for at in range(len(rows))]
