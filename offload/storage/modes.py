"""Outside every mode of torch's.

Always true:
- with `no_functions` and `no_modes` a tensor is just a tensor, whatever the caller is in the middle of
- each of these is left in one call into C: Python can raise `KeyboardInterrupt` at the first line of an `__exit__` of
  its own, and what that was to bring back would stay away
"""

from __future__ import annotations

from typing import Any

import torch

no_functions = torch._C.DisableTorchFunction  # modes and classes that take over calls in Python
_Guard = torch._C._InferenceMode
_enter: Any = _Guard.__init__  # torch changes its state here
_exit: Any = _Guard.__exit__
_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
_DISPATCH_IN_PYTHON = (
    torch._C.DispatchKey.Python,
    torch._C.DispatchKey.PythonTLSSnapshot,
    torch._C.DispatchKey.PreDispatch,
)


def is_plain_world() -> bool:
    """Whether there is no mode to leave, and no transform of torch.func; gradients may be on."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch.is_inference_mode_enabled()
        or torch._C._functorch.peek_interpreter_stack()
    )


class no_modes(_Guard):
    """Outside modes that take over ops (fake, functional), outside inference mode, and without gradients.

    It is entered for every batch and many an op. Torch's guard brings back all of the dispatcher's and of autograd's
    state, so what is set here needs no guard of its own. It is in force from when it is made: make it in the `with`.
    """

    def __init__(self) -> None:
        try:
            _enter(self, False)
            for key in _DISPATCH_IN_PYTHON:
                _exclude(key, True)
            torch._C._set_grad_enabled(False)
            torch._C._set_fwd_grad_enabled(False)
        except BaseException:
            _exit(self, None, None, None)
            raise


class no_grad(_Guard):
    """Without gradients, and in inference mode or outside it, as before. Make it in the `with`."""

    def __init__(self) -> None:
        is_inference = torch.is_inference_mode_enabled()
        try:
            _enter(self, is_inference)
            torch._C._set_grad_enabled(False)
        except BaseException:
            _exit(self, None, None, None)
            raise
