"""Where results go, how large they have to be, and what they are called.

Always true:
- a name is given once, also by another process that uses the same folder
- what holds no dense values of its own, or is on the meta device, is not taken
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from offload.storage.folders import discard
from offload.storage.handle import Handle
from offload.storage.layout import Layout
from offload.storage.modes import no_functions, no_modes
from offload.storage.subclasses import is_subclass_value
from offload.tensor.wrapper import OffloadedTensor, is_offloaded, mapped_value, wrap_handle


@dataclass(frozen=True)
class Place:
    """A folder for large results.

    Attributes:
        folder: the user's; None for a private one.
        min_bytes: the size from which on a result is large.
    """

    folder: Path | None
    min_bytes: int
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def name(self, what: str) -> str:
        """A name that nothing in the folder has, also if this process was forked in the context, as others were."""
        return f"{what}.{next(self._numbers)}.{secrets.token_hex(8)}"

    def takes(self, tensor: object) -> bool:
        """Whether this is a large plain tensor that can be stored just as it is."""
        return (
            type(tensor) is torch.Tensor
            and tensor.layout == torch.strided
            and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)
            and tensor.numel() * tensor.itemsize >= max(self.min_bytes, 1)
            and not (tensor.is_conj() or tensor.is_neg())
            and Layout(tensor.dtype, tuple(tensor.shape), tensor.stride()).is_dense
        )

    def put(self, tensor: torch.Tensor, what: str) -> OffloadedTensor:
        """A tensor's value, in a file of its own."""
        with no_functions(), no_modes():
            return wrap_handle(Handle.create(tensor, self.name(what), self.folder), tensor.device)

    @contextmanager
    def allocated(self, layout: Layout, what: str) -> Iterator[Handle]:
        """A new value of zeros, to be filled in the block. If that fails, nothing is left."""
        handle = Handle.allocate(layout, self.name(what), self.folder)
        try:
            yield handle
        except BaseException:
            discard(handle.path)
            raise


def over_mappings(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor subclass with plain tensors over their files in place of the offloaded ones inside it."""
    if is_offloaded(tensor):
        return mapped_value(tensor)
    if not is_subclass_value(tensor):
        return tensor
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: over_mappings(getattr(tensor, name)) for name in names}
    return type(tensor).__tensor_unflatten__(  # type: ignore[attr-defined,no-any-return]
        inner, context, tensor.shape, tensor.stride()
    )


def bytes_inside(tensor: torch.Tensor) -> int:
    """What the tensors inside a tensor subclass take."""
    if not is_subclass_value(tensor):
        return tensor.numel() * tensor.itemsize
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return sum(bytes_inside(getattr(tensor, name)) for name in names)
