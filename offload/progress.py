"""A progress bar for what takes longer than a second.

Always true:
- nothing is shown where the output is not a terminal, nor for quick work
- a process waits for no other: a forked child that is killed while it draws leaves no lock that is held
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
    """A bar with a lock of this process: tqdm's own is shared with all that are forked."""

    _lock = threading.RLock()


os.register_at_fork(after_in_child=lambda: Bar.set_lock(threading.RLock()))


def progress(items: Iterable[T], description: str, *, total: int | None = None) -> Iterable[T]:
    """The items, with a bar on the terminal once they have taken a second."""
    return Bar(items, description, total=total, delay=1, disable=None, leave=False)


@contextmanager
def progress_in_bytes(total: int, description: str, *, shown: bool = True) -> Iterator[Callable[[int], object]]:
    """As `progress`, for work that is counted in bytes: gives what is to be called with each number of them."""
    hidden = None if shown else True  # None: where the output is no terminal
    with Bar(desc=description, total=total, unit="B", unit_scale=True, delay=1, disable=hidden, leave=False) as bar:
        yield bar.update
