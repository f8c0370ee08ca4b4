"""A checkpoint as a mapping from names to stored values.

Always true:
- opening one reads headers and the index, no values
- every name has a value in a complete, existing file, or an error names both
- of a GGUF file in parts, the first has the metadata of all; the names of the files say how many there are
- nothing outside the checkpoint's folder is opened, and nothing in a pickle is executed
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

from offload.annotations import Json
from offload.checkpoints.dcp import METADATA, archives_of, check_shard, read_metadata
from offload.errors import CheckpointError, CorruptFileError, MissingFileError
from offload.memory import uncollected
from offload.storage.file import TensorFile
from offload.storage.gguf_header import ARCHITECTURE, PART, PARTS
from offload.storage.handle import Handle
from offload.storage.header import MARK, is_file_name
from offload.storage.layout import Layout, contiguous
from offload.storage.owning import open_owned
from offload.storage.state_file import read_json
from offload.system.reasons import reading, short, some
from offload.system.regular import absolute, is_folder, is_same_folder, is_there
from offload.tensor.blocks import dense_layout, in_shape, referenced
from offload.tensor.guests import CPU
from offload.tensor.recipes import Joined, Piece
from offload.tensor.wrapper import OffloadedTensor, PathLike, wrap_handles

COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja")  # files beside weights and code
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
ADAPTER = "adapter_model."  # the beginning of the name of peft's files
INDEX = ".index.json"
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.\w+$")
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_BESIDE = ("training_args.", "optimizer.", "scheduler.", "scaler.", "rng_state")


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A value in a file: one entry, or several that make up a tensor subclass."""

    file: TensorFile
    key: str

    @property
    def layout(self) -> Layout | None:
        """Its layout, dense; None for a tensor subclass, or if torch can't read it."""
        if self.key in self.file.header.kinds:
            return dense_layout(self.file, self.key)
        entry = self.file.entries.get(self.key)
        return entry.layout if entry else None

    @property
    def nbytes(self) -> int:
        """Bytes of its data as stored, packed or not; 0 if torch can't read it."""
        if self.key in self.file.header.kinds:
            return self.file.entries[self.key].layout.nbytes
        layout = self.layout
        if layout is not None or not self.file.is_ours:
            return layout.nbytes if layout else 0
        return sum(entry.layout.nbytes for entry in self.file.entries.values())

    @property
    def files(self) -> tuple[TensorFile, ...]:
        """The files it is in."""
        return (self.file,)

    def handle(self, _: str, offload_dir: PathLike | None = None) -> Handle:
        """The value, referenced in place."""
        return referenced(self.file, self.key, offload_dir)


@dataclass(frozen=True, slots=True)
class ShardedValue:
    """A value stored in several shards.

    Attributes:
        shards: each with the index of its first element in the whole.
    """

    layout: Layout
    shards: tuple[tuple[StoredValue, tuple[int, ...]], ...]

    @property
    def file(self) -> TensorFile:
        """The file of the first shard."""
        return self.shards[0][0].file

    @property
    def key(self) -> str:
        """The key of the first shard in its file."""
        return self.shards[0][0].key

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return self.layout.nbytes

    @property
    def files(self) -> tuple[TensorFile, ...]:
        """The files it is in."""
        return tuple({shard.file.path: shard.file for shard, _ in self.shards}.values())

    def handle(self, name: str, offload_dir: PathLike | None = None) -> Handle:
        """The value, joined when it is read."""
        pieces = [Piece(shard.handle(shard.key)) for shard, _ in self.shards]
        return Handle.compose(Joined(self.layout, pieces, [start for _, start in self.shards]), name, offload_dir)


Value: TypeAlias = StoredValue | ShardedValue


