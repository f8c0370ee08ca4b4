"""The way in: one engine a process, and the values that it knows.

Always true:
- a forked child has an engine of its own
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from offload.prefetch.engine import Counts, Engine
from offload.prefetch.residency import Pool, Value
from offload.prefetch.tracked import AWAY, Tracked
from offload.storage.handle import Handle
from offload.storage.pages import Range

_MOST_OVERLAP = 2  # times a value's size that it and its parts may be tracked


def arrive(value: Tracked) -> None:
    """To be called before a read of a value that is not `calm`; comes back when it is in memory.

    Raises:
        ReadError: the disk did not give it.
    """
    _ENGINE.arrive(value)


def tracked(handle: Handle, start: int, nbytes: int) -> Range:
    """What is read at these bytes of the file of `handle`; `UNTRACKED` if enough parts of that are known already."""
    key = (start, nbytes)
    leaving: list[Value] = []
    try:
        with lock():
            value: Tracked | None = handle.ranges.get(key)
            if value is None:
                if sum(part.nbytes for part in handle.ranges.values()) > _MOST_OVERLAP * handle.extent[1]:
                    return UNTRACKED
                value = _track(handle, key)
                leaving.extend(value.pool.add([value]))
                handle.ranges[key] = value  # last: what is known is under its budget
    finally:
        let_go(leaving)
    return value


def expect(handles: Iterable[Handle], pool: Pool | None = None) -> None:
    """Say that these values, as wholes, will be read in this order.

    Args:
        handles: of the values.
        pool: the budget that they are to be under; None for that of the process.
    """
    leaving: list[Value] = []
    try:
        with lock():
            order: list[Tracked] = []
            values: dict[Handle, Tracked] = {}
            new: dict[Pool, list[Tracked]] = {}
            for handle in handles:
                handle.pool = pool or handle.pool
                value = values.get(handle) or handle.ranges.get(handle.extent)
                if value is None or value.pool is not (handle.pool or POOL):
                    value = _track(handle, handle.extent)
                    new.setdefault(value.pool, []).append(value)
                values[handle] = value
                order.append(value)
            for value, following in pairwise(order):
                value.seeded = weakref.ref(following)
            for its_pool, members in new.items():
                leaving.extend(its_pool.add(members))
            for handle, value in values.items():
                handle.ranges[handle.extent] = value  # last: what is known is under its budget
    finally:
        let_go(leaving)


def lock() -> threading.RLock:
    """That of the engine, for those who change a pool. What a change gives to drop is dropped without it."""
    return _ENGINE.lock


def let_go(values: Iterable[Value]) -> None:
    """Drop values from memory."""
    for value in values:
        value.let_go()


def counts() -> Counts:
    """A copy of what was counted so far."""
    with _ENGINE.lock:
        return replace(_ENGINE.counts)


def _track(handle: Handle, key: tuple[int, int]) -> Tracked:
    value = Tracked(handle.pool or POOL, handle.file, *key, shared=handle.owned)
    value.is_part = key != handle.extent
    return value


def _begin_anew() -> None:
    """In a forked child there is no reader, and nothing is on its way."""
    global _ENGINE
    _ENGINE = Engine()
    for pool in Pool.all():
        for value in pool.values():
            if isinstance(value, Tracked):
                value.state = AWAY


POOL = Pool()  # of the process
UNTRACKED = Range.nowhere()
_ENGINE = Engine()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
