"""How a value is put together from stored ones, and doing it: in a file, or in memory.

Always true:
- parts are offloaded tensors, or views of them, and cover the whole; nothing is read before it is put together
- it is put together in one go, in memory for some blocks, whatever its size
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from offload.storage.handle import Handle
from offload.storage.layout import contiguous
from offload.storage.mapping import scratch
from offload.storage.write import layout_of
from offload.tensor.guests import CPU, sent_to
from offload.tensor.wrapper import OffloadedTensor, is_offloaded, value_on_cpu, wrap_handle
from offload.torch_api import DisableTorchFunctionSubclass

_BLOCK = 8 << 20  # bytes that are put together at a time
_FEW = 64 << 10  # bytes of a part up to which it is joined with others before it is written


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a value.

    Attributes:
        source: its numbers: on disk, on the CPU, of as many dimensions as the whole, perhaps of another dtype.
        start: where its first element is in the whole.
    """

    source: torch.Tensor
    start: tuple[int, ...]

    def end(self, dim: int) -> int:
        return self.start[dim] + self.source.shape[dim]

    def moved(self, dim: int, by: int) -> Part:
        start = list(self.start)
        start[dim] += by
        return replace(self, start=tuple(start))

    def between(self, start: int, stop: int) -> Part:
        """What it has of these rows, all of which it covers, as a part of them."""
        return Part(self.source[start - self.start[0] : stop - self.start[0]], (0, *self.start[1:]))

    def place_in(self, whole: torch.Tensor) -> torch.Tensor:
        for dim, (start, size) in enumerate(zip(self.start, self.source.shape, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole


def as_parts(source: torch.Tensor) -> tuple[Part, ...]:
    """A tensor as the only part of itself."""
    return (Part(source, (0,) * source.dim()),)


@dataclass(frozen=True, slots=True)
class Assembly:
    """A value that is to be put together.

    Attributes:
        parts: of what.
        twin: on the meta device: the shape, dtype and strides that it will have.
    """

    parts: tuple[Part, ...]
    twin: torch.Tensor

    def as_it_is(self) -> torch.Tensor | None:
        """The only part, if that is the value with its dtype and strides; else None."""
        (part, *others) = self.parts
        with DisableTorchFunctionSubclass():
            has, wanted = ((one.shape, one.dtype, one.stride()) for one in (part.source, self.twin))
        return part.source if has == wanted and not others else None

    def steps(self) -> str:
        """What is done to what is stored, in words."""
        with DisableTorchFunctionSubclass():
            dtypes = sorted({str(part.source.dtype) for part in self.parts} - {str(self.twin.dtype)})
            is_turned = len(self.parts) == 1 and self.parts[0].source.stride() != self.twin.stride()
        said = [f"joined from {len(self.parts)} parts"] if len(self.parts) > 1 else []
        said += [f"cast from {', '.join(dtypes)} to {self.twin.dtype}"] if dtypes else []
        said += ["laid out in another order"] if is_turned else []
        return ", ".join(said) or "a part of another value"

    def in_file(self, name: str, offload_dir: str | os.PathLike[str] | None, device: torch.device) -> OffloadedTensor:
        """The value in a new file, in the layout of the twin.

        Raises:
            WriteError, NameInUseError, ForeignFileError, CorruptFileError
        """
        layout = layout_of(self.twin)
        order = layout.order
        parts = [Part(part.source.permute(order), tuple(part.start[dim] for dim in order)) for part in self.parts]
        buffer = scratch(contiguous(torch.uint8, (_BLOCK,)))
        blocks = _blocks(parts, tuple(layout.shape[dim] for dim in order), layout.dtype, buffer)
        return wrap_handle(Handle.assemble(layout, blocks, name, offload_dir), device)

    def in_memory(self, device: torch.device) -> torch.Tensor:
        """The value as a plain tensor."""
        return sent_to(_joined(self.parts, torch.empty_like(self.twin, device=CPU)), device)


def _blocks(
    parts: Sequence[Part], shape: tuple[int, ...], dtype: torch.dtype, buffer: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Contiguous tensors of `dtype` that make up the whole, in row-major order. Each is good until the next."""
    if math.prod(shape) == 0:
        return
    nbytes = math.prod(shape) * dtype.itemsize
    first = parts[0].source
    lies_as_it_reads = first.dtype == dtype and first.is_contiguous() and not (first.is_conj() or first.is_neg())
    if len(parts) == 1 and lies_as_it_reads:
        yield _on_cpu(first)
    elif shape[:-1] and shape[0] == 1:
        below = [Part(part.source[0], part.start[1:]) for part in parts]
        yield from _blocks(below, shape[1:], dtype, buffer)
    elif nbytes <= _BLOCK and (nbytes <= _FEW * len(parts) or len(_bounds(parts, shape)) == 2):
        yield _joined(parts, buffer[:nbytes].view(dtype).view(shape))
    else:
        for start, stop in _rows(parts, shape, dtype):
            inside = [part.between(start, stop) for part in parts if part.start[0] < stop and part.end(0) > start]
            yield from _blocks(inside, (stop - start, *shape[1:]), dtype, buffer)


def _rows(parts: Sequence[Part], shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """Spans of rows that fit in a block, if they are not one row, and in which no part begins or ends."""
    most = max(1, _BLOCK // (math.prod(shape[1:]) * dtype.itemsize))
    for first, last in pairwise(_bounds(parts, shape)):
        for start in range(first, last, most):
            yield start, min(start + most, last)


def _bounds(parts: Sequence[Part], shape: tuple[int, ...]) -> list[int]:
    """The rows at which parts begin or end."""
    return sorted({0, shape[0], *(part.start[0] for part in parts), *(part.end(0) for part in parts)})


def _joined(parts: Sequence[Part], whole: torch.Tensor) -> torch.Tensor:
    for part in parts:
        part.place_in(whole).copy_(_on_cpu(part.source))
    return whole


def _on_cpu(source: torch.Tensor) -> torch.Tensor:
    return value_on_cpu(source) if is_offloaded(source) else source
