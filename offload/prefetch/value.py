"""What is known about the bytes of a stored value: which ranges of them are tracked, here and on accelerators.

Always true:
- all views of a stored value share one `PageState`
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offload.prefetch.plan import Pool, Value
from offload.storage.handle import Handle
from offload.system.locks import fork_safe_lock


class PageState:
    """What is known about the bytes of one stored value.

    Attributes:
        pool: its budget; None for the process's.
        ranges: tracked ranges, by start and length.
        copies: the copies on accelerators, by device, start and length.
        checked_until: until when (`clock.now`) its rows are assumed to be in memory without checking.
    """

    def __init__(self) -> None:
        self.pool: Pool | None = None
        self.ranges: dict[tuple[int, int], Value] = {}
        self.copies: dict[tuple[torch.device, int, int], Value] = {}
        self.checked_until = 0.0

    def begin_anew(self) -> None:
        """The value is in another file now."""
        known, self.ranges = self.ranges, {}
        for value in list(known.values()):
            value.checked_until = 0.0  # users that hold on to one check again
        copies, self.copies = self.copies, {}
        for copy in list(copies.values()):
            copy.let_go()
        self.checked_until = 0.0


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
