"""Files that are looked at before they are read: no pipe, no device, no gigabytes where a page was meant.

Always true:
- opening a file waits for nobody, creates nothing that was not asked for, and gives a regular file or an error with
  its path
- a link is followed to read, and never to write: what it leads to is somebody else's
- of JSON no more is read than its reader allows, and each of its errors is one of ours
- only a file that is not there is called missing, and only one that was read is called damaged: what the system
  refuses now it may give later, and says why in its errno
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from offload.errors import CorruptFileError, ForeignFileError, MissingFileError, OffloadError, ReadError

MOST_JSON = 64 << 20  # bytes; the index of a checkpoint of 100,000 values takes some 10
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
_MANY = "close some files, or raise the limit (ulimit -n)"
_NO_RIGHT = "this user may not: change the rights of the file, or of its folder"
_WAYS_OUT = {
    errno.EMFILE: _MANY,
    errno.ENFILE: _MANY,
    errno.EACCES: _NO_RIGHT,
    errno.EPERM: _NO_RIGHT,
    errno.EROFS: "the file system is read-only: take another folder for what is to be written",
    errno.ENOMEM: "free some memory, or raise the limits (ulimit -v, vm.max_map_count)",
    errno.EIO: "try again, and look after the disk if that does not help",
    errno.ENODEV: "this file system maps no files: copy it to another one",
    errno.ELOOP: "its links lead in a circle: put the file itself there",
    errno.ENAMETOOLONG: "the path is too long here",
}


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the regular file at `path`; the caller closes it.

    Args:
        flags: for `os.open`; with one of those that write, or with `O_NOFOLLOW`, `path` itself must not be a link.

    Raises:
        MissingFileError: there is no file at `path`.
        ForeignFileError: a link is there, and it is not followed.
        CorruptFileError: it is not a regular file.
        ReadError: it can't be opened now.
    """
    if flags & _WRITES:
        flags |= _NO_LINK
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | _NO_WAIT, 0o666)
    except OSError as error:
        if flags & _NO_LINK and error.errno in (errno.ELOOP, errno.EMLINK) and path.is_symlink():
            raise ForeignFileError(
                f"{path} is a link, and is not followed: what it leads to may be somebody else's. "
                "Put the file itself there, or take another folder."
            ) from error
        raise explained(path, error) from error
    try:
        with reading(path):
            kind = os.fstat(fd).st_mode
        if not stat.S_ISREG(kind):
            raise not_regular(path, kind)
    except BaseException:
        os.close(fd)
        raise
    return fd


def as_file(fd: int) -> BinaryIO:
    """A descriptor as a file, which closes it; it is closed if that fails, too."""
    try:
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_regular(path: Path, most: int) -> bytes:
    """All bytes of the regular file at `path`, which are at most so many.

    Raises:
        MissingFileError, ReadError: as `open_regular`.
        CorruptFileError: it is not a regular file, or larger.
    """
    with reading(path), as_file(open_regular(path)) as file:
        data = file.read(most + 1)
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
        ReadError: it can't be read now.
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
        raise ValueError(f"it names {short(twice)!r} twice")
    return unique


def is_there(path: Path) -> bool:
    """Whether anything stands at `path`, also a link that leads nowhere.

    Raises:
        ReadError: the system does not tell. `os.path.lexists` says no then, and what is there would be lost.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no path has a null character
        return False
    except OSError as error:
        raise explained(path, error) from error
    return True


def is_folder(path: Path) -> bool:
    """Whether a folder stands at `path`, or a link to one.

    Raises:
        ReadError: the system does not tell. `Path.is_dir` says no then, since Python 3.13.
    """
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        raise explained(path, error) from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Say of an error of the system which file could not be read, as `explained` does.

    Raises:
        MissingFileError, CorruptFileError, ReadError
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, OffloadError):
            raise
        raise explained(path, error) from error


def explained(path: Path, error: OSError) -> OffloadError:
    """The error to raise for one of the system at reading `path`: what an errno means stands here alone."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        reason = "the file is missing: it was moved or deleted, or belonged to a process that has ended"
        return MissingFileError(error.errno, reason, str(path))
    if isinstance(error, IsADirectoryError):
        return not_regular(path, stat.S_IFDIR)
    if error.errno == errno.ENXIO:  # a socket, or a device that nobody serves
        return not_regular(path, 0)
    way_out = _WAYS_OUT.get(error.errno or 0, "try again")
    return ReadError(error.errno, f"it can't be opened or read ({error.strerror or error}): {way_out}", str(path))


def not_regular(path: Path, kind: int) -> CorruptFileError:
    """The error to raise for what stands at `path` in place of a file; `kind` is its mode."""
    what = "a folder" if stat.S_ISDIR(kind) else "not a regular file"
    return CorruptFileError(f"{path} is {what}: a file was expected there")


def short(value: object, most: int = 200) -> str:
    """A value as text that fits into a message."""
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}..."


def first_line(error: Exception, most: int = 300) -> str:
    """What an error of a neighbour says, which may name all that it knows, as text that fits into a message."""
    return short(str(error).strip().partition("\n")[0] or type(error).__name__, most)
