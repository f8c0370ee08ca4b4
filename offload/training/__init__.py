"""Training with state on disk.

| module | what |
| --- | --- |
| `optimizer` | what an optimizer keeps of each parameter, and gradients, on disk |
| `activations` | what autograd saves for backward, on disk until it is asked for |
| `checkpoints` | model, optimizer and the rest, saved as one and loaded as one |
"""

from offload.training.activations import offload_activations
from offload.training.checkpoints import load_training, save_training
from offload.training.optimizer import offload_optimizer

__all__ = ["load_training", "offload_activations", "offload_optimizer", "save_training"]
