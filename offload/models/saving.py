"""Write a model, or named tensors, as a safetensors checkpoint.

Always true:
- no value comes into memory as a whole: what is on disk is copied from file to file, the rest goes piece by piece
- every file is complete beside its place before the first one is put there, and shards take names that no file has;
  the last renaming, of the index or of the one file, makes the new checkpoint the one that readers find
- whatever happens, a reader finds the checkpoint that was there, whole, or the new one
- what is replaced or removed is an earlier checkpoint of ours; a file that a live tensor refers to is not
- any safetensors reader gives the values back as they are
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.errors import (
    ArgumentError,
    ArgumentTypeError,
    ForeignFileError,
    OffloadError,
    ReadError,
    UnsupportedOpError,
    WriteError,
)
from offload.memory import as_bytes
from offload.models import log
from offload.models.checkpoint import Checkpoint
from offload.models.forms.packing import packed_state
from offload.models.forms.torchao import in_torchaos_form, prefixes_of_quantized
from offload.progress import progress_in_bytes
from offload.storage.file import TensorFile
from offload.storage.header import MARK, VERSION, is_standard, is_unicode
from offload.storage.layout import Layout, contiguous
from offload.storage.reasons import reading, writing
from offload.storage.regular import absolute, is_there
from offload.storage.replacing import made_folder, new_file, replacing_all, sync_folder, write_all
from offload.storage.state_file import Kind, state_if_ours
from offload.storage.subclasses import is_subclass_value, refuse_lossy
from offload.storage.write import write_beside
from offload.tensor.arguments import checked_dense, floating_dtype, refuse_unstorable
from offload.tensor.saved import files_of, identity_of, refuse_referenced, refuse_sources, subclass_value, write_value
from offload.tensor.wrapper import PathLike

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-(\d+-)?\d{5}-of-\d{5}\.safetensors")
_LARGEST_STEP = 64  # bytes to which values are aligned where their sizes allow it
_OWN_METADATA = ("format", MARK)
_KIND = Kind(what="an index of offload", stamp={"metadata": {MARK: json.dumps({"version": VERSION})}})


def save_checkpoint(
    model_or_state_dict: nn.Module | Mapping[str, torch.Tensor] | Checkpoint,
    folder: PathLike,
    max_shard_size: int | str = "5GB",
    *,
    dtype: torch.dtype | str | None = None,
) -> list[Path]:
    """Write `model.safetensors`, or shards with an index, as `save_pretrained` does, in bounded memory.

    Tied weights are written once. Quantized weights of torchao are written in torchao's own form. What was loaded from
    packed weights, and has not been changed, is written as it was packed, under the names that it had there.

    An earlier checkpoint in the folder is replaced as a whole: a process that is killed leaves it, or the new one.
    Where its shards have the usual names, new ones are called `model-2-00001-of-00003.safetensors`, as the index says.

    Args:
        model_or_state_dict: a module, of which its `state_dict()` is saved; tensors by name; or an opened checkpoint.
        folder: is made if need be. An earlier checkpoint in it is replaced if this function wrote it.
        max_shard_size: bytes of the values in a file: "5GB", "500MiB", 4096. A value that is larger has its own file.
        dtype: to convert floating-point values to, piece by piece, by itself or by its name; those of 8 bits and less
            stay as they are.

    Returns:
        The files, the index last.

    Raises:
        ForeignFileError: `folder` has a checkpoint that offload did not write, or one that live tensors refer to.
        UnsupportedOpError: a value has no form in a safetensors file.
        UnknownSubclassError: a value is of a tensor subclass that torchao has no form for.
        WriteError: the disk is full, the folder is read-only...
        ValueError: `dtype` is no floating-point one, or `max_shard_size` no amount.

    Example:
        >>> [path.name for path in save_checkpoint({"w": torch.ones(2)}, "saved")]
        ['model.safetensors']
    """
    dtype = None if dtype is None else floating_dtype(dtype)
    plan = _plan(model_or_state_dict, dtype)
    files = _shards(plan, _positive(max_shard_size))
    folder = absolute(folder)
    earlier = _earlier(folder)
    _refuse_foreign({*(folder / name for name in files), *earlier})
    _refuse_offload_folder(folder)
    refuse_sources(plan.sources, earlier)
    refuse_referenced(earlier)
    files = _with_free_names(folder, files)
    targets = [folder / name for name in files] + ([folder / _INDEX] if len(files) > 1 else [])
    made_folder(folder, plan.nbytes)
    with replacing_all(targets, plan.nbytes) as temporaries:
        _write_all(plan, files, temporaries)
    for path in earlier:
        if path not in targets:
            _remove_earlier(path)
    log.info("saved %d values, %d bytes, in %d files in %s", len(plan.parts), plan.nbytes, len(files), folder)
    return targets


# What is to be written


@dataclass(frozen=True, slots=True)
class _Part:
    """A value as it will be in its file."""

    tensor: torch.Tensor
    layout: Layout


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the files will hold.

    Attributes:
        parts: the values by key.
        ties: the names that are left out, each with the key that has its value.
        sources: the files that values come from, by name.
        metadata: what every file says.
        total_parameters: for the index.
    """

    parts: dict[str, _Part]
    ties: dict[str, str]
    sources: dict[str, list[Path]]
    metadata: dict[str, str]
    total_parameters: int

    @property
    def nbytes(self) -> int:
        return sum(part.layout.nbytes for part in self.parts.values())


