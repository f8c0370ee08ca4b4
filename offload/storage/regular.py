"""Files that are looked at before they are read: no pipe, no device, no gigabytes where a page was meant.

Always true:
- opening a file waits for nobody, creates nothing that was not asked for, and gives a regular file or an error with
  its path
- a link is followed to read, and never to write: what it leads to is somebody else's
- of JSON no more is read than its reader allows, and each of its errors is one of ours
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from offload.errors import CorruptFileError, ForeignFileError, MissingFileError, OffloadError

MOST_JSON = 64 << 20  # bytes; the index of a checkpoint of 100,000 values takes some 10
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the regular file at `path`; the caller closes it.

    Args:
        flags: for `os.open`; with one of those that write, or with `O_NOFOLLOW`, `path` itself must not be a link.

    Raises:
        MissingFileError: there is no file at `path`.
        ForeignFileError: a link is there, and it is not followed.
        CorruptFileError: it is not a regular file, or can't be opened.
    """
    if flags & _WRITES:
        flags |= _NO_LINK
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | _NO_WAIT, 0o666)
    except OSError as error:
        if flags & _NO_LINK and path.is_symlink():
            raise ForeignFileError(
                f"{path} is a link, and is not followed: what it leads to may be somebody else's. "
                "Put the file itself there, or take another folder."
            ) from error
        raise explained(path, error) from error
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return fd
    os.close(fd)
    raise not_regular(path, kind)


def read_regular(path: Path, most: int) -> bytes:
    """All bytes of the regular file at `path`, which are at most so many.

    Raises:
        MissingFileError, CorruptFileError: as `open_regular`, or it is larger.
    """
    with open(open_regular(path), "rb") as file:
        try:
            data = file.read(most + 1)
        except OSError as error:
            raise explained(path, error) from error
    if len(data) > most:
        raise CorruptFileError(f"{path} is larger than {most} bytes: no such file is, get it again")
    return data


def read_json(path: Path, what: str, *, most: int = MOST_JSON) -> Any:
    """What is in a small file of JSON.

    Args:
        what: what the file is to be, for errors: "the manifest of a cache".
        most: bytes that are read of it.

    Raises:
        MissingFileError: there is no file at `path`.
        CorruptFileError: it is no regular file, larger than `most`, no JSON, or names something twice.
    """
    data = read_regular(path, most)
    try:
        return parse_json(data)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path} can't be read as {what} ({short(error)})") from error


def parse_json(data: str | bytes) -> Any:
    """What is in JSON; UTF-8 if it is bytes.

    Raises:
        ValueError: it is no JSON, or names something twice. Also `RecursionError`, if it is nested too deeply.
    """
    text = data if isinstance(data, str) else data.decode()
    return json.loads(text, object_pairs_hook=_without_duplicates)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{short(twice)!r} is named twice")
    return unique


def explained(path: Path, error: OSError) -> OffloadError:
    """The error to raise for one of the system at reading `path`."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        reason = "the file is missing: it was moved or deleted, or belonged to a process that has ended"
        return MissingFileError(error.errno, reason, str(path))
    if isinstance(error, IsADirectoryError):
        return not_regular(path, stat.S_IFDIR)
    return CorruptFileError(f"{path} can't be opened: {error.strerror}")


def not_regular(path: Path, kind: int) -> CorruptFileError:
    """The error to raise for what stands at `path` in place of a file; `kind` is its mode."""
    what = "a folder" if stat.S_ISDIR(kind) else "not a regular file"
    return CorruptFileError(f"{path} is {what}: a file was expected there")


def short(value: object, most: int = 200) -> str:
    """A value as text that fits into a message."""
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}..."
