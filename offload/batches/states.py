"""Thread and process state, carried between threads.

Always true:
- the per-thread state of torch and Python is the same as in the thread in which a `ThreadState` was created
- process-wide state, settings and random numbers, is a batch's own while it runs
- a batch's random numbers depend on the caller's and on its number, not on which batches run beside it
"""

from __future__ import annotations

import contextvars
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch

from offload.annotations import Args
from offload.errors import UnsupportedOpError
from offload.system.modes import autograd_mode, no_functions, no_modes
from offload.torch_api import (
    dispatch_modes,
    function_modes,
    push_dispatch_mode,
    push_function_mode,
    push_saved_tensors_hooks,
    top_saved_tensors_hooks,
    transform_on_top,
    usable_accelerator,
)

T = TypeVar("T")


class ThreadState:
    """The per-thread state of torch and Python at the time of creation."""

    def __init__(self) -> None:
        """Raises `UnsupportedOpError` inside a torch.func transform, which is bound to one thread."""
        if transform_on_top() is not None:
            raise UnsupportedOpError("map_batches runs in threads, and a torch.func transform in one thread only")
        self._context = contextvars.copy_context()
        self._inference = torch.is_inference_mode_enabled()
        self._grad = torch.is_grad_enabled()
        current = usable_accelerator()
        kinds = ["cpu"] if current is None else ["cpu", current.type]
        self._autocast = {kind: _autocast(kind) for kind in kinds}
        self._functions = function_modes()
        self._dispatches = dispatch_modes()
        self._saved = top_saved_tensors_hooks(True)
        self._stream = torch.accelerator.current_stream() if current is not None else None

    def run(self, fn: Callable[[], T]) -> T:
        """Call `fn` with this state in another thread; the modes stay on there."""
        return self._context.copy().run(self._inside, fn)

    def run_delegated(self, fn: Callable[[], T]) -> T:
        """The same, with context variables that `apply_context` then sets in the thread that delegated the call."""
        return self._context.run(self._inside, fn)

    def apply_context(self) -> None:
        """Set context variables in this thread as the delegated call has left them."""
        for variable, value in self._context.items():
            if variable.get(_MISSING) is not value:
                variable.set(value)

    def _inside(self, fn: Callable[[], T]) -> T:
        with autograd_mode(inference=self._inference, grad=self._grad), ExitStack() as stack:
            if self._stream is not None:
                torch.accelerator.set_stream(self._stream)  # its device becomes the current one
            for kind, how in self._autocast.items():
                if how != _autocast(kind):  # a backend without autocast has no context for it
                    stack.enter_context(torch.autocast(kind, *how))
            # The modes belong to the caller, who has entered them: here they are only put on torch's stacks.
            for mode in self._functions:
                push_function_mode(mode)
            for mode in self._dispatches:
                push_dispatch_mode(mode)
            if self._saved is not None:
                push_saved_tensors_hooks(*self._saved)
            return fn()


def is_bare() -> bool:
    """Whether this thread is inside no mode, no hook of saved tensors, and no transform."""
    is_inside = transform_on_top() is not None or top_saved_tensors_hooks(True) is not None
    return not (is_inside or function_modes() or dispatch_modes())


def kernels() -> tuple[int, bool]:
    """How kernels compute in this thread: on how many threads, and with denormal numbers, or with 0 for them."""
    return torch.get_num_threads(), _LEAST_NORMAL / 2 > 0


def computing() -> Args:
    """What else the bits of a result depend on here: inference mode, autocast, and torch's settings."""
    return torch.is_inference_mode_enabled(), _autocast("cpu"), *(get() for get, _ in _SETTINGS[:_OF_COMPUTING])


def _autocast(kind: str) -> tuple[torch.dtype, bool, bool]:
    return torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()


class Settings:
    """torch's process-wide state, as one batch has it: settings and random numbers."""

    def __init__(self, values: Args, states: tuple[torch.Tensor, ...]) -> None:
        self._values = values
        self._states = states

    @classmethod
    def now(cls) -> Settings:
        with no_functions(), no_modes():
            states = tuple(one.get_state() for one in _generators())
        return cls(tuple(get() for get, _ in _SETTINGS), states)

    def seeded(self, seed: int) -> Settings:
        with no_functions(), no_modes():
            generators = [torch.Generator(one.device).manual_seed(seed) for one in _generators()]
            return Settings(self._values, tuple(one.get_state() for one in generators))

    def has_drawn(self, later: Settings) -> bool:
        with no_functions(), no_modes():
            return not all(map(torch.equal, self._states, later._states))

    def apply(self) -> None:
        for (get, put), value in zip(_SETTINGS, self._values, strict=True):
            if get() != value:
                put(value)
        with no_functions(), no_modes():
            for generator, state in zip(_generators(), self._states, strict=True):
                generator.set_state(state)


class Seeds:
    """A seed per batch, derived from the caller's generator, which advances only if a batch has used random numbers."""

    def __init__(self) -> None:
        with no_functions(), no_modes():
            self._source = torch.Generator()
            self._source.set_state(torch.default_generator.get_state())

    def next(self) -> int:
        with no_functions(), no_modes():
            return int(torch.randint(_MOST_SEED, (), dtype=torch.int64, generator=self._source))

    def move_on(self) -> None:
        """Advance the caller's generator, so that its next numbers differ from the batches'."""
        with no_functions(), no_modes():
            torch.default_generator.set_state(self._source.get_state())


def _generators() -> list[torch.Generator]:
    """The generators that ops use by default: of the CPU, and of the current accelerator."""
    device = usable_accelerator()
    module: Any = None if device is None else torch.get_device_module(device)
    if not hasattr(module, "default_generators"):  # it has only functions for one of its own
        return [torch.default_generator]
    return [torch.default_generator, module.default_generators[torch.accelerator.current_device_index()]]


class _Warnings:
    """The state of warnings; `warnings.catch_warnings` restores what it found, whoever set it."""

    def __init__(self) -> None:
        catching: dict[str, object] = vars(warnings)
        self._found = {
            name: catching[name] for name in ("filters", "showwarning", "_showwarnmsg_impl") if name in catching
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Warnings) and all(one is other._found[name] for name, one in self._found.items())

    __hash__ = None  # type: ignore[assignment]

    def put(self) -> None:
        for name, one in self._found.items():
            setattr(warnings, name, one)
        with warnings.catch_warnings():  # leaving it invalidates the caches of filters
            pass


def _attribute(holder: object, name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return partial(getattr, holder, name), partial(setattr, holder, name)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


_MISSING = object()
_MOST_SEED = 2**63 - 1
_LEAST_NORMAL = sys.float_info.min
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_deterministic, _set_deterministic),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    *(_attribute(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
    _attribute(torch.backends.mkldnn, "enabled"),
    (_Warnings, _Warnings.put),
    *(_attribute(sys, name) for name in ("stdout", "stderr")),
)
_OF_COMPUTING = len(_SETTINGS) - 3  # the first ones
