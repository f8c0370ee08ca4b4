"""Check that a checkpoint or an offload folder is complete.

Always true:
- every header is read, every length is compared with the file's, and every index with its files; no value is read
- nothing is written, and nothing in a pickle is executed
- a finding names its file
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from offload.checkpoints.checkpoint import INDEX, PICKLES, check_part, is_beside, is_shard, paths_of_parts, read_index
from offload.checkpoints.dcp import METADATA, archives_of, check_shard, read_metadata
from offload.errors import CheckpointError, OffloadError, ReadError
from offload.storage.file import TensorFile
from offload.storage.subclasses import layout_from
from offload.system.reasons import reading
from offload.system.regular import absolute, is_folder


@dataclass(frozen=True)
class Finding:
    """A defect of a file."""

    path: Path
    what: str


@dataclass
class Verdict:
    """The files that were checked, and the findings."""

    files: dict[Path, TensorFile | None] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether every value can be read."""
        return not self.findings

    @property
    def tensors(self) -> int:
        """Number of tensors in the readable files."""
        return sum(len(_names(file)) for file in self.files.values() if file)

    @property
    def nbytes(self) -> int:
        """Total size of the readable files."""
        return sum(file.identity.size for file in self.files.values() if file)

    def open(self, path: Path, opened: Callable[[Path], TensorFile] = TensorFile.open) -> TensorFile | None:
        """The file at `path`, checked once; None, with a finding, if it can't be used."""
        if path not in self.files:
            self.files[path] = None
            with self.noting(path):
                file = self.files[path] = opened(path)
                unreadable = file.header.unreadable.items()
                self.findings.extend(Finding(path, f"{name!r} {why}") for name, why in unreadable)
                if "subclass" in file.notes:
                    layout_from(file.notes["subclass"])
        return self.files[path]

    @contextmanager
    def noting(self, path: Path) -> Iterator[None]:
        """In this context, an error is a finding about a file; but not that it can't be read at the moment."""
        try:
            yield
        except ReadError:
            raise
        except OffloadError as error:
            self.findings.append(Finding(path, str(error).replace(f"{path} ", "").replace(f": '{path}'", "")))


def verify(path: str | os.PathLike[str]) -> Verdict:
    """Check a file of tensors, an index and its shards, or all of these in a folder.

    Raises `MissingFileError`; `CheckpointError` if the folder has no tensors; `ReadError` if a file can't be read at
    the moment, which says nothing about its content.
    """
    path, verdict = absolute(path), Verdict()
    if is_folder(path):
        _verify_folder(path, verdict)
    elif path.suffix == ".json":
        _verify_index(path, verdict)
    else:
        _verify_file(path, verdict)
    return verdict


def _verify_file(path: Path, verdict: Verdict) -> None:
    """A file, and the other parts if it is one of several."""
    file = verdict.open(path)
    with verdict.noting(path):
        paths = [] if file is None else paths_of_parts(file)
        for number, part in enumerate(map(verdict.open, paths)):
            if part is not None:
                check_part(part, number, len(paths))


def _verify_folder(folder: Path, verdict: Verdict) -> None:
    with reading(folder):
        names = sorted(os.listdir(folder))
    for name in names:
        if name.endswith(INDEX):
            _verify_index(folder / name, verdict)
    if METADATA in names:
        _verify_distributed(folder, verdict)
    for name in names:
        if name.endswith((".safetensors", ".gguf", *PICKLES)) and not is_beside(name):
            _verify_file(folder / name, verdict)
    if not verdict.files and not verdict.findings:
        raise CheckpointError(f"{folder} holds no tensors: name a checkpoint, or an offload folder")
    holders: dict[str, Path] = {}  # of names in an offload folder
    for path, file in verdict.files.items():
        if file is not None and "name" in file.notes:
            first = holders.setdefault(claimed := str(file.notes["name"]), path)
            if first != path:
                what = f"holds {claimed!r}, as {first.name} does: remove the wrong one"
                verdict.findings.append(Finding(path, what))
    if not any(name.endswith(INDEX) for name in names):
        parts = [path for path in verdict.files if is_shard(path.name) and path.suffix != ".gguf"]
        verdict.findings.extend(Finding(path, "is one shard of a checkpoint, and there is no index") for path in parts)


def _verify_distributed(folder: Path, verdict: Verdict) -> None:
    with verdict.noting(folder / METADATA):
        values = read_metadata(folder)
        for name, places in archives_of(values).items():
            verdict.open(folder / name, partial(TensorFile.of_archives, places=places))
        for value in values.values():
            for shard in value.shards:
                file = verdict.files[folder / shard.file]
                if file is not None:
                    check_shard(file, value, shard)


def _verify_index(path: Path, verdict: Verdict) -> None:
    places: Mapping[str, str] = {}
    with verdict.noting(path):
        places, _ = read_index(path)
    placed: dict[str, set[str]] = {}
    for name, shard in places.items():
        placed.setdefault(shard, set()).add(name)
    for shard, names in placed.items():
        file = verdict.open(path.parent / shard)
        if file is None:
            continue
        lacking = sorted(names - _names(file))
        verdict.findings += [Finding(path, f"places {name!r} in {shard}, which does not have it") for name in lacking]


def _names(file: TensorFile) -> set[str]:
    return {str(file.notes["name"])} if "name" in file.notes else set(file.header.keys)
