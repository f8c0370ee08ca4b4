"""Named tensors written as a safetensors checkpoint.

Always true:
- no value is in memory as a whole: what is on disk is copied from file to file, everything else piece by piece
- every file is complete under a temporary name before the first is put in place, and shards get names that no file has;
  the last rename, of the index or the only file, makes the new checkpoint the visible one
- at any moment a reader finds either the old checkpoint, complete, or the new one
- only earlier checkpoints of ours are replaced or removed, and no file that a live tensor refers to
- any safetensors reader returns the values as they are
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import MappingProxyType

import torch

from offload.checkpoints import log
from offload.checkpoints.checkpoint import Checkpoint
from offload.checkpoints.companions import missing_in, put_files
from offload.checkpoints.forms.torchao import PARTS_NOTE, in_torchaos_form
from offload.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    ForeignFileError,
    OffloadError,
    ReadError,
    UnsupportedOpError,
)
from offload.memory import as_bytes
from offload.progress import progress_in_bytes
from offload.storage.file import TensorFile, is_ours
from offload.storage.header import MARK, VERSION, is_standard, is_unicode
from offload.storage.layout import Layout, contiguous
from offload.storage.replacing import made_folder, new_file, replacing_all, sync_folder, write_all
from offload.storage.state_file import Kind
from offload.storage.subclasses import is_subclass_value, refuse_lossy
from offload.storage.write import refuse_foreign, write_beside
from offload.system.reasons import reading, writing
from offload.system.regular import is_there
from offload.tensor.arguments import checked_dense, refuse_unstorable
from offload.tensor.saved import identity_of, refuse_referenced, subclass_value, write_value

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-(\d+-)?\d{5}-of-\d{5}\.safetensors")
_FOREIGN = (
    "exists and is not part of a checkpoint that offload saved: it is left as it is. "
    "Save to another folder, or move it away first."
)
_LARGEST_STEP = 64  # alignment in bytes of values whose sizes allow it
_OWN_METADATA = ("format", MARK)
_KIND = Kind(what="an index of offload", stamp={"metadata": {MARK: json.dumps({"version": VERSION})}})


def write_checkpoint(
    contents: Contents, folder: Path, most: int, *, companions: Mapping[str, bytes] = MappingProxyType({})
) -> list[Path]:
    """Write a checkpoint, in place of an earlier one of ours; returns the files with the weights, the index last.

    Args:
        folder: created if needed.
        most: bytes of the values in a file; a value that is larger has its own file.
        companions: the configuration files of a model beside its weights: those that are missing are written.

    Raises `ForeignFileError`, `WriteError`, `ReadError`: see `offload.save_checkpoint`.
    """
    files = _shards(contents, most)
    earlier = _earlier_in(folder, files)
    missing = missing_in(folder, companions)
    files = _with_free_names(folder, files)
    targets = _targets_in(folder, files)
    made_folder(folder, contents.nbytes)
    with replacing_all(targets, contents.nbytes) as temporaries:
        _write_files(contents, files, temporaries)
    put_files(folder, missing)
    _remove_earlier(path for path in earlier if path not in targets)
    log.info("saved %d values, %d bytes, in %d files in %s", len(contents.parts), contents.nbytes, len(files), folder)
    return targets


def largest_shard(size: int | str) -> int:
    """`max_shard_size` in bytes. Raises `ArgumentError` if it is not an amount, or zero."""
    most = as_bytes(size)
    if most < 1:
        raise ArgumentError(f"max_shard_size={size!r} is too small for any value: use '5GB', '500MiB', 4096...")
    return most


# What will be written


@dataclass(frozen=True, slots=True)
class WrittenValue:
    """A value as it will be in its file.

    Attributes:
        tensor: the value as it is.
        layout: the dtype and shape that it has in the file.
    """

    tensor: torch.Tensor
    layout: Layout


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint's files will have.

    Attributes:
        parts: the values by key.
        ties: the omitted names, each with the key that has its value.
        metadata: what the header of every file says.
    """

    parts: dict[str, WrittenValue]
    ties: dict[str, str]
    metadata: dict[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(part.layout.nbytes for part in self.parts.values())


def contents_of(
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None = None,
    *,
    discarded: Collection[str] = (),
    metadata: Mapping[str, str] | None = None,
) -> Contents:
    """Named tensors as the contents of a checkpoint; those with the same value are written once.

    Args:
        dtype: to which floating-point values of more than 8 bits are converted; None for none.
        discarded: of names with the same value, those that are only kept if there is no other.
        metadata: of the files that the tensors are from.

    Raises `ArgumentTypeError`, `ArgumentError` if a name or a value can't be in such a file; `UnsupportedOpError`,
    `UnknownSubclassError` if a value can't be stored.
    """
    for name, tensor in tensors.items():
        _check(name, tensor)
    ties = _ties(tensors, discarded)
    metadata = metadata or {}
    parts, more = _parts({name: tensor for name, tensor in tensors.items() if name not in ties}, dtype)
    return Contents(parts, ties, {**metadata, **more})


def contents_in(source: Checkpoint, dtype: torch.dtype | None = None) -> Contents:
    """The contents of an opened checkpoint, with its ties and metadata: quantized values can't be read without them.

    Raises: as `contents_of`; `CheckpointError` for a dtype, if there are weights of torchao's classes.
    """
    if dtype is not None and PARTS_NOTE in source.metadata:
        raise CheckpointError(
            f"{source.path} holds weights that torchao quantized: their scales can't be converted to {dtype}. "
            "Leave the dtype as it is."
        )
    metadata = {
        key: text for key, text in source.metadata.items() if key not in _OWN_METADATA and key not in source.ties
    }
    contents = contents_of(source.tensors(), dtype, metadata=metadata)
    return replace(contents, ties={**source.ties, **contents.ties})


def _check(name: object, tensor: object) -> None:
    if not isinstance(name, str):
        raise ArgumentTypeError(f"tensor names must be strings, not {name!r}")
    if name == "__metadata__" or not is_unicode(name):
        raise ArgumentError(f"no tensor in a safetensors file can be called {name!r}: rename it")
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(
            f"{name!r} is a {type(tensor).__name__}, not a tensor: save it elsewhere, and leave it out here"
        )
    checked_dense(tensor, name)
    if not is_subclass_value(tensor):  # for those, torchao decides later whether they can be stored
        refuse_lossy(tensor, name)


def _ties(tensors: Mapping[str, torch.Tensor], discarded: Collection[str]) -> dict[str, str]:
    """The names that need no value of their own, each with the one that has it.

    Of several names the first in alphabetical order is kept, as in `safetensors.torch.save_model`, but none of
    `discarded` if there is another.
    """
    same: dict[object, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        same[identity_of(tensor)].append(name)
    ties: dict[str, str] = {}
    for names in same.values():
        first = min([name for name in names if name not in discarded] or names)
        ties.update((name, first) for name in sorted(names) if name != first)
    return ties


def _parts(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> tuple[dict[str, WrittenValue], dict[str, str]]:
    """The entries of the files, and additions to their metadata."""
    quantized = {name: value for name, tensor in tensors.items() if (value := subclass_value(tensor)) is not None}
    plain, notes = in_torchaos_form(tensors) if quantized else (tensors, {})
    for name, value in quantized.items():
        refuse_lossy(value, name)
    return {key: _part(key, tensor, dtype if key in tensors else None) for key, tensor in plain.items()}, notes


def _part(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> WrittenValue:
    refuse_unstorable(tensor, name)
    converts = dtype is not None and tensor.is_floating_point() and tensor.dtype.itemsize > 1
    layout = contiguous(dtype if dtype is not None and converts else tensor.dtype, tuple(tensor.shape))
    if not is_standard(layout):
        raise UnsupportedOpError(
            f"{name!r} is of {layout.dtype}, which safetensors does not support: convert it first, "
            "or keep it in an offload folder (OffloadedTensor.from_original_tensor, offload.disk_offload)"
        )
    return WrittenValue(tensor.detach(), layout)


# Files


def _shards(contents: Contents, most: int) -> dict[str, list[str]]:
    """The keys for each file, in file order."""
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        contents.parts,
        get_storage_size=lambda part: part.layout.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=most,
    )
    files: dict[str, list[str]] = split.filename_to_tensors or {_SINGLE: []}
    return {
        name: sorted(keys, key=lambda key: -_step(contents.parts[key].layout.nbytes)) for name, keys in files.items()
    }


def _with_free_names(folder: Path, files: dict[str, list[str]]) -> dict[str, list[str]]:
    """The same shards with unused names: an existing index refers to complete shards until it is replaced."""
    if len(files) == 1:
        return files
    for number in count(1):
        named = {name if number == 1 else name.replace("-", f"-{number}-", 1): keys for name, keys in files.items()}
        if not any(is_there(folder / name) for name in named):
            return named
    raise AssertionError("unreachable")


def _step(nbytes: int) -> int:
    """The alignment that the end of a value of this size provides for the next one: entries have no gaps.

    With values sorted by decreasing step, each is aligned to its own step, which is at least its element size.
    """
    return min(nbytes & -nbytes, _LARGEST_STEP) or _LARGEST_STEP


def _targets_in(folder: Path, files: Iterable[str]) -> list[Path]:
    """The files of a checkpoint, the index last if there is one."""
    paths = [folder / name for name in files]
    return [*paths, folder / _INDEX] if len(paths) > 1 else paths


def _write_files(contents: Contents, files: Mapping[str, list[str]], temporaries: Mapping[Path, Path]) -> None:
    """Create the files, under their temporary names by target, and write the values, by their keys in each."""
    nbytes = sum(contents.parts[key].layout.nbytes for path in temporaries for key in files.get(path.name, ()))
    with progress_in_bytes(nbytes, "saving") as advance:

        def fill(fd: int, key: str, start: int) -> None:
            part = contents.parts[key]
            write_value(fd, start, part.tensor, part.layout.dtype)
            advance(part.layout.nbytes)

        for target, temporary in temporaries.items():
            log.debug("writing %s", target)
            if target.name == _INDEX:
                _write_index(target, temporary, contents, files)
            else:
                layouts = {key: contents.parts[key].layout for key in files[target.name]}
                ties = {} if len(files) > 1 else contents.ties  # of several files, the index has them
                write_beside(temporary, target, layouts, {**ties, **contents.metadata}, fill)


def _write_index(target: Path, temporary: Path, contents: Contents, files: Mapping[str, list[str]]) -> None:
    weight_map = {key: name for name, keys in files.items() for key in keys}
    metadata = {**contents.ties, "total_size": contents.nbytes, **_KIND.stamp["metadata"]}
    index = {"metadata": metadata, "weight_map": weight_map}
    data = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
    with writing(target, len(data)), new_file(temporary, len(data), like=target) as fd:
        write_all(fd, memoryview(data), 0)


# Earlier files


def _earlier_in(folder: Path, files: Iterable[str]) -> list[Path]:
    """The files of the earlier checkpoint in a folder, which a new one replaces or removes; index first.

    These include our shards that no index names: a killed process left them. The new one would have `files`.

    Raises `ForeignFileError` if files there are not ours, or live tensors refer to them.
    """
    listed = [path for path in (folder / _INDEX, folder / _SINGLE) if is_there(path)]
    with reading(folder):
        named = [path for path in sorted(folder.glob("model-*.safetensors")) if _SHARD.fullmatch(path.name)]
    earlier = listed + [path for path in named if is_ours(path)]
    for path in sorted({*(folder / name for name in files), *earlier}):
        refuse_foreign(path, _KIND if path.name == _INDEX else None, _FOREIGN)
    _refuse_offload_folder(folder)
    refuse_referenced(earlier)
    return earlier


def _remove_earlier(paths: Iterable[Path]) -> None:
    """Remove files of the earlier checkpoint; the index durably, before any shard that it names.

    Raises `WriteError`.
    """
    for path in paths:
        with writing(path):
            path.unlink()
        if path.name == _INDEX:
            sync_folder(path.parent)


def _refuse_offload_folder(folder: Path) -> None:
    """A checkpoint among single-value files would hide them: it would be opened in their place."""
    with reading(folder):
        files = list(folder.glob("*.safetensors"))
    for path in files:
        try:
            is_value = "name" in TensorFile.open(path).notes
        except ReadError:
            raise
        except OffloadError:  # another kind of file
            is_value = False
        if is_value:
            raise ForeignFileError(f"{folder} is an offload folder ({path.name}...): save to another one")
