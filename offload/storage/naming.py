"""Which tensor an error about a file was for.

Always true:
- the error stays what it was; its message begins with the tensor, once
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from offload.errors import OffloadError


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Say in an error about a file which tensor it was for."""
    try:
        yield
    except OffloadError as error:
        label = f"tensor {name!r}: "
        if isinstance(error, OSError) and error.errno is not None:
            error.strerror = label + (error.strerror or "").removeprefix(label)
            error.args = (error.errno, error.strerror)
        else:
            error.args = (label + str(error).removeprefix(label),)
        raise
