"""One stored value, shared by all tensors that are views of it.

Always true:
- `base` is the file itself (a mapping), never a copy that could become stale
- a process has at most `MOST_MAPPINGS` of our files mapped; one that was unmapped is mapped again on demand
- writes go to a file of ours: a referenced file is copied to one before the first write
- a composed value has no file before its first write: it is computed from other values at each read
- a value is replaced as a whole, or stays as it is
- a temporary file is removed with its last user, in the process that created it
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from offload.errors import (
    ChangedFileError,
    CheckpointError,
    CorruptFileError,
    ForeignFileError,
    MissingFileError,
    UnsupportedOpError,
    WriteError,
)
from offload.storage import log
from offload.storage.file import TensorFile, value_of
from offload.storage.folders import claim, claim_among_ranks, discard, file_name, named_folder, release
from offload.storage.header import Head
from offload.storage.layout import Entry, Layout, Loose
from offload.storage.locks import fork_safe_lock
from offload.storage.mapping import addresses
from offload.storage.modes import no_functions, no_modes
from offload.storage.reasons import naming, writing
from offload.storage.regular import absolute, closed_after
from offload.storage.subclasses import Recipe, flatten, is_subclass_value, layout_from, unflatten, with_inner
from offload.storage.write import (
    Take,
    copy_entries,
    fill_holes,
    layout_of,
    new_values,
    refuse_earlier,
    write_blocks,
    write_tensor,
    write_values,
    write_zeros,
)

MOST_MAPPINGS = 16_384  # Linux allows 65,530 mappings per process; the rest is for others
_MOST_LOOKS = 100  # retries when another process replaces the file between our look and our mapping

_MADE_OF = "made of"  # a note in the file that stores a composed value; the first write drops it

Notes: TypeAlias = "Mapping[str, Any] | None"


class PageState(Protocol):
    """What the prefetcher knows about a value's bytes in memory."""

    def begin_anew(self) -> None:
        """The value is in another file now."""


class Composed(Protocol):
    """How a value is computed from other stored values, which must not be written to.

    Attributes:
        layout: of the computed value.
        recipe: how to rebuild it if it is a tensor subclass; else None.
    """

    layout: Layout
    recipe: Recipe | None

    @property
    def file(self) -> TensorFile:
        """The file of the first source value."""

    def value(self, view_spec: torch.Tensor | None = None) -> torch.Tensor:
        """The view that a meta tensor describes, or the whole, as a plain tensor: do not write to it or keep it."""

    def reads(self, view_spec: torch.Tensor) -> Iterator[tuple[Handle, torch.Tensor]]:
        """The views of stored values from which the view that a meta tensor describes is computed, as they are read."""

    def stands(self, view_spec: torch.Tensor, /) -> bool:
        """Whether the view that a meta tensor describes is stored as is, so that `value` maps it without computing."""


