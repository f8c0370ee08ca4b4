"""Stored bytes on an accelerator: which stay there, and how the others get there.

Always true:
- what is sent is what is stored; only values in files that are never written to stay, so that no copy can become stale
- which stay under the budget of the device is decided as for main memory
- what streams crosses in bundles: values that follow one another fill one slot, and are one copy. The order is that in
  which the thread used them last; what is sent in vain is dropped two bundles later
- a bundle that was made twice stays in pinned memory, in a share of main memory that is free, while all that is on disk
  fits there
- no op waits for a copy that is on its way: its stream does. The thread that issues the ops therefore runs ahead of the
  device, and the next values are sent while it computes
- without a set budget a device fills itself, and all models without one share what is free there
- a device without room keeps less for a while, and only if nothing is left to drop is that an error
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from offload.errors import ReadError
from offload.prefetch.engine import POOL, UNTRACKED, arrive, lock, range_of, replanning, track
from offload.prefetch.plan import SMALL, Pool, Value
from offload.prefetch.room import OnDevice, is_integrated, ooms_on
from offload.prefetch.staging import Sent, Staging, send_bytes, staging_for
from offload.prefetch.value import page_state_of
from offload.storage.handle import Handle

_T = TypeVar("_T")
_FOREVER = float("inf")
_ALIGNED = 256  # bytes, as a device allocates
_AHEAD = 2  # bundles of a thread whose values wait to be used
_MOST_MEMBERS = 256
_RECENT = threading.local()  # what the thread used last, and its bundles
log = logging.getLogger("offload.prefetch")


class Copy(Value):
    """A stored value, or a part of one, that may stay on a device.

    Args:
        main: the same bytes in main memory.

    Attributes:
        sent: its bytes, if they stay there.
        ahead: its bytes, if they were sent with others and are not used yet.
        bundle: the bundle that begins with it.
        following: what streamed after it.
    """

    def __init__(self, pool: Pool, handle: Handle, main: Value, device: torch.device) -> None:
        super().__init__(pool, handle.file, main.start, main.nbytes, shared=False, is_picked=main.is_picked)
        self.sent: Sent | None = None
        self.ahead: Sent | None = None
        self.bundle: Bundle | None = None
        self.following: weakref.ref[Copy] | None = None
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
        staging = staging_for(self._device)
        if not (self.kept or self.is_picked or staging is None or self.nbytes > staging.slot_bytes):
            try:
                if (bundled := self._sent_in_a_bundle(staging)) is not None:
                    return bundled
            except (torch.OutOfMemoryError, ReadError) as error:  # alone it may have room, and be readable
                with lock():
                    for pool in _pools_on(self._device) if isinstance(error, torch.OutOfMemoryError) else ():
                        pool.ooms = min(pool.ooms + 1, ooms_on(self._device))  # it is taken into account
        stored = self.stored()
        if stored is None:
            return None
        sent = send_bytes(stored, self._device)
        self.sent = sent
        self.checked_until = _FOREVER
        if not self.kept:  # in this order: a plan that another thread makes meanwhile drops what it finds
            self.let_go()
        elif is_integrated(self._device):  # it is in main memory twice
            self._main.let_go()
        return sent

    def stored(self) -> torch.Tensor | None:
        """Its bytes in main memory, mapped; None if its file is gone.

        Raises:
            ReadError: the disk failed.
        """
        arrive(self._main)
        mapped = self._mapped()
        if mapped is None:
            return None
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(mapped, self.start, (self.nbytes,), (1,))

    def taken(self) -> Sent | None:
        """Its bytes, if they were sent with what was used before it, to be used once."""
        ahead, self.ahead = self.ahead, None
        return ahead

    def _sent_in_a_bundle(self, staging: Staging) -> Sent | None:
        members = list(itertools.islice(self._streaming(staging.slot_bytes), _MOST_MEMBERS))
        bundle = self.bundle
        if bundle is None or not bundle.is_of(members):
            bundle = Bundle(members)
            self.bundle = bundle if self.following is not None else None  # else its order is not known yet
        sent_now = bundle.send(members, staging, may_pin=self._main.pool.fits)
        if sent_now is None:
            return None
        others = list(zip(members[1:], sent_now[1:], strict=True))
        for one, sent in others:
            one.ahead = sent
        bundles = _RECENT.__dict__.setdefault("bundles", deque())
        bundles.extend([[(weakref.ref(one), weakref.ref(sent)) for one, sent in others]] if others else [])
        for member, its in bundles.popleft() if len(bundles) > _AHEAD else ():
            if (old := member()) is not None and old.ahead is its():  # in vain
                old.ahead = None
        return sent_now[0]

    def _streaming(self, most: int) -> Iterator[Copy]:
        """It, and those that are expected after it and do not stay either, up to so many bytes, or the next bundle."""
        one: Copy | None = self
        seen: set[Copy] = set()
        left = most
        while one is not None and one not in seen and one.ahead is None and one._device == self._device:
            seen.add(one)
            if not one.kept:
                left -= _padded(one.nbytes)
                if one is not self and (left < 0 or one.bundle is not None):
                    return
                yield one
            one = None if one.following is None else one.following()

    def cached_bytes(self) -> int:
        return 0 if self.sent is None else self.nbytes

    def let_go(self) -> None:
        """Drop it from the device; guests that refer to it keep its memory."""
        self.sent = self.ahead = self.bundle = None
        self.checked_until = 0.0


class Bundle:
    """Values that cross the bus in one copy.

    Args:
        members: in the order of their use.
    """

    def __init__(self, members: Sequence[Copy]) -> None:
        self._members = [weakref.ref(member) for member in members]
        self._begins = list(itertools.accumulate((_padded(member.nbytes) for member in members), initial=0))
        self._pinned: torch.Tensor | None = None
        self._is_known = False

    def is_of(self, members: Sequence[Copy]) -> bool:
        return [ref() for ref in self._members] == list(members)

    def send(self, members: Sequence[Copy], staging: Staging, *, may_pin: bool) -> list[Sent] | None:
        """The bytes of each on the device; None if a file is gone.

        Args:
            may_pin: whether they may stay in pinned memory.

        Raises: as `Copy.send`.
        """
        spans = list(zip(self._begins, (member.nbytes for member in members), strict=False))
        pinned = self._pinned if may_pin else None
        if pinned is not None:
            return staging.send_many(pinned, [], spans)
        stored = [one for member in members if (one := member.stored()) is not None]
        if len(stored) < len(members):
            return None
        if self._is_known and may_pin:
            pinned = staging.pinned(self._begins[-1])
        sent = staging.send_many(pinned, stored, spans)
        self._pinned, self._is_known = pinned, True  # once it is filled: another thread may send it
        return sent


def _padded(nbytes: int) -> int:
    """With what is between two values, so that each is aligned as if it were allocated."""
    return -(-nbytes // _ALIGNED) * _ALIGNED


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
    if not copy.kept and not copy.is_picked:
        _follow(copy)
    sent = copy.sent or copy.taken() or copy.send()
    return None if sent is None else (sent.arrived(is_last=not copy.kept), copy.start - handle.extent[0])


def streams_to(device: torch.device, views: Iterable[tuple[Handle, torch.Tensor]]) -> bool:
    """Whether several views were sent to a device before, and will not stay there; then they count as used."""
    copies: list[Copy] = []
    for handle, view_spec in views:
        main = range_of(handle, view_spec)
        copy = page_state_of(handle).copies.get((device, main.start, main.nbytes)) if main is not UNTRACKED else None
        if type(copy) is Copy:
            copies.append(copy)
        elif main is not UNTRACKED:
            return False
    with lock():
        if not copies or any(one.kept or (one.is_picked and one.pool.would_admit(one)) for one in copies):
            return False
        for copy in copies:
            if copy.is_picked:
                copy.pool.picked.count(copy)
        return True


def _follow(copy: Copy) -> None:
    """Note that this thread uses a value that streams, after another one."""
    before = getattr(_RECENT, "used", None)
    last = None if before is None else before()
    if last is not copy:
        if last is not None:
            last.following = weakref.ref(copy)
        _RECENT.used = weakref.ref(copy)


def _copy_of(handle: Handle, view_spec: torch.Tensor, device: torch.device) -> Copy | None:
    page_state = page_state_of(handle)
    whole = page_state.copies.get((device, *handle.extent))
    pool = pool_on(device, page_state.pool)
    if type(whole) is Copy and whole.kept and whole.pool is pool:
        return whole
    is_small = handle.extent[1] <= SMALL
    if is_small and view_spec.numel() * view_spec.itemsize < handle.extent[1]:
        with lock():
            if pool.keeps_nothing:
                return None  # a part of what does not stay either
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
    on_device = (pool or POOL).on_devices.get(device) or POOL.on_devices.get(device)
    if on_device is None:
        with lock():
            on_device = POOL.on_devices.setdefault(device, OnDevice(None, device))
    assert isinstance(on_device, OnDevice)
    return on_device


def retry_on_oom(device: torch.device, act: Callable[[], _T]) -> _T:
    """What a function returns that allocates memory on a device: while there is too little, less stays there.

    Raises:
        torch.OutOfMemoryError: nothing more can be dropped.
    """
    is_last = False
    while True:
        try:
            return act()
        except torch.OutOfMemoryError:
            if is_last:
                raise
            is_last = not _keep_less(device)  # what was sent ahead may have been all that was there


def _pools_on(device: torch.device) -> set[OnDevice]:
    return {on_device for pool in Pool.all() if isinstance(on_device := pool.on_devices.get(device), OnDevice)}


def _keep_less(device: torch.device) -> int:
    """Let half as much stay on a device, and nothing that was sent ahead; how many bytes there were."""
    with replanning() as leaving:
        pools = _pools_on(device)
        total = sum(value.cached_bytes() for pool in pools for value in pool.values())
        if total:
            log.warning("%s has too little memory: of %d bytes that stay there, half are dropped", device, total)
        for pool in pools:
            leaving.extend(pool.keep_less())
            leaving.extend(value for value in pool.values() if type(value) is Copy and value.ahead is not None)
    return total
