"""This rank's shard of a value, according to the placements of a DTensor.

Always true:
- nothing is read: a shard is a view of the stored value, or joined from such views
- torch decides which rows or columns belong to whom: those that this rank has of a plain tensor
- a shard is a value of its own: the rest of the checkpoint is neither counted, nor read ahead, nor copied
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import torch

from offload.errors import UnsupportedOpError
from offload.storage.handle import Handle
from offload.storage.layout import contiguous
from offload.system.modes import no_functions, no_modes
from offload.system.regular import absolute
from offload.tensor.recipes import Joined, Piece
from offload.tensor.views import handle_of, meta_of, metadata_of, target_of, view_spec_of
from offload.tensor.wrapper import OffloadedTensor, PathLike, wrap_handle
from offload.torch_api import offsets_of_shard, world_of

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
        found = offsets_of_shard(placement, len(known), mesh.size(axis), coordinate[axis])
        of_dims[dim] = known[found.start : found.stop] if isinstance(found, range) else [known[at] for at in found]
    return {dim: _runs(numbers) for dim, numbers in of_dims.items()}


def _runs(numbers: Sequence[int]) -> list[Run]:
    if isinstance(numbers, range):
        return [(numbers.start, max(numbers.start, numbers.stop))]
    found = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda one: one[1] - one[0])]
    return [(run[0], run[-1] + 1) for run in found] or [(0, 0)]


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


def is_whole(outer: Any) -> bool:
    """Whether this rank has all of a DTensor: it is replicated, or its mesh has one rank."""
    sizes = outer.device_mesh.shape
    return all(one.is_replicate() or size == 1 for one, size in zip(outer.placements, sizes, strict=True))


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
