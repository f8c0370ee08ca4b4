"""A checkpoint as a mapping from names to stored values.

Always true:
- opening one reads headers and the index, no values
- every name has a value in a file that is there and whole, or there is an error that names both
- nothing outside the checkpoint's folder is opened, and no pickle
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from offload.errors import CheckpointError, MissingFileError
from offload.memory import uncollected
from offload.storage.file import TensorFile
from offload.storage.header import Layout

COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja")  # what a model's folder has beside weights and code
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A value in a file: an entry, or a tensor subclass that takes several."""

    file: TensorFile
    key: str

    @property
    def layout(self) -> Layout | None:
        """Its layout; None for a tensor subclass."""
        return self.file.entry(self.key).layout if self.key in self.file.entries else None

    @property
    def nbytes(self) -> int:
        """Bytes of data in the file."""
        layout = self.layout
        return layout.nbytes if layout else sum(entry.layout.nbytes for entry in self.file.entries.values())


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
    """A `.safetensors` file, a `*.index.json`, a folder with either, or an offload folder.

    Raises:
        MissingFileError: nothing there, or a shard is missing.
        CorruptFileError: a file is not whole.
        CheckpointError: no checkpoint there, a pickled one, or an index that contradicts its files.
    """
    path = Path(os.path.abspath(path))
    if path.is_dir():
        return _open_folder(path)
    if path.name.endswith(".index.json"):
        return _open_index(path)
    if path.suffix in _PICKLES and path.exists():
        raise CheckpointError(f"{path} is a pickled checkpoint: save it as .safetensors first")
    return Checkpoint(path, _values_of(TensorFile.open(path)))


def _open_folder(folder: Path) -> Checkpoint:
    names = sorted(os.listdir(folder))
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    files = [name for name in names if name.endswith(".safetensors")]
    if "model.safetensors" in files and "model.safetensors.index.json" not in indexes:
        return Checkpoint(folder, _values_of(TensorFile.open(folder / "model.safetensors")))
    if indexes:
        name = "model.safetensors.index.json"
        return _open_index(folder / (name if name in indexes else _the_only(folder, indexes)))
    if not files:
        pickled = [name for name in names if name.endswith(_PICKLES)]
        what = f"only pickled ones ({pickled[0]}...): save as .safetensors first" if pickled else "none"
        raise CheckpointError(f"{folder} should hold a .safetensors checkpoint; it holds {what}")
    opened = [TensorFile.open(folder / name) for name in files]
    if all("name" in file.notes for file in opened):
        values = {str(file.notes["name"]): StoredValue(file, str(file.notes["name"])) for file in opened}
        return Checkpoint(folder, values, is_offload_folder=True)
    return Checkpoint(folder, _values_of(TensorFile.open(folder / _the_only(folder, files))))


def _the_only(folder: Path, names: list[str]) -> str:
    if len(names) > 1:
        raise CheckpointError(f"{folder} holds {len(names)} checkpoints ({', '.join(names[:3])}...): name the file")
    return names[0]


def _open_index(path: Path) -> Checkpoint:
    shards: dict[str, dict[str, StoredValue]] = {}
    values: dict[str, StoredValue] = {}
    for name, shard in _weight_map(path).items():
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


def _weight_map(path: Path) -> Mapping[str, str]:
    try:
        weight_map: Any = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except FileNotFoundError as error:
        raise MissingFileError(f"{path} is missing") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not an index of shards ({type(error).__name__}: {error})") from error
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{path} is not an index of shards: its weight_map does not map names to file names")
    for name, shard in weight_map.items():
        if PurePosixPath(shard).name != shard or shard in ("", ".", ".."):
            raise CheckpointError(f"{path} places {name!r} in {shard!r}, outside its folder: refused")
        if not shard.endswith(".safetensors"):
            raise CheckpointError(f"{path} places {name!r} in {shard!r}, which is not a .safetensors file")
    return weight_map


def _values_of(file: TensorFile) -> dict[str, StoredValue]:
    if "name" in file.notes:
        return {str(file.notes["name"]): StoredValue(file, str(file.notes["name"]))}
    return {key: StoredValue(file, key) for key in (*file.entries, *file.header.unreadable)}
