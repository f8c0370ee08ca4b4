"""A value as the prefetcher knows it: its bytes, whether they are in memory, and what is read after it.

Always true:
- its stage changes in `Staged.move_to` alone, under the reader's lock; back to `AWAY`, which claims nothing, without it
- it keeps neither its file nor the values that follow it alive
- what follows it is remembered for each value that came before it; where that has branched, only from the second time
- all views of a stored value share one `PageState`
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import torch

from offload.prefetch.pages import Range
from offload.storage.file import TensorFile
from offload.storage.handle import Handle
from offload.system.locks import fork_safe_lock

if TYPE_CHECKING:
    from offload.prefetch.plan import Pool

log = logging.getLogger("offload.prefetch")

SMALL = 64 << 10  # bytes up to which a value stays once it is read
_MOST_CONTEXTS = 16  # contexts (previous reads) to distinguish per value


class Stage(Enum):
    """How far a value is on its way through memory; the package draws it."""

    AWAY = "nothing is known about its pages"
    QUEUED = "waits to be read ahead"
    READING = "is being read ahead"
    RESIDENT = "is read ahead, and not used yet"
    IN_USE = "was used, and not dropped since"
    LEAVING = "waits to be dropped, or is being dropped"


AWAY, QUEUED, READING, RESIDENT, IN_USE, LEAVING = Stage
_NEXT = {
    AWAY: (QUEUED, IN_USE, LEAVING, AWAY),  # the last: two threads have dropped it, as one that was evicted meanwhile
    QUEUED: (READING, IN_USE, AWAY),
    READING: (RESIDENT, LEAVING, AWAY),
    RESIDENT: (IN_USE, LEAVING, AWAY),
    IN_USE: (QUEUED, LEAVING, AWAY),
    LEAVING: (QUEUED, IN_USE, AWAY),
}


class Staged:
    """A value or a load, on its way through memory.

    Attributes:
        stage: how far it is; the reader's lock is held as it changes.
    """

    __slots__ = ()
    stage: Stage

    def move_to(self, stage: Stage) -> None:
        """It is at another stage now, one of those that follow its own."""
        assert stage in _NEXT[self.stage], f"a value that {self.stage.value} can't become one that {stage.value}"
        self.stage = stage  # type: ignore[misc]  # each subclass has it


class Value(Range, Staged):
    """A value, or a part of one, that is read as a whole.

    Attributes:
        pool: its budget.
        kept: whether it stays in memory after a read.
        pinned: whether it stays regardless of the plan.
        is_picked: whether ops pick it from many, like an expert: it is not part of an order.
        uses: how much it is used, if it is picked.
        is_held: whether it stays for now because several threads use it.
        seeded: its announced successor.
        waited: total seconds that ops have waited for it.
    """

    __slots__ = (
        "_branches",
        "_followers",
        "is_held",
        "is_picked",
        "kept",
        "pinned",
        "pool",
        "seeded",
        "stage",
        "uses",
        "waited",
    )

    def __init__(
        self,
        pool: Pool,
        file: TensorFile,
        start: int,
        nbytes: int,
        *,
        shared: bool,
        is_part: bool = False,
        is_picked: bool = False,
    ) -> None:
        super().__init__(file, start, nbytes, shared=shared, is_part=is_part)
        self.pool = pool
        self.kept = self.pinned = self.is_held = False
        self.is_picked = is_picked
        self.uses = 0.0
        self.stage = AWAY
        self.waited = 0.0
        self.seeded: weakref.ref[Value] | None = None
        self._followers: dict[int, tuple[weakref.ref[Value], bool]] = {}  # by the id of the previous read
        self._branches = False

    @classmethod
    def nowhere(cls) -> Value:
        """A value about which nothing is known, and that is never read in."""
        nothing = cls.__new__(cls)
        nothing.nbytes = 0
        nothing.is_picked = False
        nothing.assume_until(float("inf"))
        return nothing

    @property
    def is_ahead(self) -> bool:
        """Whether it is read ahead, or will be."""
        return self.stage in (QUEUED, READING, RESIDENT)

    @property
    def stays(self) -> bool:
        """Whether it stays in memory once it is read: by the plan, or for now."""
        return self.kept or self.is_held

    def read(self) -> None:
        """Read it; unless everything fits, without its neighbours.

        Raises:
            ReadError: the disk failed.
        """
        self.bring_in(exactly=not self.pool.fits, leave_free=self.leave_free)

    @property
    def leave_free(self) -> int:
        """Bytes of free huge pages that a resident value leaves for streaming ones, which are read again and again."""
        return self.pool.widest if self.kept and not self.pool.fits else 0

    def follower(self, before: Value | None) -> Value | None:
        """What is expected after `before` and then this value; None if that is open."""
        found = self._followers.get(id(before))
        if found is None and not self._branches:
            if self.seeded is not None:
                return self.seeded()
            found = next(reversed(self._followers.values()), None)
        return found[0]() if found is not None and found[1] else None

    @property
    def has_stayed(self) -> bool:
        """Whether it stays by the plan, and has been read since the plan was made."""
        return self.kept and self.checked_until > 0

    def let_go(self) -> None:
        """Drop it from memory; the next read brings it back. One that is being read ahead still arrives."""
        before = self.stage
        super().let_go()
        if self.stage is before:
            self.left()

    def left(self) -> None:
        """It is not in memory any more, unless it is on its way."""
        if self.stage in (RESIDENT, IN_USE, LEAVING):
            self.move_to(AWAY)

    def seed(self, following: Value) -> None:
        """Announce what will be read after it."""
        self.seeded = weakref.ref(following)

    def learn(self, before: Value | None, following: Value) -> None:
        """Record that `following` came after `before` and then this value."""
        if self.seeded is not None and self.seeded() is not following:
            self.seeded = None
        known = self._followers.pop(id(before), None)
        is_news = known is None or known[0]() is not following
        self._branches = self._branches or (known is not None and is_news)
        while len(self._followers) >= _MOST_CONTEXTS:
            del self._followers[next(iter(self._followers))]
        self._followers[id(before)] = weakref.ref(following), not (is_news and self._branches)


class Ends(Protocol):
    """Work that goes on until it is ended."""

    def end(self) -> None: ...


class PageState:
    """What is known about the bytes of one stored value.

    Attributes:
        pool: its budget; None for the process's.
        ranges: tracked ranges, by start and length.
        copies: those on accelerators, by device, start and length.
        checked_until: until when (`clock.now`) its rows are assumed to be in memory without checking.
        filling: reads in all of it, if rows are picked from it: `tables` makes it.
    """

    __slots__ = ("checked_until", "copies", "filling", "pool", "ranges")

    def __init__(self) -> None:
        self.pool: Pool | None = None
        self.ranges: dict[tuple[int, int], Value] = {}
        self.copies: dict[tuple[torch.device, int, int], Value] = {}
        self.checked_until = 0.0
        self.filling: Ends | None = None

    def begin_anew(self) -> None:
        """The value is in another file now."""
        known, self.ranges = self.ranges, {}
        for value in list(known.values()):
            value.assume_until(0.0)  # users that hold on to one check again
        copies, self.copies = self.copies, {}
        for copy in list(copies.values()):
            copy.let_go()
        self.forget_rows()

    def assume_rows_until(self, time: float) -> None:
        """Don't check until then whether its rows are in memory."""
        self.checked_until = time

    def fill_by(self, filling: Ends) -> None:
        """Its rows are read in, until they are forgotten."""
        self.filling = filling

    def forget_rows(self) -> None:
        """Assume none of its rows to be in memory any more, and stop reading them in."""
        self.checked_until = 0.0
        filling, self.filling = self.filling, None
        if filling is not None:
            filling.end()


def page_state_of(handle: Handle) -> PageState:
    """The `PageState` of the value of `handle`, created on first use."""
    if handle.page_state is None:
        with _LOCK:
            if handle.page_state is None:
                handle.page_state = PageState()
    assert type(handle.page_state) is PageState
    return handle.page_state


@contextmanager
def dropping_after(lock: threading.RLock) -> Iterator[list[Value]]:
    """Holds the lock in the block; the values that are put in the list are dropped from memory after it, without it."""
    leaving: list[Value] = []
    try:
        with lock:
            yield leaving
    finally:
        for value in leaving:
            value.let_go()


_LOCK = fork_safe_lock()  # of the first access to a value's state
