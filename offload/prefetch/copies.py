"""Stored bytes on an accelerator: which stay there, and which are sent ahead.

Always true:
- what is sent is what is stored; only values in files that are never written to stay or are sent ahead, so that no copy
  can become stale
- which stay under the budget of the device, what comes next and how far ahead to send is decided as for main memory
- an op does not wait for a copy that is on its way: its stream does
- a device without room keeps less: its budgets shrink, and only if nothing is left to drop is that an error
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from offload.prefetch.engine import POOL, UNTRACKED, arrive, engine_of, lock, range_of, replanning, tracked
from offload.prefetch.plan import OnDevice, Pool
from offload.prefetch.staging import Sent, send_bytes
from offload.prefetch.value import SMALL, Value, page_state_of
from offload.storage import clock
from offload.storage.handle import Handle
from offload.storage.modes import no_functions, no_modes

_T = TypeVar("_T")
log = logging.getLogger("offload.prefetch")


class Copy(Value):
    """A stored value, or a part of one, on a device.

    Args:
        main: the same bytes in main memory.
    """

    __slots__ = ("_main", "_sent", "device")

    def __init__(self, pool: Pool, handle: Handle, main: Value, device: torch.device) -> None:
        super().__init__(pool, handle.file, main.start, main.nbytes, shared=False)
        self.device = device
        self.is_picked = main.is_picked
        self._main = main
        self._sent: Sent | None = None

    def here(self) -> torch.Tensor | None:
        """Its bytes, for the current stream; None if it has just been dropped, or its file is gone."""
        sent = self._sent
        return None if sent is None else sent.here(is_last=not self.kept)

    # As a range that is read

    @property
    def may_ask(self) -> bool:
        """Whether it is there is known."""
        return True

    def is_cached(self) -> bool:
        """Whether it is on the device, or on its way."""
        return self._sent is not None

    def cached_bytes(self) -> int:
        """How many of its bytes are on the device."""
        return 0 if self._sent is None else self.nbytes

    def follows(self, _: Value) -> bool:  # type: ignore[override]
        """Each is sent by itself."""
        return False

    def announce(self, **_: int) -> None:
        """It is read in main memory when its turn comes."""

    def bring_in(self, **_: int) -> None:
        """Read it in main memory, and send it.

        Raises:
            ReadError: the disk failed.
            torch.OutOfMemoryError: the device has no room.
        """
        arrive(self._main)
        mapped = self._mapped()
        if mapped is not None and self._sent is None:
            with no_functions(), no_modes():
                stored = torch.empty(0, dtype=torch.uint8, device="cpu").set_(mapped, self.start, (self.nbytes,), (1,))
                self._sent = send_bytes(stored, self.device)

    def let_go(self) -> None:
        """Drop it from the device; guests that refer to it keep its memory."""
        self.checked_until = 0.0
        self._sent = None
        self.left()


def there(handle: Handle, view_spec: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, int] | None:
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
    if copy.is_picked:
        with lock():
            copy.pool.picked.count(copy)
    engine, found = engine_of(device), None
    for _ in range(_TRIES):
        if copy.checked_until < clock.now():
            engine.arrive(copy)
        found = copy.here()
        if found is not None:
            return found, copy.start - handle.extent[0]
        copy.checked_until = 0.0
    return None


def _copy_of(handle: Handle, view_spec: torch.Tensor, device: torch.device) -> Copy | None:
    page_state = page_state_of(handle)
    whole = page_state.copies.get((device, *handle.extent))
    if type(whole) is Copy and whole.kept and whole.pool is _pool_of(page_state.pool, device):
        return whole
    pool = _pool_of(page_state.pool, device)
    is_small = handle.extent[1] <= SMALL
    if is_small and not pool.max_memory:
        return None
    main = tracked(handle, *handle.extent) if is_small else range_of(handle, view_spec)
    if main is UNTRACKED:
        return None
    with replanning() as leaving:
        pool, key = _pool_of(page_state.pool, device), (device, main.start, main.nbytes)
        copy = page_state.copies.get(key)
        if type(copy) is not Copy or copy.pool is not pool:
            copy = page_state.copies[key] = Copy(pool, handle, main, device)
            leaving.extend(pool.add([copy]))
        return copy


def _pool_of(pool: Pool | None, device: torch.device) -> OnDevice:
    """The budget of a device: without one, nothing stays there."""
    pool = pool or POOL
    found = pool.on_devices.get(device) or pool.on_devices.setdefault(device, OnDevice())
    found.sends_ahead = pool.fixed_window != 0
    return found


def with_room(device: torch.device, act: Callable[[], _T]) -> _T:
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
    """Let half as much stay on a device, and nothing that was sent ahead; whether there was anything."""
    with replanning() as leaving:
        pools = {found for pool in Pool.all() if (found := pool.on_devices.get(device)) is not None}
        there = [value for pool in pools for value in pool.values() if value.cached_bytes()]
        stays = sum(value.nbytes for value in there if value.kept)
        log.warning("%s has too little memory: of %d bytes that stay there, half are dropped", device, stays)
        for pool in pools:
            kept = sum(value.nbytes for value in pool.values() if value.kept and value.cached_bytes())
            pool.max_memory = kept // 2 if kept > SMALL else 0
            pool.reconsider(anew=True)
        leaving.extend(value for value in there if not value.kept)
    return bool(leaving)


_TRIES = 3  # to use what another thread may drop meanwhile
