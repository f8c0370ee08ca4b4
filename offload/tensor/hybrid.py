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

import torch

from offload.prefetch.staging import staging_for
from offload.tensor.recipes import Piece

MOST_ROWS = 8
_CLEARLY = 0.8  # of the time that sending takes, at the most
_RUNS = 3


def crosses(x: torch.Tensor, device: torch.device) -> bool:
    """Whether activations on a device are few enough to be sent to a weight, and that is not switched off."""
    if staging_for(device) is None or os.environ.get("OFFLOAD_HYBRID") == "off":
        return False
    is_there = type(x) is torch.Tensor and x.device == device and not torch.is_autocast_enabled(device.type)
    return is_there and 0 < x.numel() <= MOST_ROWS * x.shape[-1]


def wins(
    weights: Sequence[Piece], x: torch.Tensor, here: Callable[[], object], send: Callable[[], object], *others: Hashable
) -> bool:
    """Whether products with such weights are faster `here`, where these lie, than on the device of x: tried once.

    `here` gives None if the kernels do not take them; `others` is what it also depends on.
    """
    staging, rows = staging_for(x.device), x.numel() // x.shape[-1]
    assert staging is not None, "nothing is computed elsewhere for a device without streams"
    forms = ((getattr(one.handle.composed, "form", None), tuple(one.view_spec.shape)) for one in weights)
    key = *forms, x.dtype, rows, *others
    if key not in staging.wins:
        staging.wins[key] = _wins(here, send, x.device)
    return staging.wins[key]


def _wins(here: Callable[[], object], send: Callable[[], object], device: torch.device) -> bool:
    """Whether the kernels take a product, and are clearly faster than to send its weight."""
    if here() is None:
        return False
    return _seconds(here, device) < _CLEARLY * _seconds(send, device)


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
