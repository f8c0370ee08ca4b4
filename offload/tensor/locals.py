"""This process's part of a tensor spread over many: the local tensor of a DTensor.

Always true:
- the DTensor is outside and the tensor on disk inside, never the other way round
- torch.distributed is not imported here: where there is a DTensor, it has been imported already
"""

from __future__ import annotations

from typing import Any

import torch

from offload.tensor import wrapper
from offload.torch_api import dtensor_class, dtensor_like, local_tensor


def is_dtensor(x: object) -> bool:
    """Whether this is a DTensor of torch.distributed."""
    kind = dtensor_class()
    return kind is not None and isinstance(x, kind)


def local_of(x: Any) -> Any:
    """The local tensor of a DTensor; anything else as it is."""
    return local_tensor(x) if is_dtensor(x) else x


def with_local(outer: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor like `outer` with another local tensor of that shape: `local` itself if `outer` is not a DTensor."""
    return dtensor_like(outer, local) if is_dtensor(outer) else local


def is_offloaded(x: object) -> bool:
    """Whether the data of a tensor is on disk; of a DTensor, whether this process's share is.

    Args:
        x: anything.

    Returns:
        True for an `OffloadedTensor`, and for a parameter or a DTensor over one; False for all else.

    Example:
        >>> is_offloaded(torch.ones(2))
        False
    """
    return wrapper.is_offloaded(local_of(x))
