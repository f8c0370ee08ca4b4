"""Values that several threads use one after the other, and that stay until all of them have.

Always true:
- the threads read as one, in the order of the first of them: the others find everything in memory
- what a lease holds stays until the lease moves on; a part of the budget is reserved for it
- a result that it keeps takes the place of the values that it was computed from
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from offload.prefetch.order import Stream, Streams
from offload.prefetch.plan import Pool, Users
from offload.prefetch.value import Value, dropping_after, log, page_state_of
from offload.storage.handle import Handle


class Lease:
    """Values that several threads use one after the other, and that stay until all of them have.

    The threads read as one, in the order of the first of them: the others find everything in memory.

    Attributes:
        keeps_results: whether what the first thread computes from values is kept for the others, too.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._stream = Stream(streams, lease=self)
        self._blocks: Sequence[Sequence[Handle]] = ()
        self._held: dict[Value, None] = {}
        self._bytes: dict[Pool, int] = {}  # held, per pool
        self._users: dict[Pool, Users] = {}
        self._results: dict[Hashable, torch.Tensor] = {}
        self._made: dict[Pool, int] = {}  # bytes of results, per pool
        self._is_again = False  # whether something is computed that was computed before
        self._has_warned = self._has_ended = False
        self.keeps_results = False

    def expect(self, blocks: Sequence[Sequence[Handle]]) -> None:
        """Reserve memory for these blocks, each used until the lease moves on. Other values may be used, too."""
        with dropping_after(self._streams.reader.lock) as leaving:
            self._blocks = blocks
            known = [value for block in blocks for handle in block for value in page_state_of(handle).ranges.values()]
            for pool in dict.fromkeys(value.pool for value in known):
                leaving.extend(self._take_part(pool))

    def compute(self, act: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `act` returns; of what that is computed from, nothing is kept."""
        self.keeps_results = False
        try:
            return act()
        finally:
            self.keeps_results = True

    def join(self) -> None:
        """Make the running thread read as one with the others."""
        with self._streams.reader.lock:
            self._streams.join(self._stream)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """In this context, the running thread reads as one with the others."""
        streams = self._streams
        with streams.reader.lock:
            own = streams.join(self._stream)
        try:
            yield
        finally:
            with streams.reader.lock:
                streams.join(own)

    def move_on(self) -> None:
        """All threads have used what is held. From now on, as much is reserved in the budget."""
        with dropping_after(self._streams.reader.lock) as leaving:
            self._results = {}
            held, self._held = self._held, {}
            made, self._made = self._made, {}
            sizes, self._bytes = self._bytes, {}
            for users in self._users.values():
                users.replaced.difference_update(held)  # the result did not fit this time
            for value in held:
                self._release(value)
            is_again, self._is_again = self._is_again, False
            for pool, size in sizes.items():
                if size > pool.at_a_time or (is_again and pool in self._users and self._users[pool].has_news):
                    leaving.extend(self._take_part(pool, held, made.get(pool, 0)))

    def end(self) -> None:
        """Release everything, and the reserved memory."""
        self._has_ended = True
        self.move_on()
        with dropping_after(self._streams.reader.lock) as leaving:
            self._streams.part_with(self._stream)
            while self._users:
                pool, users = next(iter(self._users.items()))
                leaving.extend(pool.part_with(users))
                del self._users[pool]
            self._blocks = ()

    def result(self, key: Hashable) -> torch.Tensor | None:
        """A result that is kept."""
        return self._results.get(key)

    # Under the lock

    def keep(self, key: Hashable, result: torch.Tensor, pool: Pool, sources: Iterable[Value]) -> None:
        """Keep a result until the lease moves on, if it fits, instead of the values that it was computed from."""
        sources = list(dict.fromkeys(sources))  # several pieces may be cuts of one value
        held = [value for value in sources if value in self._held]
        nbytes = result.untyped_storage().nbytes()
        size = self._bytes.get(pool, 0) + nbytes - sum(value.nbytes for value in held)
        if size > pool.most_at_a_time or self._has_ended:
            return
        if pool in self._users:
            replaced = self._users[pool].replaced
            self._is_again = self._is_again or not replaced.isdisjoint(sources)
            replaced.update(sources)
        for value in held:
            del self._held[value]
            self._release(value)
        self._results[key] = result
        self._bytes[pool] = size
        self._made[pool] = self._made.get(pool, 0) + nbytes

    def holds(self, value: Value) -> bool:
        """Whether a value used now stays: it does if it fits."""
        if value.is_held or self._has_ended:
            return value.is_held
        pool = value.pool
        size = self._bytes.get(pool, 0) + value.nbytes
        if size > pool.most_at_a_time:
            self._warn(size)
            return False
        value.is_held = True
        self._held[value] = None
        self._bytes[pool] = size
        return True

    def _release(self, value: Value) -> None:
        value.is_held = False
        value.assume_until(0.0)
        if not value.kept and value not in self._stream.ahead:
            self._streams.reader.drop(value)

    def _take_part(self, pool: Pool, held: Iterable[Value] = (), made: int = 0) -> list[Value]:
        """Reserve memory in a budget for the blocks, and for what was held beside them and the bytes of results.

        Returns what has to be dropped.
        """
        users = self._users.get(pool)
        if users is None:
            users = self._users[pool] = Users(self._blocks)
            pool.users.append(users)
        others = {value for value in held if value.pool is pool}.difference(*users)
        users.planned = len(users.replaced)
        users.others = max(users.others, made + sum(value.nbytes for value in others))
        return pool.reconsider(anew=True)

    def _warn(self, size: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.info("the values of one block take %d bytes, more than the budget: every batch reads them again", size)


def lease_of_thread(streams: Streams) -> Lease | None:
    """The lease under which the running thread reads."""
    stream = streams.known()
    lease = None if stream is None else stream.lease
    return lease if isinstance(lease, Lease) else None
