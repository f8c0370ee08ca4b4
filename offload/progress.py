"""A progress bar for work that takes longer than a second.

Always true:
- nothing is shown if the output is not a terminal, or for quick work
- no process waits for another: a forked child that is killed while drawing leaves no lock held
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


class Bar(tqdm):  # type: ignore[type-arg]
    """A bar with a lock of its own process: tqdm's own is shared with forked children."""

    _lock = threading.RLock()


os.register_at_fork(after_in_child=lambda: Bar.set_lock(threading.RLock()))


def progress(items: Iterable[T], description: str, *, total: int | None = None) -> Iterable[T]:
    """The items, with a progress bar on a terminal after a second."""
    return Bar(items, description, total=total, delay=1, disable=None, leave=False)


@contextmanager
def progress_in_bytes(total: int, description: str, *, shown: bool = True) -> Iterator[Callable[[int], object]]:
    """Like `progress`, for work counted in bytes: yields a function to call with each number of bytes."""
    hidden = None if shown else True  # None: hidden unless the output is a terminal
    with Bar(desc=description, total=total, unit="B", unit_scale=True, delay=1, disable=hidden, leave=False) as bar:
        yield bar.update
