"""accelerate: empty weights.

Always true:
- accelerate's own function does the work
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any


def init_empty_weights(include_buffers: bool = False) -> AbstractContextManager[Any]:
    """accelerate's context: a model that is built inside has parameters on the meta device, which take no memory.

    Args:
        include_buffers: whether buffers are on the meta device, too.

    Returns:
        A context manager.

    Example:
        >>> from torch import nn
        >>> with init_empty_weights():
        ...     model = nn.Linear(10_000, 10_000)
        >>> model.weight.device
        device(type='meta')
    """
    from accelerate import init_empty_weights as context

    entered: AbstractContextManager[Any] = context(include_buffers=include_buffers)
    return entered
