"""How much of an accelerator's memory the weights of models may take.

Always true:
- what is free there counts with what torch's allocator has reserved and does not use; a tenth of it, and 1 GiB at
  least, is left to activations and to others
- a device that does not tell what is free has room for nothing
"""

from __future__ import annotations

from contextlib import suppress

import torch

from offload.memory import available_bytes

LEAST_SPARE = 1 << 30  # bytes
_SPARE_PART = 10  # one in so many
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
    """Whether the memory of a device is main memory."""
    with suppress(*_SILENT):
        return bool(torch.get_device_module(device).get_device_properties(device).is_integrated)
    return False
