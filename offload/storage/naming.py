"""Which tensor an error about a file was for.

Always true:
- the error stays what it was; its message begins with the tensor, once, and has the file
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offload.errors import OffloadError


@contextmanager
def naming(name: str, path: Path | None = None) -> Iterator[None]:
    """Say in an error about a file which tensor it was for; and which file it was, if it does not tell."""
    try:
        yield
    except OffloadError as error:
        place = "" if path is None or str(path) in str(error) else f"{path}: "
        label = f"tensor {name!r}: {place}"
        if isinstance(error, OSError) and error.errno is not None:
            error.strerror = label + (error.strerror or "").removeprefix(label)
            error.args = (error.errno, error.strerror)
        else:
            error.args = (label + str(error).removeprefix(label),)
        raise
