"""How a value is put together from stored ones: as a recipe, in a file, or in memory.

Always true:
- parts are offloaded tensors or views of them, and cover the whole; nothing is read until the value is needed
- it is put together block by block, whatever its size
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from offload.storage.owning import create_from_blocks
from offload.storage.write import layout_of
from offload.system.modes import no_functions, no_modes
from offload.tensor.guests import copied, mapped_value
from offload.tensor.recipes import Joined, Piece
from offload.tensor.views import handle_of, metadata_of, view_spec_of
from offload.tensor.wrapper import OffloadedTensor, wrap_handle
from offload.torch_api import DisableTorchFunctionSubclass


@dataclass(frozen=True, slots=True)
class ValuePart:
    """A part of a value.

    Attributes:
        source: its numbers: on disk, on the CPU, with as many dimensions as the whole, possibly of another dtype.
        start: the index of its first element in the whole.
    """

    source: OffloadedTensor
    start: tuple[int, ...]

    def moved(self, dim: int, by: int) -> ValuePart:
        return ValuePart(self.source, (*self.start[:dim], self.start[dim] + by, *self.start[dim + 1 :]))


def as_parts(source: OffloadedTensor) -> tuple[ValuePart, ...]:
    """A tensor as its own only part."""
    return (ValuePart(source, (0,) * len(view_spec_of(source).shape)),)


@dataclass(frozen=True, slots=True)
class Assembly:
    """A value to be put together.

    Attributes:
        parts: what it consists of.
        meta: a meta tensor with the shape, dtype and strides of the result.
    """

    parts: tuple[ValuePart, ...]
    meta: torch.Tensor

    def as_it_is(self) -> OffloadedTensor | None:
        """The only part, if its shape, dtype and strides are those of the value; else None."""
        (part, *others) = self.parts
        with DisableTorchFunctionSubclass():
            has, wanted = ((one.shape, one.dtype, one.stride()) for one in (part.source, self.meta))
        return part.source if has == wanted and not others else None

    def steps(self) -> str:
        """What is done to the stored values, in words."""
        with DisableTorchFunctionSubclass():
            dtypes = sorted({str(part.source.dtype) for part in self.parts} - {str(self.meta.dtype)})
            is_turned = len(self.parts) == 1 and self.parts[0].source.stride() != self.meta.stride()
        steps = [f"joined from {len(self.parts)} parts"] if len(self.parts) > 1 else []
        steps += [f"cast from {', '.join(dtypes)} to {self.meta.dtype}"] if dtypes else []
        steps += ["laid out in another order"] if is_turned else []
        return ", ".join(steps) or "a part of another value"

    def recipe(self) -> Joined:
        """The recipe that puts it together at each read."""
        with no_functions(), no_modes():
            metas: dict[object, torch.Tensor] = {}  # thousands of experts share their layout
            pieces = []
            for part in self.parts:
                meta = view_spec_of(part.source)
                alike = metas.setdefault((metadata_of(meta), meta.untyped_storage().nbytes()), meta)
                pieces.append(Piece(handle_of(part.source), alike))
            return Joined(layout_of(self.meta), pieces, [part.start for part in self.parts])

    def in_file(self, name: str, offload_dir: str | os.PathLike[str] | None, device: torch.device) -> OffloadedTensor:
        """The value in a new file, with the layout of `meta`.

        Raises:
            WriteError, NameInUseError, ForeignFileError, CorruptFileError
        """
        recipe = self.recipe()
        with no_functions(), no_modes():
            handle = create_from_blocks(recipe.layout, recipe.blocks(), name, offload_dir)
        return wrap_handle(handle, device)

    def in_memory(self, device: torch.device) -> torch.Tensor:
        """The value as a plain tensor, or as a quantized one if it is stored as such."""
        source = self.as_it_is()
        if source is not None and handle_of(source).is_subclass:
            return copied(mapped_value(source), device)
        whole = torch.empty_like(self.meta, device=device)
        self.recipe().put_into(whole)
        return whole