def _plan(source: nn.Module | Mapping[str, torch.Tensor] | Checkpoint, dtype: torch.dtype | None) -> _Plan:
    metadata: dict[str, str] = {}
    discarded: Iterable[str] = ()
    noted: Mapping[str, str] = {}
    if isinstance(source, Checkpoint):
        tensors: dict[str, Any] = dict(source.tensors())
        metadata = _metadata_of(source)
        noted = source.ties
    elif isinstance(source, nn.Module):
        tensors = dict(source.state_dict())
        packed: Any = getattr(source, "packed_as", None)
        if dtype is None and packed is not None:
            pieces, others = packed_state(tensors)
            tensors = tensors if pieces.keys() & others.keys() else {**others, **pieces, **packed.still_beside(others)}
        discarded = _discarded_names(source)
    elif isinstance(source, Mapping):
        tensors = dict(source)
    else:
        raise ArgumentTypeError(
            f"a module, tensors by name, or a checkpoint can be saved, not a {type(source).__name__}"
        )
    for name, tensor in tensors.items():
        _check(name, tensor)
    ties = _ties(tensors, set(discarded))
    parts, more = _parts({name: tensor for name, tensor in tensors.items() if name not in ties}, dtype, metadata)
    numbers = source.parameters() if isinstance(source, nn.Module) else [part.tensor for part in parts.values()]
    sources = {name: files_of(tensor) for name, tensor in tensors.items()}
    return _Plan(parts, {**noted, **ties}, sources, {**metadata, **more}, sum(tensor.numel() for tensor in numbers))


def _metadata_of(source: Checkpoint) -> dict[str, str]:
    """What the files of a checkpoint say beside their values: a quantized one can't be read without it."""
    files = {id(file): file for value in source.values() for file in value.files}
    found: dict[str, str] = {}
    for file in files.values():
        found = {**file.header.metadata, **found}
    return {key: text for key, text in found.items() if key not in _OWN_METADATA and key not in source.ties}


def _discarded_names(model: nn.Module) -> Iterable[str]:
    """The names that a transformers model ties to others, which it expects under those."""
    tied: Iterable[str] | None = getattr(model, "all_tied_weights_keys", None)
    return tied or getattr(model, "_tied_weights_keys", None) or ()


def _check(name: object, tensor: object) -> None:
    if not isinstance(name, str):
        raise ArgumentTypeError(f"the name of a tensor is text, not {name!r}")
    if name == "__metadata__" or not is_unicode(name):
        raise ArgumentError(f"no tensor in a safetensors file can be called {name!r}: rename it")
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(
            f"{name!r} is a {type(tensor).__name__}, not a tensor: save it elsewhere, and leave it out here"
        )
    checked_dense(tensor, name)
    if not is_subclass_value(tensor):  # of those it is seen later whether torchao has a form for them
        refuse_lossy(tensor, name)


