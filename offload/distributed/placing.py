"""The share that this rank has of a value, by the placements of a DTensor.

Always true:
- torch says which rows, or columns, are whose: those that this rank has of a plain tensor
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, TypeAlias

from offload.errors import UnsupportedOpError
from offload.torch_api import offsets_of_shard

Run: TypeAlias = tuple[int, int]  # where successive rows, or columns, begin and end


def runs_of(outer: Any, name: str) -> dict[int, list[Run]]:
    """Of each dimension that is cut, the runs that this rank has of it: one at least, which may be empty."""
    of_dims: dict[int, Sequence[int]] = {}
    mesh, coordinate = outer.device_mesh, outer.device_mesh.get_coordinate()
    for axis, placement in enumerate(outer.placements):
        if placement.is_replicate():
            continue
        if placement.is_partial() or coordinate is None:
            what = f"rank is not in the mesh {tuple(mesh.shape)}" if coordinate is None else f"placement is {placement}"
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
    """Successive numbers as runs."""
    if isinstance(numbers, range):
        return [(numbers.start, max(numbers.start, numbers.stop))]
    found = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda one: one[1] - one[0])]
    return [(run[0], run[-1] + 1) for run in found] or [(0, 0)]
