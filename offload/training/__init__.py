"""Training with state on disk.

| module | what |
| --- | --- |
| `optimizer` | what an optimizer keeps of each parameter, and gradients, on disk |
| `activations` | what autograd saves for backward, on disk until it is asked for |
| `checkpoints` | model, optimizer and the rest, saved as one and loaded as one |
| `plain` | nested data with tensors in it, as JSON and named tensors |
"""