def _ties(tensors: Mapping[str, torch.Tensor], discarded: set[str]) -> dict[str, str]:
    """The names that need no value of their own, each with the one that stands for it.

    Of several names the first in the alphabet stands, as with `safetensors.torch.save_model`, but none of `discarded`
    if there is another.
    """
    same: dict[Any, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        same[identity_of(tensor)].append(name)
    ties: dict[str, str] = {}
    for names in same.values():
        kept = min([name for name in names if name not in discarded] or names)
        ties.update((name, kept) for name in sorted(names) if name != kept)
    return ties


def _parts(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None, metadata: Mapping[str, str]
) -> tuple[dict[str, _Part], dict[str, str]]:
    """The entries of the files, and what their metadata must say of them beside what it does."""
    of_quantized = prefixes_of_quantized(tensors, metadata)
    quantized = {name: value for name, tensor in tensors.items() if (value := subclass_value(tensor)) is not None}
    plain, notes = in_torchaos_form(tensors) if quantized else (tensors, {})
    for name, value in quantized.items():
        refuse_lossy(value, name)
    stay = {key for key in plain if key not in tensors or key.startswith(of_quantized)}
    return {key: _part(key, tensor, None if key in stay else dtype) for key, tensor in plain.items()}, notes


def _part(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> _Part:
    refuse_unstorable(tensor, name)
    converts = dtype is not None and tensor.is_floating_point() and tensor.dtype.itemsize > 1
    layout = contiguous(dtype if dtype is not None and converts else tensor.dtype, tuple(tensor.shape))
    if not is_standard(layout):
        raise UnsupportedOpError(
            f"{name!r} is of {layout.dtype}, which safetensors has no word for: convert it first, "
            "or keep it in an offload folder (OffloadedTensor.from_original_tensor, offload.disk_offload)"
        )
    return _Part(tensor.detach(), layout)


def _shards(plan: _Plan, most: int) -> dict[str, list[str]]:
    """The keys that go into each file, in the order in which they will lie there."""
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        plan.parts,
        get_storage_size=lambda part: part.layout.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=most,
    )
    files: dict[str, list[str]] = split.filename_to_tensors or {_SINGLE: []}
    return {name: sorted(keys, key=lambda key: -_step(plan.parts[key].layout.nbytes)) for name, keys in files.items()}


def _with_free_names(folder: Path, files: dict[str, list[str]]) -> dict[str, list[str]]:
    """The same shards, under names that no file in the folder has: an index names whole shards until it is replaced."""
    if len(files) == 1:
        return files
    for number in count(1):
        named = {name if number == 1 else name.replace("-", f"-{number}-", 1): keys for name, keys in files.items()}
        if not any(is_there(folder / name) for name in named):
            return named
    raise AssertionError("unreachable")


def _step(nbytes: int) -> int:
    """The alignment that a value of so many bytes leaves to the next one: entries must lie without gaps.

    Where those of larger steps come first, each is aligned to its own step, which is at least the size of an element.
    """
    return min(nbytes & -nbytes, _LARGEST_STEP) or _LARGEST_STEP


def _positive(size: int | str) -> int:
    most = as_bytes(size, 0)
    if most < 1:
        raise ArgumentError(f"max_shard_size={size!r} leaves no room for any value: use '5GB', '500MiB', 4096...")
    return most


# Files


def _write_all(plan: _Plan, files: Mapping[str, list[str]], temporaries: Mapping[Path, Path]) -> None:
    sharded = len(files) > 1
    metadata = plan.metadata if sharded else {**plan.ties, **plan.metadata}
    with progress_in_bytes(plan.nbytes, "saving") as advance:

        def fill(fd: int, key: str, start: int) -> None:
            part = plan.parts[key]
            write_value(fd, start, part.tensor, part.layout.dtype)
            advance(part.layout.nbytes)

        for target, temporary in temporaries.items():
            log.debug("writing %s", target)
            if target.name == _INDEX:
                _write_index(target, temporary, plan, files)
            else:
                layouts = {key: plan.parts[key].layout for key in files[target.name]}
                write_beside(temporary, target, layouts, metadata, fill)


def _write_index(target: Path, temporary: Path, plan: _Plan, files: Mapping[str, list[str]]) -> None:
    weight_map = {key: name for name, keys in files.items() for key in keys}
    numbers = {"total_parameters": plan.total_parameters, "total_size": plan.nbytes}
    index = {"metadata": {**plan.ties, **numbers, **_KIND.stamp["metadata"]}, "weight_map": weight_map}
    data = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
    with writing(target, len(data)), new_file(temporary, len(data), like=target) as fd:
        write_all(fd, memoryview(data), 0)


def _remove_earlier(path: Path) -> None:
    """Remove a file of the earlier checkpoint; the index for good, before a shard goes that it names."""
    try:
        path.unlink()
    except OSError as error:
        reason = f"the new checkpoint is written, but this file of the earlier one stays ({error.strerror}): remove it"
        raise WriteError(error.errno, reason, str(path)) from error
    if path.name == _INDEX:
        sync_folder(path.parent)


def _earlier(folder: Path) -> list[Path]:
    """The files of the checkpoint that stands in a folder, its index first: what a new one replaces or removes.

    Of shards those that are ours, also ones that no index names: a process that was killed left them.
    """
    found = [path for path in (folder / _INDEX, folder / _SINGLE) if is_there(path)]
    with reading(folder):
        shards = [path for path in sorted(folder.glob("model-*.safetensors")) if _SHARD.fullmatch(path.name)]
    return found + [path for path in shards if _is_ours(path)]


def _refuse_foreign(paths: Iterable[Path]) -> None:
    for path in sorted(paths):
        if is_there(path) and not _is_ours(path):
            raise ForeignFileError(
                f"{path} exists and is not of a checkpoint that offload saved: it is left as it is. "
                "Save to another folder, or move it away first."
            )


def _refuse_offload_folder(folder: Path) -> None:
    """A checkpoint among values of single names would hide them: what is opened then is the checkpoint."""
    with reading(folder):
        found = list(folder.glob("*.safetensors"))
    for path in found:
        file = _opened(path)
        if file is not None and file.notes.get("name") is not None:
            raise ForeignFileError(f"{folder} is an offload folder ({path.name}...): save to another one")


def _opened(path: Path) -> TensorFile | None:
    """A file of tensors; None for what is none."""
    try:
        return TensorFile.open(path)
    except ReadError:
        raise
    except OffloadError:
        return None


def _is_ours(path: Path) -> bool:
    """Whether `save_checkpoint` wrote it."""
    with reading(path):
        is_link = path.is_symlink()
    if is_link:
        return False
    if path.name == _INDEX:
        return state_if_ours(path, _KIND) is not None
    file = _opened(path)
    return file is not None and file.is_ours
