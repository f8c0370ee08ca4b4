"""A read of a value: which bytes of its file it needs, whether they are in memory, and what comes next.

Always true:
- one engine per process; a forked child has its own
- if the window is full of values waiting to be dropped, a thread that has to read by itself drops them first
- the lock is not held while the disk is read, nor while an op waits for the reader
- an op that is interrupted gives up what was ahead for its thread, so that the accounting stays correct
- small values that are not expected soon are left to the mapping, and so are views of small scattered pieces. In a file
  whose values are picked individually, the system is told to read just these, and reads nothing around them
- if the gaps between the pieces of a view are so small that the system reads them anyway, they count as read
- a view of most of a value counts as the value: a view that grows row by row is one range, not a new one each time
"""

from __future__ import annotations

import os
import random
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias

import torch

from offload.prefetch.order import Lease, Streams
from offload.prefetch.pages import PAGE, announce, are_cached
from offload.prefetch.plan import SMALL, Pool, Value
from offload.prefetch.reader import LEAST, Counts, Reader
from offload.prefetch.value import PageState, dropping_after, page_state_of
from offload.storage.handle import Access, Handle
from offload.system import clock

Views: TypeAlias = "Sequence[tuple[Handle, torch.Tensor]]"

CHECKED_FOR = 2.0  # longest time in seconds for which a value seen in memory is assumed to be still there
_FOREVER = float("inf")
_MOST_OVERLAP = 2  # times a value's size that it and its parts may be tracked
_MOST_SCATTERED = 2  # limit of the bytes spanned, as a multiple of the bytes read
_BETWEEN = 64 << 10  # gap in bytes that the system reads anyway: half its read-around for a page fault
_LEAST_PIECE = 64 << 10  # smallest scattered piece, in bytes, that is worth checking
_MOST = 2  # a part larger than the value divided by this counts as the value
_LOOKED_AT = 8  # pieces of a view to check for being in memory
_MOST_PAST = 16 << 20  # bytes up to which less work makes up for disks that feed the page cache faster
_OF_MATRICES = 3  # dimensions of a stack of matrices, of which some are read


def ensure_resident(handle: Handle, view_spec: torch.Tensor) -> Value:
    """The bytes that the view described by `view_spec` needs, now in memory.

    Raises:
        ReadError: the disk failed.
    """
    if sys.is_finalizing():  # the reader may have stopped anywhere
        return UNTRACKED
    value = _range_of(handle, view_spec)
    if value is None:
        return _ensure_pieces(handle, view_spec)
    if value is UNTRACKED:
        return _glance(handle, view_spec)
    if value.is_picked:
        value.pool.picked.count(value)
    if value.checked_until < clock.now():
        _ENGINE.arrive(value)
    return value


def compute_once(
    key: Hashable, compute: Callable[[], torch.Tensor], views: Callable[[], Iterable[tuple[Handle, torch.Tensor]]]
) -> torch.Tensor:
    """What `compute` makes of some views. If other threads are about to need the same, it is computed once for all."""
    lease, result = _ENGINE.streams.lease(), kept_result(key)
    if result is not None:
        return result
    if lease is None or not lease.keeps_results:
        return compute()
    result = lease.compute(compute)
    read = list(views())
    sources = [
        one for one in (_range_of(handle, view_spec) for handle, view_spec in read) if one not in (None, UNTRACKED)
    ]
    if read:
        with lock():
            lease.keep(key, result, page_state_of(read[0][0]).pool or POOL, sources)
    return result


def kept_result(key: Hashable) -> torch.Tensor | None:
    """What `compute_once` would return without reading anything."""
    lease = _ENGINE.streams.lease()
    return None if lease is None else lease.results.get(key)


def touch_if_resident(views: Views) -> bool:
    """Whether all that several views need was in memory; then it counts as used, as after `ensure_resident`.

    Raises: as `ensure_resident`.
    """
    now, tracked = clock.now(), []
    for handle, view_spec in views:
        value = _range_of(handle, view_spec)
        if value is None or (value.checked_until < now and (value.is_ahead or not value.is_cached())):
            return False
        tracked.append(value)
    for (handle, view_spec), value in zip(views, tracked, strict=True):
        if value.checked_until < now or value is UNTRACKED:
            ensure_resident(handle, view_spec)
        elif value.is_picked:
            value.pool.picked.count(value)
    return True


