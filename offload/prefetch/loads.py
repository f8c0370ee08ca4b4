"""Stored values that will not stay in memory, read past the page cache in the order in which they will be used.

Always true:
- only values in files that `offload` does not write are read so
- at most half of this thread's part of the window is read, or being read, and not released; but two loads always are
- a value is in memory that is used again from then on; what is computed from it has memory of its own
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch

from offload.prefetch.direct import FilePart, Load, can_be_read
from offload.prefetch.engine import Views, direct_candidates, fits, reader, reserve, span_of
from offload.prefetch.reader import LEAST
from offload.storage.handle import Handle

_MOST_AROUND = 2  # bytes that are read, as a multiple of those that are needed: rows of two values can alternate
_THREAD = threading.local()


def load_of(reads: Views, parts: Sequence[FilePart] | None = None) -> Load | None:
    """What is not in memory of several views, to be read past the page cache; None: nothing, or better not so.

    It counts as used. Not if another thread is about to need it, too.

    Args:
        reads: the views.
        parts: what `parts_of_files` has found for them, if that is known.
    """
    if fits(reads[0][0]):
        return None
    parts = parts_of_files(reads) if parts is None else parts
    chosen = direct_candidates(reads) if parts else []
    return Load([parts[number] for number in chosen]) if chosen else None


def parts_of_files(reads: Views) -> list[FilePart]:
    """Where views lie in their files; nothing if they can't be read from there past the page cache."""
    parts = []
    for handle, view_spec in reads:
        if handle.owned or handle.composed is not None or handle.subclass is not None or view_spec.is_neg():
            return []
        part = _part_of(handle, view_spec)
        is_scattered = part.nbytes > _MOST_AROUND * view_spec.numel() * view_spec.itemsize
        if is_scattered or part.start % view_spec.itemsize or view_spec.is_conj() or not can_be_read(part.file):
            return []
        parts.append(part)
    return parts


def _part_of(handle: Handle, view_spec: torch.Tensor) -> FilePart:
    return FilePart(handle.file, start_of(handle, view_spec), span_of(view_spec))


def start_of(handle: Handle, view_spec: torch.Tensor) -> int:
    """Where the first element of a view of a stored value is in its file."""
    return handle.extent[0] + int(view_spec.storage_offset()) * view_spec.itemsize


class Arriving:
    """Loads that are read from now on, in this order. Close it when done; another thread may still be reading then.

    Args:
        loads: each with its views, all under one budget.
    """

    def __init__(self, loads: Sequence[tuple[Load, Views]]) -> None:
        self._due = deque(load for load, _ in loads)
        self._held: deque[Load] = deque()
        self._is_used = False
        self._size_of_each = max((load.memory_bytes for load in self._due), default=0)  # so that it fits again
        self._most = 0
        if loads:
            capacity = reserve(sum(load.memory_bytes for load in self._due), loads[0][1][0][0])
            self._most = max(LEAST, capacity // self._size_of_each)
            self._begin_more()

    def take(self) -> Load:
        """The next one, once it is there; the one before it no longer is.

        Raises: as `Load.read`.
        """
        if self._is_used:
            self._held.popleft().release()
            self._begin_more()
        self._is_used = True
        reader().bring_load(self._held[0])
        return self._held[0]

    def close(self) -> None:
        """None of them is needed any more."""
        self._due.clear()
        for load in self._held:
            load.release()
        self._held.clear()
        if self._most:
            reader().release_soon()

    def _begin_more(self) -> None:
        while self._due and len(self._held) < self._most:
            load = self._due.popleft()
            load.make_room(self._size_of_each)
            self._held.append(load)
            reader().queue_load(load)


@contextmanager
def taken_from(load: Load | None) -> Generator[None]:
    """In this context, this thread takes stored values from a load that holds them."""
    before = getattr(_THREAD, "load", None)
    _THREAD.load = load
    try:
        yield
    finally:
        _THREAD.load = before


def is_loaded() -> bool:
    return getattr(_THREAD, "load", None) is not None


def view_in_load(handle: Handle, view_spec: torch.Tensor) -> torch.Tensor | None:
    """A view of a stored value, if it is taken from a load."""
    load: Load | None = getattr(_THREAD, "load", None)
    return None if load is None else load.tensor(_part_of(handle, view_spec), view_spec)
