"""Copies of values to an accelerator, through memory that is pinned once.

Always true:
- while the device reads one slot, the CPU fills another; a slot is refilled only after its copy has ended
- a copy is on the copy stream: work of another stream is ordered after it by `Sent.here`, and the CPU waits for neither
- what is not kept there is used once: the CPU waits while too much of it is on the device and not used yet
- devices without streams get plain copies
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from offload.kernels import native
from offload.memory import available_bytes
from offload.system.locks import fork_safe_lock
from offload.system.modes import no_functions, no_modes

_SLOT = 32 << 20  # bytes
_SLOTS = 4  # factors are sent between the numbers: two for each
_UNUSED = 64 << 20  # bytes that may be sent and not used yet, beside the last value: they take memory there
_STAGED = 64 << 10  # smallest size in bytes that goes through the slots: of less, a driver keeps a copy itself
_KEEPS_COPIES = ("cuda",)  # devices whose driver does so before the call returns: the CPU need not wait for the device
_PINNED_PART = 8  # of the free main memory, one in so many bytes may be pinned beside the slots
_MEASURED = 64 << 20  # bytes, to measure a bus
_NEEDED = ("Stream", "Event", "current_stream")  # what a device's torch module must have


def send(values: torch.Tensor, target: torch.device) -> torch.Tensor:
    """A copy of a one-dimensional, contiguous CPU tensor on an accelerator, for the current stream."""
    nbytes = values.nbytes
    is_lazy = values.is_conj() or values.is_neg()
    if nbytes < _STAGED or is_lazy or staging_for(target) is None:
        return values.to(target, non_blocking=nbytes < _STAGED and target.type in _KEEPS_COPIES)
    with no_functions(), no_modes():
        return send_bytes(values.detach().view(torch.uint8), target).arrived(is_last=True).view(values.dtype)


def send_bytes(values: torch.Tensor, target: torch.device) -> Sent:
    """A copy of one-dimensional, contiguous bytes on the CPU, which may still be on its way.

    Raises:
        torch.OutOfMemoryError: the device has no room.
    """
    staging = staging_for(target)
    return Sent(values.to(target)) if staging is None else staging.send(values)


class Sent:
    """Bytes on a device, or on their way there."""

    def __init__(self, values: torch.Tensor, staging: Staging | None = None, arrived: Any = None) -> None:
        self._values = values
        self._staging = staging
        self._arrived = arrived

    def arrived(self, *, is_last: bool) -> torch.Tensor:
        """The bytes, for the current stream of the device: its work from now on comes after their arrival.

        Args:
            is_last: whether they are not kept beyond this use, so that the CPU may run ahead by a few of them only.
        """
        staging, arrived = self._staging, self._arrived
        if staging is None:
            return self._values
        current = staging.current_stream()
        if is_last:
            staging.pace(current, self._values.nbytes)
        if arrived is not None:
            if arrived.query():
                self._arrived = None  # for every stream
            else:
                current.wait_event(arrived)
        self._values.record_stream(current)
        return self._values


@dataclass(frozen=True)
class PinnedSlot:
    """Pinned memory, and the event that marks the end of the last copy from it."""

    memory: torch.Tensor
    copied: Any


class Staging:
    """The path to one device.

    Attributes:
        sent: how many bytes were sent.
        copies: how many copies that were.
        slot_bytes: the size of a slot.
        wins: for kinds of products, whether they are faster where the weight lies than where it is sent to.
    """

    def __init__(self, device: torch.device) -> None:
        self.sent = self.copies = 0
        self.slot_bytes = _SLOT
        self.wins: dict[Hashable, bool] = {}
        self._pinned: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()  # pinned, beside the slots
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._slots = itertools.cycle([PinnedSlot(_pinned(_SLOT), self._module.Event()) for _ in range(_SLOTS)])
        self._uses: deque[tuple[Any, int]] = deque()  # ends of uses, as events, and the bytes used after each
        self._used = 0  # bytes, in total
        self._lock = fork_safe_lock()

    def current_stream(self) -> Any:
        return self._module.current_stream(self._device)

    def send(self, source: torch.Tensor) -> Sent:
        with self._lock, self._stream:  # allocated from its pool: waits for nobody else's work
            copy = torch.empty(source.nbytes, dtype=torch.uint8, device=self._device)
            for part, place in zip(source.split(_SLOT), copy.split(_SLOT), strict=True):
                self._copy(next(self._slots), [part], [0], place)
            return Sent(copy, self, self._arrived())

    def send_many(
        self, pinned: torch.Tensor | None, stored: Sequence[torch.Tensor], spans: Sequence[tuple[int, int]]
    ) -> list[Sent]:
        """Copies of several values on the device, which cross the bus as one.

        Args:
            pinned: where they stay in pinned memory; None for a slot.
            stored: what is put there first; nothing if it is there.
            spans: where each begins there, and its bytes.
        """
        with self._lock, self._stream:
            place = torch.empty(sum(spans[-1]), dtype=torch.uint8, device=self._device)
            slot = next(self._slots) if pinned is None else PinnedSlot(pinned, self._module.Event())
            self._copy(slot, stored, [begin for begin, _ in spans], place)
            arrived = self._arrived()
            return [Sent(place[begin : begin + size], self, arrived) for begin, size in spans]

    def pinned(self, nbytes: int) -> torch.Tensor | None:
        """Pinned memory to keep something in; None if too much of the memory that is free would be pinned."""
        with self._lock:
            if nbytes + sum(one.nbytes for one in self._pinned) > available_bytes() // _PINNED_PART:
                return None
            memory = _pinned(nbytes)
            self._pinned.add(memory)
            return memory

    def pace(self, current: Any, nbytes: int) -> None:
        """Some bytes are about to be used, and then freed: wait until the device has used most of the earlier ones."""
        use = self._module.Event()
        use.record(current)
        with self._lock:
            self._uses.append((use, nbytes))
            self._used += nbytes
            due = []
            while len(self._uses) > 2 and self._used > _UNUSED:
                earlier, freed = self._uses.popleft()
                self._used -= freed
                due.append(earlier)
        for use in due:
            use.synchronize()

    def _copy(
        self, slot: PinnedSlot, stored: Sequence[torch.Tensor], begins: Sequence[int], place: torch.Tensor
    ) -> None:
        slot.copied.synchronize()
        if stored:
            native.gather(stored, begins, slot.memory)
        place.copy_(slot.memory[: place.nbytes], non_blocking=True)
        slot.copied.record(self._stream)
        self.copies += 1
        self.sent += place.nbytes

    def _arrived(self) -> Any:
        arrived = self._module.Event()
        arrived.record(self._stream)
        return arrived


def _pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def staging_for(device: torch.device) -> Staging | None:
    """The path to a device; None for one without streams."""
    with _LOCK:
        if device not in _STAGINGS:
            module = torch.get_device_module(device)
            _STAGINGS[device] = Staging(device) if all(hasattr(module, name) for name in _NEEDED) else None
        return _STAGINGS[device]


def bus_rate(device: torch.device) -> float:
    """Bytes per second that reach a device, measured once."""
    known = _RATES.get(device)
    if known is None:
        values, taken = torch.zeros(_MEASURED, dtype=torch.uint8, device="cpu"), []
        for _ in range(4):
            started = time.perf_counter()
            send(values, device)
            torch.accelerator.synchronize(device)
            taken.append(time.perf_counter() - started)
        known = _RATES[device] = _MEASURED / median(taken[1:])
    return known


_LOCK = fork_safe_lock()
_RATES: dict[torch.device, float] = {}
_STAGINGS: dict[torch.device, Staging | None] = {}
