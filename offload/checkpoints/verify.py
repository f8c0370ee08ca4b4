"""Check that a checkpoint or an offload folder is complete.

Always true:
- every header is read, every length is compared with the file's, and every index with its files; no value is read
- nothing is written, and nothing in a pickle is executed
- a finding names its file
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from offload.checkpoints.checkpoint import INDEX, PICKLES, is_beside, is_shard, open_checkpoint
from offload.checkpoints.dcp import METADATA
from offload.errors import CheckpointError, OffloadError, ReadError
from offload.storage.file import TensorFile
from offload.storage.subclasses import layout_from
from offload.system.reasons import reading
from offload.system.regular import absolute, is_folder


@dataclass
class Verdict:
    """The readable files, the tensors in them, by file and key, and the findings."""

    files: dict[Path, TensorFile] = field(default_factory=dict)
    tensors: set[tuple[Path, str]] = field(default_factory=set)
    findings: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether every value can be read."""
        return not self.findings

    @property
    def nbytes(self) -> int:
        """Total size of the readable files."""
        return sum(file.identity.size for file in self.files.values())

    def open(self, path: Path) -> None:
        """Open what is at `path`; an error is a finding, unless a file can't be read at the moment."""
        try:
            for value in open_checkpoint(path).values():
                self.files.update((file.path, file) for file in value.files)
                self.tensors.add((value.file.path, value.key))
                if value.key in value.file.header.unreadable:
                    self.note(f"{path}: {value.key!r} {value.file.header.unreadable[value.key]}")
                if "subclass" in value.file.notes:
                    layout_from(value.file.notes["subclass"])
        except ReadError:
            raise
        except OffloadError as error:
            self.note(str(error))

    def note(self, finding: str) -> None:
        """A defect of a shard is found in its file, and again by the index."""
        if finding not in self.findings:
            self.findings.append(finding)


def verify(path: str | os.PathLike[str]) -> Verdict:
    """Check a file of tensors, an index and its shards, or all of these in a folder.

    Of an index, and of a folder as a whole, the first defect is found. Raises `MissingFileError`; `CheckpointError` if
    the folder has no tensors; `ReadError` if a file can't be read at the moment, which says nothing about its content.
    """
    path, verdict = absolute(path), Verdict()
    if not is_folder(path):
        verdict.open(path)
        return verdict
    with reading(path):
        names = sorted(name for name in os.listdir(path) if not is_beside(name))
    indexes = [name for name in names if name.endswith(INDEX)]
    for name in [*(name for name in names if name.endswith((".safetensors", ".gguf", *PICKLES))), *indexes]:
        verdict.open(path / name)
    shard = next((name for name in names if is_shard(name) and not name.endswith(".gguf")), None)
    if METADATA in names or any("name" in file.notes for file in verdict.files.values()):
        verdict.open(path)
    if shard is not None and not indexes:
        verdict.note(f"{path} holds {shard}, a part of a checkpoint, but no index: get the *{INDEX} again")
    if not verdict.files and not verdict.findings:
        raise CheckpointError(f"{path} holds no tensors: name a checkpoint, or an offload folder")
    return verdict
