"""A model's distinct tensors, each under all its names, and moving them to their places.

Always true:
- tied weights are one slot, and stay one parameter
- what is already in its place is not touched
- torch decides which rows or columns of a DTensor belong to whom: those that this rank has of a plain tensor
- a rank's shard is a view of the stored value, or joined from such views, and a value of its own: the rest of the
  checkpoint is neither counted, nor read ahead, nor copied
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from offload.errors import ArgumentTypeError, UnsupportedOpError
from offload.memory import uncollected
from offload.models import log
from offload.models.device_map import Place
from offload.progress import progress
from offload.storage.handle import Handle
from offload.storage.layout import contiguous
from offload.system.modes import inside, no_functions, no_inference, no_modes
from offload.system.reasons import some
from offload.system.regular import absolute
from offload.tensor.deferred import DeferredTensor
from offload.tensor.locals import is_dtensor, local_of, with_local
from offload.tensor.recipes import Joined, Piece
from offload.tensor.views import handle_of, meta_of, metadata_of, target_of, view_spec_of
from offload.tensor.wrapper import OffloadedTensor, PathLike, carry_attributes, dressed, is_offloaded, wrap_handle
from offload.torch_api import (
    DisableTorchFunctionSubclass,
    buffers_of,
    offsets_of_shard,
    parameters_of,
    share_hooks,
    unsaved_buffers_of,
    world_of,
)


@dataclass(slots=True)
class Slot:
    """A distinct tensor of a model, with all its names."""

    tensor: torch.Tensor  # of a DTensor, this rank's local tensor
    is_parameter: bool
    names: list[str] = field(default_factory=list)
    # its possible names in a checkpoint: all but those of non-persistent buffers
    keys: list[str] = field(default_factory=list)
    # the modules' dictionaries, and the name in each
    owners: list[tuple[dict[str, torch.Tensor | None], str]] = field(default_factory=list)
    others: list[torch.Tensor] = field(default_factory=list)  # tensors with the same value
    outer: torch.Tensor | None = None  # the DTensor, if it is one

    @classmethod
    def of(cls, tensor: torch.Tensor, *, is_parameter: bool) -> Slot:
        return cls(local_of(tensor), is_parameter, outer=tensor if is_dtensor(tensor) else None)

    @property
    def name(self) -> str:
        return (self.keys or self.names)[0]

    @property
    def held(self) -> torch.Tensor:
        """What its owners hold: the tensor, or the DTensor around it."""
        return self.tensor if self.outer is None else self.outer

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.itemsize

    @property
    def folder(self) -> Path | None:
        """The user's folder in which it is, or will be, stored."""
        return handle_of(self.tensor).folder if is_offloaded(self.tensor) else None

    def join(self, other: Slot) -> None:
        self.names += other.names
        self.keys += other.keys
        self.owners += other.owners
        self.others += [other.tensor, *other.others]

    def fill(self, tensor: torch.Tensor) -> None:
        """Put a tensor into all its owners; a new one that is not held elsewhere."""
        if tensor is self.tensor:
            return
        held = self._dressed(tensor)
        for members, name in self.owners:
            members[name] = held
        self._hold(held)

    def _hold(self, held: torch.Tensor) -> None:
        self.tensor, self.outer = local_of(held), None if self.outer is None else held

    def become(self, tensor: torch.Tensor) -> bool:
        """Turn its tensor into the new one, as all holders see; False if torch refuses, and only its owners do."""
        if tensor is self.tensor:
            return True
        old, new = self.held, self._dressed(tensor)
        if old.is_leaf and old.grad is not None:
            new.grad = old.grad.to(new.device)
        if old.is_leaf and old.requires_grad:
            share_hooks(new, old)
        try:
            torch.utils.swap_tensors(old, new)
        except (RuntimeError, TypeError):  # a graph or a weak reference holds it; or the layout differs
            self.fill(local_of(new))
            return False
        self._hold(old)
        return True

    def follow_dtype(self) -> None:
        """Update the dtype of a DTensor after its local tensor got another value."""
        if self.outer is not None and self.outer.dtype != self.tensor.dtype:
            torch.utils.swap_tensors(self.outer, self._dressed(self.tensor))

    def _dressed(self, tensor: torch.Tensor) -> torch.Tensor:
        with DisableTorchFunctionSubclass():  # answered by the wrapper's metadata: no rule is needed
            tensor = tensor if self.outer is None else with_local(self.outer, tensor)
            if self.is_parameter and not isinstance(tensor, nn.Parameter):
                is_inexact = tensor.dtype.is_floating_point or tensor.dtype.is_complex
                needs_grad = self.held.requires_grad and is_inexact
                if is_offloaded(tensor):
                    tensor = dressed(tensor, requires_grad=needs_grad, is_parameter=True)
                else:
                    tensor = nn.Parameter(tensor, needs_grad)
        carry_attributes(self.held, tensor)
        return tensor


