"""Tensor names as file names.

Always true:
- `file_name` is injective, also where the file system folds case
- a file name holds only `a-z 0-9 . _ - % ~` and is at most 200 bytes long
- a name too long for that is cut and given a hash: the true name is in the file's header
"""

from __future__ import annotations

import hashlib
import string

from offload.errors import ArgumentError, ArgumentTypeError

SUFFIX = ".safetensors"
_PLAIN = frozenset(string.ascii_lowercase + string.digits + "._-")
_LONGEST = 188
_TAKEN = "__metadata__"
_RESERVED = frozenset(
    {"con", "prn", "aux", "nul"} | {f"{port}{digit}" for port in ("com", "lpt") for digit in string.digits}
)


def file_name(name: str) -> str:
    """The file name under which the tensor called `name` is stored.

    Raises:
        ArgumentTypeError: `name` is not text.
        ArgumentError: it is empty, not valid unicode, or taken by the file format.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(f"a tensor's name must be text, not {name!r}: it is the name of its file")
    if not name:
        raise ArgumentError("a tensor's name must not be empty: it is the name of its file")
    if name == _TAKEN:
        raise ArgumentError(f"a tensor can't be called {_TAKEN!r}, which safetensors files use for themselves")
    stem = "".join(char if char in _PLAIN else _percent(char) for char in name)
    if stem[0] == "." or stem.partition(".")[0] in _RESERVED:
        stem = f"%{ord(stem[0]):02x}{stem[1:]}"
    if len(stem) > _LONGEST:
        stem = f"{_cut(stem, _LONGEST - 34)}%~{hashlib.sha256(name.encode()).hexdigest()[:32]}"
    return stem + SUFFIX


def _percent(char: str) -> str:
    try:
        return "".join(f"%{byte:02x}" for byte in char.encode())
    except UnicodeEncodeError as error:
        raise ArgumentError(f"a tensor's name must be valid unicode, not {char!r}") from error


def _cut(stem: str, length: int) -> str:
    """The first `length` characters, without half a `%xx` at the end."""
    cut = stem[:length]
    tail = cut.rfind("%", length - 2)
    return cut if tail < 0 else cut[:tail]
