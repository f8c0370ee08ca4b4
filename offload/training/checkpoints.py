"""Training checkpoints: model, optimizer and everything that belongs to them, at one point in time.

Always true:
- a checkpoint is complete and on the disk before it becomes the latest; until then, and after a failure or a kill at
  any moment, the previous one is
- what is on disk is copied from file to file; nothing is in memory as a whole
- nothing in a checkpoint is executed: tensors are safetensors, the rest is JSON
- a checkpoint is read and checked completely before any state is restored from it
- earlier checkpoints are removed file by file as they were written, and never one that tensors refer to; besides these
  only a new one that did not become the latest is removed
"""

from __future__ import annotations

import copy
import errno
import os
import random
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from offload.errors import (
    CheckpointError,
    DtypeMismatchError,
    MissingFileError,
    OffloadError,
    UnsupportedOpError,
)
from offload.models.loader import load_file
from offload.models.saving import save_checkpoint
from offload.storage.header import MARK, VERSION
from offload.storage.nodes import Way, decode, encode
from offload.storage.owning import writable_base
from offload.storage.reasons import short, some, writing
from offload.storage.regular import absolute, is_folder, is_there
from offload.storage.replacing import made_folder, remove, replacing_folder
from offload.storage.state_file import MOST_NESTED, Kind, state_if_ours, write_state
from offload.storage.write import refuse_foreign
from offload.tensor.arguments import refuse_unstorable
from offload.tensor.materialize import materialize
from offload.tensor.saved import files_of, subclass_value
from offload.tensor.views import handle_of
from offload.tensor.wrapper import is_offloaded
from offload.training.optimizer import is_on_disk, log
from offload.tree.structure import Named, classes_among

StateDict: TypeAlias = dict[str, Any]
"""What `state_dict` returns."""

_LATEST = "latest.json"
_STATE = "state.json"
_CHECKPOINT = re.compile(r"checkpoint-([0-9]{1,18})")
_KIND = Kind(what="a file of save_training", stamp={MARK: {"version": VERSION}}, most=MOST_NESTED)


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
        folder: for checkpoints; is made if need be. Of those in it the latest stays, and is replaced in one step.
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
        >>> save_training(layer, "run", optimizer, step=10).name
        'checkpoint-1'
        >>> load_training(layer, "run", optimizer)
        {'step': 10}
    """
    folder = absolute(folder)
    latest = folder / _LATEST
    refuse_foreign(latest, _KIND, "was not written by offload: it is left as it is. Save to another folder.")
    named = Named()
    structure = encode(
        _parts(model, optimizer, extra, frozen=frozen),
        lambda tensor, way: {"tensor": named.name_for(_checked(tensor, way), way)},
    )
    made_folder(folder)
    with writing(folder):
        numbers = [int(found[1]) for path in folder.iterdir() if (found := _CHECKPOINT.fullmatch(path.name))]
    made = folder / f"checkpoint-{max(numbers, default=0) + 1}"
    with replacing_folder(made) as temporary:
        files = save_checkpoint({name: tensor.detach() for name, tensor in named.tensors.items()}, temporary)
        write_state(temporary / _STATE, _KIND, {"files": [path.name for path in files], "structure": structure})
    try:
        write_state(latest, _KIND, {"checkpoint": made.name})
    finally:
        with suppress(OSError):  # what can't be removed now is removed by the next save
            _sweep(folder, made, named.tensors.values())
    log.info("%s is the latest checkpoint, of %s tensors", made, len(named.tensors))
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
        DtypeMismatchError: a tensor of the model has another dtype than the one that was saved.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> _ = save_training(layer, "a_run", step=7)
        >>> load_training(layer, "a_run")
        {'step': 7}
    """
    checkpoint = _latest(absolute(folder))
    saved = _read(checkpoint)
    missing = stateful.keys() - saved.stateful.keys()
    if missing or (optimizer is not None and saved.optimizer is None):
        raise CheckpointError(f"{checkpoint} has no state of {', '.join(sorted(missing)) or 'an optimizer'}")
    _refuse_other_model(model.state_dict(), saved.model, saved.left_out, checkpoint)
    if optimizer is not None:
        _refuse_other_optimizer(optimizer, saved.optimizer, checkpoint)
    states = {name: materialize(saved.stateful.pop(name)) for name in stateful}
    extra: dict[str, Any] = materialize({**saved.stateful, **saved.extra})
    numbers = materialize(saved.random)
    _require_open(saved.model.values(), model.state_dict().values())
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


# The contents of a checkpoint


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


def _checked(tensor: torch.Tensor, way: Way) -> torch.Tensor:
    """A tensor that can be stored in a training checkpoint.

    Raises:
        UnsupportedOpError: it is a subclass, such as a quantized weight.
    """
    name = ".".join(way)
    refuse_unstorable(tensor, name)
    if subclass_value(tensor) is not None:
        raise UnsupportedOpError(
            f"{name} is a tensor subclass, which a training checkpoint can't store: pass frozen=False to leave out "
            "parameters that are not trained"
        )
    return tensor


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
class _Saved:
    """The contents of a checkpoint: states as returned by `state_dict`, and extra values."""

    model: StateDict
    left_out: set[str]
    optimizer: Any
    stateful: StateDict
    extra: StateDict
    random: StateDict


