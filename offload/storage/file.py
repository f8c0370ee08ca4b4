"""A file of tensors (safetensors, GGUF or torch.save), checked and mapped.

Always true:
- a header is parsed once for all tensors of a file, before anything is mapped
- the mapped file is the one whose header was read, even while another process replaces it
- mapping a file never creates it, extends it, or writes to it
- our own files are mapped shared; all others copy-on-write, so that no store can reach them
- no file descriptor is kept open
"""

from __future__ import annotations

import os
import stat
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch

from offload.annotations import Json
from offload.errors import (
    ChangedFileError,
    CheckpointError,
    CorruptFileError,
    MissingKeyError,
    OffloadError,
    UnsupportedTorchError,
)
from offload.storage import gguf_header, pickled
from offload.storage.header import Header, read_header
from offload.storage.layout import Entry
from offload.storage.mapping import map_bytes
from offload.storage.state_file import Kind, state_if_ours
from offload.system import clock
from offload.system.locks import fork_safe_lock
from offload.system.reasons import explained, not_regular, reading, some
from offload.system.regular import Descriptor, absolute, as_file, closed_on_error, open_regular

LOOKED_AT_FOR = 0.1  # seconds for which a file that was looked at is taken to be the same


@dataclass(frozen=True, slots=True)
class Identity:
    """Identifies a file and its state: inode, size in bytes, modification time in nanoseconds."""

    inode: int
    size: int
    modified: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


