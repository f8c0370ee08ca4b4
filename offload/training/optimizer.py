"""An optimizer's state on disk.

Always true:
- an optimizer stays what it was: its class, groups, hooks, and `state_dict`
- a step processes some parameters at a time with the optimizer's own code: what it creates for them is on disk, or
  gone, before the next ones; the result is bit for bit that of one step over all
- small state and step counts stay in memory
- a gradient's file is removed with the gradient
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from offload.errors import ArgumentError, ArgumentTypeError, UnsupportedOpError
from offload.memory import as_bytes, count_freed
from offload.storage.owning import create_temporary
from offload.storage.subclasses import refuse_lossy
from offload.system.regular import absolute
from offload.tensor.materialize import materialize
from offload.tensor.views import handle_of
from offload.tensor.wrapper import OffloadedTensor, is_offloaded, wrap_handle

log = logging.getLogger("offload.training")
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def offload_optimizer(
    optimizer: AnyOptimizer,
    *,
    offload_dir: str | os.PathLike[str] | None = None,
    model: nn.Module | None = None,
    gradients: bool = False,
    min_bytes: int | str = "64KiB",
    step_bytes: int | str | None = "32MiB",
) -> AnyOptimizer:
    """Keep the state of an optimizer on disk: `exp_avg`, `momentum_buffer`, and whatever it has of a parameter's size.

    State that is there is moved; state that the first step makes goes to disk at once. `state_dict` hands it out as it
    is, `load_state_dict` keeps it on disk, and so does `add_param_group`. Gradient accumulation, `clip_grad_norm_`,
    `GradScaler` and learning-rate schedulers work as before.

    A step changes the files in place, so that a crash leaves them in the middle of one: `save_training` makes
    checkpoints.

    Args:
        optimizer: one of torch's, over parameters in memory or on disk; it is changed in place.
        offload_dir: for the files, which then stay; None for a private folder.
        model: whose names the files bear: `<name>.exp_avg`. Without it, the names that the optimizer was given
            (`AdamW(model.named_parameters())`), or those of parameters on disk, or group and place.
        gradients: whether gradients, too, go to disk as soon as they are accumulated: those of parameters that require
            grad now. Without that all of them are in memory between backward and `zero_grad`, as large as what is
            trained.
        min_bytes: what is smaller stays in memory: bytes, or "64KiB".
        step_bytes: of parameters that are stepped at a time, at least one; None for all at once.

    Returns:
        The same optimizer.

    Raises:
        UnsupportedOpError: it needs all parameters at once (LBFGS), or is not torch's, so that this is not known;
            pass `step_bytes=None` then, and its whole first step is in memory. Or its `step` was replaced.
        TypeError: it is not an optimizer.
        ValueError: its state is on disk already.
        NameInUseError, ForeignFileError, WriteError

    Example:
        >>> layer = nn.Linear(100, 100)
        >>> optimizer = offload_optimizer(torch.optim.AdamW(layer.parameters()), model=layer, min_bytes=1000)
        >>> layer(torch.ones(1, 100)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[layer.weight]["exp_avg"].name
        'weight.exp_avg'
    """
    kind: Any = type(optimizer)
    if not issubclass(kind, Optimizer):
        what = repr(optimizer) if issubclass(kind, type) else f"a {kind.__name__}"
        raise ArgumentTypeError(f"an optimizer of torch.optim is needed, made with its parameters; {what} was given")
    if issubclass(kind, _OnDisk):
        raise ArgumentError(f"the state of this {kind.__name__} is on disk already")
    if step_bytes is not None and not _steps_one_by_one(kind):
        raise UnsupportedOpError(
            f"{kind.__module__}.{kind.__name__} may need all parameters in one step: pass step_bytes=None for that; "
            "the first step then creates its whole state in memory"
        )
    place = _Place(
        folder=None if offload_dir is None else absolute(offload_dir),
        given={} if model is None else {parameter: name for name, parameter in model.named_parameters()},
        gradients=gradients,
        min_bytes=as_bytes(min_bytes),
        step_bytes=None if step_bytes is None else as_bytes(step_bytes),
    )
    hooks: list[RemovableHandle] = []
    step = _own_step(optimizer)
    try:
        vars(optimizer).pop("step", None)
        optimizer._place = place  # type: ignore[attr-defined]
        optimizer.__class__ = _kind_on_disk(kind)  # type: ignore[assignment]
        for number, group in enumerate(optimizer.param_groups):
            hooks += place.welcome(group, number)
        for parameter in list(optimizer.state):
            place.put(parameter, optimizer.state[parameter], {})
    except BaseException:  # restored as it was; what is on disk already stays there, for the next call
        for hook in hooks:
            hook.remove()
        optimizer.__class__ = kind
        vars(optimizer).pop("_place", None)
        vars(optimizer).update(step)
        raise
    return optimizer


def is_on_disk(optimizer: Optimizer) -> bool:
    """Whether `offload_optimizer` was called on it."""
    return isinstance(optimizer, _OnDisk)


@dataclass
class _Place:
    """Where the state goes, and its names.

    Attributes:
        given: the names in the model, by parameter.
        names: the names of the optimizer's parameters.
    """

    folder: Path | None
    given: dict[torch.Tensor, str]
    gradients: bool
    min_bytes: int
    step_bytes: int | None
    names: dict[torch.Tensor, str] = field(default_factory=dict)

    def welcome(self, group: Mapping[str, Any], number: int) -> list[RemovableHandle]:
        """Name the parameters of a group, and hook their gradients if these go to disk; returns the hooks."""
        hooks = []
        taken = set(self.names.values())
        own = group.get("param_names") or [None] * len(group["params"])
        for count, (parameter, called) in enumerate(zip(group["params"], own, strict=True)):
            if parameter in self.names:
                continue
            choices = (self.given.get(parameter), called, parameter.name if is_offloaded(parameter) else None)
            plain = f"group{number}.{count}"
            name = next((choice for choice in choices if choice and choice not in taken), plain)
            self.names[parameter] = name
            taken.add(name)
            if self.gradients and parameter.requires_grad:
                move = partial(_move_gradient, self.min_bytes, self.folder, name)
                hooks.append(parameter.register_post_accumulate_grad_hook(move))
        return hooks

    def put(self, parameter: torch.Tensor, state: dict[str, Any], before: Mapping[str, object]) -> None:
        """Put a parameter's state on disk, replacing what was there `before`."""
        for key, value in state.items():
            old = before.get(key)
            if value is old:
                continue
            if not _belongs_on_disk(value, self.min_bytes):
                state[key] = materialize(value)
                continue
            name = f"{self.names.get(parameter, 'unknown')}.{key}"
            if is_offloaded(value) and (value.name, handle_of(value).folder) == (name, self.folder):
                continue  # put there by an earlier call that failed later
            if is_offloaded(old) and old.shape == value.shape and old.dtype == value.dtype:
                old.update_values(value)
                state[key] = old
            else:
                refuse_lossy(value, name)
                state[key] = OffloadedTensor.from_original_tensor(value.detach(), name, self.folder, exist_ok=True)
                log.debug("%s of the optimizer goes to %s", name, state[key].offload_path)
                del value
                count_freed(state[key].nbytes)

    def parts(self, parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """The parameters in parts."""
        part: list[torch.Tensor] = []
        size = 0
        for parameter in parameters:
            if part and self.step_bytes is not None and size + parameter.nbytes > self.step_bytes:
                yield part
                part, size = [], 0
            part.append(parameter)
            size += parameter.nbytes
        yield part


def _belongs_on_disk(value: object, min_bytes: int) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.dim() > 0
        and value.nbytes >= max(min_bytes, 1)
    )


def _move_gradient(min_bytes: int, folder: Path | None, name: str, parameter: torch.Tensor) -> None:
    """A hook on `parameter` that holds no reference to it: files are removed without cyclic garbage collection."""
    grad = parameter.grad
    if grad is None or is_offloaded(grad) or grad.requires_grad or not _belongs_on_disk(grad, min_bytes):
        return
    parameter.grad = wrap_handle(create_temporary(grad, f"{name}.grad", folder), grad.device)
    nbytes = grad.nbytes
    del grad
    count_freed(nbytes)


class _OnDisk(Optimizer):
    """Mixed into the class of an optimizer whose state is on disk."""

    _place: _Place
    _opt_called: bool

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like the optimizer's own; the state goes to disk, too."""
        super().add_param_group(param_group)
        self._place.welcome(self.param_groups[-1], len(self.param_groups) - 1)

    def load_state_dict(self, state_dict: Any) -> None:
        """Like the optimizer's own; loaded state is copied to this optimizer's files."""
        before = self.state
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            if isinstance(parameter, torch.Tensor):
                self._place.put(parameter, state, before.get(parameter, {}))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_place": self._place}


@cache
def _kind_on_disk(kind: type[Optimizer]) -> type[Optimizer]:
    """A subclass of optimizer class `kind` with state on disk."""
    own_step = kind.step.__wrapped__ if getattr(kind.step, "hooked", False) else kind.step  # type: ignore[attr-defined]

    def step(self: _OnDisk, closure: Callable[[], object] | None = None) -> Any:
        """One step over all parameters, some at a time. `closure` recomputes the loss, once."""
        self._opt_called = True  # learning-rate schedulers check this
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with closing(_parts(self)) as parts:
            for part in parts:
                own_step(self)
                for parameter in part:
                    state = self.state.get(parameter, {})
                    self._place.put(parameter, state, {key: one for key, one in state.items() if is_offloaded(one)})
                count_freed(sum(parameter.nbytes for parameter in part))
        return loss

    hooked: Any = Optimizer.profile_hook_step(step)  # hooks run once per step, not once per part
    hooked.hooked = True
    hooked._wrapped_by_lr_sched = True  # keeps schedulers from wrapping it: they look for this name
    return type(kind.__name__, (_OnDisk, kind), {"step": hooked, "__module__": kind.__module__})


def _parts(optimizer: _OnDisk) -> Generator[list[torch.Tensor]]:
    """The parameters in parts; each time the optimizer sees only that part."""
    groups = optimizer.param_groups
    if optimizer._place.step_bytes is None:
        yield [parameter for group in groups for parameter in group["params"]]
        return
    whole = [group["params"] for group in groups]
    try:
        for group, parameters in zip(groups, whole, strict=True):
            optimizer.param_groups = [group]
            for part in optimizer._place.parts(parameters):
                group["params"] = part
                yield part
            group["params"] = parameters
    finally:
        optimizer.param_groups = groups
        for group, parameters in zip(groups, whole, strict=True):
            group["params"] = parameters


def _steps_one_by_one(kind: type[Optimizer]) -> bool:
    """Whether a step treats parameters independently: true for all of torch's except LBFGS."""
    own = next(base for base in kind.__mro__ if "step" in vars(base))
    return own.__module__.split(".")[:2] == ["torch", "optim"] and not issubclass(kind, LBFGS)


def _own_step(optimizer: Optimizer) -> dict[str, Any]:
    """A `step` that a learning-rate scheduler set on the optimizer, which would call the previous class's.

    Raises `UnsupportedOpError` if it was not set by a scheduler.
    """
    replaced = vars(optimizer).get("step")
    if replaced is None:
        return {}
    if not hasattr(replaced, "_wrapped_by_lr_sched"):
        raise UnsupportedOpError(
            f"the step of this {type(optimizer).__name__} was replaced by {replaced!r}: call offload_optimizer first"
        )
    return {"step": replaced}
