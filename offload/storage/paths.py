"""What users call a file or folder, as a path.

Always true:
- a path is absolute: it means the same when the working directory has changed
"""

from __future__ import annotations

import os
from pathlib import Path

from offload.errors import ArgumentError, ArgumentTypeError


def text_of(path: str | os.PathLike[str]) -> str:
    """A path as text, as it was given.

    Raises:
        ArgumentTypeError: it is no path.
        ArgumentError: it holds what no path does: a NUL, or half a character.
    """
    try:
        text = os.fsdecode(path)
    except TypeError as error:
        raise ArgumentTypeError(f"a path is needed, not {path!r}: give text, or a pathlib.Path") from error
    if "\0" in text:
        raise ArgumentError(f"{text!r} is no path: it holds a NUL")
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise ArgumentError(f"{text!r} is no path: it holds half a character ({error.reason})") from error
    return text


def absolute(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a file or folder.

    Raises: as `text_of`.
    """
    return Path(os.path.abspath(text_of(path)))
