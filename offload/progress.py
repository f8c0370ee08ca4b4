"""A progress bar for what takes longer than a second.

Always true:
- nothing is shown where the output is not a terminal, nor for quick work
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def progress(items: Iterable[T], description: str, *, total: int | None = None) -> Iterable[T]:
    """The items, with a bar on the terminal once they have taken a second."""
    return tqdm(items, description, total=total, delay=1, disable=None, leave=False)
