"""What a stored value is: bytes in somebody else's file, bytes in a file of ours, or computed from other values.

Always true:
- a source never changes: a handle switches from one to another in one assignment
- `map` maps the file whose header was read, or raises; it reads nothing, and never creates or extends a file
- only an owned source is mapped shared; a store into any other mapping does not reach the file
- a composed source has no file of its own: its value is computed from other values at each read
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import torch

from offload.storage.file import TensorFile
from offload.storage.layout import Entry, Layout
from offload.storage.subclasses import SubclassSpec, layout_from, unflatten
from offload.system.reasons import naming

if TYPE_CHECKING:
    from offload.storage.handle import Handle

_CPU = torch.device("cpu")
MADE_OF = "made of"  # a note in the file that stores a composed value: of what


class Composition(ABC):
    """A value that is computed at each read from other stored values, which must not be written to.

    Attributes:
        layout: of the computed value.
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

    def stands(self, _: torch.Tensor, /) -> bool:
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