@runtime_checkable
class InBlocks(Composed, Protocol):
    """A composed value that is a plain tensor and can be computed in parts."""

    def picked(self, view_spec: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Some rows, by sorted index, of the view that a meta tensor describes, as a new tensor."""

    def blocks(self) -> Iterator[torch.Tensor]:
        """Contiguous plain tensors that make up the whole in layout order; each is valid until the next one."""


class Handle:
    """The value called `name`. Use `create`, `allocate`, `reference`, `compose` or `adopt`.

    Attributes:
        name: the tensor's name; its key in the file.
        folder: the user's folder that writes go to; None for a private one.
        layout: shape, dtype and strides of the whole value.
        extent: its first byte in the file, and its size.
        part: its place, if it is only a part of a value in a file of somebody else's; our own files hold it whole.
        generation: counts changes of `layout`, so that views can tell when they are stale.
        owned: whether `file` is ours to write.
        composed: how it is computed while it has no file; `file` is then one of its sources.
        meta: a meta tensor of this layout, created on first use; None until then.
        page_state: what the prefetcher knows about its bytes in memory.
        has_holes: whether the file may be sparse; its blocks are then reserved before the first store.
        is_apart: whether it is read without its neighbours in the file.
        is_picked: whether it is one of many that are used in no fixed order, such as experts.
        is_fixed: whether others write to the file in place, so that it must never be replaced.
    """

    __slots__ = (
        "__weakref__",
        "_addresses",
        "_base",
        "_own_lock",
        "_pid",
        "composed",
        "extent",
        "file",
        "folder",
        "generation",
        "has_holes",
        "is_apart",
        "is_fixed",
        "is_picked",
        "layout",
        "meta",
        "name",
        "owned",
        "page_state",
        "part",
        "recipe",
    )

    def __init__(self, name: str, folder: Path | None) -> None:
        self.name = name
        self.folder = folder
        self.generation = 0
        self.owned = False
        self.composed: Composed | None = None
        self.has_holes = False
        self.is_fixed = False
        self.is_apart = self.is_picked = False
        self.part: Entry | None = None
        self._base: torch.Tensor | None = None
        self._addresses: torch.UntypedStorage | None = None
        self._own_lock: threading.RLock | None = None
        self.page_state: PageState | None = None
        self._pid = 0  # the process that removes the file with this handle; 0 for none

    @property
    def _lock(self) -> threading.RLock:
        """Created on first use: of a model's tens of thousands of experts, most never need it."""
        if self._own_lock is None:
            with _LOCK:
                if self._own_lock is None:
                    self._own_lock = fork_safe_lock()
        return self._own_lock

    @property
    def path(self) -> Path:
        """The path of its file."""
        return self.file.path

    @property
    def entry(self) -> Entry:
        """Its entry in the file; not for a subclass, which has several."""
        return self.part or self.file.entry(self.name)

    @property
    def is_subclass(self) -> bool:
        return self.recipe is not None

    @property
    def was_stored(self) -> bool:
        """Whether it was a composed value and has been stored."""
        return not self.owned and self.composed is None and _MADE_OF in self.file.notes

    # Creating

    @classmethod
    def create(
        cls,
        tensor: torch.Tensor,
        name: str,
        offload_dir: str | os.PathLike[str] | None,
        notes: Notes = None,
        *,
        exist_ok: bool = True,
    ) -> Handle:
        """A new file that holds a plain tensor or a wrapper subclass; `notes` go into its header.

        Args:
            exist_ok: whether to replace a file that an earlier tensor left under that name.

        Raises:
            NameInUseError, ForeignFileError, WriteError, UnknownSubclassError
        """
        handle = cls(name, _folder_for(name, offload_dir))
        with handle._claimed(exist_ok=exist_ok) as path:
            handle._write(path, tensor, notes)
        return handle

    @classmethod
    def passing(cls, tensor: torch.Tensor, name: str, root: Path | None) -> Handle:
        """Like `create`, in a private folder below `root`: the file goes with this handle in any case.

        Raises:
            WriteError, UnknownSubclassError
        """
        handle = cls(name, None)
        with handle._claimed(None if root is None else named_folder(root)) as path:
            handle._write(path, tensor, None)
        return handle

    @classmethod
    def assemble(
        cls,
        layout: Layout,
        blocks: Iterable[torch.Tensor],
        name: str,
        offload_dir: str | os.PathLike[str] | None,
    ) -> Handle:
        """A new file from contiguous plain CPU tensors that make up the value in the order of `layout`.

        Raises:
            NameInUseError, ForeignFileError, WriteError
        """
        handle = cls(name, _folder_for(name, offload_dir))
        with handle._new({name: layout}) as (fd, head):
            write_blocks(fd, head.start(name), blocks)
        return handle

    @classmethod
    def allocate(
        cls, layout: Layout, name: str, offload_dir: str | os.PathLike[str] | None, *, exist_ok: bool = True
    ) -> Handle:
        """A new file that reads as zeros; takes disk space, but no memory and no time. `exist_ok`: as for `create`.

        Raises:
            NameInUseError, ForeignFileError, WriteError
        """
        handle = cls(name, _folder_for(name, offload_dir))
        with handle._new({name: layout}, exist_ok=exist_ok) as (fd, head):
            write_zeros(fd, head)
        return handle

    @classmethod
    def reference(cls, file: TensorFile, key: str, offload_dir: str | os.PathLike[str] | None = None) -> Handle:
        """The value `key` of a file that is left as it is; the first write copies it to `offload_dir`.

        In a file of ours that holds a subclass, the key is the value's name. A value that can't be mapped as a tensor
        where it lies is copied to `offload_dir` at once.
        """
        if key in file.header.loose:
            return cls._copied_out(file, file.header.loose[key], offload_dir)
        handle = cls(key, None if offload_dir is None else absolute(offload_dir))
        handle._open(file)
        return handle

    @classmethod
    def reference_part(cls, file: TensorFile, part: Entry, offload_dir: str | os.PathLike[str] | None = None) -> Handle:
        """Like `reference`, for a part of the value `part.key`: the rest is neither read, counted nor copied."""
        handle = cls(part.key, None if offload_dir is None else absolute(offload_dir))
        handle.part = part
        handle._open(file)
        handle.read_apart()
        return handle

    @classmethod
    def compose(cls, composed: Composed, name: str, offload_dir: str | os.PathLike[str] | None = None) -> Handle:
        """A value that is computed at each read; its first write stores it in `offload_dir`."""
        handle = cls(name, None if offload_dir is None else absolute(offload_dir))
        handle.composed = composed
        handle.recipe, handle.meta = composed.recipe, None
        handle.layout, handle.file, handle.extent = composed.layout, composed.file, (0, 0)
        return handle

    def read_apart(self) -> None:
        """From now on, reads of it and of others in its file don't include their neighbours."""
        self.is_apart = self.file.is_picked_from = True

    def elsewhere(self, offload_dir: str | os.PathLike[str] | None) -> Handle:
        """The same value (not ours to write), with another folder for its first write."""
        if (composed := self.composed) is not None:
            return Handle.compose(composed, self.name, offload_dir)
        if self.part is not None:
            return Handle.reference_part(self.file, self.part, offload_dir)
        return Handle.reference(self.file, self.name, offload_dir)

    @classmethod
    def _copied_out(cls, file: TensorFile, loose: Loose, offload_dir: str | os.PathLike[str] | None) -> Handle:
        try:
            file_name(loose.key)
        except ValueError as error:
            raise CorruptFileError(f"{file.path} holds a value that can't be copied out: {error}") from error
        handle = cls(loose.key, _folder_for(loose.key, offload_dir))
        with no_functions(), no_modes(), handle._new({loose.key: loose.layout}) as (fd, head):
            if loose.entry is not None:
                copy_entries(file, [loose.entry], fd, head, settled=True)
            else:
                value = value_of(loose, file)
                in_order = value if loose.layout.overlaps else value.permute(loose.layout.order)
                write_tensor(fd, head.start(loose.key), in_order)
        return handle

    @classmethod
    def adopt(cls, file: TensorFile, name: str) -> Handle:
        """The value of a file of ours in a user's folder, reopened for writing.

        Raises:
            NameInUseError: a live tensor is stored there.
            ForeignFileError: `offload` did not write that file, or the path is a symlink.
        """
        if file.path.is_symlink():
            raise ForeignFileError(
                f"{file.path} is a link: {name!r} can be referenced there (without this offload_dir), not written"
            )
        if not file.is_ours:
            raise ForeignFileError(
                f"{file.path} was not written by offload: {name!r} can be referenced there, not written"
            )
        handle = cls(name, file.path.parent)
        handle._open(file)
        claim_among_ranks(claim(name, handle.folder, handle), handle)
        handle.owned = True
        return handle

    @classmethod
    def shared(cls, file: TensorFile, name: str, folder: Path | None) -> Handle:
        """A value that another process owns; both write to one file, and only in place if it has no header."""
        handle = cls(name, folder)
        handle._open(file)
        handle.owned = True
        handle.is_fixed = handle.has_holes = file.is_raw
        return handle

    @contextmanager
    def _claimed(self, root: Path | None = None, *, exist_ok: bool = True, alike: bool = False) -> Iterator[Path]:
        """The path to write to, in a private folder below `root` unless the user named one; released on failure.

        `alike` means that all ranks write the same contents there.
        """
        if self.owned:
            yield self.path
            return
        path = claim(self.name, _folder_for(self.name, self.folder), self, root)
        try:
            if self.folder is not None and not alike:
                claim_among_ranks(path, self)
            if not exist_ok:
                refuse_earlier(path, self.name)
            yield path
        except BaseException:
            if not self.owned:
                release(path, self)
            raise

    @contextmanager
    def _new(
        self, layouts: Mapping[str, Layout], more: Notes = None, *, exist_ok: bool = True, take: Take | None = None
    ) -> Iterator[tuple[int, Head]]:
        """Like `new_values`, for this value; `more` are notes in addition to its name."""
        notes, durable = {"name": self.name, **(more or {})}, self.folder is not None
        with (
            self._claimed(exist_ok=exist_ok, alike=_MADE_OF in notes) as path,
            naming(self.name),
            new_values(path, layouts, notes, durable=durable, take=take or self._take) as new,
        ):
            yield new

    def _write(self, path: Path, tensor: torch.Tensor, notes: Notes) -> None:
        """Write the whole value; if shape and dtype stay the same, the old strides are kept."""
        with naming(self.name), no_functions(), no_modes():
            said: Recipe = {**(notes or {}), "name": self.name}
            if is_subclass_value(tensor):
                values, said["subclass"] = flatten(tensor, self.name)
                layouts = {key: layout_of(value) for key, value in values.items()}
            else:
                layout, old = layout_of(tensor), getattr(self, "layout", None)
                if old is not None and (layout.shape, layout.dtype) == (old.shape, old.dtype) and not old.overlaps:
                    layout = old
                values, layouts = {self.name: tensor}, {self.name: layout}
            write_values(path, values, layouts, said, durable=self.folder is not None, take=self._take)

    def _take(self, file: TensorFile) -> None:
        """`file` is ours from now on; in a private folder, it is then removed with this handle."""
        old = getattr(self, "layout", None)
        self.part = None
        self._open(file)
        self.generation += old not in (None, self.layout)
        if not self.owned and self.folder is None:
            self._pid = os.getpid()
        self.owned = True

    def _open(self, file: TensorFile) -> None:
        with naming(self.name, file.path):
            recipe = None if self.name in file.header.entries else file.notes.get("subclass")
            entries = [self.part or file.entry(self.name)] if recipe is None else list(file.header.entries.values())
            layout = entries[0].layout if recipe is None else layout_from(recipe)
        self.recipe: Recipe | None = recipe
        if recipe is not None or layout != getattr(self, "layout", None):
            self.meta: torch.Tensor | None = None
        self.layout: Layout = layout
        self.file = file
        self.composed = None
        start = min(entry.start for entry in entries)
        self.extent = start, max(entry.start + entry.layout.nbytes for entry in entries) - start
        self._base = self._addresses = None
        if self.page_state is not None:
            self.page_state.begin_anew()

    # Reading

    def base(self) -> torch.Tensor:
        """The whole value as a plain CPU tensor over the mapped file. Reads nothing; must not be written to.

        A composed value is computed, which reads all of it.

        Raises:
            MissingFileError, ChangedFileError, CorruptFileError: the file has changed.
            ReadError: it can't be read at the moment.
        """
        if (composed := self.composed) is not None:
            return composed.value()
        file, base = self.file, self._base  # in this order: a file older than its base is checked again
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

    def _map(self) -> torch.Tensor:
        with self._lock, naming(self.name), no_functions(), no_modes():
            if not self.owned:
                self.file.check()
            self._base = base = self._map_owned() if self.owned else self._mapped()
        if self.owned:
            _keep_mapped(self)
        return base

    def _map_owned(self) -> torch.Tensor:
        """Map whatever is at the path now; another process may replace it between our look and our mapping."""
        for _ in range(_MOST_LOOKS):
            self._follow()
            with suppress(ChangedFileError):
                return self._mapped()
        raise ChangedFileError(f"{self.path} is replaced faster than it can be mapped: try again")

    def _mapped(self) -> torch.Tensor:
        if self.recipe is None:
            return self.file.tensor(self.entry, shared=self.owned)
        parts = {key: self.file.tensor(entry, shared=self.owned) for key, entry in self.file.entries.items()}
        with naming(self.name, self.file.path):
            return unflatten(parts, self.recipe, self.name)

    def _follow(self) -> None:
        """Another process may have put a new value at our path: switch to it if it has the same layout."""
        if self.file.is_raw:  # there is no header to say what another file would hold
            now, known = TensorFile.raw(self.path, self.file.entry(self.name)).identity, self.file.identity
            if (now.inode, now.size) != (known.inode, known.size):
                raise ChangedFileError(f"{self.path} is not the file that was opened: open it again")
            return
        if self.file.is_current():
            return
        file = TensorFile.open(self.file.path)
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

    def another_base(self) -> torch.Tensor:
        """Like `base`, but a new tensor object over the file."""
        base = self.base()
        if self.composed is not None:
            return base if self.recipe is None else with_inner(base, lambda inner: inner)
        with no_functions(), no_modes():
            return self._mapped()

    def pointers(self) -> torch.UntypedStorage:
        """The value's bytes as a new storage, for code that tells tensors apart by address.

        For a composed value, reserved addresses that can't be read; for a subclass, those of one inner tensor.
        """
        if self.composed is not None:
            with self._lock:
                if self._addresses is None:
                    self._addresses = addresses(self.layout.nbytes)
                return self._addresses
        self.base()
        entry = self.entry if self.recipe is None else next(iter(self.file.entries.values()))
        return self.file.storage(entry, shared=self.owned)

    def unmap(self) -> None:
        """Drop the mapping; it is created again on demand."""
        self._base = None
        self.file.unmap()

    # Writing

    def writable_base(self) -> torch.Tensor:
        """Like `base`, but stores into it go to the file."""
        if not self.owned:
            self._own()
        if self.has_holes:
            self._fill_holes()
        return self.base()

    def _own(self) -> None:
        with self._lock:
            if self.owned:
                return
            source = self.path
            self._copy_to(self)
            log.debug("%r is to be written: it is copied from %s to %s", self.name, source, self.path)

    def take_up(self, mark: str) -> bool:
        """Switch to the file in the named folder in which a composed value with this mark was stored, if there is one.

        Raises:
            ReadError: it can't be read at the moment.
        """
        assert self.folder is not None
        try:
            file = TensorFile.open(self.folder / file_name(self.name))
        except (MissingFileError, CorruptFileError, CheckpointError):
            return False
        if not file.is_ours or file.notes.get(_MADE_OF) != mark or file.path.is_symlink():
            return False
        with self._lock:
            self._open(file)
        return True

    def has_stored(self) -> bool:
        """Whether the named folder has a file in which a composed value of this name was stored, with any mark."""
        assert self.folder is not None
        with suppress(MissingFileError, CorruptFileError, CheckpointError):
            return _MADE_OF in TensorFile.open(self.folder / file_name(self.name)).notes
        return False

    def put_down(self, mark: str) -> None:
        """Compute a composed value once, store it in its file in the named folder, and refer to that from then on.

        That file is never written to: a first write replaces it and drops the mark.

        Raises:
            WriteError, NameInUseError, ForeignFileError, and as `base`.
        """
        composed, other = self.composed, Handle(self.name, self.folder)
        assert isinstance(composed, InBlocks)
        with other._new({self.name: self.layout}, {_MADE_OF: mark}) as (fd, head), no_functions(), no_modes():
            write_blocks(fd, head.start(self.name), composed.blocks())
        with self._lock:
            self._open(TensorFile.open(other.path))

    def _copy_to(self, other: Handle) -> None:
        """Give `other` this value, from file to file."""
        composed = self.composed
        if isinstance(composed, InBlocks):
            with other._new({other.name: self.layout}) as (fd, head), no_functions(), no_modes():
                write_blocks(fd, head.start(other.name), composed.blocks())
            return
        if composed is not None:
            other.replace(composed.value())
            return
        with self._lock:
            self.base()
            with naming(self.name):
                entries = [self.entry] if self.recipe is None else list(self.file.entries.values())
            settled, more = not self.owned, None if self.recipe is None else {"subclass": self.recipe}
            with other._new({entry.key: entry.layout for entry in entries}, more) as (fd, head):
                copy_entries(self.file, entries, fd, head, settled=settled)

    def _fill_holes(self) -> None:
        """Reserve missing blocks: a store into a hole on a full disk would kill the process."""
        with self._lock, naming(self.name), writing(self.path, self.file.identity.size, "offload_dir"):
            with closed_after(self.file.descriptor(os.O_RDWR, settled=False)) as fd:
                fill_holes(fd, self.file.identity.size)
            self.has_holes = False

    def replace(self, tensor: torch.Tensor, notes: Notes = None) -> None:
        """Make `tensor` (of any shape and dtype) the whole value, atomically; `notes` go into the file's header.

        Raises:
            WriteError, ForeignFileError, NameInUseError: the old value is kept.
            UnsupportedOpError: the file may only be written in place.
        """
        if self.is_fixed:
            raise UnsupportedOpError(
                f"{self.name!r} is in a file that others write in place ({self.path}: a column of a cache, or a leaf "
                "of a memmap folder): write rows of the cache, or copy_ to the tensor"
            )
        with self._lock, self._claimed() as path:
            self._write(path, tensor, notes)

    def take_over(self, file: TensorFile) -> None:
        """Continue with a file of ours that is where the first write would put one.

        Raises:
            NameInUseError: a live tensor is stored there.
        """
        with self._lock, self._claimed():
            self._take(file)

    def clear(self, layout: Layout, parts: Iterable[tuple[int, torch.Tensor]] = ()) -> None:
        """Make the value zeros with `layout`, like `allocate`. Existing views become stale in any case.

        `parts` are the non-zero parts: plain tensors, each with its byte offset in the value.

        Raises:
            WriteError: the old value is kept.
        """
        with self._lock, self._new({self.name: layout}, take=self._take_anew) as (fd, head):
            write_zeros(fd, head)
            for begin, part in parts:
                write_tensor(fd, head.start(self.name) + begin, part)

    def _take_anew(self, file: TensorFile) -> None:
        """Like `_take`, and existing views become stale."""
        self._take(file)
        self.generation += 1

    def flush(self) -> None:
        """Wait until all writes are on the disk.

        Raises:
            WriteError: the disk failed.
            MissingFileError, ChangedFileError, CorruptFileError: the file has changed.
            ReadError: it can't be opened at the moment.
        """
        if not self.owned:
            return
        self.base()
        with naming(self.name):
            with closed_after(self.file.descriptor(settled=False)) as fd:
                try:
                    os.fsync(fd)
                except OSError as error:
                    reason = f"what was written may not be on the disk ({error.strerror}): write it again, elsewhere"
                    raise WriteError(error.errno, reason, str(self.path)) from error
            if self.file.lost_writes:
                reason = "something that was written did not reach the disk: write it again, elsewhere"
                raise WriteError(errno.EIO, reason, str(self.path))

    def duplicate(self) -> Handle:
        """An independent copy, made from file to file in a private folder; for a composed value, another composed one.

        Raises:
            WriteError, and as `base`.
        """
        if self.composed is not None:  # its sources are never written to
            return self.elsewhere(None)
        copy = Handle(self.name, None)
        self._copy_to(copy)
        return copy

    # The end

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():  # the private folder is gone already, and module globals may be gone, too
            return
        _MAPPED.pop(id(self), None)
        if getattr(self, "_pid", 0) == os.getpid():
            discard(self.file.path)


def _folder_for(name: str, offload_dir: str | os.PathLike[str] | None) -> Path | None:
    file_name(name)  # refuses an invalid name before anything is done with it
    with naming(name):
        return None if offload_dir is None else named_folder(offload_dir)


def _keep_mapped(handle: Handle) -> None:
    """Record a mapping, and drop the oldest when there are too many."""
    with _LOCK:
        _MAPPED.pop(id(handle), None)
        _MAPPED[id(handle)] = weakref.ref(handle)
        while len(_MAPPED) > MOST_MAPPINGS:
            found = _MAPPED.pop(next(iter(_MAPPED)))()
            if found is not None:
                found.unmap()


_LOCK = fork_safe_lock()
_MAPPED: dict[int, weakref.ref[Handle]] = {}  # by `id`, oldest mapping first; a handle removes itself when it dies
