"""Files are checked before they are read: no pipe, no device, no gigabytes where one page was expected.

Always true:
- opening a file never blocks, creates only what was asked for, and returns a regular file or raises an error with its
  path
- a symlink is followed to read, never to write: its target is somebody else's
- a path is absolute: it means the same after the working directory has changed
- a descriptor has one owner, from the call that opens it to the one that closes it: after an interrupt it is closed
  once, never again when its number may be another file's
"""

from __future__ import annotations

import errno
import io
import os
import select
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import starmap
from pathlib import Path
from typing import BinaryIO, TypeAlias

from offload.errors import ArgumentError, ArgumentTypeError, CorruptFileError, ForeignFileError
from offload.system.reasons import explained, not_regular, reading

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

# Owns a descriptor of any kind, folders too, and closes it once: by `close`, after a `with` block, or with its last
# reference. It is Python's only such object in C: a class with `__del__` could be interrupted there.
Descriptor: TypeAlias = select.epoll


def owned(opens: Callable[..., int], *args: object) -> Descriptor:
    """What `opens(*args)` opens, with its owner. An interrupt comes before or after this, as it is one call of C."""
    return next(map(select.epoll.fromfd, starmap(opens, [args])))


def text_of(path: str | os.PathLike[str]) -> str:
    """A path as text, unchanged.

    Raises `ArgumentTypeError` if it is not a path; `ArgumentError` if it contains a NUL or a lone surrogate.
    """
    try:
        text = os.fsdecode(path)
    except TypeError as error:
        raise ArgumentTypeError(f"a path is needed, not {path!r}: give text, or a pathlib.Path") from error
    if "\0" in text:
        raise ArgumentError(f"{text!r} is not a path: it holds a NUL")
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise ArgumentError(f"{text!r} is not a path: it has an incomplete character ({error.reason})") from error
    return text


def absolute(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a file or folder. Raises: as `text_of`."""
    return Path(os.path.abspath(text_of(path)))


def open_regular(path: Path, flags: int = os.O_RDONLY) -> Descriptor:
    """The regular file at `path`, opened; with `flags` that write, or `O_NOFOLLOW`, `path` itself must not be a link.

    Raises `MissingFileError`, `ReadError`; `ForeignFileError` if it is a symlink and must not be followed;
    `CorruptFileError` if it is not a regular file.
    """
    if flags & _WRITES:
        flags |= os.O_NOFOLLOW
    try:
        opened = owned(os.open, path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if flags & os.O_NOFOLLOW and error.errno in (errno.ELOOP, errno.EMLINK) and path.is_symlink():
            raise ForeignFileError(
                f"{path} is a link, and is not followed: its target may belong to others. Put the file itself there, "
                "or take another folder."
            ) from error
        raise explained(path, error) from error
    with closed_on_error(opened), reading(path):
        kind = os.fstat(opened.fileno()).st_mode
        if not stat.S_ISREG(kind):
            raise not_regular(path, kind)
    return opened


@contextmanager
def closed_on_error(opened: Descriptor) -> Iterator[None]:
    """Close a descriptor if the block fails; otherwise it stays open."""
    try:
        yield
    except BaseException:
        opened.close()
        raise


@contextmanager
def as_file(opened: Descriptor) -> Iterator[BinaryIO]:
    """A descriptor as a file object, to read in the block; afterwards both are closed."""
    with opened, open(opened.fileno(), "rb", closefd=False) as file:
        yield file


class Section(io.RawIOBase):
    """A range of an open file, as a file of its own; closing it leaves the other open."""

    def __init__(self, fd: int, begin: int, size: int) -> None:
        self._fd, self._begin, self._size, self._at = fd, begin, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence] + offset
        if at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = at
        return at

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        part = memoryview(buffer)[: max(0, self._size - self._at)]
        count = os.preadv(self._fd, [part], self._begin + self._at) if part else 0
        self._at += count
        return count


def read_all(fd: int, count: int, at: int) -> bytes:
    """`count` bytes of an open file, or those up to its end: a system may give fewer at a time. Raises `OSError`."""
    data = os.pread(fd, count, at)
    while len(data) < count and (more := os.pread(fd, count - len(data), at + len(data))):
        data += more
    return data


def read_regular(path: Path, most: int) -> bytes:
    """All bytes of the regular file at `path`, at most `most` of them.

    Raises `MissingFileError`, `ReadError`, as `open_regular`; `CorruptFileError` if it is not a regular file, or
    larger.
    """
    with reading(path), as_file(open_regular(path)) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise CorruptFileError(
            f"{path} is larger than {most} bytes, too large for such a file: download or copy it again"
        )
    return data


def is_there(path: Path) -> bool:
    """Whether anything is at `path`, including a dangling symlink.

    Raises:
        ReadError: the system does not tell. `os.path.lexists` would return False, and an existing file could be lost.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: the path has a null character
        return False
    except OSError as error:
        raise explained(path, error) from error
    return True


def is_same_folder(one: str | os.PathLike[str] | None, other: str | os.PathLike[str] | None) -> bool:
    """Whether two paths lead to the same place, existing or not; None is not a folder and equals nothing."""
    if one is None or other is None:
        return False
    one, other = absolute(one), absolute(other)
    return one == other or os.path.realpath(one) == os.path.realpath(other)


def is_folder(path: Path) -> bool:
    """Whether there is a folder, or a link to one, at `path`.

    Raises:
        ReadError: the system does not tell. `Path.is_dir` returns False in that case since Python 3.13.
    """
    return stat.S_ISDIR(_mode_of(path))


def is_file(path: Path) -> bool:
    """Whether there is a regular file, or a link to one, at `path`.

    Raises `ReadError` if the system does not tell, as for `is_folder`.
    """
    return stat.S_ISREG(_mode_of(path))


def _mode_of(path: Path) -> int:
    """0 if there is nothing."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return 0
    except OSError as error:
        raise explained(path, error) from error
