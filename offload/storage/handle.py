"""One stored value, shared by all the tensors that are views of it.

Always true:
- what is written goes to a file of ours: a referenced file is copied to one before the first write
- `base` is the file itself (a mapping), never a copy that could grow stale
- a temporary file goes with its handle, in the process that made it
"""

from __future__ import annotations

import errno
import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch

from offload.errors import ChangedFileError, ForeignFileError, OffloadError, UnsupportedOpError, WriteError
from offload.storage.file import TensorFile
from offload.storage.folders import claim, discard, named_folder, release
from offload.storage.header import Entry, Layout
from offload.storage.locks import ForkSafeLock
from offload.storage.loose import Loose, value_of
from offload.storage.modes import plain_world
from offload.storage.subclasses import Recipe, flatten, is_subclass_value, layout_from, unflatten
from offload.storage.write import copy_entries, explained, fill_holes, layout_of, write_empty, write_values

Notes: TypeAlias = "Mapping[str, Any] | None"

MOST_MAPPINGS = 16_384  # Linux allows a process 65,530 mappings; the rest is for others
_MOST_LOOKS = 100  # at a file that another process replaces between each look and the mapping of what was seen


class Handle:
    """The value called `name`. Use `create`, `allocate`, `reference` or `adopt`.

    Attributes:
        name: the tensor's name; its key in the file.
        folder: the user's folder that writes go to; None for a private one.
        layout: shape, dtype and strides of the whole value.
        extent: where the value is in its file: the first byte, and how many.
        generation: counts changes of `layout`, so that views can tell that they are stale.
        owned: whether `file` is ours to write.
        twin: a meta tensor of this layout, kept for those who need one; None until somebody does.
        ranges: what is known of its bytes in memory, by start and length; kept for those who read ahead.
        copies: what stays of it on accelerators, by device; kept for those who send it there.
        pool: the memory budget that it is under; None for that of the process.
        has_holes: whether the file may lack blocks on the disk, which are then reserved before it is stored into.
        is_fixed: whether others write to the file in place, so that it is never to be replaced.
    """

    __slots__ = (
        "__weakref__",
        "_base",
        "_lock",
        "_pid",
        "copies",
        "extent",
        "file",
        "folder",
        "generation",
        "has_holes",
        "is_fixed",
        "layout",
        "name",
        "owned",
        "pool",
        "ranges",
        "recipe",
        "twin",
    )

    def __init__(self, name: str, folder: Path | None) -> None:
        self.name = name
        self.folder = folder
        self.generation = 0
        self.owned = False
        self.has_holes = False
        self.is_fixed = False
        self._base: torch.Tensor | None = None
        self._lock = ForkSafeLock()
        self.ranges: dict[tuple[int, int], Any] = {}
        self.copies: dict[torch.device, Any] = {}
        self.pool: Any = None
        self._pid = 0  # the process that removes the file with this handle; 0 for nobody

    @classmethod
    def create(
        cls, tensor: torch.Tensor, name: str, offload_dir: str | os.PathLike[str] | None, notes: Notes = None
    ) -> Handle:
        """A new file that holds the value of a plain tensor, or of a wrapper subclass; `notes` go into its header.

        Raises:
            NameInUseError, ForeignFileError, WriteError, UnknownSubclassError
        """
        handle = cls(name, _folder_for(name, offload_dir))
        with handle._claimed() as path:
            handle._write(path, tensor, _layout_for(tensor), notes)
        return handle

    @classmethod
    def assemble(
        cls,
        layout: Layout,
        blocks: Iterable[torch.Tensor],
        name: str,
        offload_dir: str | os.PathLike[str] | None,
    ) -> Handle:
        """A new file whose value comes in contiguous plain tensors on the CPU, as `layout` orders them.

        Raises:
            NameInUseError, ForeignFileError, WriteError
        """
        handle = cls(name, _folder_for(name, offload_dir))
        with handle._claimed() as path, _naming(name):
            write_values(path, {name: blocks}, {name: layout}, {"name": name}, durable=handle.folder is not None)
            handle._take(TensorFile.open(path))
        return handle

    @classmethod
    def allocate(cls, layout: Layout, name: str, offload_dir: str | os.PathLike[str] | None) -> Handle:
        """A new file whose value reads as zeros; takes disk, but neither memory nor time.

        Raises:
            NameInUseError, ForeignFileError, WriteError
        """
        handle = cls(name, _folder_for(name, offload_dir))
        with handle._claimed() as path, _naming(name):
            write_empty(path, name, layout, {"name": name}, durable=handle.folder is not None)
            handle._take(TensorFile.open(path))
        return handle

    @classmethod
    def reference(cls, file: TensorFile, key: str, offload_dir: str | os.PathLike[str] | None = None) -> Handle:
        """The value `key` of a file that stays as it is; a first write copies it to `offload_dir`.

        A file of ours that holds a subclass is referenced by the value's name. A value that no tensor can be over where
        it lies is copied there at once.
        """
        if key in file.header.loose:
            return cls._copied_out(file, file.header.loose[key], offload_dir)
        handle = cls(key, None if offload_dir is None else Path(os.path.abspath(offload_dir)))
        handle._open(file)
        return handle

    @classmethod
    def _copied_out(cls, file: TensorFile, loose: Loose, offload_dir: str | os.PathLike[str] | None) -> Handle:
        handle = cls(loose.key, _folder_for(loose.key, offload_dir))
        notes, durable = {"name": loose.key}, handle.folder is not None
        with handle._claimed() as path, _naming(loose.key), plain_world():
            if loose.entry is not None:
                copy_entries(file, [loose.entry], path, notes, settled=True, durable=durable)
            else:
                value = value_of(loose, file)
                write_values(path, {loose.key: value}, {loose.key: loose.layout}, notes, durable=durable)
            handle._take(TensorFile.open(path))
        return handle

    @classmethod
    def adopt(cls, file: TensorFile, name: str) -> Handle:
        """The value of a file of ours in a folder of the user's, opened again to be written to.

        Raises:
            NameInUseError: a live tensor is stored there.
            ForeignFileError: `offload` did not write that file.
        """
        if not file.is_ours:
            raise ForeignFileError(
                f"{file.path} was not written by offload: {name!r} can be referenced there, not written"
            )
        handle = cls(name, file.path.parent)
        handle._open(file)
        claim(name, handle.folder, handle)
        handle.owned = True
        return handle

    @classmethod
    def shared(cls, file: TensorFile, name: str, folder: Path | None) -> Handle:
        """A value that another process owns; both write to the one file."""
        handle = cls(name, folder)
        handle._open(file)
        handle.owned = True
        return handle

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def is_subclass(self) -> bool:
        return self.recipe is not None

    def base(self) -> torch.Tensor:
        """The whole value as a plain CPU tensor over the mapped file. Reads nothing; must not be written to.

        Raises:
            MissingFileError, ChangedFileError, CorruptFileError: the file is not what it was.
        """
        file, base = self.file, self._base  # in this order: a file older than its base is looked at again
        if base is not None:
            try:
                status = os.stat(file.path)
            except OSError:
                return self._map()
            known = file.identity
            if (
                status.st_ino == known.inode
                and status.st_size == known.size
                and (self.owned or status.st_mtime_ns == known.modified)
            ):
                return base
        return self._map()

    def another_base(self) -> torch.Tensor:
        """As `base`, but a tensor of one's own over the file."""
        self.base()
        with plain_world():
            return self._mapped()

    def writable_base(self) -> torch.Tensor:
        """As `base`, but what is stored into it is stored in the file."""
        if not self.owned:
            self._own()
        if self.has_holes:
            self._fill_holes()
        return self.base()

    def replace(self, tensor: torch.Tensor, notes: Notes = None) -> None:
        """Make `tensor` (of any shape and dtype) the whole value, atomically; `notes` go into the file's header.

        Raises:
            WriteError, ForeignFileError, NameInUseError: the old value stands.
            UnsupportedOpError: the file is written in place only.
        """
        if self.is_fixed:
            raise UnsupportedOpError(
                f"{self.name!r} is a column of a cache ({self.path.parent}), which is written in place: "
                "write rows of the cache, or copy_ to the tensor"
            )
        with self._lock, self._claimed() as path:
            old = self.layout
            layout = _layout_for(tensor)
            if (layout.shape, layout.dtype) == (old.shape, old.dtype) and not is_subclass_value(tensor):
                layout = old
            self._write(path, tensor, layout, notes)
            self.generation += self.layout != old

    def take_over(self, file: TensorFile) -> None:
        """Go on from a file of ours that stands where the first write would put one.

        Raises:
            NameInUseError: a live tensor is stored there.
        """
        with self._lock, self._claimed():
            old = self.layout
            self._take(file)
            self.generation += self.layout != old

    def clear(self, layout: Layout) -> None:
        """Make the value zeros of `layout`, as `allocate` does. Views that were cut before are stale, in any case.

        Raises:
            WriteError: the old value stands.
        """
        with self._lock, self._claimed() as path, _naming(self.name):
            write_empty(path, self.name, layout, {"name": self.name}, durable=self.folder is not None)
            self._take(TensorFile.open(path))
            self.generation += 1

    def flush(self) -> None:
        """Wait until what was written is on the disk.

        Raises:
            WriteError: the disk did not take it.
            MissingFileError, ChangedFileError, CorruptFileError: the file is not what it was.
        """
        if not self.owned:
            return
        self.base()
        with _naming(self.name):
            fd = self.file.descriptor(settled=False)
            try:
                os.fsync(fd)
            except OSError as error:
                reason = f"what was written may not be on the disk ({error.strerror}): write it again, elsewhere"
                raise WriteError(error.errno, reason, str(self.path)) from error
            finally:
                os.close(fd)
            if self.file.lost_writes:
                reason = "something that was written did not reach the disk: write it again, elsewhere"
                raise WriteError(errno.EIO, reason, str(self.path))

    def duplicate(self) -> Handle:
        """An independent copy in a private folder, made from file to file.

        Raises:
            WriteError, and as `base`.
        """
        copy = Handle(self.name, None)
        with copy._claimed() as path:
            self._copy_to(path, durable=False)
            copy._take(TensorFile.open(path))
        return copy

    def pointers(self) -> torch.UntypedStorage:
        """The value's bytes as a storage of their own, for those who tell tensors apart by address."""
        self.base()
        return self.file.storage(self.file.entry(self.name), shared=self.owned)

    def unmap(self) -> None:
        """Let go of the mapping; it comes back when it is asked for."""
        self._base = None
        self.file.unmap()

    def _map(self) -> torch.Tensor:
        with self._lock, _naming(self.name), plain_world():
            base = self._map_owned() if self.owned else self._map_referenced()
            self._base = base
        if self.owned:
            _keep_mapped(self)
        return base

    def _map_referenced(self) -> torch.Tensor:
        self.file.check()
        return self._mapped()

    def _map_owned(self) -> torch.Tensor:
        """Whatever value stands at the path now: another process may replace it again before it is mapped."""
        for _ in range(_MOST_LOOKS):
            self._follow()
            with suppress(ChangedFileError):
                return self._mapped()
        raise ChangedFileError(f"{self.path} is replaced faster than it can be mapped: try again")

    def _mapped(self) -> torch.Tensor:
        if self.recipe is None:
            return _mapped(self.file, self.name, shared=self.owned)
        parts = {key: _mapped(self.file, key, shared=self.owned) for key in self.file.entries}
        return unflatten(parts, self.recipe, self.name)

    def _follow(self) -> None:
        """Another process may have put a new value at our path: take it, if it has the same layout."""
        file = TensorFile.open(self.path)
        if file is self.file:
            return
        if not file.is_ours:
            raise ChangedFileError(f"{self.path} was replaced by a file that offload did not write")
        old = self.layout
        try:
            self._open(file)
        except KeyError as error:
            raise ChangedFileError(f"{self.path} now holds another tensor: {error.args[0]}") from error
        if self.layout != old:
            self.generation += 1
            raise ChangedFileError(f"{self.path} now holds {self.layout}, not {old}: open it again")

    def _open(self, file: TensorFile) -> None:
        with _naming(self.name):
            recipe = file.notes.get("subclass") if self.name not in file.entries else None
            layout = file.entry(self.name).layout if recipe is None else layout_from(recipe)
        self.recipe: Recipe | None = recipe
        if recipe is not None or layout != getattr(self, "layout", None):
            self.twin: torch.Tensor | None = None
        self.layout: Layout = layout
        self.file = file
        self.extent = _extent(file.entries.values() if recipe else [file.entry(self.name)])
        self._base = None
        known, self.ranges = self.ranges, {}
        for extent in list(known.values()):
            extent.calm_until = 0.0  # who holds on to one asks again
        self.copies = {}

    def _take(self, file: TensorFile) -> None:
        """`file` is ours from now on; if it was not, and is in a private folder, it goes with this handle."""
        self._open(file)
        if not self.owned and self.folder is None:
            self._pid = os.getpid()
        self.owned = True

    @contextmanager
    def _claimed(self) -> Iterator[Path]:
        """The path to write to; given back if nothing came of it."""
        if self.owned:
            yield self.path
            return
        path = claim(self.name, _folder_for(self.name, self.folder), self)
        try:
            yield path
        except BaseException:
            release(path, self)
            raise

    def _write(self, path: Path, tensor: torch.Tensor, layout: Layout, notes: Notes) -> None:
        with _naming(self.name), plain_world():
            said: Recipe = {**(notes or {}), "name": self.name}
            if is_subclass_value(tensor):
                values, said["subclass"] = flatten(tensor, self.name)
                layouts = {key: layout_of(value) for key, value in values.items()}
            else:
                values, layouts = {self.name: tensor}, {self.name: layout}
            write_values(path, values, layouts, said, durable=self.folder is not None)
            self._take(TensorFile.open(path))

    def _fill_holes(self) -> None:
        """A store into a hole of a full disk would end the process."""
        with self._lock, _naming(self.name), explained(self.path, self.file.identity.size):
            fd = self.file.descriptor(os.O_RDWR, settled=False)
            try:
                fill_holes(fd, self.file.identity.size)
            finally:
                os.close(fd)
            self.has_holes = False

    def _own(self) -> None:
        with self._lock:
            if self.owned:
                return
            with self._claimed() as path:
                self._copy_to(path, durable=self.folder is not None)
                self._take(TensorFile.open(path))

    def _copy_to(self, path: Path, *, durable: bool) -> None:
        with self._lock:
            self.base()
            with _naming(self.name):
                keys = [self.name] if self.recipe is None else list(self.file.entries)
                notes = {"name": self.name, **({} if self.recipe is None else {"subclass": self.recipe})}
                entries = [self.file.entry(key) for key in keys]
                copy_entries(self.file, entries, path, notes, settled=not self.owned, durable=durable)

    def __del__(self) -> None:
        if sys.is_finalizing():  # the private folder went as a whole; modules go now
            return
        _MAPPED.pop(id(self), None)
        if getattr(self, "_pid", 0) == os.getpid():
            discard(self.file.path)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Say in an error about a file which tensor it was for."""
    try:
        yield
    except OffloadError as error:
        label = f"tensor {name!r}: "
        if isinstance(error, OSError) and error.errno is not None:
            error.strerror = label + (error.strerror or "").removeprefix(label)
            error.args = (error.errno, error.strerror)
        else:
            error.args = (label + str(error).removeprefix(label),)
        raise


def _folder_for(name: str, offload_dir: str | os.PathLike[str] | None) -> Path | None:
    with _naming(name):
        return None if offload_dir is None else named_folder(offload_dir)


def _layout_for(tensor: torch.Tensor) -> Layout:
    if is_subclass_value(tensor):
        return Layout(tensor.dtype, tuple(tensor.shape), tensor.stride())
    with plain_world():
        return layout_of(tensor)


def _extent(entries: Iterable[Entry]) -> tuple[int, int]:
    start = min(entry.start for entry in entries)
    return start, max(entry.start + entry.layout.nbytes for entry in entries) - start


def _mapped(file: TensorFile, key: str, *, shared: bool) -> torch.Tensor:
    entry = file.entry(key)
    empty = torch.empty(0, dtype=entry.layout.dtype, device="cpu")
    return empty.set_(file.storage(entry, shared=shared), 0, entry.layout.shape, entry.layout.stride)


def _keep_mapped(handle: Handle) -> None:
    """Count a mapping, and drop the oldest when there are too many."""
    with _LOCK:
        _MAPPED.pop(id(handle), None)
        _MAPPED[id(handle)] = weakref.ref(handle)
        while len(_MAPPED) > MOST_MAPPINGS:
            found = _MAPPED.pop(next(iter(_MAPPED)))()
            if found is not None:
                found.unmap()


_LOCK = ForkSafeLock()
_MAPPED: dict[int, weakref.ref[Handle]] = {}  # by `id`, the oldest mapping first; a handle that dies leaves it
