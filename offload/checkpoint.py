"""A checkpoint as a mapping from names to stored values.

Always true:
- opening one reads headers and the index, no values
- every name has a value in a file that is there and whole, or there is an error that names both
- nothing outside the checkpoint's folder is opened, and nothing in a pickle is run
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from offload.errors import CheckpointError, MissingFileError
from offload.memory import uncollected
from offload.storage.file import TensorFile
from offload.storage.header import Layout

COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja")  # what a model's folder has beside weights and code
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
INDEX = ".index.json"
_BESIDE = ("training_args.", "optimizer.", "scheduler.", "scaler.", "rng_state")


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A value in a file: an entry, or a tensor subclass that takes several."""

    file: TensorFile
    key: str

    @property
    def layout(self) -> Layout | None:
        """Its layout; None for a tensor subclass, and for what torch can't read."""
        found = self.file.entries.get(self.key) or self.file.header.loose.get(self.key)
        return found.layout if found else None

    @property
    def nbytes(self) -> int:
        """Bytes of its data; 0 for what torch can't read."""
        layout = self.layout
        if layout is not None or not self.file.is_ours:
            return layout.nbytes if layout else 0
        return sum(entry.layout.nbytes for entry in self.file.entries.values())


class Checkpoint(Mapping[str, StoredValue]):
    """The values of a checkpoint by name. Use `open_checkpoint`.

    Attributes:
        path: the file or folder.
        is_offload_folder: whether these are per-name files that `offload` wrote.
    """

    def __init__(self, path: Path, values: Mapping[str, StoredValue], *, is_offload_folder: bool = False) -> None:
        self.path = path
        self.is_offload_folder = is_offload_folder
        self._values = values

    def __getitem__(self, name: str) -> StoredValue:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(value.nbytes for value in self.values())


@uncollected()
def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """A file of tensors, the index of several, a folder with either, or an offload folder.

    Files are `.safetensors`, or of torch.save (`.bin`, `.pt`, `.pth`, `.ckpt`), and are told by what is in them.
    An index is a `*.index.json`. In a folder with both forms, safetensors is taken.

    Raises:
        MissingFileError: nothing there, or a shard is missing.
        CorruptFileError: a file is not whole.
        CheckpointError: no checkpoint there, a pickle that holds code or no tensors, or an index that contradicts its
            files.
    """
    path = Path(os.path.abspath(path))
    if path.is_dir():
        return _open_folder(path)
    if path.name.endswith(INDEX):
        return _open_index(path)
    return Checkpoint(path, _values_of(TensorFile.open(path)))


def _open_folder(folder: Path) -> Checkpoint:
    names = sorted(os.listdir(folder))
    files = [name for name in names if name.endswith(".safetensors")]
    found = _model_in(folder, names, "model", (".safetensors",))
    if found is None and files:
        opened = [TensorFile.open(folder / name) for name in files]
        if all("name" in file.notes for file in opened):
            values = {str(file.notes["name"]): StoredValue(file, str(file.notes["name"])) for file in opened}
            return Checkpoint(folder, values, is_offload_folder=True)
        found = _the_only(folder, files)
    found = found or _model_in(folder, names, "pytorch_model", PICKLES)
    if found is None:
        pickled = [name for name in names if name.endswith(PICKLES) and not is_beside(name)]
        if not pickled:
            raise CheckpointError(f"{folder} should hold a checkpoint, .safetensors or .bin; it holds none")
        found = _the_only(folder, pickled)
    if found.endswith(INDEX):
        return _open_index(folder / found)
    return Checkpoint(folder, _values_of(TensorFile.open(folder / found)))


def _model_in(folder: Path, names: list[str], stem: str, suffixes: tuple[str, ...]) -> str | None:
    """The usual file, the usual index, or the only index: the name of the one that stands for a folder's model."""
    indexes = [name for name in names if name.endswith(tuple(f"{suffix}{INDEX}" for suffix in suffixes))]
    usual = stem + suffixes[0]
    if usual in names and usual + INDEX not in indexes:
        return usual
    if usual + INDEX in indexes:
        return usual + INDEX
    return _the_only(folder, indexes) if indexes else None


def is_beside(name: str) -> bool:
    """Whether a pickle of this name lies beside a model as a rule, and holds none: what a training goes on from."""
    return name.startswith(_BESIDE)


def _the_only(folder: Path, names: list[str]) -> str:
    if len(names) > 1:
        raise CheckpointError(f"{folder} holds {len(names)} checkpoints ({', '.join(names[:3])}...): name the file")
    return names[0]


def _open_index(path: Path) -> Checkpoint:
    shards: dict[str, dict[str, StoredValue]] = {}
    values: dict[str, StoredValue] = {}
    for name, shard in weight_map(path).items():
        if shard not in shards:
            shards[shard] = _open_shard(path.parent, shard, name)
        if name not in shards[shard]:
            raise CheckpointError(
                f"{path} says that {name!r} is in {shard}, and it is not: the files do not belong together"
            )
        values[name] = shards[shard][name]
    return Checkpoint(path.parent, values)


def _open_shard(folder: Path, shard: str, name: str) -> dict[str, StoredValue]:
    try:
        return _values_of(TensorFile.open(folder / shard))
    except MissingFileError as error:
        raise MissingFileError(f"{folder / shard}, which holds {name!r}, is missing: get that shard again") from error


def weight_map(path: Path) -> Mapping[str, str]:
    """The file of each name, as an index has it.

    Raises:
        MissingFileError: it is not there.
        CheckpointError: it is no index, names something twice, or something outside its folder.
    """
    try:
        places: Any = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)["weight_map"]
    except FileNotFoundError as error:
        raise MissingFileError(f"{path} is missing") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path} {error}") from error
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not an index of shards ({type(error).__name__}: {error})") from error
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise CheckpointError(f"{path} is not an index of shards: its weight_map does not map names to file names")
    for name, shard in places.items():
        if PurePosixPath(shard).name != shard or shard in ("", ".", ".."):
            raise CheckpointError(f"{path} places {name!r} in {shard!r}, outside its folder: refused")
        if not shard.endswith((".safetensors", *PICKLES)):
            raise CheckpointError(f"{path} places {name!r} in {shard!r}, which is neither .safetensors nor .bin")
    return places


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise CheckpointError(f"names {twice!r} twice: get the index again")
    return unique


def _values_of(file: TensorFile) -> dict[str, StoredValue]:
    if "name" in file.notes:
        return {str(file.notes["name"]): StoredValue(file, str(file.notes["name"]))}
    return {key: StoredValue(file, key) for key in file.header.keys}
