"""Blocks compute in one thread, whichever batch they are called for.

The kernels of a thread have threads of their own (OpenMP). If batches compute by turns, each in its thread, the system
wakes other threads for each block, often on the same core; in one thread, they stay where they are.

Always true:
- a block is called in another thread only if the state of its caller's is one that can be carried over: without
  gradients, modes, hooks, transforms, a compiler, or kernels that compute in another way
- what a block sets in context variables, its caller finds there
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from offload.batches.states import ThreadState, is_bare, kernels
from offload.importing import imported
from offload.torch_api import is_compiled, not_compiled, usable_accelerator


class DelegatedCall:
    """A call that one thread may make for another; `is_done` if it was made."""

    def __init__(self, fn: Callable[[], object]) -> None:
        self._fn, self._kernels, self._state = fn, kernels(), ThreadState()
        self._result: object = None
        self._error: Exception | None = None
        self.is_done = False

    @staticmethod
    def can_be_run() -> bool:
        """Whether another thread can make calls for this one."""
        return not torch.is_grad_enabled() and usable_accelerator() is None and is_bare()

    def run(self) -> None:
        """Make the call in this thread, after another one, if it computes as the other thread does."""
        if kernels() != self._kernels or not is_bare() or is_compiled():
            return
        try:
            self._result = self._state.run_delegated(self._fn)
        except Exception as error:
            self._error = error
        self.is_done = True

    def result(self) -> object:
        """Its result; called in the other thread. What it raises is raised there."""
        self._state.apply_context()
        error, self._error = self._error, None  # its frames refer to this one
        if error is None:
            return self._result
        try:
            raise error
        finally:
            del error


class Forward:
    """A module's forward, while batches pass it."""

    def __init__(self, module: nn.Module, delegate: Callable[..., DelegatedCall | None]) -> None:
        """`delegate` is given the call, None if it is to be compiled, and its arguments; returns it if it was made."""
        self._module, self._plain, self._delegate = module, module.forward, delegate
        if imported("torch._dynamo", "disable"):
            self._delegate = not_compiled(delegate)
        functools.update_wrapper(self, module.forward)  # for those who ask for its parameters

    def __call__(self, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling():
            self._delegate(None, (args, kwargs))
            return self._plain(*args, **kwargs)
        forward = partial(self._plain, *args, **kwargs)
        delegated = self._delegate(None if is_compiled() else forward, (args, kwargs))
        return forward() if delegated is None else delegated.result()

    def take_off(self) -> None:
        """Leave the module its class's, unless somebody has given it another."""
        if vars(self._module).get("forward") is self:
            del vars(self._module)["forward"]
