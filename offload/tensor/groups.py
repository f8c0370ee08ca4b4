"""Products of groups of rows with a matrix each, as of the experts of a layer.

Always true:
- only matrices of groups with rows are read
- of a recipe, the kernels multiply by the packed pieces where they lie; where they can't, one matrix at a time is
  computed: a whole layer would take many times its stored size
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import accumulate, chain
from typing import Any

import torch

from offload.annotations import Args, Kwargs, Op
from offload.prefetch.direct import Load
from offload.prefetch.engine import ensure_resident, is_shared, prefetch
from offload.prefetch.loads import Arriving, load_of, taken_from
from offload.storage.handle import Handle
from offload.tensor.guests import CPU, mapped_value, value_on
from offload.tensor.products import multiplied
from offload.tensor.recipes import Piece
from offload.tensor.registry import implements
from offload.tensor.rules import call, guests_of, has_file, named_guests, read
from offload.tensor.views import handle_of, view_spec_of
from offload.tensor.wrapper import OffloadedTensor, guest_of
from offload.torch_api import modes_are_on

_AT_ONCE = 4  # matrices whose reads start together, while as many are used


@implements(torch.ops.aten._grouped_mm.default)
def multiply_groups(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Only matrices of groups with rows are read: of a layer's experts, those that tokens were routed to."""
    rows, matrices, *rest = args
    ends = rest[0] if rest else kwargs.get("offs")
    if ends is None or not has_file(matrices) or rows.dim() != 2 or ends.shape != matrices.shape[:-2]:
        return read(func, args, kwargs)
    if ends.is_meta or modes_are_on():  # which groups have rows is unknown
        return read(func, args, kwargs)
    ends, more = guest_of(ends), guests_of(rest[1:], {})
    options = named_guests({name: value for name, value in kwargs.items() if name != "offs"}, {})
    counts = torch.diff(ends.cpu(), prepend=ends.new_zeros(1, device="cpu"))
    groups = counts.nonzero().flatten()
    if matrices._handle.composed is not None:
        return _multiply_one_by_one(func, guest_of(rows), matrices, counts, groups.tolist(), more, options)
    parts = [view_spec_of(matrices).select(0, group) for group in groups.tolist()]
    prefetch((matrices._handle, part) for part in parts)
    if matrices._target == CPU:
        for part in parts:
            ensure_resident(matrices._handle, part)
        return read(func, args, kwargs, {id(matrices): mapped_value(matrices)})
    if not parts:  # torch has no product of none
        return guest_of(rows).new_zeros(len(rows), matrices.shape[-1])
    chosen = _stacked([value_on(handle_of(matrices), part, matrices._target) for part in parts])
    ends = ends[groups.to(ends.device)]
    return call(func, [guest_of(rows), chosen, ends, *more], options)


def _multiply_one_by_one(
    func: Op,
    rows: torch.Tensor,
    matrices: OffloadedTensor,
    counts: torch.Tensor,
    groups: list[int],
    more: Sequence[object],
    options: Kwargs,
) -> torch.Tensor:
    """Of a recipe: from its pieces, or one matrix after the other."""
    handle, view_spec, device = handle_of(matrices), view_spec_of(matrices), matrices._target
    is_plain = all(value is None for value in (*more, *options.values()))
    ends, each = [*accumulate(counts.tolist())], counts.split(1)
    results, begin = [], 0

    def multiply(group: int, some: torch.Tensor) -> torch.Tensor:
        if is_plain:
            product = multiplied(some, Piece(handle, view_spec[group].t()), device=device)
            if product is not None:
                return product
        matrix = value_on(handle, view_spec[group : group + 1], device)
        product_of_all: torch.Tensor = call(func, [some, matrix, each[group].to(rows.device), *more], options)
        return product_of_all

    with closing(_arriving(handle, view_spec, groups, may_pass=device == CPU and not is_shared())) as arriving:
        for group, load in arriving:
            with taken_from(load):
                results.append(multiply(group, rows[begin : ends[group]]))
            begin = ends[group]
    if begin < len(rows) or not results:  # rows of no group: torch leaves their memory uninitialized
        results.append(rows.new_zeros(len(rows) - begin, matrices.shape[-1]))
    return torch.cat(results)


def _arriving(
    handle: Handle, view_spec: torch.Tensor, groups: Sequence[int], *, may_pass: bool
) -> Generator[tuple[int, Load | None]]:
    """The groups, one by one; their matrices are read ahead, past the page cache if `may_pass`, and they leave."""
    recipe = handle.composed
    assert recipe is not None
    reads = {group: list(recipe.reads(view_spec[group : group + 1])) for group in groups}
    loads = {group: load for group, views in reads.items() if may_pass and views and (load := load_of(views))}
    due = [views for group, views in reads.items() if group not in loads]
    with closing(Arriving([(load, reads[group]) for group, load in loads.items()])) as past:
        prefetch(chain.from_iterable(due[: 2 * _AT_ONCE]))
        used = 0
        for group in groups:
            load = past.take() if group in loads else None
            if load is None:
                if used and used % _AT_ONCE == 0:
                    prefetch(chain.from_iterable(due[used + _AT_ONCE : used + 2 * _AT_ONCE]))
                used += 1
            yield group, load


def _stacked(matrices: list[torch.Tensor]) -> torch.Tensor:
    """Matrices as one tensor, with the same memory order."""
    if matrices[0].stride(-2) == 1:
        return torch.stack([matrix.mT for matrix in matrices]).mT
    return torch.stack(matrices)
