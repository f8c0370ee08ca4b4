"""Outside every mode of torch's.

Always true:
- in a plain world a tensor is just a tensor, whatever the caller is in the middle of
"""

from __future__ import annotations

from typing import Any

import torch


def is_plain_world() -> bool:
    """Whether there is no mode to leave, and no transform of torch.func; gradients may be on."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch.is_inference_mode_enabled()
        or torch._C._functorch.peek_interpreter_stack()
    )


class plain_world:
    """Outside every mode (fake, functional, inference, a default device), where a tensor is just a tensor.

    Without gradients. It is entered for every batch and many an op: of torch's own guards, with nothing around them.
    """

    __slots__ = ("_guards",)

    def __enter__(self) -> None:
        guards = (torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch._C._InferenceMode(False))
        self._guards: tuple[Any, ...] = guards
        for guard in guards:
            guard.__enter__()
        torch._C._set_grad_enabled(False)  # the last guard brings back what was before it

    def __exit__(self, *error: object) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(*error)