@uncollected()
def tensor_slots(model: nn.Module) -> list[Slot]:
    """The parameters and buffers of a model, each once; `ArgumentTypeError` for no module."""
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"a torch.nn.Module is needed, not {type(model).__name__}: {str(model)[:80]!r}")
    slots: dict[int, Slot] = {}
    for prefix, module in model.named_modules():
        for members, is_parameter in ((parameters_of(module), True), (buffers_of(module), False)):
            for name, tensor in members.items():
                if tensor is None:
                    continue
                slot = slots.get(id(tensor))
                if slot is None:
                    slot = slots[id(tensor)] = Slot.of(tensor, is_parameter=is_parameter)
                full_name = f"{prefix}.{name}" if prefix else name
                slot.names.append(full_name)
                slot.owners.append((members, name))
                if name not in unsaved_buffers_of(module):
                    slot.keys.append(full_name)
    return list(slots.values())


def tied_slots(model: nn.Module) -> list[Slot]:
    """Like `tensor_slots`, after letting the model tie its weights."""
    tie_weights = getattr(model, "tie_weights", None)  # transformers
    if callable(tie_weights):
        tie_weights()
    return tensor_slots(model)


@inside(no_inference)  # inference tensors could not be trained later
def place_tensors(
    slots: Iterable[Slot],
    placed: Mapping[str, Place],
    offload_dir: PathLike | None = None,
    *,
    offload_buffers: bool = False,
) -> None:
    """Move every tensor that has data to its place, one by one, for all who hold it; warns where torch refuses."""
    left: list[str] = []
    for slot in progress(slots, "placing"):
        place = place_of_slot(slot, placed, offload_buffers=offload_buffers)
        if is_meta(slot.tensor) or _is_at(slot.tensor, place):
            continue
        if not slot.become(at_place(slot.tensor, slot, place, folder_of(slot, offload_dir))):
            left.append(slot.name)
    if left:
        log.warning(
            "%d tensors are held by a graph, or by weak references, so that torch can't change them: %s. The model has "
            "new ones in their places; whatever else holds the old ones keeps them. Make optimizers of them again, and "
            "tie weights of other modules again.",
            len(left),
            some(left),
        )


def place_of_slot(slot: Slot, placed: Mapping[str, Place], *, offload_buffers: bool) -> Place:
    """Its place in the map. A buffer goes to disk only with `offload_buffers`, or if it is a packed weight."""
    place = placed[slot.name]
    is_packed = slot.tensor.dtype == torch.uint8 and slot.name.rpartition(".")[2] == "weight"  # BitNet's
    is_weight = slot.is_parameter or is_packed
    if not place.on_disk or is_weight or offload_buffers:
        return place
    return Place(False, place.device)


def folder_of(slot: Slot, offload_dir: PathLike | None) -> PathLike | None:
    """The folder for writes to a slot: the named one, or for a DTensor this rank's folder in it."""
    return offload_dir if slot.outer is None else folder_of_rank(slot.outer, offload_dir)


def is_meta(tensor: torch.Tensor) -> bool:
    with DisableTorchFunctionSubclass():
        return tensor.is_meta


def _is_at(tensor: torch.Tensor, place: Place) -> bool:
    with DisableTorchFunctionSubclass():
        if isinstance(tensor, DeferredTensor):
            return False
        is_there = is_offloaded(tensor) == place.on_disk and tensor.device == place.device
        return is_there or place.device.type == "meta"  # a tensor for "meta" may stay


def at_place(
    tensor: torch.Tensor, slot: Slot, place: Place, offload_dir: PathLike | None, *, name: str | None = None
) -> torch.Tensor:
    """A value moved to its place; one that is on disk already stays in its file."""
    name = slot.name if name is None else name
    if slot.outer is not None and tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=place.device)
    if isinstance(tensor, DeferredTensor):
        stored = _put_together(tensor, name, place, offload_dir)
        return stored if slot.outer is None or not is_offloaded(stored) else alone(stored, name, offload_dir)
    if not place.on_disk and is_offloaded(tensor):
        log.debug("%s: read into memory, for %s", name, place.device)
        tensor = tensor.materialize()
    elif place.on_disk and not is_offloaded(tensor):
        log.debug("%s: written to disk, from memory", name)
        tensor = OffloadedTensor.from_original_tensor(tensor, name, offload_dir, exist_ok=True)
    elif is_offloaded(tensor):
        log.debug("%s: stays in %s", name, handle_of(tensor).path)
    return tensor if tensor.device == place.device else tensor.detach().to(place.device)