class Checkpoint(Mapping[str, Value]):
    """The values of a checkpoint by name. Use `open_checkpoint`.

    Attributes:
        path: the file or folder.
        is_offload_folder: whether it is a folder of single-value files that `offload` wrote.
        ties: names without a value of their own, each with the name whose value they share.
    """

    def __init__(
        self,
        path: Path,
        values: Mapping[str, Value],
        metadata: Mapping[str, Json] | None = None,
        *,
        is_offload_folder: bool = False,
        files: Sequence[TensorFile] = (),
    ) -> None:
        self.path = path
        self._files = files  # one may have metadata, and no values
        self.ties = _ties(values, metadata or {})
        self.is_offload_folder = is_offload_folder
        self._values = values

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(value.nbytes for value in self.values())

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file, whose tensor names differ from those of transformers models."""
        return ARCHITECTURE in self.metadata

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata in the headers of its files."""
        files = {file.path: file for file in self._files or (file for value in self.values() for file in value.files)}
        return {key: text for file in files.values() for key, text in file.header.metadata.items()}

    @uncollected()
    def tensors(
        self, offload_dir: PathLike | None = None, devices: Mapping[str, torch.device] | None = None
    ) -> dict[str, OffloadedTensor]:
        """Its values as tensors, referenced in place; those of an offload folder that is `offload_dir` are for writing.

        Args:
            offload_dir: where they go at the first write; None for a private folder.
            devices: the wanted names, each with the device for its ops; None for all names, on the CPU.
        """
        wanted = dict.fromkeys(self, CPU) if devices is None else devices
        to_write = self.is_offload_folder and self.is_in(offload_dir)
        values = [self[name] for name in wanted]
        handles = [
            open_owned(value.file, value.key) if to_write else value.handle(name, offload_dir)
            for name, value in zip(wanted, values, strict=True)
        ]
        tensors = wrap_handles(zip(handles, wanted.values(), strict=True))
        shaped = (in_shape(tensor, one.file, one.key) for tensor, one in zip(tensors, values, strict=True))
        return dict(zip(wanted, shaped, strict=True))

    def is_in(self, offload_dir: PathLike | None) -> bool:
        """Whether it is in this folder."""
        return is_same_folder(self.path, offload_dir)

    def refuse_own_folder(self, offload_dir: PathLike | None) -> None:
        """Raises `CheckpointError` if values would go to the checkpoint's own folder, except an offload folder."""
        if self.is_in(offload_dir) and not self.is_offload_folder:
            raise CheckpointError(
                f"{self.path} is a checkpoint's own folder: values in it would be taken for the checkpoint when it "
                "is opened again. Give another offload_dir."
            )


@uncollected()
def open_checkpoint(path: PathLike) -> Checkpoint:
    """A file of tensors, an index of several, a folder with either, or an offload folder.

    Files are `.safetensors`, GGUF, or from torch.save (`.bin`, `.pt`, `.pth`, `.ckpt`), recognised by their content.
    A GGUF file is given by its own path, as a folder may hold several of one model; one in several parts by any part.
    An index is a `*.index.json`, or any `.json` that is named itself. In a folder with both forms, safetensors is
    taken. A folder may also be one of torch.distributed.checkpoint (`.metadata`, `*.distcp`).

    Raises:
        MissingFileError: there is nothing, or a shard is missing.
        CorruptFileError: a file is damaged.
        ReadError: a file can't be read at the moment.
        CheckpointError: no checkpoint there, a pickle that holds code or no tensors, or an index that contradicts its
            files.
    """
    path = absolute(path)
    if not is_there(path):
        raise MissingFileError(
            f"{path} does not exist: give a file, an index or a folder. For a model on the hub, use "
            "offload.from_pretrained."
        )
    if is_folder(path):
        return _open_folder(path)
    if path.suffix == ".json":
        return _open_index(path)
    return _open_file(path, path)


def _open_file(path: Path, file: Path) -> Checkpoint:
    opened = TensorFile.open(file)
    parts = with_other_parts(opened)
    if len(parts) > 1:
        return Checkpoint(parts[0].path, _values_by_name(parts), files=parts)
    return Checkpoint(path, _values_of(opened), opened.header.metadata)


