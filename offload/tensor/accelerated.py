"""Values that stay on an accelerator between ops, within its budget.

Always true:
- only values in files that nobody writes to stay: there is no copy that could be stale
- without a budget for the device nothing stays there
"""

from __future__ import annotations

import torch

from offload.prefetch.reads import POOL, let_go, lock
from offload.prefetch.residency import Pool, Value
from offload.prefetch.staging import lend, settle
from offload.storage.handle import Handle
from offload.storage.modes import no_functions, no_modes
from offload.tensor.cuts import cut, sent_to, twin_of
from offload.tensor.extents import brought_in


class Copy(Value):
    """A whole value on a device. `base` is None while it is not there."""

    __slots__ = ("base",)

    def __init__(self, pool: Pool, handle: Handle) -> None:
        super().__init__(pool, handle.file, *handle.extent, shared=False)
        self.base: torch.Tensor | None = None

    def cached_bytes(self) -> int:
        """How much of it is on the device."""
        return 0 if self.base is None else self.nbytes

    def let_go(self) -> None:
        """Drop it from the device."""
        self.base = None


def resident_guest(handle: Handle, twin: torch.Tensor, target: torch.device) -> torch.Tensor | None:
    """What `twin` cuts out of the value on a device, if that stays there; None if it is to be sent for each op.

    Raises: as `Handle.base`, also where the file is not read.
    """
    copy = _copy_to_stay(handle, target)
    if copy is None:
        return None
    base, there = handle.base(), copy.base
    if there is None:
        brought_in(handle, twin_of(handle))
        with no_functions(), no_modes():  # it outlives the mode that it was first asked for in
            there = sent_to(base, target)
            settle(target)
        copy.base = there
    lend(there, target)
    return cut(there, twin)


def _copy_to_stay(handle: Handle, target: torch.device) -> Copy | None:
    pool = (handle.pool or POOL).on_devices.get(target)
    if pool is None or handle.owned or handle.recipe is not None:
        return None
    leaving: list[Value] = []
    try:
        with lock():
            copy: Copy | None = handle.copies.get(target)
            if copy is None or copy.pool is not pool:
                copy = handle.copies[target] = Copy(pool, handle)
                leaving.extend(pool.add([copy]))
            return copy if copy.kept else None
    finally:
        let_go(leaving)
