"""Products for an accelerator that are computed where the weight lies, in main memory: a few rows go over and back.

Always true:
- only of a packed weight, or of experts, that do not stay on the device; each is sent at its first use, so that its
  budget knows it
- both ways are timed once per form and size, here and now; without a clear difference the weight is sent
- neither in exact mode, nor with `OFFLOAD_HYBRID=off`
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from offload.prefetch.copies import streams_to
from offload.prefetch.staging import staging_for
from offload.tensor.guests import sent_to
from offload.tensor.recipes import Piece

MOST_ROWS = 8
_CLEARLY = 0.8  # of the time that sending takes, at the most
_RUNS = 3


def multiplied_where_it_lies(
    x: torch.Tensor,
    weight: Piece,
    device: torch.device,
    multiply: Callable[[torch.Tensor], Any],
    send: Callable[[], Any],
) -> torch.Tensor | None:
    """A product for a device, computed on the CPU; None if the weight is to be sent.

    Args:
        x: on the device.
        multiply: the product with rows in main memory; None if the kernels do not take it.
        send: the product on the device.
    """
    if not crosses(x, device) or not streams_to(device, weight.reads(weight.view_spec)):
        return None

    def there_and_back() -> torch.Tensor | None:
        found = multiply(x.cpu())
        return None if found is None else sent_to(found, device)

    return there_and_back() if wins((weight,), x, device, there_and_back, send) else None


def crosses(x: torch.Tensor, device: torch.device) -> bool:
    """Whether activations on a device are few enough to be sent to a weight, and that is not switched off."""
    if staging_for(device) is None or os.environ.get("OFFLOAD_HYBRID") == "off":
        return False
    is_there = type(x) is torch.Tensor and x.device == device and not torch.is_autocast_enabled(device.type)
    return is_there and 0 < x.numel() <= MOST_ROWS * x.shape[-1]


def wins(
    weights: Sequence[Piece],
    x: torch.Tensor,
    device: torch.device,
    there_and_back: Callable[[], object],
    send: Callable[[], object],
    *others: Hashable,
) -> bool:
    """Whether products with such weights are faster where these lie than where they are sent to: tried once.

    Args:
        others: what it also depends on.
    """
    staging, rows = staging_for(device), x.numel() // x.shape[-1]
    assert staging is not None, "nothing is computed elsewhere for a device without streams"
    forms = ((getattr(one.handle.composed, "form", None), tuple(one.view_spec.shape)) for one in weights)
    key = *forms, x.dtype, rows, *others
    if key not in staging.wins:
        staging.wins[key] = _wins(there_and_back, send, device)
    return staging.wins[key]


def _wins(there_and_back: Callable[[], object], send: Callable[[], object], device: torch.device) -> bool:
    """Whether the kernels take a product, and are clearly faster than to send its weight."""
    if there_and_back() is None:
        return False
    return _seconds(there_and_back, device) < _CLEARLY * _seconds(send, device)


def _seconds(act: Callable[[], object], device: torch.device) -> float:
    """The shortest of a few runs, after a first one."""
    taken = []
    for _ in range(1 + _RUNS):
        torch.accelerator.synchronize(device)
        started = time.perf_counter()
        act()
        torch.accelerator.synchronize(device)
        taken.append(time.perf_counter() - started)
    return min(taken[1:])