def _open_folder(folder: Path) -> Checkpoint:
    with reading(folder):
        names = _without_adapter(sorted(os.listdir(folder)))
    file_name = _usual_in(names, "model.safetensors")
    files = [name for name in names if name.endswith(".safetensors")]
    if file_name is None and files:
        opened = [TensorFile.open(folder / name) for name in files]
        if all("name" in file.notes for file in opened):
            return Checkpoint(folder, _values_by_name(opened), is_offload_folder=True)
    file_name = file_name or _the_only(folder, names, (".safetensors",))
    if file_name is None and METADATA in names:
        return _open_distributed(folder)
    file_name = file_name or _usual_in(names, "pytorch_model.bin") or _the_only(folder, names, PICKLES)
    if file_name is None:
        raise _nothing_in(folder, names)
    return _open_index(folder / file_name) if file_name.endswith(INDEX) else _open_file(folder, folder / file_name)


def _nothing_in(folder: Path, names: list[str]) -> CheckpointError:
    packed = ", ".join(name for name in names if name.endswith(".gguf"))
    more = f", but GGUF files ({packed}): give the path of one of them" if packed else ""
    return CheckpointError(f"{folder} has no checkpoint, neither .safetensors nor .bin{more}")


def _without_adapter(names: list[str]) -> list[str]:
    """The names of a folder without peft's files, unless there are no others with weights."""
    own = [name for name in names if not name.startswith(ADAPTER)]
    ends = (".safetensors", INDEX, METADATA, *PICKLES)
    return own if any(name.endswith(ends) and not is_beside(name) for name in own) else names


def _open_distributed(folder: Path) -> Checkpoint:
    values, files, joined = read_metadata(folder), {}, dict[str, Value]()
    for name, places in archives_of(values).items():
        files[name] = _open_part(folder / name, next(iter(places)), partial(TensorFile.of_archives, places=places))
    for name, value in values.items():
        for shard in value.shards:
            check_shard(files[shard.file], value, shard)
        stored = tuple((StoredValue(files[shard.file], shard.key), shard.start) for shard in value.shards)
        joined[name] = stored[0][0] if not stored[1:] else ShardedValue(contiguous(value.dtype, value.shape), stored)
    return Checkpoint(folder, joined)


def _open_part(path: Path, name: str, opens: Callable[[Path], TensorFile] = TensorFile.open) -> TensorFile:
    """One of several files; the error if it is missing names a value that it holds."""
    try:
        return opens(path)
    except MissingFileError as error:
        raise MissingFileError(f"{path}, which holds {name!r}, is missing: download or copy that file again") from error


def _values_by_name(files: Iterable[TensorFile]) -> dict[str, StoredValue]:
    values: dict[str, StoredValue] = {}
    for file in files:
        for name, value in _values_of(file).items():
            first = values.setdefault(name, value)
            if first is not value:
                raise CheckpointError(
                    f"{file.path} holds {name!r}, as {first.file.path.name} does: remove the wrong one"
                )
    return values


def _usual_in(names: list[str], usual: str) -> str | None:
    return next((name for name in (usual + INDEX, usual) if name in names), None)


def is_beside(name: str) -> bool:
    """Whether a pickle of this name usually lies beside a model without being one: state for resuming training."""
    return name.startswith(_BESIDE)


def _the_only(folder: Path, names: list[str], suffixes: tuple[str, ...]) -> str | None:
    """The only index of a form, else the only file; None if there is neither."""
    indexes = [name for name in names if name.endswith(tuple(f"{suffix}{INDEX}" for suffix in suffixes))]
    candidates = indexes or [name for name in names if name.endswith(suffixes) and not is_beside(name)]
    shard = next(filter(is_shard, candidates), None)
    if shard is not None:
        raise CheckpointError(
            f"{folder} holds {shard}, a part of a checkpoint, but no index: get the *{INDEX} again, or name the file"
        )
    if len(candidates) > 1:
        raise CheckpointError(f"{folder} holds {len(candidates)} checkpoints ({some(candidates, 3)}): name the file")
    return next(iter(candidates), None)


def is_shard(name: str) -> bool:
    """Whether the file name is that of one of several shards, which belong to an index."""
    match = _SHARD.search(name)
    return match is not None and int(match[1]) > 1


