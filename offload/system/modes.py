"""Leaving all torch modes.

Always true:
- inside `no_functions` and `no_modes` a tensor is just a tensor, whatever modes the caller has on
- each is left in a single C call: Python can raise `KeyboardInterrupt` at the first line of an `__exit__` written in
  Python, and what that should restore would stay off
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from offload.torch_api import (
    PYTHON_KEYS,
    TRANSFORM_KEYS,
    InferenceMode,
    exclude_key,
    function_modes_are_on,
    modes_are_on,
    set_forward_grad,
    set_grad,
    transform_on_top,
)
from offload.torch_api import no_functions as no_functions

_enter = InferenceMode.__init__  # torch changes its state here
_exit = InferenceMode.__exit__
F = TypeVar("F", bound=Callable[..., Any])


def is_plain_world() -> bool:
    """Whether no mode and no torch.func transform is on; gradients may be on."""
    return not (modes_are_on() or function_modes_are_on() or torch.is_inference_mode_enabled() or transform_on_top())


class no_modes(InferenceMode):
    """Turns off what takes over ops: modes (fake, functional) and torch.func's transforms; inference mode; gradients.

    It is entered for every batch and many ops. Torch's guard restores the whole state of the dispatcher and of
    autograd, so what is set here needs no guard of its own. It takes effect when it is created: create it in `with`.
    """

    def __init__(self) -> None:
        try:
            _enter(self, False)
            for key in PYTHON_KEYS if transform_on_top() is None else (*PYTHON_KEYS, *TRANSFORM_KEYS):
                exclude_key(key, True)
            set_grad(False)
            set_forward_grad(False)
        except BaseException:
            _exit(self, None, None, None)
            raise


class autograd_mode(InferenceMode):
    """Turns inference mode on or off; gradients too, if `grad` is given. Create it in the `with`."""

    def __init__(self, *, inference: bool, grad: bool | None = None) -> None:
        try:
            _enter(self, inference)
            if grad is not None:
                set_grad(grad)
        except BaseException:
            _exit(self, None, None, None)
            raise


# Functions: an object whose own `__init__` is interrupted at its end would outlive the mode around it, and put that
# mode's state back later.


def no_inference() -> autograd_mode:
    """Turns off inference mode, in which tensors are made that can't be trained later. Call it in the `with`."""
    return autograd_mode(inference=False)


def no_grad() -> autograd_mode:
    """Turns off gradients; inference mode stays as it was. Call it in the `with`."""
    return autograd_mode(inference=torch.is_inference_mode_enabled(), grad=False)


def inside(guard: Callable[[], AbstractContextManager[None]]) -> Callable[[F], F]:
    """A decorator: a function is called inside a guard of this module."""

    def decorated(function: F) -> F:
        @wraps(function)
        def called(*args: object, **kwargs: object) -> Any:
            with guard():
                return function(*args, **kwargs)

        return cast("F", called)

    return decorated
