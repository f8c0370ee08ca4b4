"""Values and files that are none: a memory that notes what is read into it, and by whom."""

from __future__ import annotations

import itertools
import threading
import weakref
from itertools import pairwise

from offload.prefetch.engine import Engine
from offload.prefetch.plan import Pool, Value
from offload.system import clock
from tests.engines import rest

MIB = 1 << 20


class File:
    """A stand-in for a file that is not mapped; ranges hold weak references to theirs."""

    is_picked_from = False

    def mapping(self, *, shared: bool) -> None:
        return None


class Made(Value):
    """A value that records what happens to it, in a fake memory that records how full it is."""

    def __init__(self, name: str, memory: Memory, pool: Pool, nbytes: int, start: int = 0) -> None:
        super().__init__(pool, memory.file, start, nbytes, shared=False)  # type: ignore[arg-type]
        self.name = name
        self.memory = memory

    @property
    def may_ask(self) -> bool:
        return True

    def is_cached(self) -> bool:
        return self in self.memory.here

    def bring_in(self, *, exactly: bool = False) -> None:
        if self.name == "broken":
            raise OSError("the disk is broken")
        self.memory.take(self)

    def announce(self, *, exactly: bool = False) -> None:
        pass

    def let_go(self) -> None:
        super().let_go()
        self.memory.drop(self)


class Memory:
    def __init__(self) -> None:
        self.file = File()
        self.here: set[Made] = set()
        self.log: list[tuple[str, bool]] = []  # what was read, and whether by the reader
        self.most = 0
        self._lock = threading.Lock()

    def take(self, value: Made) -> None:
        with self._lock:
            self.here.add(value)
            self.log.append((value.name, threading.current_thread().name == "offload-reader"))
            self.most = max(self.most, sum(value.nbytes for value in self.here))

    def drop(self, value: Made) -> None:
        with self._lock:
            self.here.discard(value)


def made(
    memory: Memory, names: str, *, size: int = MIB, budget: int = 0, window: int = 4 * MIB, is_picked: bool = False
) -> list[Made]:
    """Values that stream, unless there is a budget for them."""
    pool = Pool(budget, window)
    values = [Made(name, memory, pool, size, place * 2 * size) for place, name in enumerate(names)]  # far apart
    for value in values:
        value.is_picked = is_picked
    pool.add(values)
    return values


def read(engine: Engine, values: list[Made]) -> None:
    """Read like ops that take a while: the reader becomes idle in between."""
    for value in values:
        if value.checked_until < clock.now():
            engine.arrive(value)
            assert value.is_cached()
            rest(engine)


def seed(values: list[Made]) -> list[Made]:
    """Announce their order."""
    for value, following in pairwise(values):
        value.seeded = weakref.ref(following)
    return values


def values_of(pool: Pool, sizes: list[int], start: int = 0, *, is_picked: bool = False) -> list[Value]:
    """One after the other in a file."""
    starts = itertools.accumulate(sizes, initial=start)
    values = [
        Value(pool, FILE, start, size, shared=False, is_picked=is_picked)  # type: ignore[arg-type]
        for start, size in zip(starts, sizes, strict=False)
    ]
    pool.add(values)
    return values


FILE = File()
