"""A tensor subclass that is rebuilt over its inner tensors, in the files where these lie.

Always true:
- nothing is copied: the inner tensors are views of their files
- it is rebuilt once, and again only where a file is mapped anew
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from offload.prefetch.engine import brought_in
from offload.storage.modes import no_functions, no_modes
from offload.storage.reasons import naming
from offload.storage.subclasses import layout_from, unflatten
from offload.tensor.guests import uncut
from offload.tensor.recipes import Digest, Piece, Recipe


class Rebuilt(Recipe):
    """A tensor subclass over its inner tensors where these lie: nothing is copied.

    Args:
        name: of the value.
        pieces: the inner tensors, each whole in a file, by key; and
        recipe: how it is rebuilt from them, as `flatten` gives both.
    """

    __slots__ = ("_keys", "_made", "_name", "recipe")

    def __init__(self, name: str, pieces: Mapping[str, Piece], recipe: dict[str, Any]) -> None:
        self.layout = layout_from(recipe)
        self.pieces = tuple(pieces.values())
        self.recipe = recipe
        self._name = name
        self._keys = tuple(pieces)
        self._made: tuple[list[torch.Tensor], torch.Tensor] | None = None  # over which mappings, and what

    def __reduce__(self) -> tuple[Any, ...]:
        return Rebuilt, (self._name, dict(zip(self._keys, self.pieces, strict=True)), self.recipe)

    @property
    def form(self) -> str:
        """As of all recipes: it is in the checkpoint as it is."""
        return "referenced"

    def note(self, digest: Digest) -> None:
        """As `Piece.note`."""
        super().note(digest)
        digest.update(repr(self.recipe).encode())

    def value(self, twin: torch.Tensor | None = None) -> torch.Tensor:
        """See `Composed`.

        Raises: as `unflatten`, as `uncut`, and as `Handle.base`.
        """
        bases = [piece.handle.base() for piece in self.pieces]
        for piece in self.pieces:
            brought_in(piece.handle, piece.twin)
        made = self._made
        if made is None or any(now is not before for now, before in zip(bases, made[0], strict=True)):
            with no_functions(), no_modes(), naming(self._name, self.file.path):
                values = dict(zip(self._keys, bases, strict=True))
                self._made = made = bases, unflatten(values, self.recipe or {}, self._name)
        return made[1] if twin is None else uncut(made[1], twin, self._name)
