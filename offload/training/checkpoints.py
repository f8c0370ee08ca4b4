"""Checkpoints of training: model, optimizer and all that belongs to them, at one moment.

Always true:
- a checkpoint is whole and on the disk before it is the latest; until then, and after a failure or a kill at any
  moment, the one before is
- what is on disk is copied from file to file; nothing comes into memory as a whole
- nothing in a checkpoint is run: tensors are safetensors, the rest is JSON
- what is removed is an earlier checkpoint, file by file as it was written, and never one that tensors refer to
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from offload.errors import ArgumentTypeError, CheckpointError, DtypeMismatchError, ForeignFileError, MissingFileError
from offload.loader import load_file
from offload.saving import save_checkpoint
from offload.storage.header import MARK, VERSION
from offload.storage.paths import absolute
from offload.storage.write import explained, put_file, remove, sweep_folders, sync_folder, temporary_for
from offload.tensor.arguments import refuse_other
from offload.tensor.materialize import materialize
from offload.tensor.saved import file_of
from offload.training.optimizer import is_on_disk
from offload.training.plain import Apart, put_together

_LATEST = "latest.json"
_STATE = "state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def save_training(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    /,
    *,
    frozen: bool = True,
    **extra: Any,
) -> Path:
    """Save a model, its optimizer, the states of random numbers and what else is given, as one.

    Args:
        folder: for checkpoints; is made if need be. Of those in it the latest stays, and is replaced in one step.
        model: whose `state_dict` is saved.
        optimizer: whose `state_dict` is saved, on disk or in memory.
        frozen: whether parameters that do not require grad are saved too. With False they are the caller's to load
            again, from where they came: for adapters on a large model.
        extra: plain data (numbers, text, lists, dictionaries, tensors...), and objects with a `state_dict` of such:
            schedulers, scalers, data loaders.

    Returns:
        The checkpoint's folder, in `folder`.

    Raises:
        TypeError: something in `extra` is neither.
        UnsupportedOpError: a value has no form in a safetensors file.
        ForeignFileError: `folder` has a file of the same name that offload did not write.
        WriteError: the disk is full... The checkpoint before stays.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> optimizer = torch.optim.AdamW(layer.parameters())
        >>> save_training("run", layer, optimizer, step=10).name
        'checkpoint-1'
        >>> load_training("run", layer, optimizer)
        {'step': 10}
    """
    _refuse_others(model, optimizer)
    folder = absolute(folder)
    latest = folder / _LATEST
    if os.path.lexists(latest) and _marked(latest) is None:
        raise ForeignFileError(f"{latest} was not written by offload: it is left as it is. Save to another folder.")
    apart = Apart()
    tree = _tree(apart, model, optimizer, extra, frozen=frozen)
    with explained(folder, 0, "folder"):
        folder.mkdir(parents=True, exist_ok=True)
        sweep_folders(folder)  # what killed processes left of checkpoints that they were writing
        made = _written(folder, apart, tree)
        _put_json(latest, {"checkpoint": made.name})
        sync_folder(folder)
    _remove_others(folder, made, apart.tensors.values())
    return made


def load_training(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None, /, **stateful: Any
) -> dict[str, Any]:
    """Bring a model, its optimizer and the states of random numbers back to the latest checkpoint, in place.

    Values on disk are copied from file to file, and stay on disk.

    Args:
        folder: that was given to `save_training`.
        model, optimizer: made as those that were saved.
        stateful: objects to be given their state back, under the names under which they were saved.

    Returns:
        What else was saved, by name.

    Raises:
        MissingFileError: there is no checkpoint yet.
        CheckpointError: it is of another model, or not whole.
        DtypeMismatchError: a tensor of the model has another dtype than the one that was saved.
    """
    _refuse_others(model, optimizer)
    checkpoint = _latest(absolute(folder))
    saved = _marked(checkpoint / _STATE)
    if saved is None:
        raise CheckpointError(f"{checkpoint / _STATE} is missing, or not whole: the checkpoint can't be used")
    parts = put_together(saved["tree"], load_file(checkpoint))
    missing = stateful.keys() - parts["stateful"].keys()
    if missing or (optimizer is not None and parts["optimizer"] is None):
        raise CheckpointError(f"{checkpoint} has no state of {', '.join(sorted(missing)) or 'an optimizer'}")
    state = parts["optimizer"]
    _refuse_other_model(model.state_dict(), parts["model"], set(parts["left_out"]), checkpoint)
    if optimizer is not None:
        _refuse_other_optimizer(optimizer, state, checkpoint)
    model.load_state_dict(parts["model"], strict=False)
    if optimizer is not None:
        optimizer.load_state_dict(state if is_on_disk(optimizer) else materialize(state))
    for name, thing in stateful.items():
        thing.load_state_dict(materialize(parts["stateful"].pop(name)))
    _set_random_states(materialize(parts["random"]))
    extra: dict[str, Any] = materialize({**parts["stateful"], **parts["extra"]})
    return extra


# What a checkpoint holds


def _tree(
    apart: Apart, model: nn.Module, optimizer: Optimizer | None, extra: Mapping[str, Any], *, frozen: bool
) -> dict[str, Any]:
    parameters = model.named_parameters(remove_duplicate=False)
    left_out = set() if frozen else {name for name, parameter in parameters if not parameter.requires_grad}
    states = {name: thing.state_dict() for name, thing in extra.items() if hasattr(thing, "state_dict")}
    parts = {
        "model": {name: value for name, value in model.state_dict().items() if name not in left_out},
        "left_out": sorted(left_out),
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "stateful": states,
        "extra": {name: value for name, value in extra.items() if name not in states},
        "random": _random_states(),
    }
    return {name: apart.take(part, name) for name, part in parts.items()}


def _random_states() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()
    states = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _set_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])


def _refuse_other_model(
    values: Mapping[str, Any], saved: Mapping[str, Any], left_out: set[str], checkpoint: Path
) -> None:
    """Before anything is changed."""
    wrong = sorted((values.keys() ^ saved.keys()) - left_out)
    if wrong:
        raise CheckpointError(f"{checkpoint} is of another model, which differs in {', '.join(wrong[:5])}...")
    for name, value in values.items():
        other = saved.get(name)
        if not (isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)):
            continue
        if other.dtype != value.dtype:
            raise DtypeMismatchError(
                f"{name!r} is of {value.dtype}, and of {other.dtype} in {checkpoint}: make the model as it was saved"
            )
        if other.shape != value.shape:
            raise CheckpointError(
                f"{checkpoint} is of another model (size mismatch): {name!r} is {tuple(value.shape)}, and "
                f"{tuple(other.shape)} there"
            )


def _refuse_other_optimizer(optimizer: Optimizer, saved: Mapping[str, Any], checkpoint: Path) -> None:
    there, here = ([len(group["params"]) for group in each] for each in (saved["param_groups"], optimizer.param_groups))
    if there != here:
        raise CheckpointError(f"{checkpoint} is of another optimizer: its groups have {there} parameters, not {here}")


# Folders


def _written(folder: Path, apart: Apart, tree: Mapping[str, Any]) -> Path:
    """A new checkpoint, whole; not yet the latest."""
    temporary = temporary_for(folder / "checkpoint")
    try:
        files = save_checkpoint(apart.tensors, temporary)
        _put_json(temporary / _STATE, {"files": [path.name for path in files], "tree": tree})
        sync_folder(temporary)
        numbers = [int(found[1]) for path in folder.iterdir() if (found := _CHECKPOINT.fullmatch(path.name))]
        made = folder / f"checkpoint-{max(numbers, default=0) + 1}"
        os.rename(temporary, made)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return made


def _refuse_others(model: object, optimizer: object) -> None:
    refuse_other(model, nn.Module, "a torch.nn.Module")
    if isinstance(optimizer, type) or (optimizer is not None and not hasattr(optimizer, "state_dict")):
        raise ArgumentTypeError(f"an optimizer is needed, or None, not {repr(optimizer)[:80]}")


def _latest(folder: Path) -> Path:
    pointer = _marked(folder / _LATEST)
    name = pointer.get("checkpoint") if pointer else None
    if not isinstance(name, str) or not _CHECKPOINT.fullmatch(name):
        raise MissingFileError(2, "there is no checkpoint of training yet: save_training makes one", str(folder))
    return folder / name


def _remove_others(folder: Path, latest: Path, saved: Iterable[torch.Tensor]) -> None:
    """Remove the earlier checkpoints, but for one that tensors are over."""
    in_use = {file.parent for tensor in saved if (file := file_of(tensor))}
    for path in folder.iterdir():
        state = _marked(path / _STATE) if _CHECKPOINT.fullmatch(path.name) and path not in {latest, *in_use} else None
        if state is not None:
            for name in (*state["files"], _STATE):
                remove(path / Path(name).name)
            with suppress(OSError):  # somebody has put a file there
                path.rmdir()


def _put_json(path: Path, content: Mapping[str, Any]) -> None:
    put_file(path, json.dumps({MARK: {"version": VERSION}, **content}).encode())


def _marked(path: Path) -> dict[str, Any] | None:
    """What is in a JSON file of ours; None for any other, or none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and MARK in found else None
