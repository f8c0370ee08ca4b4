"""Tensor subclasses rebuilt over inner tensors that stay in their files.

Always true:
- nothing is copied: the inner tensors are views of their files
- a value is rebuilt once, and again only if a file has been mapped anew
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from offload.annotations import Digest
from offload.prefetch.engine import ensure_resident
from offload.storage.subclasses import layout_from, unflatten
from offload.system.modes import no_functions, no_modes
from offload.system.reasons import naming
from offload.tensor.guests import CPU
from offload.tensor.recipes import Piece, Recipe
from offload.tensor.views import uncut


class Rebuilt(Recipe):
    """A tensor subclass over inner tensors that stay in their files: nothing is copied.

    Args:
        name: of the value.
        pieces: the inner tensors by key, each a whole value of a file; and
        subclass: how to rebuild it from them; `flatten` returns both.
    """

    __slots__ = ("_keys", "_made", "_name", "subclass")

    def __init__(self, name: str, pieces: Mapping[str, Piece], subclass: dict[str, Any]) -> None:
        self.layout = layout_from(subclass)
        self.pieces = tuple(pieces.values())
        self.subclass = subclass
        self._name = name
        self._keys = tuple(pieces)
        self._made: tuple[list[torch.Tensor], torch.Tensor] | None = None  # the mappings, and the result

    def __reduce__(self) -> tuple[object, ...]:
        return Rebuilt, (self._name, dict(zip(self._keys, self.pieces, strict=True)), self.subclass)

    @property
    def form(self) -> str:
        """See `Recipe`: it is stored in the checkpoint as is."""
        return "referenced"

    def note(self, digest: Digest) -> None:
        """As `Piece.note`."""
        super().note(digest)
        digest.update(repr(self.subclass).encode())

    def value(self, view_spec: torch.Tensor | None = None, device: torch.device = CPU) -> torch.Tensor:
        """See `Composition`."""
        if device != CPU:
            with no_functions(), no_modes(), naming(self._name, self.file.path):
                sent = [piece.value(device=device) for piece in self.pieces]
                made_there = unflatten(dict(zip(self._keys, sent, strict=True)), self.subclass or {}, self._name)
                return made_there if view_spec is None else uncut(made_there, view_spec, self._name)
        bases = [piece.handle.base() for piece in self.pieces]
        for piece in self.pieces:
            ensure_resident(piece.handle, piece.view_spec)
        noted = self._made
        if noted is None or any(now is not before for now, before in zip(bases, noted[0], strict=True)):
            with no_functions(), no_modes(), naming(self._name, self.file.path):
                values = dict(zip(self._keys, bases, strict=True))
                self._made = noted = bases, unflatten(values, self.subclass or {}, self._name)
        return noted[1] if view_spec is None else uncut(noted[1], view_spec, self._name)
