"""Where results go, how large they have to be, and their names.

Always true:
- a name is used once, even by other processes that use the same folder
- tensors without dense values of their own, or on the meta device, are not taken
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from offload.storage.layout import Layout
from offload.storage.owning import create_value
from offload.storage.subclasses import is_subclass_value, with_inner
from offload.system.modes import no_functions, no_modes
from offload.tensor.guests import mapped_value
from offload.tensor.wrapper import OffloadedTensor, is_offloaded, wrap_handle

log = logging.getLogger("offload.offloading")


@dataclass(frozen=True)
class Place:
    """A folder for large results."""

    folder: Path | None  # the user's; None for a private one
    min_bytes: int  # from which a result is large
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def name(self, what: str) -> str:
        """A name that is new in the folder, even if processes were forked inside the context."""
        return f"{what}.{next(self._numbers)}.{secrets.token_hex(8)}"

    def takes(self, tensor: object, what: str) -> bool:
        """Whether this result of `what` is a large plain tensor that can be stored as it is."""
        if type(tensor) is not torch.Tensor or tensor.is_meta:
            return False
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            log.debug("%s: a result stays in memory, since it is sparse, quantized or nested", what)
            return False
        if tensor.numel() * tensor.itemsize < max(self.min_bytes, 1):
            return False
        layout = Layout(tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.is_conj() or tensor.is_neg() or not layout.is_dense:
            log.debug("%s: %s stays in memory, since its elements overlap or are lazily changed", what, layout)
            return False
        return True

    def put(self, tensor: torch.Tensor, what: str) -> OffloadedTensor:
        with no_functions(), no_modes():
            handle = create_value(tensor, self.name(what), self.folder)
            log.debug("%s: written to %s", what, handle.path)
            return wrap_handle(handle, tensor.device)


def over_mappings(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor subclass with plain tensors over their files instead of the offloaded ones inside it."""
    if is_offloaded(tensor):
        return mapped_value(tensor)
    return with_inner(tensor, over_mappings) if is_subclass_value(tensor) else tensor


def bytes_inside(tensor: torch.Tensor) -> int:
    """The size of the tensors inside a tensor subclass."""
    if not is_subclass_value(tensor):
        return tensor.numel() * tensor.itemsize
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return sum(bytes_inside(getattr(tensor, name)) for name in names)
