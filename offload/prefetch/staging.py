"""Copies of values to an accelerator, through memory that is pinned once.

Always true:
- while the device reads one slot, the CPU fills the other; a slot is refilled only after its copy has ended
- a copy is ordered before later work on the stream that was current at the call; the call does not wait for it
- no memory is pinned per value; small values, and devices without streams, get a plain copy
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from offload.storage.locks import fork_safe_lock
from offload.storage.modes import no_functions, no_modes

_SLOT = 32 << 20  # bytes
_SLOTS = 2
_STAGED = 1 << 20  # smallest size in bytes that goes through the slots
_NEEDED = ("Stream", "Event", "stream", "current_stream")  # what a device's torch module must have


def send(values: torch.Tensor, target: torch.device) -> torch.Tensor:
    """A copy of a one-dimensional, contiguous CPU tensor on an accelerator."""
    nbytes = values.numel() * values.itemsize
    is_lazy = values.is_conj() or values.is_neg()
    staging = _staging_for(target) if nbytes >= _STAGED and not is_lazy else None
    if staging is None:
        return values.to(target)
    with no_functions(), no_modes():
        return staging.send(values.detach().view(torch.uint8)).view(values.dtype)


def settle(device: torch.device) -> None:
    """Wait until everything sent to a device has arrived, for all of its streams."""
    torch.get_device_module(device).current_stream(device).synchronize()


def lend(values: torch.Tensor, device: torch.device) -> None:
    """Keep memory that stays on a device from being reused before the current stream is done with it."""
    values.record_stream(torch.get_device_module(device).current_stream(device))


@dataclass(frozen=True)
class Slot:
    """Pinned memory, and the event that marks the end of the last copy from it."""

    memory: torch.Tensor
    copied: Any


class Staging:
    """The path to one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._slots = itertools.cycle([Slot(_pinned(_SLOT), self._module.Event()) for _ in range(_SLOTS)])
        self._uses: deque[Any] = deque()  # events: the use of each previously sent value has ended
        self._lock = fork_safe_lock()

    def send(self, source: torch.Tensor) -> torch.Tensor:
        """A copy of the bytes on the device."""
        with self._lock:
            with self._module.stream(self._stream):  # allocated from this stream's pool: waits for nobody else's work
                copy = torch.empty(len(source), dtype=torch.uint8, device=self._device)
                for part, place in zip(source.split(_SLOT), copy.split(_SLOT), strict=True):
                    slot = self._copy(part, place)
            current = self._module.current_stream(self._device)
            self._pace(current)
            current.wait_event(slot.copied)
            copy.record_stream(current)
            return copy

    def _pace(self, current: Any) -> None:
        """The CPU may run ahead of the device, but only by a few values: they take memory there."""
        use = self._module.Event()
        use.record(current)
        self._uses.append(use)
        if len(self._uses) > _SLOTS:
            self._uses.popleft().synchronize()

    def _copy(self, part: torch.Tensor, place: torch.Tensor) -> Slot:
        slot = next(self._slots)
        slot.copied.synchronize()
        pinned = slot.memory[: len(part)]
        pinned.copy_(part)
        place.copy_(pinned, non_blocking=True)
        slot.copied.record(self._stream)
        return slot


def _pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _staging_for(device: torch.device) -> Staging | None:
    with _LOCK:
        if device not in _STAGINGS:
            module = torch.get_device_module(device)
            _STAGINGS[device] = Staging(device) if all(hasattr(module, name) for name in _NEEDED) else None
        return _STAGINGS[device]


_LOCK = fork_safe_lock()
_STAGINGS: dict[torch.device, Staging | None] = {}
