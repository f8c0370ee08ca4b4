"""Outside every mode of torch's.

Always true:
- with `no_functions` and `no_modes` a tensor is just a tensor, whatever the caller is in the middle of
- each of these is left in one call into C: Python can raise `KeyboardInterrupt` at the first line of an `__exit__` of
  its own, and what that was to bring back would stay away
"""

from __future__ import annotations

from typing import Any

import torch

from offload.torch_api import (
    PYTHON_KEYS,
    InferenceMode,
    exclude_key,
    function_modes_are_on,
    modes_are_on,
    set_forward_grad,
    set_grad,
    transform_on_top,
)
from offload.torch_api import no_functions as no_functions

_enter: Any = InferenceMode.__init__  # torch changes its state here
_exit: Any = InferenceMode.__exit__


def is_plain_world() -> bool:
    """Whether there is no mode to leave, and no transform of torch.func; gradients may be on."""
    return not (modes_are_on() or function_modes_are_on() or torch.is_inference_mode_enabled() or transform_on_top())


class no_modes(InferenceMode):
    """Outside modes that take over ops (fake, functional), outside inference mode, and without gradients.

    It is entered for every batch and many an op. Torch's guard brings back all of the dispatcher's and of autograd's
    state, so what is set here needs no guard of its own. It is in force from when it is made: make it in the `with`.
    """

    def __init__(self) -> None:
        try:
            _enter(self, False)
            for key in PYTHON_KEYS:
                exclude_key(key, True)
            set_grad(False)
            set_forward_grad(False)
        except BaseException:
            _exit(self, None, None, None)
            raise


class no_grad(InferenceMode):
    """Without gradients, and in inference mode or outside it, as before. Make it in the `with`."""

    def __init__(self) -> None:
        is_inference = torch.is_inference_mode_enabled()
        try:
            _enter(self, is_inference)
            set_grad(False)
        except BaseException:
            _exit(self, None, None, None)
            raise
