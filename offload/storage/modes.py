"""Outside every mode of torch's.

Always true:
- in `plain_world` a tensor is just a tensor, whatever the caller is in the middle of
"""

from __future__ import annotations

from typing import Any

import torch


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
