"""A safetensors file, checked and mapped.

Always true:
- a header is parsed once for all the tensors of a file, and before anything is mapped
- mapping a file never creates it, extends it, or writes to it by itself
- a file of ours is mapped shared; a file of somebody else's copy-on-write, so that no store can reach it
- no file descriptor is kept
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.errors import ChangedFileError, CorruptFileError, MissingFileError, OffloadError
from offload.storage.header import Entry, Header, header_length, parse
from offload.storage.locks import ForkSafeLock


@dataclass(frozen=True, slots=True)
class Identity:
    """Which file this is, and in which state: inode, size in bytes, modification time in nanoseconds."""

    inode: int
    size: int
    modified: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


class TensorFile:
    """An opened safetensors file. Use `TensorFile.open`; one object serves all the tensors of a file."""

    __slots__ = ("__weakref__", "_private", "_shared", "header", "identity", "path")

    def __init__(self, path: Path, identity: Identity, header: Header) -> None:
        self.path = path
        self.identity = identity
        self.header = header
        self._private: torch.UntypedStorage | None = None
        self._shared: torch.UntypedStorage | None = None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> TensorFile:
        """The file at `path`, its header read and checked against its length.

        Raises:
            MissingFileError: there is no file at `path`.
            CorruptFileError: what is there is not a whole safetensors file.
        """
        path = Path(os.path.abspath(path))
        with _LOCK:
            known = _OPENED.get(path)
            if known is not None and known.identity == Identity.of(file_status(path)):
                return known
            opened = cls(path, *_read(path))
            _OPENED[path] = opened
            return opened

    @property
    def entries(self) -> Mapping[str, Entry]:
        return self.header.entries

    @property
    def is_ours(self) -> bool:
        """True for a file that `offload` wrote."""
        return self.header.notes is not None

    @property
    def notes(self) -> Mapping[str, Any]:
        return self.header.notes or {}

    def entry(self, key: str) -> Entry:
        """The entry called `key`.

        Raises:
            KeyError: the file has none such; the message names some that it has.
            CorruptFileError: torch has no dtype for it.
        """
        if key in self.header.unreadable:
            raise CorruptFileError(
                f"{key!r} in {self.path} is stored as {self.header.unreadable[key]}: no torch dtype fits"
            )
        if key not in self.entries:
            some = ", ".join(sorted(self.entries)[:5])
            raise KeyError(f"{self.path} has no tensor {key!r}; it has {len(self.entries)}: {some}...")
        return self.entries[key]

    def check(self) -> None:
        """Raises `ChangedFileError` if this is no longer the file that was opened."""
        if Identity.of(file_status(self.path)) != self.identity:
            raise ChangedFileError(
                f"{self.path} has changed since it was opened (size, modification time or inode): "
                "its tensors can't be trusted any more. Load the checkpoint again."
            )

    def storage(self, entry: Entry, *, shared: bool) -> torch.UntypedStorage:
        """The bytes of one entry, mapped without a copy; each call gives a storage object of its own."""
        whole = self._whole(shared)
        return whole[entry.start : entry.start + entry.layout.nbytes]

    def unmap(self) -> None:
        """Let go of the mapping; storages that were handed out keep theirs."""
        self._private = self._shared = None

    def _whole(self, shared: bool) -> torch.UntypedStorage:
        mapped = self._shared if shared else self._private
        if mapped is None:
            mapped = (_map_shared if shared else _map_private)(self.path, self.identity.size)
            self.check_mapped()
            if shared:
                self._shared = mapped
            else:
                self._private = mapped
        return mapped

    def check_mapped(self) -> None:
        """The file was looked at, then mapped by its path: it must be the same one."""
        status = file_status(self.path)
        if (status.st_ino, status.st_size) != (self.identity.inode, self.identity.size):
            self.check()


def file_status(path: Path) -> os.stat_result:
    """`os.stat`, with an error that says what to do."""
    try:
        return os.stat(path)
    except FileNotFoundError as error:
        raise MissingFileError(
            f"{path} is missing: it was moved or deleted, or its offload_dir belonged to a process that has ended"
        ) from error
    except OSError as error:
        raise CorruptFileError(f"{path} can't be looked at: {error.strerror}") from error


def _read(path: Path) -> tuple[Identity, Header]:
    status = file_status(path)
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
        raise CorruptFileError(f"{path} is {kind}: a safetensors file was expected")
    try:
        with open(path, "rb") as file:
            identity = Identity.of(os.fstat(file.fileno()))
            length = header_length(file.read(8), identity.size)
            return identity, parse(file.read(length), identity.size)
    except OffloadError as error:
        raise CorruptFileError(f"{path} can't be used: {error}. Get the file again.") from error
    except OSError as error:
        raise CorruptFileError(f"{path} can't be read: {error.strerror}") from error


def _map_shared(path: Path, size: int) -> torch.UntypedStorage:
    # `from_file(shared=True)` creates and extends: `_read` has seen the file at this size.
    return torch.UntypedStorage.from_file(str(path), True, size)


def _map_private(path: Path, size: int) -> torch.UntypedStorage:
    if _mmap is None:
        return torch.UntypedStorage.from_file(str(path), False, size)
    return _map_without_reserve(_mmap, path, size)


def _map_without_reserve(call: Callable[..., int | None], path: Path, size: int) -> torch.UntypedStorage:
    """A copy-on-write mapping that does not count against the commit limit: a file may be larger than memory.

    `UntypedStorage.from_file(shared=False)` reserves its whole length, which Linux refuses beyond memory and swap.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
        address = call(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    finally:
        os.close(fd)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"{path} can't be mapped: {os.strerror(ctypes.get_errno())}")
    buffer = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(buffer, _munmap, address, size).atexit = False
    return torch.frombuffer(buffer, dtype=torch.uint8, requires_grad=False).untyped_storage()


def _libc_mmap() -> tuple[Callable[..., int | None] | None, Callable[..., int]]:
    if not sys.platform.startswith("linux"):
        return None, lambda address, size: 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc.mmap, libc.munmap


_mmap, _munmap = _libc_mmap()
_LOCK = ForkSafeLock()
_OPENED: weakref.WeakValueDictionary[Path, TensorFile] = weakref.WeakValueDictionary()
