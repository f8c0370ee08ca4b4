"""One stored value, shared by all tensors that are views of it: in a file of others, in one of ours, or computed.

Always true:
- `base` is the file itself (a mapping), never a copy that could become stale
- what the value is at any moment is its source, which never changes itself: a handle switches from one to another in
  one assignment
- only the file of an owned source is mapped shared; a store into any other mapping does not reach the file
- a process has at most `MOST_MAPPINGS` of our files mapped; one that was unmapped is mapped again on demand
- nothing here writes a file: a value is created, copied at its first write, and replaced in `owning`
- a temporary file is removed with its last user, in the process that created it
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import ClassVar, Protocol, TypeAlias

import torch

from offload.errors import ChangedFileError, WriteError
from offload.storage.file import TensorFile, file_status
from offload.storage.folders import discard
from offload.storage.layout import Entry, Layout
from offload.storage.mapping import addresses
from offload.storage.subclasses import SubclassSpec, layout_from, unflatten
from offload.system.locks import fork_safe_lock
from offload.system.modes import no_functions, no_modes
from offload.system.reasons import naming
from offload.system.regular import absolute

MOST_MAPPINGS = 16_384  # Linux allows 65,530 mappings per process; the rest is for others
_MOST_LOOKS = 100  # retries when another process replaces the file between our look and our mapping
_CPU = torch.device("cpu")
MADE_OF = "made of"  # a note in the file that stores a composed value: of what


class Composition(ABC):
    """A value that is computed at each read from other stored values, which must not be written to.

    Attributes:
        layout: the layout of the computed value.
        subclass: how to rebuild it if it is a tensor subclass; else None.
    """

    __slots__ = ()
    layout: Layout
    subclass: SubclassSpec | None
    extent = (0, 0)
    owned = in_place = has_holes = False

    @property
    def composed(self) -> Composition:
        return self

    @property
    @abstractmethod
    def file(self) -> TensorFile:
        """The file of the first source value."""

    @abstractmethod
    def value(self, view_spec: torch.Tensor | None = None, device: torch.device = _CPU) -> torch.Tensor:
        """The view that a meta tensor describes, or the whole, as a plain tensor: do not write to it or keep it.

        `device`: where it is computed: only what is stored is sent there.
        """

    @abstractmethod
    def reads(self, view_spec: torch.Tensor, /) -> Iterator[tuple[Handle, torch.Tensor]]:
        """The views of stored values from which the view that a meta tensor describes is computed, as they are read."""

    def is_stored_as_is(self, _: torch.Tensor, /) -> bool:
        """Whether the view that a meta tensor describes is stored as is, so that `value` maps it without computing."""
        return False

    def map(self) -> torch.Tensor:
        """The value, computed; all of its sources are read."""
        return self.value()


class InBlocks(Composition):
    """A composed value that is a plain tensor and can be computed in parts."""

    __slots__ = ()

    @abstractmethod
    def blocks(self) -> Iterator[torch.Tensor]:
        """Contiguous plain tensors that make up the whole in layout order; each is valid until the next one."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A value in a file: of others, which must not change and is not written to; or of ours, which holds nothing else.

    Attributes:
        name: its key in the file, or the beginning of the keys of its inner tensors.
        extent: its first byte in the file, and its size.
        part: its place, if it is only a part of the value `name` of others.
        in_place: whether others write to the file in place, so that it must never be replaced.
        has_holes: whether the file may be sparse; its blocks are then reserved before the first store.
    """

    file: TensorFile
    name: str
    layout: Layout
    subclass: SubclassSpec | None
    extent: tuple[int, int]
    owned: bool = False
    part: Entry | None = None
    in_place: bool = False
    has_holes: bool = False

    composed: ClassVar[None] = None

    @classmethod
    def of_others(cls, file: TensorFile, name: str, part: Entry | None = None) -> Stored:
        """Raises `KeyError` if the file has no such value; `CorruptFileError` if torch can't read it."""
        return cls(file, name, *_described(file, name, part), part=part)

    @classmethod
    def of_ours(cls, file: TensorFile, name: str, *, in_place: bool = False) -> Stored:
        """Raises `KeyError` if the file has no such value."""
        return cls(file, name, *_described(file, name), owned=True, in_place=in_place, has_holes=in_place)

    @property
    def entry(self) -> Entry:
        """Its entry in the file; not for a subclass, which has several."""
        return self.part or self.file.entry(self.name)

    @property
    def entries(self) -> list[Entry]:
        """Its entries in the file: one, or those of the inner tensors."""
        return [self.entry] if self.subclass is None else list(self.file.entries.values())

    def bytes(self) -> torch.UntypedStorage:
        """Its bytes as a new storage; for a subclass, those of one inner tensor."""
        return self.file.storage(self.entries[0], shared=self.owned)

    def map(self) -> torch.Tensor:
        """The value as a plain tensor over the mapped file: shared if it is ours, otherwise copy-on-write.

        Raises `MissingFileError`, `CorruptFileError`, `ReadError`; `ChangedFileError` if another file is there by now.
        """
        if not self.owned:
            self.file.check()
        if self.subclass is None:
            return self.file.tensor(self.entry, shared=self.owned)
        parts = {key: self.file.tensor(entry, shared=self.owned) for key, entry in self.file.entries.items()}
        with naming(self.name, self.file.path):
            return unflatten(parts, self.subclass, self.name)