def _read(checkpoint: Path) -> _Saved:
    """A whole checkpoint, its tensors on disk.

    Raises:
        CheckpointError, CorruptFileError, MissingFileError: it is incomplete.
    """
    state = state_if_ours(checkpoint / _STATE, _KIND)
    if state is None:
        raise CheckpointError(f"{checkpoint / _STATE} is missing or incomplete: the checkpoint can't be used")
    tensors = load_file(checkpoint)
    try:
        parts = decode(state["structure"], lambda kind, name: {"tensor": tensors}[kind][name], classes_among(()))
        found = _Saved(**{**parts, "left_out": set(parts["left_out"])})
        named: list[object] = [found.model, found.stateful, found.extra, found.random]
        if not all(isinstance(part, dict) and all(isinstance(name, str) for name in part) for part in named):
            raise TypeError("a part is not a dictionary")
        if found.optimizer is not None:
            _check_optimizer(found.optimizer)
    except Exception as error:  # malformed parts can raise anything
        raise _damaged(checkpoint, f"it ({type(error).__name__}: {short(error)})") from error
    return found


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
        f"{checkpoint / _STATE} is not complete: {what} can't be used, and nothing was changed. Use an earlier copy "
        "of the folder, or start training again."
    )


def _refuse_other_model(values: StateDict, saved: StateDict, left_out: set[str], checkpoint: Path) -> None:
    """Refuse another model before anything is changed."""
    wrong = sorted((values.keys() ^ saved.keys()) - left_out)
    if wrong:
        raise CheckpointError(f"{checkpoint} belongs to another model, which differs in {some(wrong)}")
    for name, value in values.items():
        other = saved.get(name)
        if isinstance(value, torch.Tensor) != isinstance(other, torch.Tensor) and name in saved:
            raise CheckpointError(
                f"{checkpoint} holds for {name!r} a {type(other).__name__}, not a {type(value).__name__}"
            )
        if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
            continue
        if other.dtype != value.dtype:
            raise DtypeMismatchError(
                f"{name!r} is of {value.dtype}, and of {other.dtype} in {checkpoint}: create the model as it was "
                "when it was saved"
            )
        if other.shape != value.shape:
            raise CheckpointError(
                f"{checkpoint} belongs to another model (size mismatch): {name!r} is {tuple(value.shape)}, and "
                f"{tuple(other.shape)} there"
            )


def _refuse_other_optimizer(optimizer: Optimizer, saved: StateDict, checkpoint: Path) -> None:
    old, new = ([len(group["params"]) for group in each] for each in (saved["param_groups"], optimizer.param_groups))
    if old != new:
        raise CheckpointError(f"{checkpoint} belongs to another optimizer: its groups have {old} parameters, not {new}")


def _require_open(saved: Iterable[object], values: Iterable[object]) -> None:
    """Open all files to be read and written, so that system errors come before any change."""
    for tensor in filter(is_offloaded, saved):
        handle_of(tensor).base()
    for tensor in filter(is_offloaded, values):
        writable_base(handle_of(tensor))


# Folders


def _latest(folder: Path) -> Path:
    if not is_there(folder / _LATEST):
        reason = "there is no training checkpoint yet: save_training writes one"
        raise MissingFileError(errno.ENOENT, reason, str(folder))
    pointer = state_if_ours(folder / _LATEST, _KIND) or {}
    name = pointer.get("checkpoint")
    if not isinstance(name, str) or not _CHECKPOINT.fullmatch(name):
        raise CheckpointError(
            f"{folder / _LATEST} names no training checkpoint: it is damaged, or was written by another program"
        )
    if not is_folder(folder / name):
        raise MissingFileError(errno.ENOENT, f"the checkpoint that {_LATEST} names is gone", str(folder / name))
    return folder / name


def _sweep(folder: Path, made: Path, saved: Iterable[torch.Tensor]) -> None:
    """Remove the earlier checkpoints, except one that tensors refer to; and the new one if it is not the latest.

    Raises:
        ReadError: the latest can't be determined; all of them stay.
    """
    if (state_if_ours(folder / _LATEST, _KIND) or {}).get("checkpoint") != made.name:
        shutil.rmtree(made, ignore_errors=True)
        return
    in_use = {file.parent for tensor in saved for file in files_of(tensor)}
    for path in folder.iterdir():
        if not _CHECKPOINT.fullmatch(path.name) or path in {made, *in_use} or path.is_symlink():
            continue
        files = (state_if_ours(path / _STATE, _KIND) or {}).get("files")
        if isinstance(files, list) and all(isinstance(name, str) for name in files):
            for name in (*files, _STATE):
                remove(path / Path(name).name)
            with suppress(OSError):  # another program has put a file there
                path.rmdir()
