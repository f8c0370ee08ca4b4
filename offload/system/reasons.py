"""What a system error means, in words for the person who reads it.

Always true:
- what an errno means, and what to do about it, is only here
- only a file that does not exist is called missing, and only one that was read is called damaged: what the system
  refuses now it may allow later, and its errno says why
- an error keeps its type when the tensor's name is added: its message begins with the name, once
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from offload.errors import (
    CorruptFileError,
    MissingFileError,
    OffloadError,
    ReadError,
    WriteError,
    visible,
    visible_lines,
)

_MANY = "close some files, or raise the limit (ulimit -n)"
_NO_RIGHT = "no permission: change the permissions of the file, or of its folder"
_NOT_WRITABLE = "the folder is not writable: take another {place}"
_NO_FOLDER = "a file is where a folder should be: take another {place}"
_TO_READ = {
    errno.EMFILE: _MANY,
    errno.ENFILE: _MANY,
    errno.EACCES: _NO_RIGHT,
    errno.EPERM: _NO_RIGHT,
    errno.EROFS: "the file system is read-only: write to another folder",
    errno.ENOMEM: "free some memory, or raise the limits (ulimit -v, vm.max_map_count)",
    errno.EIO: "try again, and check the disk if that does not help",
    errno.ENODEV: "this file system can't map files: copy it to another one",
    errno.ELOOP: "its links form a loop: put the file itself there",
    errno.ENAMETOOLONG: "the path is too long here",
}
_TO_WRITE = {
    errno.EMFILE: _MANY,
    errno.ENFILE: _MANY,
    errno.ENOSPC: "free some space, or take another {place}",
    errno.EDQUOT: "your quota is used up: take another {place}",
    errno.EFBIG: "files can't be that large here (ulimit -f, or the file system)",
    errno.EACCES: _NOT_WRITABLE,
    errno.EPERM: _NOT_WRITABLE,
    errno.EROFS: "the file system is read-only: take another {place}",
    errno.ENOENT: "the folder is gone: make it again, or take another {place}",
    errno.EEXIST: _NO_FOLDER,
    errno.ENOTDIR: _NO_FOLDER,
}


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Say which file could not be read when the system raises an error, as `explained` does.

    Raises `MissingFileError`, `CorruptFileError`, `ReadError`.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, OffloadError):
            raise
        raise explained(path, error) from error


@contextmanager
def writing(path: Path, size: int = 0, place: str = "folder") -> Iterator[None]:
    """Say what could not be written where, and what to do, when the system raises an error.

    Args:
        size: of what was to be written, in bytes; 0 if it was only to be created.
        place: what the user can change: the folder, an `offload_dir`, a name.

    Raises `WriteError`.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, OffloadError):
            raise
        what = f"{size} bytes could not be written" if size else "it could not be made"
        way_out = _TO_WRITE.get(error.errno or 0, "try again, or take another {place}").format(place=place)
        reason = f"{what} ({error.strerror}); nothing was changed: {way_out}"
        raise WriteError(error.errno, reason, str(path)) from error


@contextmanager
def naming(name: str, path: Path | None = None) -> Iterator[None]:
    """Add to a file error which tensor it was for, and which file if it does not say."""
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


def explained(path: Path, error: OSError) -> OffloadError:
    """The error to raise when the system fails to read `path`."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        reason = "the file is missing: it was moved or deleted, or belonged to a process that has ended"
        return MissingFileError(error.errno, reason, str(path))
    if isinstance(error, IsADirectoryError):
        return not_regular(path, stat.S_IFDIR)
    if error.errno == errno.ENXIO:  # a socket, or a device without a driver
        return not_regular(path, 0)
    way_out = _TO_READ.get(error.errno or 0, "try again")
    return ReadError(error.errno, f"it can't be opened or read ({error.strerror or error}): {way_out}", str(path))


def not_regular(path: Path, kind: int) -> CorruptFileError:
    """The error to raise when there is no regular file at `path`; `kind` is the mode of what is there."""
    what = "a folder" if stat.S_ISDIR(kind) else "not a regular file"
    return CorruptFileError(f"{path} is {what}: a file was expected there")


def some(things: Iterable[object], most: int = 5) -> str:
    """The first few as text, and how many more there are."""
    texts = [visible(str(thing)) for thing in things]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def short(value: object, most: int = 200) -> str:
    """A value as text short enough for a message."""
    text = visible_lines(str(value))
    return text if len(text) <= most else f"{text[:most]}..."


def first_line(error: Exception, most: int = 300) -> str:
    """The first line of a third-party error, short enough for a message: some list everything they know.

    The next line is added to one that ends with a colon.
    """
    first, _, rest = str(error).strip().partition("\n")
    if first.endswith(":"):
        first = f"{first} {rest.strip().partition(chr(10))[0]}".strip()
    return short(first or type(error).__name__, most)
