"""One stored value, shared by all the tensors that are views of it.

Always true:
- `base` is the file itself (a mapping), never a copy that could grow stale
- a process has at most `MOST_MAPPINGS` files of ours mapped; one that was let go comes back when it is asked for
- what is written goes to a file of ours: a referenced file is copied to one before the first write
- a composed value has no file before its first write: it is carried out from others at each read
- a value is replaced whole, or keeps the one that it has
- a temporary file goes with the last that knows it, in the process that made it
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

MOST_MAPPINGS = 16_384  # Linux allows a process 65,530 mappings; the rest is for others
_MOST_LOOKS = 100  # at a file that another process replaces between each look and the mapping of what was seen

_MADE_OF = "made of"  # the note in a file that a composed value was stored in; a write leaves it out

Notes: TypeAlias = "Mapping[str, Any] | None"


class Books(Protocol):
    """What is known of the bytes of a value in memory, by those who read ahead."""

    def begin_anew(self) -> None:
        """The value is in another file now."""


class Composed(Protocol):
    """How a value is carried out from others, which are stored and which nobody writes to.

    Attributes:
        layout: that it has once it is carried out.
        recipe: how a tensor subclass is rebuilt, if it is one; else None.
    """

    layout: Layout
    recipe: Recipe | None

    @property
    def file(self) -> TensorFile:
        """The file of the first of these values."""

    def value(self, twin: torch.Tensor | None = None) -> torch.Tensor:
        """What a meta tensor cuts out of it, or all, as a plain tensor: not to be written to, nor kept."""

    def reads(self, twin: torch.Tensor) -> Iterator[tuple[Handle, torch.Tensor]]:
        """The views of stored values that what a meta tensor cuts out of it is carried out from, as they are read."""

    def stands(self, twin: torch.Tensor, /) -> bool:
        """Whether what a meta tensor cuts out of it is in a file as it reads, so that `value` is over that."""


@runtime_checkable
class InBlocks(Composed, Protocol):
    """One whose value is a plain tensor, which can be carried out in parts."""

    def picked(self, twin: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Some rows of what a meta tensor cuts out of it, by their sorted numbers, as a tensor of their own."""

    def blocks(self) -> Iterator[torch.Tensor]:
        """Contiguous plain tensors that make up the whole, as its layout orders them; each is good until the next."""