class TensorFile:
    """An open file of tensors. Use `open`, which returns one object for all tensors of a file, or `raw`."""

    __slots__ = (
        "__weakref__", "_private", "_shared", "header", "identity", "is_picked_from", "is_raw", "looked_at_until",
        "lost_writes", "path",
    )  # fmt: skip

    def __init__(self, path: Path, identity: Identity, header: Header) -> None:
        self.path = path
        self.identity = identity
        self.header = header
        self.is_raw = False  # whether the header is stored elsewhere
        self.is_picked_from = False  # whether some values are read individually: neighbours are not read along
        self.lost_writes = False  # whether the disk failed to take data that was stored into a mapping
        self.looked_at_until = 0.0  # when (`clock.now`) it is to be looked at again
        self._private: torch.UntypedStorage | None = None
        self._shared: torch.UntypedStorage | None = None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> TensorFile:
        """The file at `path`, its header read and checked against its length.

        Raises `MissingFileError`, `ReadError`; `CorruptFileError` if it is not a complete file of tensors;
        `CheckpointError` if it is a pickle with code in it, or without named tensors.
        """
        path = absolute(path)
        with _LOCK:
            known = _OPENED.get(path)
            if known is not None and known.identity == Identity.of(file_status(path)):
                return known
            opened = cls(path, *_read(path, _read_header))
            _OPENED.pop(path, None)  # the key object goes with the file it was for: no path comparisons at exit
            _OPENED[path] = opened
            return opened

    @classmethod
    def written(cls, path: Path, header: Header) -> TensorFile:
        """The file at `path`, just written and starting with `header`: nothing is read."""
        return cls(path, Identity.of(os.stat(path)), header)

    @classmethod
    def is_open(cls, path: str | os.PathLike[str]) -> bool:
        """Whether something in this process holds the file that is at `path` now, by whatever path."""
        with suppress(OSError):
            identity, known = Identity.of(os.stat(path)), [file() for file in _OPENED.valuerefs()]
            return any(file is not None and file.identity == identity for file in known)
        return False

    @classmethod
    def raw(cls, path: str | os.PathLike[str], entry: Entry) -> TensorFile:
        """The file at `path`, which has no header: one value, laid out as `entry` says; other bytes may follow it.

        Raises `MissingFileError`, `ReadError`; `CorruptFileError` if it is too short, or not a regular file.
        """
        path = absolute(path)
        status, end = file_status(path), entry.start + entry.layout.nbytes
        if not stat.S_ISREG(status.st_mode):
            raise not_regular(path, status.st_mode)
        if status.st_size < end:
            raise CorruptFileError(
                f"{path} is cut off: {entry.key!r}, {entry.layout.dtype} {list(entry.layout.shape)}, "
                f"takes {end} bytes, and {status.st_size} are there. Download or copy the file again."
            )
        opened = cls(path, Identity.of(status), Header({}, {entry.key: entry}, {}))
        opened.is_raw = True
        return opened

    @classmethod
    def of_archives(cls, path: str | os.PathLike[str], places: Mapping[str, tuple[int, int]]) -> TensorFile:
        """The file at `path`, a sequence of torch.save archives of one tensor each.

        `places` has their offset and size in bytes, by key. Raises: as `open`.
        """
        path = absolute(path)
        opened = cls(path, *_read(path, lambda file, size: pickled.read_archives(file, size, places)))
        opened.is_raw = True
        return opened

    @property
    def entries(self) -> Mapping[str, Entry]:
        return self.header.entries

    @property
    def is_ours(self) -> bool:
        """True for a file that `offload` wrote."""
        return self.header.notes is not None

    @property
    def notes(self) -> Mapping[str, Json]:
        return self.header.notes or {}

    def entry(self, key: str) -> Entry:
        """The entry called `key`.

        Raises:
            KeyError: the file has no such key; the message names some that it has.
            CorruptFileError: torch can't read it.
        """
        if key in self.header.unreadable:
            raise CorruptFileError(f"{key!r} in {self.path} {self.header.unreadable[key]}")
        if key not in self.entries:
            keys = self.header.keys
            raise MissingKeyError(f"{self.path} has no tensor {key!r}; it has {len(keys)}: {some(sorted(keys))}")
        return self.entries[key]

    def is_current(self) -> bool:
        """Whether this is still the file at its path, unchanged."""
        with suppress(OSError):
            return Identity.of(os.stat(self.path)) == self.identity
        return False

    def check(self) -> None:
        """Raises `ChangedFileError` if the file is no longer the one that was opened."""
        if Identity.of(file_status(self.path)) != self.identity:
            raise self._changed()

    def is_as_opened(self) -> bool:
        """Whether `check` raises nothing. It is asked ten times a second at the most: in between, nothing has changed.

        Only for files that are not ours: those follow other rules.
        """
        now = clock.now()
        if self.looked_at_until < now:
            try:
                self.check()
            except OffloadError:
                return False
            self.looked_at_until = now + LOOKED_AT_FOR
        return True

    def moved_to(self, path: Path) -> None:
        """The file has been renamed; mappings stay valid."""
        with _LOCK:
            _OPENED.pop(self.path, None)
            _OPENED.pop(path, None)
            self.path = path
            _OPENED[path] = self

    def descriptor(self, flags: int = os.O_RDONLY, *, settled: bool = True) -> Descriptor:
        """The very file whose header was read, opened with `flags` of `os.open` that neither create nor truncate.

        With `settled`, a file whose modification time has changed is refused, too; not for files that we write to.
        Raises `MissingFileError`, `CorruptFileError`, `ReadError` if it can't be opened; `ChangedFileError` if there is
        another file now.
        """
        opened = open_regular(self.path, flags)
        with closed_on_error(opened), reading(self.path):
            now = Identity.of(os.fstat(opened.fileno()))
            if (now if settled else replace(now, modified=self.identity.modified)) != self.identity:
                raise self._changed()
        return opened

    def storage(self, entry: Entry, *, shared: bool) -> torch.UntypedStorage:
        """The bytes of one entry, mapped without a copy; each call returns a new storage object.

        Raises: as `descriptor`.
        """
        whole = self.mapped(shared=shared)
        part: torch.UntypedStorage = whole[entry.start : entry.start + entry.layout.nbytes]
        return part

    def tensor(self, entry: Entry, *, shared: bool) -> torch.Tensor:
        """The value of one entry, over its storage. Raises: as `descriptor`."""
        empty = torch.empty(0, dtype=entry.layout.dtype, device="cpu")
        return empty.set_(self.storage(entry, shared=shared), 0, entry.layout.shape, entry.layout.stride)

    def unmap(self) -> None:
        """Drop the mapping; storages already handed out keep it alive."""
        self._private = self._shared = None

    def mapped(self, *, shared: bool) -> torch.UntypedStorage:
        """The whole file, mapped once. Raises: as `descriptor`."""
        mapped = self.mapping(shared=shared)
        if mapped is not None:
            return mapped
        with _LOCK:  # two mappings would keep each other's pages in memory
            mapped = self.mapping(shared=shared)
            if mapped is None:
                with self.descriptor(os.O_RDWR if shared else os.O_RDONLY, settled=not shared) as opened:
                    mapped = map_bytes(opened.fileno(), self.path, 0, self.identity.size, shared=shared)
                if shared:
                    self._shared = mapped
                else:
                    self._private = mapped
            return mapped

    def mapping(self, *, shared: bool) -> torch.UntypedStorage | None:
        """The mapping of the whole file, if there is one already."""
        return self._shared if shared else self._private

    def _changed(self) -> ChangedFileError:
        return ChangedFileError(
            f"{self.path} has changed since it was opened (size, modification time or inode): "
            "its tensors can't be trusted any more. Open it, or load the checkpoint, again."
        )


