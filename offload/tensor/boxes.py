"""Contiguous parts of a value's memory, and the cuts of the value that lie in them.

Always true:
- only shapes, strides and offsets are looked at: nothing is read
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offload.storage.layout import Layout, contiguous_stride
from offload.tensor.views import with_bits_of


@dataclass(frozen=True, slots=True)
class Box:
    """A contiguous part of a value's memory; dimensions are ordered from the outermost to the innermost there.

    Attributes:
        start, size: its begin and extent in each dimension.
        first: its first element in the value, in memory order.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]
    first: int

    @classmethod
    def around(cls, layout: Layout, view_spec: torch.Tensor) -> Box:
        """The smallest box that contains the cut by `view_spec` of a dense value."""
        shape = [layout.shape[dim] for dim in layout.order]
        first = int(view_spec.storage_offset()) * view_spec.itemsize
        steps = sum((size - 1) * step for size, step in zip(view_spec.shape, view_spec.stride(), strict=True))
        last = (first + int(steps) * view_spec.itemsize + view_spec.itemsize - 1) // layout.dtype.itemsize
        first //= layout.dtype.itemsize
        start, size, begin = [0] * len(shape), list(shape), 0
        for dim, step in enumerate(contiguous_stride(tuple(shape))):
            low, high = first // step, last // step
            start[dim], size[dim] = low, high - low + 1
            begin += low * step
            if low != high:
                break
            first, last = first - low * step, last - low * step
        return cls(tuple(start), tuple(size), begin)


def recut(stored: torch.Tensor, first: int, spec: torch.Tensor) -> torch.Tensor:
    """The cut by `spec` from `found`, which is laid out like the part of the value from byte `first` on."""
    if stored.dtype == spec.dtype:
        offset = stored.storage_offset() + int(spec.storage_offset()) - first // spec.itemsize
        value = stored.as_strided(spec.shape, spec.stride(), offset)
    else:
        offset = (stored.storage_offset() * stored.itemsize - first) // spec.itemsize + int(spec.storage_offset())
        value = torch.empty(0, dtype=spec.dtype, device=stored.device)
        value.set_(stored.untyped_storage(), offset, spec.shape, spec.stride())
    return with_bits_of(value, spec) if spec.is_conj() or spec.is_neg() else value


def start_in(layout: Layout, spec: torch.Tensor) -> tuple[int, ...] | None:
    """Where in a dense value the box begins that a cut describes; None for other cuts."""
    if spec.dtype != layout.dtype or spec.dim() != len(layout.shape) or spec.is_conj() or spec.is_neg():
        return None
    steps = zip(spec.stride(), layout.stride, spec.shape, strict=True)
    if not layout.is_dense or not spec.numel() or any(has != step and size > 1 for has, step, size in steps):
        return None
    start, left = [0] * spec.dim(), int(spec.storage_offset())
    for dim in layout.order:
        start[dim], left = divmod(left, layout.stride[dim])
    return tuple(start)


def rows_in(layout: Layout, spec: torch.Tensor) -> tuple[int, int] | None:
    """Which whole rows of a row-major value a cut consists of, in whatever shape: the first, and how many; or None."""
    if spec.dtype != layout.dtype or not lies_as(spec, contiguous_stride(tuple(spec.shape))) or not spec.numel():
        return None
    row = math.prod(layout.shape[1:])
    first, shifted = divmod(int(spec.storage_offset()), row)
    is_whole = layout.shape and layout.stride == contiguous_stride(layout.shape) and not shifted + spec.numel() % row
    return (first, spec.numel() // row) if is_whole else None


def first_row(shape: Sequence[int], at: Sequence[int], size: Sequence[int]) -> int | None:
    """The row of a box that a part of it begins with; None if other rows are between those of the part."""
    shape, at, size = shape[:-1], at[:-1], size[:-1]
    outer = next((dim for dim, rows in enumerate(shape) if rows > 1), len(shape))
    if tuple(shape[outer + 1 :]) != tuple(size[outer + 1 :]):
        return None
    return sum(begin * step for begin, step in zip(at, contiguous_stride(tuple(size)), strict=True))


def lies_as(view_spec: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Whether its elements are laid out like those of a value with these strides."""
    return not (view_spec.is_conj() or view_spec.is_neg()) and all(
        has == step or size == 1 for has, step, size in zip(view_spec.stride(), strides, view_spec.shape, strict=True)
    )
