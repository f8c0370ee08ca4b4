"""How much of an accelerator's memory the weights of models may take.

Always true:
- what is free there counts with what torch's allocator has reserved and does not use; a tenth of it, and 1 GiB at
  least, is left to activations and to others
- a device that does not tell what is free has room for nothing
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
from torch import nn

from offload.memory import available_bytes
from offload.prefetch.plan import NEWS, SMALL, Pool, Value, fitting, size_of
from offload.system import clock

LEAST_SPARE = 1 << 30  # bytes
_SPARE_PART = 10  # one in so many
_GLANCE = 0.1  # seconds between looks whether others need what is spared on a device
_GOLDEN = (5**0.5 - 1) / 2  # fractions of its multiples are spread evenly, however many there are
_CALM = 30.0  # seconds without an out-of-memory error after which more may stay on a device again
_FEW = 2048  # values of a device for which each new one triggers a plan, in a millisecond or two
_SILENT = (RuntimeError, AssertionError, AttributeError, ValueError)  # of devices that tell nothing


def room_on(device: torch.device, *, held: int = 0, beside: int = 0) -> int:
    """Bytes of weights that may stay on a device if no budget is set.

    Args:
        held: bytes of these that are there already.
        beside: bytes that something else will need, such as keys and values of the context.
    """
    free = free_on(device) + held
    return max(0, free - spare_of(free) - beside)


def spare_of(free: int) -> int:
    """How many of the free bytes are left to activations, and to others."""
    return max(LEAST_SPARE, free // _SPARE_PART)


def free_on(device: torch.device) -> int:
    """Bytes that can be allocated on a device now; of one that shares main memory, no more than there is of that."""
    with suppress(*_SILENT):
        free = int(torch.accelerator.get_memory_info(device)[0])
        unused = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
        free += max(0, unused)
        return min(free, available_bytes()) if is_integrated(device) else free
    return 0


def ooms_on(device: torch.device) -> int:
    """How many allocations have failed on a device in this process, anybody's."""
    with suppress(*_SILENT):
        return int(torch.accelerator.memory_stats(device).get("num_ooms", 0))
    return 0


def is_integrated(device: torch.device) -> bool:
    with suppress(*_SILENT):
        return bool(torch.get_device_module(device).get_device_properties(device).is_integrated)
    return False


class OnDevice(Pool):
    """Values that are copied to an accelerator.

    Its values become known one by one, each as it is sent for the first time. A new one may stay instead of another,
    so that those that stay are spread evenly; but one that has left is not sent again for that.

    Without a set budget they fill the device: `grant` says how far, and holds until the next one. If others then take
    what was spared for them, less stays.

    Args:
        max_memory: bytes that may stay there; None for what there is room for.
        device: whose memory it is.

    Attributes:
        contexts: for each `generate` that runs, the model, and the bytes of its keys and values.
        beside: models, and the bytes of keys and values of each, while it does not generate.
        ooms: failed allocations there that are taken into account.
    """

    def __init__(self, max_memory: int | None, device: torch.device) -> None:
        super().__init__(max_memory, window=0)
        self.contexts: dict[object, tuple[nn.Module, int]] = {}
        self.beside: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self.ooms = ooms_on(device)
        self._device = device
        self._granted: int | None = None
        self._spared = 0
        self._glanced = 0.0
        self._most = sys.maxsize  # since an out-of-memory error
        self._calm_from = 0.0
        self._new: set[Value] = set()

    def add(self, values: Iterable[Value]) -> list[Value]:
        values = list(values)
        self._new = {value for value in values if not value.is_picked}
        if self._new:
            self._looked = float("-inf")  # a device is full within less than the usual time between two looks
        try:
            return super().add(values)
        finally:
            self._new = set()

    @property
    def keeps_nothing(self) -> bool:
        """Whether there is no budget to keep anything there, however small. Under the engine's lock."""
        return not (self.room() if self._granted is None or self.max_memory is not None else self._granted)

    def room(self) -> int:
        """Bytes that there is room for now, with those that are there. Under the engine's lock."""
        if self.max_memory is not None:
            return self.max_memory
        generating = {model for model, _ in self.contexts.values()}
        beside = sum(nbytes for model, nbytes in self.beside.items() if model not in generating)
        beside += sum(nbytes for _, nbytes in self.contexts.values())
        return room_on(self._device, held=self._held(), beside=beside)

    def _held(self) -> int:
        return sum(value.cached_bytes() for value in self.values())

    def is_due(self) -> bool:
        """As in all pools, and soon after others have taken half of what was spared, or an allocation has failed."""
        if clock.now() - self._glanced > _GLANCE:
            self._glanced = clock.now()
            is_short = self.max_memory is None and free_on(self._device) < self._spared // 2
            if is_short or ooms_on(self._device) > self.ooms:
                self._looked = float("-inf")
        return super().is_due()

    def grant(self) -> list[Value]:
        """Let as much stay as there is room for now, if no budget is set. Returns those to drop."""
        self._granted = None
        return self.reconsider(anew=True)

    def keep_less(self) -> list[Value]:
        """Let half as much stay as does, until there was no out-of-memory error for a while. Returns those to drop."""
        stay = [value for value in self.values() if value.cached_bytes()]
        self._halve(size_of(stay))
        self.reconsider(anew=True)
        return [value for value in stay if not value.kept]

    def _halve(self, nbytes: int) -> None:
        self._most = nbytes // 2 if nbytes > SMALL else 0
        self._calm_from, self.ooms = clock.now() + _CALM, ooms_on(self._device)

    def limit_now(self) -> int:
        held = self._held()
        if ooms_on(self._device) > self.ooms:  # somebody else's
            self._halve(held)
        is_calm = clock.now() >= self._calm_from
        if is_calm and self._most < sys.maxsize:
            self._most = self._most * 2 if 0 < self._most // 2 < held else sys.maxsize
            self._calm_from = clock.now() + _CALM
        return min(self._most, self._granted_now(held, is_calm=is_calm) if self.max_memory is None else self.max_memory)

    def _granted_now(self, held: int, *, is_calm: bool) -> int:
        """What there was room for when this was last asked, or what is left of it."""
        free = free_on(self._device) + held
        self._spared = spare_of(free)
        if self._granted is None:
            self._granted = self.room()
        elif free - held < self._spared // 2:
            self._granted = max(0, min(self._granted, free - self._spared))
            self._calm_from = clock.now() + _CALM
        elif is_calm:
            self._granted = max(self._granted, self.room())
        return self._granted

    def _always(self, value: Value) -> bool:
        return value.nbytes <= SMALL and not self.keeps_nothing

    def _is_news(self, limit: int) -> bool:
        return limit < self._limit or super()._is_news(limit)

    @property
    def _least_news(self) -> float:
        return 0.0 if self._new and self.max_memory != 0 and len(self._values) <= _FEW else NEWS

    def _first_of(self, values: Iterable[Value], **_: bool) -> Sequence[list[Value]]:
        return ([value for value in values if value.has_stayed or value in self._new],)

    def _some_of(self, values: list[Value], free: int) -> set[Value]:
        """As many as fit, those with the lowest fractions of their number times the golden ratio.

        These are evenly spread over as many values as have come so far, and each of them was so before.
        """
        order = {value: number * _GOLDEN % 1 for number, value in self._values.items()}
        return fitting(sorted(values, key=order.__getitem__), free)
