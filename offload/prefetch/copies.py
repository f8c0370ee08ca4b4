"""Stored bytes on an accelerator: which stay there, and how the others get there.

Always true:
- what is sent is what is stored; only values in files that are never written to stay, so that no copy can become stale
- which stay under the budget of the device is decided as for main memory
- no op waits for a copy that is on its way: its stream does. The thread that issues the ops therefore runs ahead of the
  device, and the next values are sent while it computes
- without a set budget a device fills itself, and all models without one share what is free there
- a device without room keeps less for a while, and only if nothing is left to drop is that an error
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from offload.prefetch.engine import POOL, UNTRACKED, arrive, lock, range_of, replanning, track
from offload.prefetch.plan import OnDevice, Pool
from offload.prefetch.room import is_integrated
from offload.prefetch.staging import Sent, send_bytes
from offload.prefetch.value import SMALL, Value, page_state_of
from offload.storage.handle import Handle

_T = TypeVar("_T")
_FOREVER = float("inf")
log = logging.getLogger("offload.prefetch")


class Copy(Value):
    """A stored value, or a part of one, that may stay on a device.

    Args:
        main: the same bytes in main memory.

    Attributes:
        sent: its bytes, if they stay there.
    """

    __slots__ = ("_device", "_main", "sent")

    def __init__(self, pool: Pool, handle: Handle, main: Value, device: torch.device) -> None:
        super().__init__(pool, handle.file, main.start, main.nbytes, shared=False, is_picked=main.is_picked)
        self.sent: Sent | None = None
        self._device = device
        self._main = main

    def send(self) -> Sent | None:
        """Its bytes on the device, where they stay if they may; None if its file is gone.

        Raises:
            ReadError: the disk failed.
            torch.OutOfMemoryError: the device has no room.
        """
        with replanning() as leaving:
            leaving.extend(self.pool.reconsider())
            leaving.extend(self.pool.admit(self) if self.is_picked else ())
        arrive(self._main)
        mapped = self._mapped()
        if mapped is None:
            return None
        stored = torch.empty(0, dtype=torch.uint8, device="cpu").set_(mapped, self.start, (self.nbytes,), (1,))
        sent = send_bytes(stored, self._device)
        self.sent = sent
        self.assume_until(_FOREVER)
        if not self.kept:  # in this order: a plan that another thread makes meanwhile drops what it finds
            self.let_go()
        elif is_integrated(self._device):  # it is in main memory twice
            self._main.let_go()
        return sent

    def cached_bytes(self) -> int:
        """How many of its bytes stay on the device."""
        return 0 if self.sent is None else self.nbytes

    def let_go(self) -> None:
        """Drop it from the device; guests that refer to it keep its memory."""
        self.sent = None
        self.assume_until(0.0)


def copy_on(handle: Handle, view_spec: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, int] | None:
    """The stored bytes that a view spans, on a device, for its current stream.

    Args:
        handle: of a value in a file that is never written to.

    Returns:
        The bytes, and where in the value they begin. None if the view is small or scattered: it is sent each time.

    Raises:
        ReadError: the disk failed.
        torch.OutOfMemoryError: the device has no room.
    """
    copy = _copy_of(handle, view_spec, device)
    if copy is None:
        return None
    if copy.pool.is_due():
        with replanning() as leaving:
            leaving.extend(copy.pool.reconsider())
    if copy.is_picked:
        with lock():
            copy.pool.picked.count(copy)
    sent = copy.sent or copy.send()
    return None if sent is None else (sent.arrived(is_last=not copy.kept), copy.start - handle.extent[0])


def _copy_of(handle: Handle, view_spec: torch.Tensor, device: torch.device) -> Copy | None:
    page_state = page_state_of(handle)
    whole = page_state.copies.get((device, *handle.extent))
    pool = pool_on(device, page_state.pool)
    if type(whole) is Copy and whole.kept and whole.pool is pool:
        return whole
    is_small = handle.extent[1] <= SMALL
    if is_small and pool.keeps_nothing:
        return None
    main = track(handle, *handle.extent) if is_small else range_of(handle, view_spec)
    if main is UNTRACKED:
        return None
    key = device, main.start, main.nbytes
    known = page_state.copies.get(key)
    if type(known) is Copy and known.pool is pool:
        return known
    with replanning() as leaving:
        pool = pool_on(device, page_state.pool)
        copy = page_state.copies.get(key)
        if type(copy) is not Copy or copy.pool is not pool:
            copy = page_state.copies[key] = Copy(pool, handle, main, device)
            leaving.extend(pool.add([copy]))
        return copy


def pool_on(device: torch.device, pool: Pool | None = None) -> OnDevice:
    """The budget of a device for the values of a pool: unless it has one of its own, the one that all share."""
    found = (pool or POOL).on_devices.get(device) or POOL.on_devices.get(device)
    if found is None:
        with lock():
            found = POOL.on_devices.setdefault(device, OnDevice(None, device))
    return found


def retry_on_oom(device: torch.device, act: Callable[[], _T]) -> _T:
    """What a function returns that allocates memory on a device: while there is too little, less stays there.

    Raises:
        torch.OutOfMemoryError: nothing more can be dropped.
    """
    while True:
        try:
            return act()
        except torch.OutOfMemoryError:
            if not _keeps_less(device):
                raise


def _keeps_less(device: torch.device) -> bool:
    """Let half as much stay on a device; whether there was anything."""
    with replanning() as leaving:
        pools = {found for pool in Pool.all() if (found := pool.on_devices.get(device)) is not None}
        total = sum(value.cached_bytes() for pool in pools for value in pool.values())
        log.warning("%s has too little memory: of %d bytes that stay there, half are dropped", device, total)
        for pool in pools:
            leaving.extend(pool.keep_less())
    return bool(leaving)
