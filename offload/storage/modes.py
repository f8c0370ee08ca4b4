"""Outside every mode of torch's.

Always true:
- in `plain_world` a tensor is just a tensor, whatever the caller is in the middle of
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def plain_world() -> Iterator[None]:
    """Outside every mode (fake, functional, inference, a default device), where a tensor is just a tensor."""
    with (
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        yield