class Handle:
    """The value called `name`. Use `create`, `allocate`, `reference`, `compose` or `adopt`.

    Attributes:
        name: the tensor's name; its key in the file.
        folder: the user's folder that writes go to; None for a private one.
        layout: shape, dtype and strides of the whole value.
        extent: where the value is in its file: the first byte, and how many.
        part: where in the file it is, if it is a part of a value there; not of a file of ours, which has it whole.
        generation: counts changes of `layout`, so that views can tell that they are stale.
        owned: whether `file` is ours to write.
        composed: how it is carried out, while it has no file; `file` is then one of those that it is carried out from.
        twin: a meta tensor of this layout, kept for those who need one; None until somebody does.
        books: what is known of its bytes in memory; kept for those who read ahead.
        has_holes: whether the file may lack blocks on the disk, which are then reserved before it is stored into.
        is_apart: whether it is read without its neighbours.
        is_picked: whether it is one of many that are picked in no order, such as experts.
        is_fixed: whether others write to the file in place, so that it is never to be replaced.
    """

    __slots__ = (
        "__weakref__",
        "_addresses",
        "_base",
        "_own_lock",
        "_pid",
        "books",
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
        "name",
        "owned",
        "part",
        "recipe",
        "twin",
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
        self.books: Books | None = None
        self._pid = 0  # the process that removes the file with this handle; 0 for nobody

    @property
    def _lock(self) -> threading.RLock:
        """Made when it is first asked for: most of the tens of thousands of experts of a model never are."""
        if self._own_lock is None:
            with _LOCK:
                if self._own_lock is None:
                    self._own_lock = fork_safe_lock()
        return self._own_lock

    @property
    def path(self) -> Path:
        """Of its file."""
        return self.file.path

    @property
    def entry(self) -> Entry:
        """Where its file has it; not for a subclass, which takes several."""
        return self.part or self.file.entry(self.name)

    @property
    def is_subclass(self) -> bool:
        return self.recipe is not None

    @property
    def was_stored(self) -> bool:
        """Whether it was carried out from others, and stored so."""
        return not self.owned and self.composed is None and _MADE_OF in self.file.notes

    # How it begins

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
        """A new file that holds the value of a plain tensor, or of a wrapper subclass; `notes` go into its header.

        Args:
            exist_ok: whether a file that an earlier tensor left under that name is replaced.

        Raises:
            NameInUseError, ForeignFileError, WriteError, UnknownSubclassError
        """
        handle = cls(name, _folder_for(name, offload_dir))
        with handle._claimed(exist_ok=exist_ok) as path:
            handle._write(path, tensor, notes)
        return handle

    @classmethod
    def passing(cls, tensor: torch.Tensor, name: str, root: Path | None) -> Handle:
        """As `create`, in a private folder below `root`: the file goes with this handle, whatever happens.

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
        """A new file whose value comes in contiguous plain tensors on the CPU, as `layout` orders them.

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
        """A new file whose value reads as zeros; takes disk, but neither memory nor time. `exist_ok`: as `create`.

        Raises:
            NameInUseError, ForeignFileError, WriteError
        """
        handle = cls(name, _folder_for(name, offload_dir))
        with handle._new({name: layout}, exist_ok=exist_ok) as (fd, head):
            write_zeros(fd, head)
        return handle

    @classmethod
    def reference(cls, file: TensorFile, key: str, offload_dir: str | os.PathLike[str] | None = None) -> Handle:
        """The value `key` of a file that stays as it is; a first write copies it to `offload_dir`.

        A file of ours that holds a subclass is referenced by the value's name. A value that no tensor can be over where
        it lies is copied there at once.
        """
        if key in file.header.loose:
            return cls._copied_out(file, file.header.loose[key], offload_dir)
        handle = cls(key, None if offload_dir is None else absolute(offload_dir))
        handle._open(file)
        return handle

    @classmethod
    def reference_part(cls, file: TensorFile, part: Entry, offload_dir: str | os.PathLike[str] | None = None) -> Handle:
        """As `reference`, of a part of the value `part.key`: the rest is neither read, counted nor copied."""
        handle = cls(part.key, None if offload_dir is None else absolute(offload_dir))
        handle.part = part
        handle._open(file)
        handle.read_apart()
        return handle

    @classmethod
    def compose(cls, composed: Composed, name: str, offload_dir: str | os.PathLike[str] | None = None) -> Handle:
        """A value that is carried out at each read; its first write puts it into a file in `offload_dir`."""
        handle = cls(name, None if offload_dir is None else absolute(offload_dir))
        handle.composed = composed
        handle.recipe, handle.twin = composed.recipe, None
        handle.layout, handle.file, handle.extent = composed.layout, composed.file, (0, 0)
        return handle

    def read_apart(self) -> None:
        """Neither it nor others in its file are read with their neighbours."""
        self.is_apart = self.file.is_picked_from = True

    def elsewhere(self, offload_dir: str | os.PathLike[str] | None) -> Handle:
        """The same value, which is not ours to write, with another folder for its first write."""
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
        """The value of a file of ours in a folder of the user's, opened again to be written to.

        Raises:
            NameInUseError: a live tensor is stored there.
            ForeignFileError: `offload` did not write that file, or a link is in its place.
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
        """A value that another process owns; both write to the one file: in place alone, if that has no header."""
        handle = cls(name, folder)
        handle._open(file)
        handle.owned = True
        handle.is_fixed = handle.has_holes = file.is_raw
        return handle

    @contextmanager
    def _claimed(self, root: Path | None = None, *, exist_ok: bool = True, alike: bool = False) -> Iterator[Path]:
        """The path to write to, in a private folder below `root` if in none of the user's; given back for nothing.

        `alike` says that all ranks write the same there.
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
        """As `new_values`, of this value; `more` are notes beside its name."""
        notes, durable = {"name": self.name, **(more or {})}, self.folder is not None
        with (
            self._claimed(exist_ok=exist_ok, alike=_MADE_OF in notes) as path,
            naming(self.name),
            new_values(path, layouts, notes, durable=durable, take=take or self._take) as new,
        ):
            yield new

    def _write(self, path: Path, tensor: torch.Tensor, notes: Notes) -> None:
        """Write the whole value; one that differs in no shape and dtype lies as the old one did."""
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
        """`file` is ours from now on; if it was not, and is in a private folder, it goes with this handle."""
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
            self.twin: torch.Tensor | None = None
        self.layout: Layout = layout
        self.file = file
        self.composed = None
        start = min(entry.start for entry in entries)
        self.extent = start, max(entry.start + entry.layout.nbytes for entry in entries) - start
        self._base = self._addresses = None
        if self.books is not None:
            self.books.begin_anew()

    # To be read

    def base(self) -> torch.Tensor:
        """The whole value as a plain CPU tensor over the mapped file. Reads nothing; must not be written to.

        One that is composed is carried out: that reads all of it.

        Raises:
            MissingFileError, ChangedFileError, CorruptFileError: the file is not what it was.
            ReadError: it can't be read now.
        """
        if (composed := self.composed) is not None:
            return composed.value()
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

    def _map(self) -> torch.Tensor:
        with self._lock, naming(self.name), no_functions(), no_modes():
            if not self.owned:
                self.file.check()
            self._base = base = self._map_owned() if self.owned else self._mapped()
        if self.owned:
            _keep_mapped(self)
        return base

    def _map_owned(self) -> torch.Tensor:
        """Whatever value stands at the path now: another process may replace it again before it is mapped."""
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
        """Another process may have put a new value at our path: take it, if it has the same layout."""
        if self.file.is_raw:  # without a header it does not tell what it holds: another one may be of anything
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
        """As `base`, but a tensor of one's own over the file."""
        base = self.base()
        if self.composed is not None:
            return base if self.recipe is None else with_inner(base, lambda inner: inner)
        with no_functions(), no_modes():
            return self._mapped()

    def pointers(self) -> torch.UntypedStorage:
        """The value's bytes as a storage of their own, for those who tell tensors apart by address.

        Of a composed value it has the addresses alone: nothing can be read from it. Of a subclass, one inner tensor.
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
        """Let go of the mapping; it comes back when it is asked for."""
        self._base = None
        self.file.unmap()

    # To be written

    def writable_base(self) -> torch.Tensor:
        """As `base`, but what is stored into it is stored in the file."""
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
        """Refer to the file in the named folder that a composed value of this mark was stored in, if it is there.

        Raises:
            ReadError: it can't be looked at now.
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
        """Whether the named folder has a file that a composed value of this name was stored in, of whatever mark."""
        assert self.folder is not None
        with suppress(MissingFileError, CorruptFileError, CheckpointError):
            return _MADE_OF in TensorFile.open(self.folder / file_name(self.name)).notes
        return False

    def put_down(self, mark: str) -> None:
        """Carry a composed value out once, into its file in the named folder, which is referred to from then on.

        Nobody writes to that file: a first write replaces it, and takes the mark away.

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
        """Make it the value of `other`, from file to file."""
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
        """A store into a hole of a full disk would end the process."""
        with self._lock, naming(self.name), writing(self.path, self.file.identity.size, "offload_dir"):
            with closed_after(self.file.descriptor(os.O_RDWR, settled=False)) as fd:
                fill_holes(fd, self.file.identity.size)
            self.has_holes = False

    def replace(self, tensor: torch.Tensor, notes: Notes = None) -> None:
        """Make `tensor` (of any shape and dtype) the whole value, atomically; `notes` go into the file's header.

        Raises:
            WriteError, ForeignFileError, NameInUseError: the old value stands.
            UnsupportedOpError: the file is written in place only.
        """
        if self.is_fixed:
            raise UnsupportedOpError(
                f"{self.name!r} is in a file that others write in place ({self.path}: a column of a cache, or a leaf "
                "of a memmap folder): write rows of the cache, or copy_ to the tensor"
            )
        with self._lock, self._claimed() as path:
            self._write(path, tensor, notes)

    def take_over(self, file: TensorFile) -> None:
        """Go on from a file of ours that stands where the first write would put one.

        Raises:
            NameInUseError: a live tensor is stored there.
        """
        with self._lock, self._claimed():
            self._take(file)

    def clear(self, layout: Layout, parts: Iterable[tuple[int, torch.Tensor]] = ()) -> None:
        """Make the value zeros of `layout`, as `allocate` does. Views that were cut before are stale, in any case.

        `parts` are what is not to be zero: plain tensors, each with the byte of the value that it begins at.

        Raises:
            WriteError: the old value stands.
        """
        with self._lock, self._new({self.name: layout}, take=self._take_anew) as (fd, head):
            write_zeros(fd, head)
            for begin, part in parts:
                write_tensor(fd, head.start(self.name) + begin, part)

    def _take_anew(self, file: TensorFile) -> None:
        """As `_take`, and views that were cut before are stale."""
        self._take(file)
        self.generation += 1

    def flush(self) -> None:
        """Wait until what was written is on the disk.

        Raises:
            WriteError: the disk did not take it.
            MissingFileError, ChangedFileError, CorruptFileError: the file is not what it was.
            ReadError: it can't be opened now.
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
        """An independent copy, made from file to file, in a private folder; of a composed value another one.

        Raises:
            WriteError, and as `base`.
        """
        if self.composed is not None:  # nobody writes to what it is carried out from
            return self.elsewhere(None)
        copy = Handle(self.name, None)
        self._copy_to(copy)
        return copy

    # How it ends

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():  # the private folder went as a whole; modules go now, and their names before others
            return
        _MAPPED.pop(id(self), None)
        if getattr(self, "_pid", 0) == os.getpid():
            discard(self.file.path)


def _folder_for(name: str, offload_dir: str | os.PathLike[str] | None) -> Path | None:
    file_name(name)  # refuses what is no name, before anything is done with it
    with naming(name):
        return None if offload_dir is None else named_folder(offload_dir)


def _keep_mapped(handle: Handle) -> None:
    """Count a mapping, and drop the oldest when there are too many."""
    with _LOCK:
        _MAPPED.pop(id(handle), None)
        _MAPPED[id(handle)] = weakref.ref(handle)
        while len(_MAPPED) > MOST_MAPPINGS:
            found = _MAPPED.pop(next(iter(_MAPPED)))()
            if found is not None:
                found.unmap()


_LOCK = fork_safe_lock()
_MAPPED: dict[int, weakref.ref[Handle]] = {}  # by `id`, the oldest mapping first; a handle that dies leaves it