def _open_index(path: Path) -> Checkpoint:
    shards: dict[str, dict[str, StoredValue]] = {}
    values: dict[str, StoredValue] = {}
    places, metadata = _read_index(path)
    for name, shard in places.items():
        if shard not in shards:
            shards[shard] = _values_of(_open_part(path.parent / shard, name))
        if name not in shards[shard]:
            raise CheckpointError(
                f"{path} says that {name!r} is in {shard}, and it is not: the files do not belong together"
            )
        values[name] = shards[shard][name]
    return Checkpoint(path.parent, values, metadata)


def _read_index(path: Path) -> tuple[Mapping[str, str], Mapping[str, Json]]:
    """The file of each name according to an index, and the rest of the index.

    Raises `MissingFileError`, `ReadError`; `CheckpointError` if it is not an index, has duplicate keys, or names a file
    outside its folder.
    """
    try:
        index = read_json(path, "an index of shards")
    except CorruptFileError as error:
        raise CheckpointError(str(error)) from error
    places = index.get("weight_map", index) if isinstance(index, dict) else None  # accelerate also reads a bare map
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise CheckpointError(
            f"{path} is not an index of shards, which maps names to files in a weight_map: "
            "name an index, a file of tensors, or the folder"
        )
    if not places:
        raise CheckpointError(f"{path} names no tensors: download or copy the index again")
    metadata = index.get("metadata")
    for name, shard in places.items():
        if not is_file_name(shard):
            raise CheckpointError(f"{path} places {short(name)!r} in {short(shard)!r}, outside its folder: refused")
    return places, metadata if isinstance(metadata, dict) else {}


def _ties(values: Container[str], metadata: Mapping[str, Json]) -> dict[str, str]:
    """The tied weights that `safetensors.torch.save_model` notes: each omitted name, with the one that was saved."""
    return {
        name: kept
        for name, kept in metadata.items()
        if isinstance(kept, str) and name not in values and kept in values and name not in ("format", MARK)
    }


def _values_of(file: TensorFile) -> dict[str, StoredValue]:
    if "name" in file.notes:
        return {str(file.notes["name"]): StoredValue(file, str(file.notes["name"]))}
    return {key: StoredValue(file, key) for key in file.header.keys}


# GGUF files in several parts, as llama.cpp's `llama-gguf-split` writes and names them


def first_part(path: Path) -> Path:
    """The part with the metadata, for any part; another file itself."""
    match = _PART.fullmatch(path.name)
    return path if match is None else path.with_name(_name_of(match, 1))


def pattern_of(name: str) -> str:
    """A pattern for the names of all parts, for the name of any."""
    match = _PART.fullmatch(name)
    return name if match is None else f"{match['stem']}-?????-of-{match['count']}.gguf"


def with_other_parts(file: TensorFile) -> list[TensorFile]:
    """All parts of a GGUF file, in order; of a file that is whole, only itself.

    Raises `MissingFileError` if a part is missing; `CheckpointError` if the file's name does not say which part it is,
    or says what another part is; and as `TensorFile.open`.
    """
    said = file.header.metadata.get(PARTS, "")
    count = int(said) if said.isdecimal() else 1
    if count < 2:
        return [file]
    match = _PART.fullmatch(file.path.name)
    if match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"{file.path} is one of {count} parts, and its name does not say which: give the parts the names "
            f"...-00001-of-{count:05}.gguf and so on"
        )
    paths = [file.path.with_name(_name_of(match, number)) for number in range(1, count + 1)]
    missing = [path.name for path in paths if not is_there(path)]
    if missing:
        raise MissingFileError(
            f"{file.path.parent} lacks {missing[0]}{f' and {len(missing) - 1} more' if missing[1:] else ''}, of "
            f"{count} parts of a model: download or copy that file again"
        )
    parts = [file if path == file.path else TensorFile.open(path) for path in paths]
    for number, part in enumerate(parts):
        if (part.header.metadata.get(PART), part.header.metadata.get(PARTS)) != (str(number), str(count)):
            raise CheckpointError(f"{part.path} is not part {number + 1} of {count}, though it is named so")
    return parts


def _name_of(match: re.Match[str], number: int) -> str:
    return f"{match['stem']}-{number:05}-of-{match['count']}.gguf"
