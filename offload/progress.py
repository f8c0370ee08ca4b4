"""A progress bar for what takes longer than a second.

Always true:
- nothing is shown where the output is not a terminal, nor for quick work
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def progress(items: Iterable[T], description: str, *, total: int | None = None) -> Iterable[T]:
    """The items, with a bar on the terminal once they have taken a second."""
    return tqdm(items, description, total=total, delay=1, disable=None, leave=False)


@contextmanager
def progress_in_bytes(total: int, description: str) -> Iterator[Callable[[int], object]]:
    """As `progress`, for work that is counted in bytes: gives what is to be called with each number of them."""
    with tqdm(desc=description, total=total, unit="B", unit_scale=True, delay=1, disable=None, leave=False) as bar:
        yield bar.update
