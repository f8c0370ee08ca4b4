"""Training checkpoints: model, optimizer and everything that belongs to them, at one point in time.

Always true:
- a checkpoint is a tree (`offload.tree`), whose manifest is replaced in one step: after a failure or a kill at any
  moment it is the previous one, or the new one
- what is on disk is copied from file to file; nothing is in memory as a whole
- a tree that the user saved is not replaced, and what the saved tensors refer to is not removed
- nothing in a checkpoint is executed: tensors are safetensors, the rest is JSON
- a checkpoint is read and checked completely before any state is restored from it
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from offload.errors import (
    CheckpointError,
    CorruptFileError,
    ForeignFileError,
    OffloadError,
    UnknownTypeError,
    UnsupportedOpError,
)
from offload.storage.header import MARK
from offload.storage.nodes import Way, encode
from offload.storage.owning import writable_base
from offload.storage.state_file import MOST_NESTED, Kind, read_state
from offload.system.reasons import short, some
from offload.system.regular import absolute
from offload.tensor.arguments import refuse_unstorable
from offload.tensor.materialize import materialize
from offload.tensor.saved import subclass_value
from offload.tensor.views import handle_of
from offload.tensor.wrapper import is_offloaded
from offload.training.optimizer import is_on_disk, log
from offload.tree.saved import KIND, MANIFEST, load_tree, save_as

StateDict: TypeAlias = dict[str, Any]
"""What `state_dict` returns."""

_KIND = Kind(
    what="a training checkpoint that offload saved",
    stamp={MARK: {**KIND.stamp[MARK], "training": True}},
    missing="there is no training checkpoint yet: save_training writes one",
    foreign=ForeignFileError,
    most=MOST_NESTED,
)


def save_training(
    model: nn.Module,
    folder: str | os.PathLike[str],
    optimizer: Optimizer | None = None,
    /,
    *,
    frozen: bool = True,
    **extra: object,
) -> Path:
    """Save a model, its optimizer, the states of random numbers and what else is given, as one.

    Args:
        model: whose `state_dict` is saved.
        folder: for this alone; is made if need be. An earlier checkpoint in it is replaced in one step.
        optimizer: whose `state_dict` is saved, on disk or in memory.
        frozen: whether parameters that do not require grad are saved too. With False they are the caller's to load
            again, from where they came: for adapters on a large model.
        extra: plain data (numbers, text, lists, dictionaries, tensors...), and objects with a `state_dict` of such:
            schedulers, scalers, data loaders.

    Returns:
        The manifest, `tree.json`: `load_tree` opens the parts in place.

    Raises:
        TypeError: something in `extra` is neither.
        UnsupportedOpError: a value has no form in a safetensors file.
        ForeignFileError: `folder` has a `tree.json` that `save_training` did not write.
        WriteError: the disk is full, another process is saving there... The checkpoint before stays.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> optimizer = torch.optim.AdamW(layer.parameters())
        >>> save_training(layer, "run", optimizer, step=10).name
        'tree.json'
        >>> load_training(layer, "run", optimizer)
        {'step': 10}
    """
    parts = _parts(model, optimizer, extra, frozen=frozen)
    encode(parts, _checked)  # refuses what loading could not make again
    made = save_as(_KIND, parts, folder, together=True)
    log.info("saved a training checkpoint in %s", made.parent)
    return made


def load_training(
    model: nn.Module, folder: str | os.PathLike[str], optimizer: Optimizer | None = None, /, **stateful: Any
) -> dict[str, Any]:
    """Bring a model, its optimizer and the states of random numbers back to the latest checkpoint, in place.

    Values on disk are copied from file to file, and stay on disk.

    Args:
        model, optimizer: made as those that were saved.
        folder: that was given to `save_training`.
        stateful: objects to be given their state back, under the names under which they were saved.

    Returns:
        What else was saved, by name.

    Raises:
        MissingFileError: there is no checkpoint yet.
        CheckpointError: it is of another model, or not whole; or one of `stateful` did not take its state. Nothing is
            changed then.
        ReadError, WriteError: a file can't be opened now; nothing is changed.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> _ = save_training(layer, "a_run", step=7)
        >>> load_training(layer, "a_run")
        {'step': 7}
    """
    checkpoint = absolute(folder)
    saved = _read(checkpoint)
    missing = stateful.keys() - saved.stateful.keys()
    if missing or (optimizer is not None and saved.optimizer is None):
        raise CheckpointError(f"{checkpoint} has no state of {', '.join(sorted(missing)) or 'an optimizer'}")
    _refuse_other_model(model.state_dict(), saved.model, saved.left_out, checkpoint)
    states = {name: materialize(saved.stateful.pop(name)) for name in stateful}
    extra: dict[str, Any] = materialize({**saved.stateful, **saved.extra})
    numbers = materialize(saved.random)
    for tensor in filter(is_offloaded, saved.model.values()):  # system errors come before any change
        handle_of(tensor).base()
    for tensor in filter(is_offloaded, model.state_dict().values()):
        writable_base(handle_of(tensor))
    if "cuda" in numbers and torch.cuda.is_available():
        torch.cuda.init()  # or its states would be kept for later, and neither be tried nor undone
    with ExitStack() as undone:
        undone.callback(_set_random, _random_states())
        try:
            _set_random(numbers)
        except Exception as error:  # invalid states can raise anything
            what = f"its states of random numbers ({type(error).__name__}: {short(error)})"
            raise _damaged(checkpoint, what) from error
        for name, thing in stateful.items():
            undone.callback(thing.load_state_dict, copy.deepcopy(thing.state_dict()))
            with _taking(name, checkpoint):
                thing.load_state_dict(states[name])
        if optimizer is not None:
            undone.callback(vars(optimizer).update, {"state": optimizer.state, "param_groups": optimizer.param_groups})
            with _taking("the optimizer", checkpoint):
                optimizer.load_state_dict(saved.optimizer if is_on_disk(optimizer) else materialize(saved.optimizer))
        with _taking("the model", checkpoint):
            model.load_state_dict(saved.model, strict=False)
        undone.pop_all()
    _set_random(numbers)  # again: what was loaded may have drawn some
    return extra


@contextmanager
def _taking(name: str, checkpoint: Path) -> Iterator[None]:
    """Say which `load_state_dict` failed."""
    try:
        yield
    except OffloadError:
        raise
    except Exception as error:  # of any class
        raise CheckpointError(
            f"{checkpoint}: {name} did not accept the saved state ({type(error).__name__}: {short(error)}): was it "
            "created like the one that was saved?"
        ) from error


def _parts(model: nn.Module, optimizer: Optimizer | None, extra: StateDict, *, frozen: bool) -> StateDict:
    parameters = model.named_parameters(remove_duplicate=False)
    left_out = set() if frozen else {name for name, parameter in parameters if not parameter.requires_grad}
    states = {name: thing.state_dict() for name, thing in extra.items() if hasattr(thing, "state_dict")}
    return {
        "model": {name: value for name, value in model.state_dict().items() if name not in left_out},
        "left_out": sorted(left_out),
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "stateful": states,
        "extra": {name: value for name, value in extra.items() if name not in states},
        "random": _random_states(),
    }


def _checked(tensor: torch.Tensor, way: Way) -> object:
    """Raises `UnsupportedOpError` if a training checkpoint can't store a tensor: a subclass, as a quantized weight."""
    name = ".".join(way)
    refuse_unstorable(tensor, name)
    if subclass_value(tensor) is not None:
        raise UnsupportedOpError(
            f"{name} is a tensor subclass, which a training checkpoint can't store: pass frozen=False to leave out "
            "parameters that are not trained"
        )
    return None


