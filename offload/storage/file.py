"""A file of tensors, safetensors, GGUF or what torch.save wrote, checked and mapped.

Always true:
- a header is parsed once for all the tensors of a file, and before anything is mapped
- what is mapped is the file whose header was read, also while another process replaces it
- mapping a file never creates it, extends it, or writes to it by itself
- a file of ours is mapped shared; a file of somebody else's copy-on-write, so that no store can reach it
- no file descriptor is kept
- a value that no tensor can be over where it lies is copied out as torch gives it, unpacked and in native byte order;
  memory is taken for one such value at a time, and for its record where that is packed, and goes back to the system
"""

from __future__ import annotations

import io
import os
import stat
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from offload.errors import (
    ChangedFileError,
    CheckpointError,
    CorruptFileError,
    MissingKeyError,
    OffloadError,
    UnsupportedTorchError,
)
from offload.storage import gguf_header, pickled
from offload.storage.header import Header, header_length, parse
from offload.storage.layout import Entry, Loose, Record, can_be_over, contiguous
from offload.storage.locks import fork_safe_lock
from offload.storage.mapping import mapped as map_bytes
from offload.storage.mapping import scratch, scratch_bytes
from offload.storage.reasons import not_regular, reading, some
from offload.storage.regular import Section, absolute, as_file, closed_after, closed_on_error, open_regular
from offload.torch_api import as_negated