def _put_together(tensor: DeferredTensor, name: str, place: Place, offload_dir: PathLike | None) -> torch.Tensor:
    if place.device.type == "meta":
        return tensor.to(place.device)
    steps = f"{tensor.form}, as {tensor.dtype}"
    if not place.on_disk:
        log.debug("%s: read into memory, for %s: %s", name, place.device, steps)
        return tensor.materialize(place.device)
    stored = tensor.stored(name, offload_dir, place.device)
    is_recipe = handle_of(stored).composed is not None
    how = "stays in" if tensor.is_stored else "a recipe over" if is_recipe else "written to"
    log.debug("%s: %s %s: %s", name, how, stored.offload_path, steps)
    return stored


# This rank's shard of a value, as the placements of a DTensor say


Run: TypeAlias = tuple[int, int]  # first and end of consecutive rows or columns


def share_of(value: torch.Tensor, outer: Any, name: str) -> torch.Tensor:
    """This rank's shard of a value as the DTensor `outer` says; slicing and joining the value must not read it."""
    for dim, runs in sorted(runs_of(outer, name).items(), key=lambda one: len(one[1])):
        parts = [value.narrow(dim, begin, end - begin) for begin, end in runs]
        value = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return value


def runs_of(outer: Any, name: str) -> dict[int, list[Run]]:
    """For each sharded dimension, this rank's runs of indices: at least one, which may be empty."""
    of_dims: dict[int, Sequence[int]] = {}
    mesh, coordinate = outer.device_mesh, outer.device_mesh.get_coordinate()
    for axis, placement in enumerate(outer.placements):
        if placement.is_replicate():
            continue
        if placement.is_partial() or coordinate is None:
            outside = f"rank is not in the mesh {tuple(mesh.shape)}"
            what = outside if coordinate is None else f"placement is {placement!r}"
            raise UnsupportedOpError(
                f"{name!r} can't be filled from a checkpoint where its {what}: give it Shard or Replicate placements "
                "on a mesh that this rank is in"
            )
        dim = placement.dim % outer.dim()
        known = of_dims.get(dim, range(outer.shape[dim]))
        own = offsets_of_shard(placement, len(known), mesh.size(axis), coordinate[axis])
        of_dims[dim] = known[own.start : own.stop] if isinstance(own, range) else [known[at] for at in own]
    return {dim: _runs(numbers) for dim, numbers in of_dims.items()}


def _runs(numbers: Sequence[int]) -> list[Run]:
    if isinstance(numbers, range):
        return [(numbers.start, max(numbers.start, numbers.stop))]
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda one: one[1] - one[0])]
    return [(run[0], run[-1] + 1) for run in runs] or [(0, 0)]


def alone(share: OffloadedTensor, name: str, offload_dir: PathLike | None) -> OffloadedTensor:
    """A shard on disk as a value of its own, whose first write goes to its rank's folder, or to a private one."""
    with no_functions(), no_modes():
        view_spec = view_spec_of(share)
        piece = Piece(handle_of(share), view_spec).alone()
        if metadata_of(piece.view_spec) != metadata_of(meta_of(piece.handle)):
            layout = contiguous(view_spec.dtype, tuple(view_spec.shape))
            piece = Piece(Handle.compose(Joined(layout, [piece], [(0,) * view_spec.dim()]), name))
        composed = piece.handle.composed
        handle = (
            piece.handle.elsewhere(offload_dir) if composed is None else Handle.compose(composed, name, offload_dir)
        )
    return wrap_handle(handle, target_of(share))


def folder_of_rank(outer: Any, offload_dir: PathLike | None) -> Path | None:
    """The folder for a rank's shards, named for its place in the mesh; for its number, if the mesh lacks some ranks."""
    if offload_dir is None:
        return None
    mesh = outer.device_mesh
    rank, world = world_of(mesh)
    place, shape = mesh.get_coordinate(), tuple(mesh.shape)
    if mesh.size() != world:
        place, shape = [rank], (world,)
    return absolute(offload_dir) / f"rank-{'.'.join(map(str, place))}-of-{'.'.join(map(str, shape))}"