Source: TypeAlias = Stored | Composition


def _described(
    file: TensorFile, name: str, part: Entry | None = None
) -> tuple[Layout, SubclassSpec | None, tuple[int, int]]:
    """The layout of a value in a file, how to rebuild it if it is a tensor subclass, and its extent."""
    entry = part or file.header.entries.get(name)
    if entry is not None:
        return entry.layout, None, (entry.start, entry.layout.nbytes)
    with naming(name, file.path):
        subclass = file.notes.get("subclass")
        if subclass is None:
            raise AssertionError(file.entry(name))  # which raises
        layout, entries = layout_from(subclass), file.entries.values()
    start = min(entry.start for entry in entries)
    return layout, subclass, (start, max(entry.start + entry.layout.nbytes for entry in entries) - start)


class KnownPages(Protocol):
    """What the prefetcher knows about a value's bytes in memory."""

    def begin_anew(self) -> None:
        """The value is in another file now."""


class Access(Enum):
    """How a value is read.

    Attributes:
        TOGETHER: small neighbours in the file are read along.
        APART: it is read alone, as are others in the file.
        PICKED: like `APART`, and it is one of many that are used in no fixed order, such as experts.
    """

    TOGETHER = 0
    APART = 1
    PICKED = 2


class Handle:
    """The value called `name`. Use `reference`, `compose`, `shared`, or the functions in `owning`.

    Attributes:
        folder: the user's folder that writes go to; None for a private one.
        generation: counts changes of the layout, so that views can tell when they are stale.
        meta: a meta tensor of the whole value, created on first use; None until then.
        page_state: what the prefetcher knows about its bytes in memory.
    """

    __slots__ = (
        "__weakref__", "_addresses", "_base", "_own_lock", "_pid",
        "access", "folder", "generation", "meta", "name", "page_state", "source",
    )  # fmt: skip
    source: Source

    def __init__(self, name: str, folder: str | os.PathLike[str] | None, source: Source | None = None) -> None:
        self.name = name
        self.folder = None if folder is None else absolute(folder)
        self.generation = 0
        self.access = Access.TOGETHER
        self.meta: torch.Tensor | None = None
        self.page_state: KnownPages | None = None
        self._base: torch.Tensor | None = None
        self._addresses: torch.UntypedStorage | None = None
        self._own_lock: threading.RLock | None = None
        self._pid = 0  # the process that removes the file with this handle; 0 for none
        if source is not None:
            self.source = source

    @property
    def lock(self) -> threading.RLock:
        """Held while the source is switched. Created on first use: of tens of thousands of experts, few need it."""
        if self._own_lock is None:
            with _LOCK:
                if self._own_lock is None:
                    self._own_lock = fork_safe_lock()
        return self._own_lock

    # The source, as others look at it

    @property
    def file(self) -> TensorFile:
        """Its file; for a composed value, that of its first source."""
        return self.source.file

    @property
    def path(self) -> Path:
        """The path of its file."""
        return self.source.file.path

    @property
    def layout(self) -> Layout:
        """Shape, dtype and strides of the whole value."""
        return self.source.layout

    @property
    def extent(self) -> tuple[int, int]:
        """Its first byte in the file, and its size; our own files hold the value whole."""
        return self.source.extent

    @property
    def subclass(self) -> SubclassSpec | None:
        """How to rebuild it if it is a tensor subclass."""
        return self.source.subclass

    @property
    def is_subclass(self) -> bool:
        return self.source.subclass is not None

    @property
    def owned(self) -> bool:
        """Whether its file is ours to write."""
        return self.source.owned

    @property
    def composed(self) -> Composition | None:
        """How it is computed while it has no file."""
        return self.source.composed

    # Values of others' files

    @classmethod
    def reference(cls, file: TensorFile, key: str, offload_dir: str | os.PathLike[str] | None = None) -> Handle:
        """The value `key` of a file that is left as it is; the first write copies it to `offload_dir`.

        In a file of ours that holds a subclass, the key is the value's name.
        """
        return cls(key, offload_dir, Stored.of_others(file, key))

    @classmethod
    def reference_part(cls, file: TensorFile, part: Entry, offload_dir: str | os.PathLike[str] | None = None) -> Handle:
        """Like `reference`, for a part of the value `part.key`: the rest is neither read, counted nor copied."""
        source = Stored.of_others(file, part.key, part)
        handle = cls(part.key, offload_dir, source)
        handle.read_apart()
        return handle

    @classmethod
    def compose(cls, composed: Composition, name: str, offload_dir: str | os.PathLike[str] | None = None) -> Handle:
        """A value that is computed at each read; its first write stores it in `offload_dir`."""
        return cls(name, offload_dir, composed)

    @classmethod
    def shared(cls, file: TensorFile, name: str, folder: Path | None, *, in_place: bool = False) -> Handle:
        """A value that another process owns; both write to one file. `in_place`: see `Stored`."""
        return cls(name, folder, Stored.of_ours(file, name, in_place=in_place or file.is_raw))

    def elsewhere(self, offload_dir: str | os.PathLike[str] | None) -> Handle:
        """The same value (not ours to write), with another folder for its first write."""
        source = Stored.of_others(self.file, self.name) if self.owned else self.source
        handle = Handle(self.name, offload_dir, source)
        handle.access = self.access
        return handle

    def read_apart(self, access: Access = Access.APART) -> None:
        """From now on, reads of it and of others in its file don't include their neighbours."""
        self.access = access
        self.file.is_picked_from = True

    # Reading

    def base(self) -> torch.Tensor:
        """The whole value as a plain CPU tensor over the mapped file, which must not be written to.

        Reads nothing; but a composed value is computed. Raises `MissingFileError`, `ChangedFileError`,
        `CorruptFileError` if the file has changed; `ReadError` if it can't be read at the moment.
        """
        source, base = self.source, self._base  # in this order: see `set_source`
        if base is not None:
            file = source.file
            try:
                status = os.stat(file.path)
            except OSError:
                return self._map()
            known = file.identity
            if (
                status.st_ino == known.inode
                and status.st_size == known.size
                and (source.owned or status.st_mtime_ns == known.modified)
            ):
                return base
        elif source.composed is not None:
            return source.map()
        return self._map()

    def _map(self) -> torch.Tensor:
        with self.lock, naming(self.name), no_functions(), no_modes():
            self._base = base = self._map_owned() if self.source.owned else self.source.map()
        if self.source.owned:
            with _LOCK:
                _MAPPED.pop(id(self), None)
                _MAPPED[id(self)] = weakref.ref(self)
                while len(_MAPPED) > MOST_MAPPINGS:
                    oldest = _MAPPED.pop(next(iter(_MAPPED)))()
                    if oldest is not None:
                        oldest.unmap()
        return base

    def _map_owned(self) -> torch.Tensor:
        """Map whatever is at the path now; another process may replace it between our look and our mapping."""
        for _ in range(_MOST_LOOKS):
            self._follow()
            with suppress(ChangedFileError):
                return self.source.map()
        raise ChangedFileError(f"{self.path} is replaced faster than it can be mapped: try again")

    def _follow(self) -> None:
        """Another process may have put a new value at our path: switch to it if it has the same layout."""
        source = self.source
        assert isinstance(source, Stored)
        file = source.file
        if file.is_raw:  # there is no header to say what another file would hold
            now, known = TensorFile.raw(file.path, source.entry).identity, file.identity
            if (now.inode, now.size) != (known.inode, known.size):
                raise _another(file)
            return
        if source.in_place and file_status(file.path).st_ino != file.identity.inode:  # nobody replaces it
            raise _another(file)
        if file.is_current():
            return
        newer = TensorFile.open(file.path)
        if newer is file:
            return
        if not newer.is_ours:
            raise ChangedFileError(f"{file.path} was replaced by a file that offload did not write")
        try:
            self.set_source(Stored.of_ours(newer, self.name, in_place=source.in_place))
        except KeyError as error:
            raise ChangedFileError(f"{file.path} now holds another tensor: {error.args[0]}") from error
        if self.layout != source.layout:
            raise ChangedFileError(f"{file.path} now holds {self.layout}, not {source.layout}: open it again")

    def pointers(self) -> torch.UntypedStorage:
        """The value's bytes as a new storage, for code that tells tensors apart by address.

        For a composed value, reserved addresses that can't be read; for a subclass, those of one inner tensor.
        """
        if self.composed is not None:
            with self.lock:
                if self._addresses is None:
                    self._addresses = addresses(self.layout.nbytes)
                return self._addresses
        self.base()
        source = self.source
        assert isinstance(source, Stored)
        return source.bytes()

    def unmap(self) -> None:
        """Drop the mapping; it is created again on demand."""
        self._base = None
        self.file.unmap()

    # Switching to another source, under the lock

    def set_source(self, source: Source) -> None:
        """The value is there from now on. Views become stale if its layout is another one."""
        old: Source | None = getattr(self, "source", None)
        is_alike = old is not None and source.layout == old.layout
        if source.subclass is not None or not is_alike:
            self.meta = None
        self.generation += old is not None and not is_alike
        self._base = self._addresses = None  # before the source: with a new source, nobody finds an old mapping
        self.source = source
        if self.page_state is not None:
            self.page_state.begin_anew()

    def own(self, file: TensorFile) -> None:
        """The value is in `file`, which is ours, from now on; in a private folder, it is removed with this handle."""
        was_owned = hasattr(self, "source") and self.source.owned
        self.set_source(Stored.of_ours(file, self.name))
        if not was_owned and self.folder is None:
            self._pid = os.getpid()  # after the source: the file that is removed is never another one

    # The end

    def flush(self) -> None:
        """Wait until all writes are on the disk.

        Raises `WriteError` if the disk failed; and as `Handle.base`.
        """
        if not self.owned:
            return
        self.base()
        with naming(self.name):
            with self.file.descriptor(settled=False) as opened:
                try:
                    os.fsync(opened)
                except OSError as error:
                    reason = f"written data may not be on the disk ({error.strerror}): write it again, elsewhere"
                    raise WriteError(error.errno, reason, str(self.path)) from error
            if self.file.lost_writes:
                reason = "written data did not reach the disk: write it again, elsewhere"
                raise WriteError(errno.EIO, reason, str(self.path))

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():  # the private folder is gone already, and module globals may be gone, too
            return
        _MAPPED.pop(id(self), None)
        if getattr(self, "_pid", 0) == os.getpid():
            discard(self.path)


def _another(file: TensorFile) -> ChangedFileError:
    return ChangedFileError(f"{file.path} is not the file that was opened: open it again")


_LOCK = fork_safe_lock()
_MAPPED: dict[int, weakref.ref[Handle]] = {}  # by `id`, oldest mapping first; a handle removes itself when it dies