def _random_states() -> StateDict:
    kind, keys, *rest = np.random.get_state()
    states = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _set_random(states: StateDict) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    for index, state in enumerate(list(states.get("cuda", ()))[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, index)


@dataclass
class _States:
    """The contents of a checkpoint: states as returned by `state_dict`, and extra values."""

    model: StateDict
    left_out: set[str]
    optimizer: Any
    stateful: StateDict
    extra: StateDict
    random: StateDict


def _read(checkpoint: Path) -> _States:
    """A whole checkpoint, its tensors on disk.

    Raises `CheckpointError`, `CorruptFileError`, `MissingFileError` if it is incomplete.
    """
    try:
        read_state(checkpoint / MANIFEST, _KIND)  # refuses other trees
        parts = load_tree(checkpoint)
        saved = _States(**{**parts, "left_out": set(parts["left_out"])})
        named: list[object] = [saved.model, saved.stateful, saved.extra, saved.random]
        if not all(isinstance(part, dict) and all(isinstance(name, str) for name in part) for part in named):
            raise TypeError("a part is not a dictionary")
        if saved.optimizer is not None:
            _check_optimizer(saved.optimizer)
    except (CorruptFileError, ForeignFileError, UnknownTypeError) as error:
        raise CheckpointError(f"{error} (nothing was changed)") from error
    except OffloadError:
        raise
    except Exception as error:  # malformed parts can raise anything
        raise _damaged(checkpoint, f"it ({type(error).__name__}: {short(error)})") from error
    return saved


def _check_optimizer(state: Any) -> None:
    """Raises any error if it is not the state of an optimizer."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if sorted(numbers) != list(range(len(numbers))) or not all(type(number) is int for number in numbers):
        raise ValueError("its groups name no parameters")
    for number, its_state in state["state"].items():
        if isinstance(number, int) and (number not in numbers or not isinstance(its_state, dict)):
            raise ValueError(f"it has a state of {short(number)}")


def _damaged(checkpoint: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint / MANIFEST} is not complete: {what} can't be used, and nothing was changed. Use an earlier copy "
        "of the folder, or start training again."
    )


def _refuse_other_model(values: StateDict, saved: StateDict, left_out: set[str], checkpoint: Path) -> None:
    """Refuse another model before anything is changed."""
    wrong = sorted((values.keys() ^ saved.keys()) - left_out)
    if wrong:
        raise CheckpointError(f"{checkpoint} belongs to another model, which differs in {some(wrong)}")
    for name, value in values.items():
        mine, theirs = _form_of(value), _form_of(saved.get(name, value))
        if mine != theirs:
            raise CheckpointError(f"{checkpoint} belongs to another model: {name!r} is {mine}, and {theirs} there")


def _form_of(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return "not a tensor"
    return f"{value.dtype} of shape {tuple(value.shape)}"
