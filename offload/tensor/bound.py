"""Products with a packed weight that are ready: one look-up, and one call for each part of the weight.

Always true:
- a product is bound to one source and one view of a tensor: whatever gives the tensor another value gives it another
  source, and the product is made anew
- the weight is as resident as without it, and its files are looked at ten times a second at the most
- what is not as usual (modes, gradients, `exact`, other strides) is left to the product that is not bound, which has
  the same bits
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offload.kernels.native import MOST_ROWS, Product
from offload.prefetch.engine import ensure_resident
from offload.prefetch.value import Value
from offload.storage.handle import Handle
from offload.storage.source import Source
from offload.system import clock
from offload.tensor.guests import CPU
from offload.tensor.small import releases
from offload.tensor.wrapper import OffloadedTensor, guest_of
from offload.torch_api import (
    DisableTorchFunctionSubclass,
    function_modes_are_on,
    is_dual_level,
    is_traced,
    modes_are_on,
    transform_on_top,
)

_PLAIN = (torch.Tensor, nn.Parameter)


class BoundProduct:
    """`F.linear` with one weight, and activations of its dtype.

    Args:
        weight: computes on the CPU.
        product: with the packed rows of all of it.
        pieces: what the addresses in `product` lie in.
        sources: what all pieces are made of, none of it in files of ours.
        reads: the views of stored values that it reads.
        most_rows: of activations for which it is faster than the dense weight.
    """

    __slots__ = (
        "_composed", "_dtype", "_most_rows", "_pieces", "_product", "_ranges", "_reads", "_releases",
        "_source", "_sources", "_view_spec",
    )  # fmt: skip

    def __init__(
        self,
        weight: OffloadedTensor,
        product: Product,
        pieces: list[list[torch.Tensor]],
        sources: list[tuple[Handle, Source]],
        reads: list[tuple[Handle, torch.Tensor]],
        most_rows: int,
    ) -> None:
        self._source = weight._handle.source
        self._view_spec = weight._view_spec
        self._composed: Any = self._source.composed
        self._dtype = self._view_spec.dtype
        self._product, self._pieces, self._reads, self._most_rows = product, pieces, reads, most_rows
        self._ranges: list[Value] = [ensure_resident(*read) for read in reads]
        self._sources = sources
        self._releases = releases()

    def is_of(self, weight: OffloadedTensor) -> bool:
        """Whether it is of what the weight is now."""
        is_same = weight._handle.source is self._source and weight._view_spec is self._view_spec
        return is_same and weight._target is CPU and self._releases == releases()

    def multiply(
        self, x: torch.Tensor, weight: OffloadedTensor, bias: Any, *, exactly: bool, any_rows: bool
    ) -> torch.Tensor | None:
        """`F.linear(x, weight, bias)`; None if it has to be computed otherwise.

        Args:
            exactly: whether the dense weight is wanted.
            any_rows: whether any number of rows that the kernels take is multiplied.

        Raises:
            ReadError: the disk failed.
        """
        height, columns = self._product.sizes
        if not self.is_of(weight) or exactly or self._composed.is_exact or not _is_usual_world():
            return None
        if not is_usual(x, self._dtype) or x.shape[-1:] != (columns,):
            return None
        if not 0 < x.numel() <= (MOST_ROWS if any_rows else self._most_rows) * columns:
            return None
        if torch.is_grad_enabled():
            with DisableTorchFunctionSubclass():
                if x.requires_grad or weight.requires_grad or getattr(bias, "requires_grad", False):
                    return None
        if bias is not None:
            bias = guest_of(bias)
            if not is_usual(bias, self._dtype) or bias.shape != (height,):
                return None
        for handle, source in self._sources:
            if handle.source is not source or not source.file.is_as_opened():
                return None
        now = clock.now()
        for number, known in enumerate(self._ranges):
            if known.checked_until < now or known.is_picked:
                self._ranges[number] = ensure_resident(*self._reads[number])
        place = torch.empty((*x.shape[:-1], height), dtype=self._dtype, device=CPU)
        self._product.into(x, bias, place)
        return place


def _is_usual_world() -> bool:
    """Whether nothing follows, replaces or casts ops; gradients may be recorded."""
    if modes_are_on() or function_modes_are_on() or transform_on_top() is not None:
        return False
    return not (is_dual_level() or is_traced() or torch.is_autocast_enabled("cpu"))


def is_usual(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor is torch's own, of a dtype, contiguous, and has memory that the kernels can read."""
    return (
        type(x) in _PLAIN
        and x.dtype is dtype
        and x.layout is torch.strided
        and x.is_cpu
        and not x.is_nested
        and x.is_contiguous()
        and not x.is_neg()
    )
