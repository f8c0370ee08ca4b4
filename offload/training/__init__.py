"""Training with state on disk.

| module | what |
| --- | --- |
| `optimizer` | an optimizer's state, and gradients, on disk |
| `activations` | tensors that autograd saves for backward, on disk until then |
| `checkpoints` | model, optimizer and other state, saved and loaded together |
"""

from offload.training.activations import offload_activations
from offload.training.checkpoints import load_training, save_training
from offload.training.optimizer import offload_optimizer

__all__ = ["load_training", "offload_activations", "offload_optimizer", "save_training"]
