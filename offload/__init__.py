"""PyTorch tensors that live on disk."""

from offload import ops
from offload.tensor.wrapper import OffloadedTensor, is_offloaded
