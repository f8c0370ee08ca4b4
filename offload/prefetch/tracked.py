"""A value whose place in the order of reads is known.

Always true:
- a value is `AWAY` (nothing is known of it), `QUEUED`, being `READ`, or `HERE`: read ahead, and not asked for yet
"""

from __future__ import annotations

import weakref

from offload.prefetch.residency import Pool, Value
from offload.storage.file import TensorFile

AWAY, QUEUED, READ, HERE = range(4)
_MOST_CONTEXTS = 16  # reads before a value that are told apart


class Tracked(Value):
    """A value whose place in the order is known."""

    __slots__ = ("branches", "followers", "is_leaving", "seeded", "state", "waited")

    def __init__(self, pool: Pool, file: TensorFile, start: int, nbytes: int, *, shared: bool) -> None:
        super().__init__(pool, file, start, nbytes, shared=shared)
        self.state = AWAY
        self.is_leaving = False
        self.branches = False
        self.waited = 0.0  # seconds, in all
        self.seeded: weakref.ref[Tracked] | None = None
        self.followers: dict[int, tuple[weakref.ref[Tracked], bool]] = {}  # by the id of the read before

    def follower(self, before: Tracked | None) -> Tracked | None:
        """What is expected after `before`, then this one; None if that is anybody's guess."""
        found = self.followers.get(id(before))
        if found is None and not self.branches:
            if self.seeded is not None:
                return self.seeded()
            found = next(reversed(self.followers.values()), None)
        return found[0]() if found is not None and found[1] else None

    def let_go(self) -> None:
        """Drop it from memory; the next read brings it back."""
        if self.state == HERE:
            self.state = AWAY
        super().let_go()

    def learn(self, before: Tracked | None, following: Tracked) -> None:
        """After `before`, then this one, came `following`."""
        if self.seeded is not None and self.seeded() is not following:
            self.seeded = None
        known = self.followers.pop(id(before), None)
        is_news = known is None or known[0]() is not following
        self.branches = self.branches or (known is not None and is_news)
        while len(self.followers) >= _MOST_CONTEXTS:
            del self.followers[next(iter(self.followers))]
        self.followers[id(before)] = weakref.ref(following), not (is_news and self.branches)