def file_of_ours(path: Path) -> TensorFile | None:
    """The file of tensors at `path`, if `offload` wrote it; None for a link, and for what others wrote.

    Raises `MissingFileError` if there is nothing; `ReadError` if the system does not tell what is there.
    """
    if not _is_link(path):
        with suppress(CorruptFileError, CheckpointError, UnsupportedTorchError):
            file = TensorFile.open(path)
            return file if file.is_ours else None
    return None


def is_ours(path: Path, kind: Kind | bytes | None = None) -> bool:
    """Whether `offload` wrote the file at `path`: JSON of a kind, one with these first bytes, or a file of tensors.

    Raises: as `file_of_ours`
    """
    if kind is None:
        return file_of_ours(path) is not None
    if _is_link(path):
        return False
    if isinstance(kind, Kind):
        return state_if_ours(path, kind) is not None
    with suppress(CorruptFileError), as_file(open_regular(path)) as file, reading(path):
        return file.read(len(kind)) == kind
    return False


def _is_link(path: Path) -> bool:
    with reading(path):
        return stat.S_ISLNK(os.lstat(path).st_mode)


def file_status(path: Path) -> os.stat_result:
    """`os.stat`, with an error that says what to do."""
    try:  # not `with reading`: it is called for each value that is mapped
        return os.stat(path)
    except OSError as error:
        raise explained(path, error) from error


def _read(path: Path, read_header: Callable[[BinaryIO, int], Header]) -> tuple[Identity, Header]:
    with reading(path), as_file(open_regular(path)) as file:
        with suppress(OSError):  # otherwise the system reads ahead past the header, megabytes on some disks
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        identity = Identity.of(os.fstat(file.fileno()))
        try:
            return identity, read_header(file, identity.size)
        except UnsupportedTorchError:
            raise
        except CheckpointError as error:
            raise CheckpointError(f"{path} {error}") from (error.__cause__ or error)
        except OffloadError as error:
            raise CorruptFileError(f"{path} can't be used: {error}. Download or copy the file again.") from error


def _read_header(file: BinaryIO, size: int) -> Header:
    """The format is recognised by the first bytes, whatever the file's name."""
    start = file.read(_START)
    if start.startswith(_LFS):
        raise CorruptFileError("it is a git-lfs pointer instead of the file: run `git lfs pull`")
    file.seek(0)
    if pickled.recognizes(start):
        return pickled.read_header(file)
    if start.startswith(gguf_header.MAGIC):
        return gguf_header.read_header(file, size)
    return read_header(file, size)


_START = 64  # first bytes, enough to recognise a format
_LFS = b"version https://git-lfs"
_LOCK = fork_safe_lock()
_OPENED: weakref.WeakValueDictionary[Path, TensorFile] = weakref.WeakValueDictionary()
