"""Training checkpoints: model, optimizer and everything that belongs to them, at one point in time.

Always true:
- a checkpoint is a tree (`offload.tree`), whose manifest is replaced in one step: after a failure or a kill at any
  moment it is the previous one, or the new one
- what is on disk is copied from file to file; nothing is in memory as a whole
- nothing in a checkpoint is executed: tensors are safetensors, the rest is JSON
- a checkpoint is loaded as a whole, or not at all; only a model that refuses it half-way keeps what it took before
"""

from __future__ import annotations

import copy
import os
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from offload.errors import CheckpointError, OffloadError
from offload.storage.nodes import encode
from offload.storage.owning import writable_base
from offload.system.reasons import short, some
from offload.system.regular import absolute
from offload.tensor.materialize import materialize
from offload.tensor.views import handle_of
from offload.tensor.wrapper import is_offloaded
from offload.training.optimizer import is_on_disk, log
from offload.tree.saved import load_tree, save_tree

StateDict: TypeAlias = dict[str, Any]
"""What `state_dict` returns."""

_PARTS = {"model", "left_out", "optimizer", "stateful", "extra", "random"}


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
        UnsupportedOpError: a value has no form in a safetensors file, as a quantized weight: leave those out by
            `frozen=False`.
        ForeignFileError: `folder` has a `tree.json` of another program.
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
    encode(parts, lambda *_: None)  # refuses classes, which loading would have to be given
    manifest = save_tree(parts, folder)
    log.info("saved a training checkpoint in %s", manifest.parent)
    return manifest


def load_training(
    model: nn.Module, folder: str | os.PathLike[str], optimizer: Optimizer | None = None, /, **stateful: Any
) -> StateDict:
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
        CheckpointError: it is of another model, or has no state of the optimizer, or of one of `stateful`; or one of
            these, which is named, did not take its state. Nothing is changed then, but a model that refuses it.
        CorruptFileError, ReadError, WriteError: a file is damaged, or can't be used now.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> _ = save_training(layer, "a_run", step=7)
        >>> load_training(layer, "a_run")
        {'step': 7}
    """
    checkpoint = absolute(folder)
    saved = load_tree(checkpoint)
    if not isinstance(saved, dict) or saved.keys() != _PARTS:
        raise CheckpointError(f"{checkpoint} holds a tree that save_training did not write: load_tree opens it")
    what = "load_training"
    try:
        missing = stateful.keys() - saved["stateful"].keys()
        if missing or (optimizer is not None and saved["optimizer"] is None):
            raise CheckpointError(f"{checkpoint} has no state of {', '.join(sorted(missing)) or 'an optimizer'}")
        _refuse_other_model(model.state_dict(), saved["model"], {*saved["left_out"]}, checkpoint)
        others = {**saved["stateful"], **saved["extra"]}
        extra: StateDict = materialize({name: value for name, value in others.items() if name not in stateful})
        for tensor in filter(is_offloaded, saved["model"].values()):  # system errors come before any change
            handle_of(tensor).base()
        for tensor in filter(is_offloaded, model.state_dict().values()):
            writable_base(handle_of(tensor))
        numbers = materialize(saved["random"])
        if "cuda" in numbers and torch.cuda.is_available():
            torch.cuda.init()  # or its states would be kept for later, and neither be tried nor undone
        with ExitStack() as undone:
            undone.callback(_set_random, _random_states())
            for what, thing in stateful.items():
                undone.callback(thing.load_state_dict, copy.deepcopy(thing.state_dict()))
                thing.load_state_dict(materialize(others[what]))
            what = "the optimizer"
            if optimizer is not None:
                before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
                undone.callback(vars(optimizer).update, before)
                state = saved["optimizer"]
                optimizer.load_state_dict(state if is_on_disk(optimizer) else materialize(state))
            what = "the generators of random numbers"
            _set_random(numbers)
            what = "the model"
            model.load_state_dict(saved["model"], strict=False)
            undone.pop_all()
        _set_random(numbers)  # again: what was loaded may have drawn some
    except OffloadError:
        raise
    except Exception as error:  # of any class
        raise CheckpointError(
            f"{checkpoint}: {what} did not accept the saved state ({type(error).__name__}: {short(error)}): was it "
            "created like the one that was saved?"
        ) from error
    return extra


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