_STEP = 1 << 20  # bytes that are read at a time


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
    """An opened file of tensors. Use `open`, which gives one object for all the tensors of a file, or `raw`."""

    __slots__ = (
        "__weakref__", "_private", "_shared", "header", "identity", "is_picked_from", "is_raw", "lost_writes", "path"
    )  # fmt: skip

    def __init__(self, path: Path, identity: Identity, header: Header) -> None:
        self.path = path
        self.identity = identity
        self.header = header
        self.is_raw = False  # whether the header is not in the file
        self.is_picked_from = False  # whether some of its values are read apart: nothing is read along with others
        self.lost_writes = False  # whether the disk did not take something that was stored into a mapping
        self._private: torch.UntypedStorage | None = None
        self._shared: torch.UntypedStorage | None = None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> TensorFile:
        """The file at `path`, its header read and checked against its length.

        Raises:
            MissingFileError: there is no file at `path`.
            CorruptFileError: what is there is not a whole file of tensors.
            ReadError: it can't be read now.
            CheckpointError: a pickle that holds code, or no tensors by name.
        """
        path = absolute(path)
        with _LOCK:
            known = _OPENED.get(path)
            if known is not None and known.identity == Identity.of(file_status(path)):
                return known
            opened = cls(path, *_read(path, _read_header))
            _OPENED.pop(
                path, None
            )  # the key goes with the file that it was for: at exit there is no comparing of paths
            _OPENED[path] = opened
            return opened

    @classmethod
    def written(cls, path: Path, header: Header) -> TensorFile:
        """The file at `path`, which has just been written, and begins with `header`: nothing is read."""
        return cls(path, Identity.of(os.stat(path)), header)

    @classmethod
    def is_open(cls, path: str | os.PathLike[str]) -> bool:
        """Whether somebody in this process has the file that is at `path` now."""
        known = _OPENED.get(Path(os.path.abspath(path)))
        if known is None:
            return False
        with suppress(OSError):
            return known.identity == Identity.of(os.stat(path))
        return False

    @classmethod
    def raw(cls, path: str | os.PathLike[str], entry: Entry) -> TensorFile:
        """The file at `path`, which has no header: its one value lies as `entry` says, and other bytes may follow it.

        Raises:
            MissingFileError: there is no file at `path`.
            CorruptFileError: it is too short for the value, or not a regular file.
            ReadError: it can't be looked at now.
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
        """The file at `path`, of archives that torch.save wrote one after another, each of one tensor.

        Args:
            places: for each tensor, by the key that it is to have, where its archive begins, and how many bytes it has.

        Raises: as `open`.
        """
        path = absolute(path)
        opened = cls(path, *_read(path, lambda file, size: _header_of_archives(file, size, places)))
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
    def notes(self) -> Mapping[str, Any]:
        return self.header.notes or {}

    def entry(self, key: str) -> Entry:
        """The entry called `key`.

        Raises:
            KeyError: the file has none such; the message names some that it has.
            CorruptFileError: torch can't read it.
        """
        if key in self.header.unreadable:
            raise CorruptFileError(f"{key!r} in {self.path} {self.header.unreadable[key]}")
        if key not in self.entries:
            keys = self.header.keys
            raise MissingKeyError(f"{self.path} has no tensor {key!r}; it has {len(keys)}: {some(sorted(keys))}")
        return self.entries[key]

    def is_current(self) -> bool:
        """Whether this is still the file at its path, and as it was."""
        with suppress(OSError):
            return Identity.of(os.stat(self.path)) == self.identity
        return False

    def check(self) -> None:
        """Raises `ChangedFileError` if this is no longer the file that was opened."""
        if Identity.of(file_status(self.path)) != self.identity:
            raise self._changed()

    def moved_to(self, path: Path) -> None:
        """It has been renamed; what is mapped stays mapped."""
        with _LOCK:
            _OPENED.pop(self.path, None)
            _OPENED.pop(path, None)
            self.path = path
            _OPENED[path] = self

    def descriptor(self, flags: int = os.O_RDONLY, *, settled: bool = True) -> int:
        """An open file descriptor of the very file whose header was read. The caller closes it.

        Args:
            flags: for `os.open`; nothing is created or cut.
            settled: also refuse a file whose modification time has moved; False for one that is ours to write.

        Raises:
            MissingFileError, CorruptFileError, ReadError: the file can't be opened.
            ChangedFileError: another one is there now.
        """
        fd = open_regular(self.path, flags)
        with closed_on_error(fd), reading(self.path):
            now = Identity.of(os.fstat(fd))
            if (now if settled else replace(now, modified=self.identity.modified)) != self.identity:
                raise self._changed()
        return fd

    def storage(self, entry: Entry, *, shared: bool) -> torch.UntypedStorage:
        """The bytes of one entry, mapped without a copy; each call gives a storage object of its own.

        Raises: as `descriptor`.
        """
        whole = self.mapped(shared=shared)
        part: torch.UntypedStorage = whole[entry.start : entry.start + entry.layout.nbytes]
        return part

    def tensor(self, entry: Entry, *, shared: bool) -> torch.Tensor:
        """The value of one entry, over its storage.

        Raises: as `descriptor`.
        """
        empty = torch.empty(0, dtype=entry.layout.dtype, device="cpu")
        return empty.set_(self.storage(entry, shared=shared), 0, entry.layout.shape, entry.layout.stride)

    def unmap(self) -> None:
        """Let go of the mapping; storages that were handed out keep theirs."""
        self._private = self._shared = None

    def mapped(self, *, shared: bool) -> torch.UntypedStorage:
        """The whole file, mapped once.

        Raises: as `descriptor`.
        """
        mapped = self.mapping(shared=shared)
        if mapped is not None:
            return mapped
        with _LOCK:  # two mappings would keep each other's pages in memory
            return self.mapping(shared=shared) or self._make_mapping(shared=shared)

    def mapping(self, *, shared: bool) -> torch.UntypedStorage | None:
        """The whole file, if it is mapped already."""
        return self._shared if shared else self._private

    def _make_mapping(self, *, shared: bool) -> torch.UntypedStorage:
        with closed_after(self.descriptor(os.O_RDWR if shared else os.O_RDONLY, settled=not shared)) as fd:
            mapped = map_bytes(fd, self.path, 0, self.identity.size, shared=shared)
        if shared:
            self._shared = mapped
        else:
            self._private = mapped
        return mapped

    def _changed(self) -> ChangedFileError:
        return ChangedFileError(
            f"{self.path} has changed since it was opened (size, modification time or inode): "
            "its tensors can't be trusted any more. Open it, or load the checkpoint, again."
        )


def file_status(path: Path) -> os.stat_result:
    """`os.stat`, with an error that says what to do."""
    with reading(path):
        return os.stat(path)


def _read(path: Path, read_header: Callable[[BinaryIO, int], Header]) -> tuple[Identity, Header]:
    with reading(path), as_file(open_regular(path)) as file:
        with suppress(OSError):  # else the system reads on behind the header, by megabytes on some disks
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
    """Told by how it begins, whatever its name."""
    start = file.read(pickled.MAGIC_SIZE)
    if start.startswith(_LFS):
        raise CorruptFileError("it is a git-lfs pointer, a note in place of the file: run `git lfs pull`")
    file.seek(0)
    if pickled.is_pickled(start):
        return pickled.read_header(file, size)
    if start.startswith(gguf_header.MAGIC):
        return gguf_header.read_header(file, size)
    length = header_length(file.read(8), size)
    return parse(file.read(length), size)


def _header_of_archives(file: BinaryIO, size: int, places: Mapping[str, tuple[int, int]]) -> Header:
    entries: dict[str, Entry] = {}
    unreadable: dict[str, str] = {}
    loose: dict[str, Loose] = {}
    for key, (begin, nbytes) in places.items():
        if begin + nbytes > size:
            raise CorruptFileError(
                f"it is cut off: its archive of {key!r} ends at byte {begin + nbytes}, it has {size}"
            )
        section = io.BufferedReader(Section(file.fileno(), begin, nbytes))
        found = pickled.read_tensor(section, nbytes, key)
        if isinstance(found, str):
            unreadable[key] = found
            continue
        found = replace(found, record=replace(found.record, start=found.record.start + begin))
        if found.entry is not None and can_be_over(found.entry):
            entries[key] = found.entry
        else:
            loose[key] = found
    return Header({}, entries, unreadable, loose)


# Values that no tensor can be over where they lie


def value_of(loose: Loose, file: TensorFile) -> torch.Tensor:
    """The value as a plain tensor of its own, of the layout in which it is copied out; if that overlaps, all in a row.

    Raises:
        CorruptFileError
        ReadError, and as `TensorFile.descriptor`.
    """
    storage = _bytes_of(loose, file)
    layout, stride = loose.layout, loose.stride
    if layout.overlaps:
        layout = contiguous(layout.dtype, (layout.nbytes // layout.dtype.itemsize,))
        stride = layout.stride
    value = torch.empty(0, dtype=layout.dtype, device="cpu").set_(storage, 0, layout.shape, stride)
    if loose.is_conjugated:
        value = value.conj()
    return scratch(layout).copy_(as_negated(value) if loose.is_negated else value)


def _bytes_of(loose: Loose, file: TensorFile) -> torch.UntypedStorage:
    """From its first element to its last, in the byte order of this machine."""
    record, dtype = loose.record, loose.layout.dtype
    if record.packed is not None:
        storage = _in_memory(_unpacked(record, file)[loose.begin : loose.begin + loose.span])
        if loose.begin % dtype.itemsize:
            storage = storage.clone()
    elif record.is_swapped or loose.start % dtype.itemsize:
        storage = _in_memory(_range_of(file, loose.start, loose.span))
    else:
        storage = file.mapped(shared=False)[loose.start : loose.start + loose.span]
    if record.is_swapped:
        storage.byteswap(dtype)
    return storage


def _in_memory(data: memoryview) -> torch.UntypedStorage:
    if not data:
        return torch.UntypedStorage(0, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8).untyped_storage()


def _range_of(file: TensorFile, start: int, count: int) -> memoryview:
    with closed_after(file.descriptor()) as fd:
        data, done = memoryview(scratch_bytes(count))[:count], 0
        while done < count:
            with reading(file.path):
                block = os.pread(fd, min(count - done, _STEP), start + done)
            if not block:
                raise CorruptFileError(f"{file.path} ended early: download or copy the file again")
            data[done : done + len(block)] = block
            done += len(block)
        return data


def _unpacked(record: Record, file: TensorFile) -> memoryview:
    """A deflated record, unpacked; what is packed is read a block at a time."""
    data, done = memoryview(scratch_bytes(record.nbytes))[: record.nbytes], 0
    try:
        for part in _inflated(record, file):
            if done + len(part) > record.nbytes:
                raise zlib.error(f"more than the {record.nbytes} bytes that were promised")
            data[done : done + len(part)] = part
            done += len(part)
    except zlib.error as error:
        raise CorruptFileError(f"{file.path} can't be unpacked ({error}): download or copy the file again") from error
    if done < record.nbytes:
        raise CorruptFileError(f"{file.path} gives {done} bytes of {record.nbytes}: download or copy the file again")
    return data


def _inflated(record: Record, file: TensorFile) -> Iterator[bytes]:
    inflate = zlib.decompressobj(-zlib.MAX_WBITS)
    end = record.start + (record.packed or 0)
    for at in range(record.start, end, _STEP):
        block = bytes(_range_of(file, at, min(end - at, _STEP)))
        while block:
            yield inflate.decompress(block, _STEP)
            block = inflate.unconsumed_tail
    yield inflate.flush()


_LFS = b"version https://git-lfs"
_LOCK = fork_safe_lock()
_OPENED: weakref.WeakValueDictionary[Path, TensorFile] = weakref.WeakValueDictionary()
