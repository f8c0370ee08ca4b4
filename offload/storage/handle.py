"""One stored value, shared by all the tensors that are views of it.

Always true:
- what is written goes to a file of ours: a referenced file is copied to one before the first write
- `base` is the file itself (a mapping), never a copy that could grow stale
- a temporary file goes with its handle, in the process that made it
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from offload.errors import ChangedFileError, CorruptFileError, MissingFileError, OffloadError
from offload.storage.file import TensorFile
from offload.storage.folders import claim, named_folder
from offload.storage.header import Layout
from offload.storage.locks import ForkSafeLock
from offload.storage.subclasses import Recipe, flatten, is_subclass_value, unflatten
from offload.storage.write import copy_entry, layout_of, write_empty, write_values

MOST_MAPPINGS = 16_384  # Linux allows a process 65,530 mappings; the rest is for others


class Handle:
    """The value called `name`. Use `create`, `allocate`, `reference` or `adopt`.

    Attributes:
        name: the tensor's name; its key in the file.
        folder: the user's folder that writes go to; None for a private one.
        layout: shape, dtype and strides of the whole value.
        generation: counts changes of `layout`, so that views can tell that they are stale.
        owned: whether `file` is ours to write.
    """

    __slots__ = (
        "__weakref__",
        "_base",
        "_lock",
        "_pid",
        "file",
        "folder",
        "generation",
        "layout",
        "name",
        "owned",
        "recipe",
    )

    def __init__(self, name: str, folder: Path | None) -> None:
        self.name = name
        self.folder = folder
        self.generation = 0
        self.owned = False
        self._base: torch.Tensor | None = None
        self._lock = ForkSafeLock()
        self._pid = 0  # the process that removes the file with this handle; 0 for nobody

    @classmethod
    def create(cls, tensor: torch.Tensor, name: str, offload_dir: str | os.PathLike[str] | None) -> Handle:
        """A new file that holds the value of a plain tensor, or of a wrapper subclass.

        Raises:
            NameInUseError, ForeignFileError, WriteError, UnknownSubclassError
        """
        handle = cls(name, None if offload_dir is None else named_folder(offload_dir))
        handle._write(claim(name, handle.folder, handle), tensor, _layout_for(tensor))
        return handle

    @classmethod
    def allocate(cls, layout: Layout, name: str, offload_dir: str | os.PathLike[str] | None) -> Handle:
        """A new file whose value reads as zeros; takes disk, but neither memory nor time.

        Raises:
            NameInUseError, ForeignFileError, WriteError
        """
        handle = cls(name, None if offload_dir is None else named_folder(offload_dir))
        path = claim(name, handle.folder, handle)
        write_empty(path, name, layout, {"name": name}, durable=handle.folder is not None)
        handle._take(TensorFile.open(path))
        return handle

    @classmethod
    def reference(cls, file: TensorFile, key: str, offload_dir: str | os.PathLike[str] | None = None) -> Handle:
        """The value `key` of a file that stays as it is; a first write copies it to `offload_dir`.

        A file of ours that holds a subclass is referenced by the value's name.
        """
        handle = cls(key, None if offload_dir is None else Path(os.path.abspath(offload_dir)))
        handle._open(file)
        return handle

    @classmethod
    def adopt(cls, file: TensorFile, name: str) -> Handle:
        """The value of a file of ours in a folder of the user's, opened again to be written to.

        Raises:
            NameInUseError: a live tensor is stored there.
        """
        handle = cls(name, file.path.parent)
        claim(name, handle.folder, handle)
        handle._open(file)
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
        base, file = self._base, self.file
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

    def writable_base(self) -> torch.Tensor:
        """As `base`, but what is stored into it is stored in the file."""
        if not self.owned:
            self._own()
        return self.base()

    def replace(self, tensor: torch.Tensor) -> None:
        """Make `tensor` (of any shape and dtype) the whole value, atomically.

        Raises:
            WriteError, ForeignFileError, NameInUseError: the old value stands.
        """
        with self._lock:
            path = self.path if self.owned else claim(self.name, self.folder, self)
            old = self.layout
            layout = _layout_for(tensor)
            if (layout.shape, layout.dtype) == (old.shape, old.dtype) and not is_subclass_value(tensor):
                layout = old
            self._write(path, tensor, layout)
            self.generation += self.layout != old

    def flush(self) -> None:
        """Wait until what was written is on the disk."""
        if not self.owned:
            return
        with _naming(self.name):
            fd = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def duplicate(self) -> Handle:
        """An independent copy in a private folder, made from file to file."""
        copy = Handle(self.name, None)
        path = claim(copy.name, None, copy)
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
            if self.owned:
                self._follow()
            else:
                self.file.check()
            parts = {
                entry.key: _mapped(self.file, entry.key, shared=self.owned)
                for entry in ([self.file.entry(self.name)] if self.recipe is None else self.file.entries.values())
            }
            base = parts[self.name] if self.recipe is None else unflatten(parts, self.recipe, self.name)
            self._base = base
        if self.owned:
            _keep_mapped(self)
        return base

    def _follow(self) -> None:
        """Another process may have put a new value at our path: take it, if it has the same layout."""
        file = TensorFile.open(self.path)
        if file is self.file:
            return
        if not file.is_ours:
            raise ChangedFileError(f"{self.path} was replaced by a file that offload did not write")
        old = self.layout
        self._open(file)
        if self.layout != old:
            self.generation += 1
            raise ChangedFileError(f"{self.path} now holds {self.layout}, not {old}: open it again")

    def _open(self, file: TensorFile) -> None:
        with _naming(self.name):
            recipe = file.notes.get("subclass") if self.name not in file.entries else None
            if recipe is None:
                layout = file.entry(self.name).layout
            else:
                layout = Layout(getattr(torch, recipe["dtype"]), tuple(recipe["shape"]), tuple(recipe["stride"]))
        self.recipe: Recipe | None = recipe
        self.layout: Layout = layout
        self.file = file
        self._base = None

    def _take(self, file: TensorFile) -> None:
        """`file` is ours from now on."""
        self._open(file)
        self.owned = True
        if self.folder is None:
            self._pid = os.getpid()

    def _write(self, path: Path, tensor: torch.Tensor, layout: Layout) -> None:
        with _naming(self.name), plain_world():
            notes: Recipe = {"name": self.name}
            if is_subclass_value(tensor):
                values, notes["subclass"] = flatten(tensor, self.name)
                layouts = {key: layout_of(value) for key, value in values.items()}
            else:
                values, layouts = {self.name: tensor.resolve_conj().resolve_neg()}, {self.name: layout}
            write_values(path, values, layouts, notes, durable=self.folder is not None)
            self._take(TensorFile.open(path))

    def _own(self) -> None:
        with self._lock:
            if self.owned:
                return
            folder = self.folder if self.folder is None else named_folder(self.folder)
            path = claim(self.name, folder, self)
            self._copy_to(path, durable=folder is not None)
            self._take(TensorFile.open(path))

    def _copy_to(self, path: Path, *, durable: bool) -> None:
        with _naming(self.name):
            keys = [self.name] if self.recipe is None else list(self.file.entries)
            notes = {"name": self.name, **({} if self.recipe is None else {"subclass": self.recipe})}
            copy_entry(self.file, keys, path, notes, durable=durable)

    def __del__(self) -> None:
        if getattr(self, "_pid", 0) == os.getpid():
            self.file.path.unlink(missing_ok=True)


@contextmanager
def plain_world() -> Iterator[None]:
    """Outside every mode (fake, functional, inference, a default device), where a tensor is just a tensor."""
    with (
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        yield


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Say in an error about a file which tensor it was for."""
    try:
        yield
    except (MissingFileError, CorruptFileError, ChangedFileError) as error:
        raise type(error)(f"tensor {name!r}: {error}") from error
    except OSError as error:
        if isinstance(error, OffloadError):
            error.args = (error.errno, f"tensor {name!r}: {error.strerror}", error.filename)
            error.strerror = error.args[1]
        raise


def _layout_for(tensor: torch.Tensor) -> Layout:
    if is_subclass_value(tensor):
        return Layout(tensor.dtype, tuple(tensor.shape), tensor.stride())
    with plain_world():
        return layout_of(tensor)


def _mapped(file: TensorFile, key: str, *, shared: bool) -> torch.Tensor:
    entry = file.entry(key)
    empty = torch.empty(0, dtype=entry.layout.dtype, device="cpu")
    return empty.set_(file.storage(entry, shared=shared), 0, entry.layout.shape, entry.layout.stride)


def _keep_mapped(handle: Handle) -> None:
    """Count a mapping, and drop the oldest when there are too many."""
    with _LOCK:
        _MAPPED.append(weakref.ref(handle))
        while len(_MAPPED) > MOST_MAPPINGS:
            oldest = _MAPPED.popleft()()
            if oldest is not None and oldest is not handle:
                oldest.unmap()


_LOCK = ForkSafeLock()
_MAPPED: deque[weakref.ref[Handle]] = deque()
