"""What stands in a file for a value, seen through a mapping, whoever puts another there.

Always true:
- `base` is the file itself (a mapping), never a copy that could grow stale
- a process has at most `MOST_MAPPINGS` files of ours mapped; one that was let go comes back when it is asked for
- a temporary file goes with the last that knows it, in the process that made it
"""

from __future__ import annotations

import os
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from offload.errors import ChangedFileError
from offload.storage.file import TensorFile
from offload.storage.folders import discard
from offload.storage.header import Layout, extent_of
from offload.storage.locks import fork_safe_lock
from offload.storage.modes import no_functions, no_modes
from offload.storage.naming import naming
from offload.storage.subclasses import Recipe, layout_from, unflatten

MOST_MAPPINGS = 16_384  # Linux allows a process 65,530 mappings; the rest is for others
_MOST_LOOKS = 100  # at a file that another process replaces between each look and the mapping of what was seen


class Stored:
    """The value called `name`, to be read. `Handle` makes and writes it.

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
        self._lock = fork_safe_lock()
        self.ranges: dict[tuple[int, int], Any] = {}
        self.copies: dict[torch.device, Any] = {}
        self.pool: Any = None
        self._pid = 0  # the process that removes the file with this handle; 0 for nobody

    @property
    def path(self) -> Path:
        """Of its file."""
        return self.file.path

    @property
    def is_subclass(self) -> bool:
        return self.recipe is not None

    def base(self) -> torch.Tensor:
        """The whole value as a plain CPU tensor over the mapped file. Reads nothing; must not be written to.

        Raises:
            MissingFileError, ChangedFileError, CorruptFileError: the file is not what it was.
            ReadError: it can't be read now.
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
        with no_functions(), no_modes():
            return self._mapped()

    def pointers(self) -> torch.UntypedStorage:
        """The value's bytes as a storage of their own, for those who tell tensors apart by address."""
        self.base()
        return self.file.storage(self.file.entry(self.name), shared=self.owned)

    def unmap(self) -> None:
        """Let go of the mapping; it comes back when it is asked for."""
        self._base = None
        self.file.unmap()

    def _map(self) -> torch.Tensor:
        with self._lock, naming(self.name), no_functions(), no_modes():
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
            return self.file.tensor(self.name, shared=self.owned)
        parts = {key: self.file.tensor(key, shared=self.owned) for key in self.file.entries}
        with naming(self.name, self.file.path):
            return unflatten(parts, self.recipe, self.name)

    def _follow(self) -> None:
        """Another process may have put a new value at our path: take it, if it has the same layout."""
        if self.file.is_raw:
            self._refuse_another_raw()
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

    def _refuse_another_raw(self) -> None:
        """A file without a header does not tell what it holds: another one may be of anything."""
        now, known = TensorFile.raw(self.file.path, self.file.entry(self.name)).identity, self.file.identity
        if (now.inode, now.size) != (known.inode, known.size):
            raise ChangedFileError(f"{self.path} is another file than the one that was opened: open it again")

    def _open(self, file: TensorFile) -> None:
        with naming(self.name, file.path):
            recipe = file.notes.get("subclass") if self.name not in file.entries else None
            layout = file.entry(self.name).layout if recipe is None else layout_from(recipe)
        self.recipe: Recipe | None = recipe
        if recipe is not None or layout != getattr(self, "layout", None):
            self.twin: torch.Tensor | None = None
        self.layout: Layout = layout
        self.file = file
        self.extent = extent_of(file.entries.values() if recipe else [file.entry(self.name)])
        self._base = None
        known, self.ranges = self.ranges, {}
        for extent in list(known.values()):
            extent.calm_until = 0.0  # who holds on to one asks again
        self.copies = {}

    def __del__(self) -> None:
        if sys.is_finalizing():  # the private folder went as a whole; modules go now
            return
        _MAPPED.pop(id(self), None)
        if getattr(self, "_pid", 0) == os.getpid():
            discard(self.file.path)


def _keep_mapped(handle: Stored) -> None:
    """Count a mapping, and drop the oldest when there are too many."""
    with _LOCK:
        _MAPPED.pop(id(handle), None)
        _MAPPED[id(handle)] = weakref.ref(handle)
        while len(_MAPPED) > MOST_MAPPINGS:
            found = _MAPPED.pop(next(iter(_MAPPED)))()
            if found is not None:
                found.unmap()


_LOCK = fork_safe_lock()
_MAPPED: dict[int, weakref.ref[Stored]] = {}  # by `id`, the oldest mapping first; a handle that dies leaves it
