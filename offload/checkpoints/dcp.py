"""Folders of torch.distributed.checkpoint: values that many processes have written, as one checkpoint.

Always true:
- nothing in the pickled metadata is executed: its objects become notes, and any name that torch does not write there
  is refused
- no value is read; what one process wrote whole is referenced in its file, and shards become a recipe
- shards are the cells of a grid over their value, and have its dtype

Source of the format: `torch/distributed/checkpoint/metadata.py` and `filesystem.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from offload.errors import CheckpointError, CorruptFileError
from offload.storage.file import TensorFile
from offload.storage.header import is_file_name
from offload.storage.layout import are_counts, is_countable
from offload.storage.pickled import NESTS, NotedObject, read_notes
from offload.system.reasons import short
from offload.system.regular import read_regular

METADATA = ".metadata"
_LONGEST = 1 << 28  # bytes of the metadata
_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    **dict.fromkeys(("pathlib", "pathlib._local"), ("Path", "PosixPath", "WindowsPath")),
}

Sizes: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a value, or all of it, as written by one process, in a file of the folder under a key.

    Attributes:
        begin, nbytes: the range of its archive in that file.
        start, shape: which part of the value it is.
    """

    file: str
    key: str
    begin: int
    nbytes: int
    start: Sizes
    shape: Sizes


@dataclass(frozen=True, slots=True)
class Sharded:
    """A value and the shards that cover it."""

    dtype: torch.dtype
    shape: Sizes
    shards: tuple[Shard, ...]


def read_metadata(folder: Path) -> dict[str, Sharded]:
    """The values in a folder, by name; for a nested training state, those of the model.

    Raises `MissingFileError`, `ReadError`; `CorruptFileError` if the metadata is cut off or damaged; `CheckpointError`
    if it names code or a file outside the folder, has no tensors, or its shards do not cover a value.
    """
    path = folder / METADATA
    try:
        metadata = _fields(read_notes(read_regular(path, _LONGEST), _CLASSES))
        stored = _fields(metadata["storage_data"], dict)
        places = {_place_of(index): _fields(info) for index, info in stored.items()}
        tensors = {
            name: _fields(noted)
            for name, noted in _fields(metadata["state_dict_metadata"], dict).items()
            if type(noted).__name__ == "TensorStorageMetadata"
        }
        names = _names(tensors, metadata.get("planner_data"))
        values = {name: _sharded(name, key, tensors[key], places) for name, key in names.items()}
    except (CheckpointError, CorruptFileError) as error:
        raise type(error)(f"{path} {error}") from (error.__cause__ or error)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptFileError(
            f"{path} is damaged ({type(error).__name__}: {short(error)}): download or copy it again"
        ) from error
    if not values:
        raise CheckpointError(f"{path} names no tensors")
    return values


def archives_of(values: Mapping[str, Sharded]) -> dict[str, dict[str, tuple[int, int]]]:
    """For each file, the offset and size of each shard's archive, by key."""
    files: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
    for value in values.values():
        for shard in value.shards:
            files[shard.file][shard.key] = shard.begin, shard.nbytes
    return files


def check_shard(file: TensorFile, value: Sharded, shard: Shard) -> None:
    """Raises `CheckpointError` if a file's content contradicts the metadata."""
    entry = file.entries.get(shard.key)
    if entry is not None and (entry.layout.shape, entry.layout.dtype) != (shard.shape, value.dtype):
        raise CheckpointError(
            f"{file.path} holds {entry.layout.dtype} {list(entry.layout.shape)} for {shard.key!r}, and {METADATA} says "
            f"{value.dtype} {list(shard.shape)}: the files do not belong together"
        )


def _fields(noted: object, kind: type = NotedObject) -> dict[Any, Any]:
    """The fields of a noted dataclass, or a dictionary itself."""
    fields = noted.state if kind is NotedObject and isinstance(noted, NotedObject) else noted
    if not isinstance(noted, kind) or not isinstance(fields, dict):
        raise CorruptFileError(f"has a {type(noted).__name__} in place of a {kind.__name__}: download or copy it again")
    return fields