def direct_candidates(views: Views) -> list[int]:
    """Which of several views are not in memory, and will not stay there: they need not pass the page cache.

    None of them if one has to; small ones, which stay once they are read, are left out. They count as used.
    """
    now, away = clock.now(), {}
    for number, (handle, view_spec) in enumerate(views):
        value = _range_of(handle, view_spec)
        if value is UNTRACKED:
            continue
        if value is None or not value.is_picked or handle.owned:
            return []
        if value.checked_until < now and (value.is_ahead or not value.is_cached()):
            away[number] = value
    if not away:
        return []
    nbytes, pool = sum(value.nbytes for value in away.values()), next(iter(away.values())).pool
    with lock():
        if nbytes > min(_MOST_PAST, _ENGINE.streams.own().capacity_past(pool) // LEAST):
            return []
        if any(value.stays or value.is_ahead or value.pool.would_admit(value) for value in away.values()):
            return []
    for value in away.values():
        value.pool.picked.count(value)
    return list(away)


def fits(handle: Handle) -> bool:
    """Whether all values under the budget of this one can stay in memory."""
    return (page_state_of(handle).pool or POOL).fits


def reserve(nbytes: int, handle: Handle) -> int:
    """So many bytes under the budget of `handle` are about to be read past the page cache; how many at a time."""
    with lock():
        stream = _ENGINE.streams.own()
        stream.reserve(nbytes)
        return stream.capacity_past(page_state_of(handle).pool or POOL)


def reader() -> Reader:
    return _ENGINE.reader


def is_shared() -> bool:
    """Whether other threads are about to use the same values as this one."""
    lease = _ENGINE.streams.lease()
    return lease is not None and lease.keeps_results


def prefetch(views: Iterable[tuple[Handle, torch.Tensor]]) -> None:
    """Start reading what several views need, before waiting for the first, as far as the window allows."""
    now, values = clock.now(), []
    for handle, view_spec in views:
        value = _range_of(handle, view_spec)
        if value is UNTRACKED:
            _announce(handle, view_spec)
        elif value is not None and value.checked_until < now:
            values.append(value)
    if len(values) > 1:
        with lock():
            _ENGINE.streams.own().bring_soon(values)


def span_of(view_spec: torch.Tensor) -> int:
    """Bytes from the start of the first element of a view to the end of the last."""
    steps = sum((size - 1) * step for size, step in zip(view_spec.shape, view_spec.stride(), strict=True))
    return (1 + int(steps)) * view_spec.itemsize


def _glance(handle: Handle, view_spec: torch.Tensor) -> Value:
    """Start reading a view that is not tracked; the result says when to do it again."""
    if not handle.file.is_picked_from:
        return UNTRACKED
    _announce(handle, view_spec)
    return Value.nowhere(clock.now() + CHECKED_FOR)


def _announce(handle: Handle, view_spec: torch.Tensor) -> None:
    """Start reading a view that is left to the mapping, whose page faults would read megabytes around each piece."""
    mapped = handle.file.mapping(shared=handle.owned) if handle.file.is_picked_from else None
    if mapped is None or not view_spec.numel():
        return
    piece, others = (handle.extent[1], []) if handle.subclass is not None else _piece_of(view_spec, PAGE)
    first = handle.extent[0] + (int(view_spec.storage_offset()) * view_spec.itemsize if handle.subclass is None else 0)
    pieces = [mapped.data_ptr() + start for start in _starts(first, others)]
    some = pieces[:: max(1, len(pieces) // _LOOKED_AT)]
    if len(pieces) > 1 and all(are_cached(address, piece) for address in some):
        return
    for address in pieces:
        announce(address, piece)


def _range_of(handle: Handle, view_spec: torch.Tensor) -> Value | None:
    """The bytes that are read as one range; None for several pieces, each worth checking."""
    nbytes = view_spec.numel() * view_spec.itemsize
    source, page_state = handle.source, page_state_of(handle)
    start, most = source.extent
    whole = page_state.ranges.get(source.extent)
    if source.subclass is not None or nbytes == most:
        return whole or (_track(page_state, handle, start, most) if most > SMALL else UNTRACKED)
    if whole is not None and whole.checked_until >= clock.now():
        return whole
    if nbytes <= SMALL:
        return UNTRACKED
    span = span_of(view_spec)
    if span > _MOST_SCATTERED * nbytes:
        piece, others = _piece_of(view_spec)
        if others:
            return None if piece >= _LEAST_PIECE else UNTRACKED
    if span * _MOST > most:
        return whole or _track(page_state, handle, start, most)
    return _track(page_state, handle, start + int(view_spec.storage_offset()) * view_spec.itemsize, span)


def _piece_of(view_spec: torch.Tensor, between: int = _BETWEEN) -> tuple[int, list[tuple[int, int]]]:
    """The size in bytes of one piece of a scattered view; and the counts and distances of the others.

    Gaps of up to `between` bytes don't split a piece.
    """
    piece, others = view_spec.itemsize, []
    for step, size in sorted(zip(view_spec.stride(), view_spec.shape, strict=True)):
        distance = int(step) * view_spec.itemsize
        if distance - piece <= between:
            piece += (int(size) - 1) * distance
        else:
            others.append((int(size), distance))
    return piece, others


def _starts(first: int, others: Iterable[tuple[int, int]]) -> list[int]:
    """The first byte of every piece of a view, given the first piece's."""
    starts = [first]
    for size, distance in others:
        starts = [start + number * distance for start in starts for number in range(size)]
    return starts


def _ensure_pieces(handle: Handle, view_spec: torch.Tensor) -> Value:
    """The pieces of a scattered view, now in memory; returns the one that expires first."""
    piece, others = _piece_of(view_spec)
    first = handle.extent[0] + int(view_spec.storage_offset()) * view_spec.itemsize
    tracked = [track(handle, start, piece) for start in _starts(first, others)]
    for one in tracked:
        if one.checked_until < clock.now():
            _ENGINE.arrive(one)
    return min(tracked, key=lambda one: one.checked_until)


class Engine:
    """What the threads of a process share: the reader with its lock and counters, and the streams of all threads."""

    def __init__(self) -> None:
        self.reader = Reader()
        self.streams = Streams(self.reader)
        self._chance = random.Random()  # separate: the global one belongs to the user

    def arrive(self, value: Value) -> None:
        """Read `value` if it is not in memory, and start on what comes next.

        Raises:
            ReadError: the disk failed.
        """
        try:
            self._arrive(value)
        except BaseException:
            self._mend(value)
            raise

    def _arrive(self, value: Value) -> None:
        lock, streams = self.reader.lock, self.streams
        with lock:
            stream = streams.own()
            leaving = value.pool.reconsider()
            for left in value.pool.admit(value) if value.is_picked else ():
                self.reader.drop(left)
            expected = value in stream.ahead
            if expected:
                stream.move_to(value)
        for left in leaving:
            left.let_go()
        was_cached = not expected and value.is_cached()
        if not expected:
            with lock:
                if not was_cached and value.kept and value.checked_until > 0 and value.may_ask:
                    value.pool.doubt()  # it should be here: something else needed the memory
                if not (was_cached and (value.kept or value.is_held)):
                    stream.move_to(value)
        if not self.reader.brings(value, was_cached=was_cached):
            self._make_sure(value)
        if value.kept or value.is_held:
            lasts = value.is_held or (value.nbytes <= SMALL and (value.is_picked or not value.is_apart))
            calm = _FOREVER if lasts else CHECKED_FOR * self._chance.uniform(0.1, 1)  # some value is always due
            value.checked_until = clock.now() + calm

    def _mend(self, value: Value) -> None:
        """After an unfinished read: give up what this thread has ahead, and drop what was to be dropped."""
        with self.reader.lock:
            if (stream := self.streams.known()) is not None:
                stream.give_up()
            if not value.kept:
                self.reader.drop(value)
            self.reader.mend()

    def _make_sure(self, value: Value) -> None:
        """Read what the reader has not read."""
        reader = self.reader
        if value.is_cached():
            with reader.lock:
                reader.counts.found += 1
            return
        started = clock.now()
        with reader.lock:  # if the reader is behind with dropping, this makes room
            leaving = reader.take_leaving() if self.streams.in_flight() > value.pool.window else []
        reader.let_go(leaving)
        missing = value.missing_bytes()
        value.read()
        with reader.lock:
            reader.counts.missed += 1
            reader.counts.bytes_read += missing
            reader.counts.waited += clock.now() - started


def range_of(handle: Handle, view_spec: torch.Tensor) -> Value:
    """The bytes that a view spans, as one range, or the whole value if that is most of it.

    `UNTRACKED` if the view is small or scattered.
    """
    start, most = handle.extent
    nbytes, span = view_spec.numel() * view_spec.itemsize, span_of(view_spec)
    if nbytes <= SMALL or span > _MOST_SCATTERED * nbytes:
        return UNTRACKED
    if span * _MOST > most:
        return track(handle, start, most)
    return track(handle, start + int(view_spec.storage_offset()) * view_spec.itemsize, span)


def track(handle: Handle, start: int, nbytes: int) -> Value:
    """The range of these bytes in the file of `handle`; `UNTRACKED` if enough of its parts are tracked already."""
    return _track(page_state_of(handle), handle, start, nbytes)


def _track(page_state: PageState, handle: Handle, start: int, nbytes: int) -> Value:
    key = start, nbytes
    value = page_state.ranges.get(key)
    if value is not None:
        return value
    with replanning() as leaving:
        value = page_state.ranges.get(key)
        if value is None:
            parts = page_state.ranges.values()
            if parts and sum(part.nbytes for part in parts) > _MOST_OVERLAP * handle.extent[1]:
                return UNTRACKED
            value = _new_value(handle, key, page_state)
            leaving.extend(value.pool.add([value]))
            page_state.ranges[key] = value  # last: tracked values are under a budget
    return value


def expect(handles: Iterable[Handle], pool: Pool | None = None) -> None:
    """Announce that these whole values will be read in this order.

    Args:
        handles: the values.
        pool: their budget; None for the process's.
    """
    with replanning() as leaving:
        order: list[Value] = []
        values: dict[Handle, Value] = {}
        new: dict[Pool, list[Value]] = {}
        for handle in handles:
            page_state = page_state_of(handle)
            page_state.pool = pool or page_state.pool
            value = values.get(handle) or page_state.ranges.get(handle.extent)
            if value is None or value.pool is not (page_state.pool or POOL):
                value = _new_value(handle, handle.extent, page_state)
                new.setdefault(value.pool, []).append(value)
            values[handle] = value
            order.append(value)
        for value, following in pairwise(order):
            value.seeded = weakref.ref(following)
        for its_pool, members in new.items():
            leaving.extend(its_pool.add(members))
        for handle, value in values.items():
            page_state_of(handle).ranges[handle.extent] = value  # last: tracked values are under a budget


def count_in(handles: Iterable[Handle], pool: Pool) -> None:
    """Let these values, which may be read in any order, stay in memory under this budget.

    Not those that are pinned under another one.
    """
    with lock():
        for page_state in map(page_state_of, handles):
            if page_state.pool is not pool and not any(value.pinned for value in page_state.ranges.values()):
                page_state.pool = pool
                page_state.begin_anew()


def lock() -> threading.RLock:
    return _ENGINE.reader.lock


def replanning() -> AbstractContextManager[list[Value]]:
    """Holds the lock in the block; the values that are put in the list are dropped from memory after it."""
    return dropping_after(lock())


def lease() -> Lease:
    """For threads that are about to use the same values, one after the other; call `end` on it when done."""
    return Lease(_ENGINE.streams)


def counts() -> Counts:
    with _ENGINE.reader.lock:
        return replace(_ENGINE.reader.counts)


def _new_value(handle: Handle, key: tuple[int, int], page_state: PageState) -> Value:
    source = handle.source
    is_cut = key != source.extent
    is_picked = handle.access is Access.PICKED or (is_cut and len(source.layout.shape) == _OF_MATRICES)
    if is_picked:
        source.file.is_picked_from = True
    return Value(
        page_state.pool or POOL,
        source.file,
        *key,
        shared=source.owned,
        is_part=is_cut or handle.access is not Access.TOGETHER,
        is_picked=is_picked,
    )


def arrive(value: Value) -> None:
    """As `Engine.arrive`; nothing if it was in memory a moment ago."""
    if value.checked_until < clock.now():
        _ENGINE.arrive(value)


def _begin_anew() -> None:
    """A forked child has no reader, and nothing is in flight."""
    global _ENGINE
    _ENGINE = Engine()
    for pool in Pool.all():
        pool.begin_anew()


POOL = Pool()  # the process's
UNTRACKED = Value.nowhere()
_ENGINE = Engine()
os.register_at_fork(after_in_child=_begin_anew)