def _sizes(noted: object) -> Sizes:
    """A `torch.Size`."""
    sizes = list(noted.args[0]) if isinstance(noted, NotedObject) and len(noted.args) == 1 else None
    if sizes is None or not are_counts(sizes):
        raise CorruptFileError(f"has a malformed size, {short(sizes)}: download or copy it again")
    return tuple(sizes)


def _place_of(index: object) -> tuple[str, Sizes | None]:
    fields = _fields(index)
    offset = fields.get("offset")
    return fields["fqn"], None if offset is None else _sizes(offset)


def _names(tensors: Mapping[str, object], paths: object) -> dict[str, str]:
    """The key of each value by its name; for a nested model, by its names inside the model."""
    nested: dict[tuple[Any, ...], dict[str, str]] = defaultdict(dict)
    for key in tensors:
        path = paths.get(key) if isinstance(paths, dict) else None
        if isinstance(path, tuple):
            deepest = max((at for at, step in enumerate(path[:-1]) if step in NESTS), default=None)
            if deepest is not None:
                nested[path[: deepest + 1]][".".join(map(str, path[deepest + 1 :]))] = key
    if len(nested) > 1:
        several = ", ".join(".".join(map(str, path)) for path in nested)
        raise CheckpointError(f"names several models ({short(several)}): save one of them by itself")
    return next(iter(nested.values()), {key: key for key in tensors})


def _sharded(
    name: object, key: object, noted: Mapping[str, Any], places: Mapping[Any, Mapping[str, object]]
) -> Sharded:
    shape, dtype = _sizes(noted["size"]), noted["properties"].state[0]
    if not isinstance(name, str) or not isinstance(dtype, torch.dtype) or not is_countable(shape, dtype.itemsize):
        raise CorruptFileError(f"gives {short(name)!r} a malformed dtype or shape: download or copy it again")
    parts: dict[Sizes, Shard] = {}
    for chunk in noted["chunks"]:
        fields = _fields(chunk)
        start, sides = _sizes(fields["offsets"]), _sizes(fields["sizes"])
        if len(start) != len(shape) or len(sides) != len(shape):
            raise CheckpointError(f"gives {name!r} of shape {list(shape)} a shard of {list(sides)} at {list(start)}")
        if start not in parts and (0 not in sides or 0 in shape):
            parts[start] = _shard(name, start, sides, shape, places.get((key, start)))
    shards = tuple(parts[start] for start in sorted(parts))
    if not shards or not _is_grid(shape, shards):
        raise CheckpointError(
            f"gives {name!r} of shape {list(shape)} {len(shards)} shards that do not cover it as a grid: "
            "the save was not finished"
        )
    return Sharded(dtype, shape, shards)


def _shard(name: str, start: Sizes, sides: Sizes, shape: Sizes, place: Mapping[str, Any] | None) -> Shard:
    if place is None:
        raise CheckpointError(
            f"does not say where the shard of {name!r} at {list(start)} is: the save was not finished"
        )
    file, begin, nbytes = place["relative_path"], place["offset"], place["length"]
    if place.get("transform_descriptors"):
        raise CheckpointError(f"says that {name!r} was packed by an extension: save it again without one")
    if not isinstance(file, str) or not is_file_name(file):
        raise CheckpointError(f"places {name!r} in {short(file)!r}, outside its folder: refused")
    if not are_counts([begin, nbytes]):
        raise CorruptFileError(f"places {name!r} at a malformed byte: download or copy it again")
    sections = ", ".join(f"{low}:{low + side}" for low, side in zip(start, sides, strict=True))
    return Shard(file, name if sides == shape else f"{name}[{sections}]", begin, nbytes, start, sides)


def _is_grid(shape: Sizes, shards: tuple[Shard, ...]) -> bool:
    """Whether shards with different starts are the cells of a grid over a value, as processes of a mesh share it."""
    cells = 1
    for at, side in enumerate(shape):
        cuts = sorted({(shard.start[at], shard.shape[at]) for shard in shards})
        ends = [0, *(low + length for low, length in cuts)]
        if [low for low, _ in cuts] != ends[:-1] or ends[-1] != side:
            return False
        cells *= len(cuts)
    return cells == len(shards)
