"""GGUF files in several parts, as llama.cpp's `llama-gguf-split` writes them.

Always true:
- the first part has the metadata of all; the names of the files say how many there are
- a part that is missing, or that belongs elsewhere, is an error that names it

Source of the names: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-model-loader.cpp
"""

from __future__ import annotations

import re
from pathlib import Path

from offload.errors import CheckpointError, MissingFileError
from offload.storage.file import TensorFile
from offload.storage.gguf_header import PART, PARTS
from offload.system.regular import is_there

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def first_part(path: Path) -> Path:
    """The part with the metadata, for any part; another file itself."""
    found = _PART.fullmatch(path.name)
    return path if found is None else path.with_name(_name_of(found, 1))


def pattern_of(name: str) -> str:
    """A pattern for the names of all parts, for the name of any."""
    found = _PART.fullmatch(name)
    return name if found is None else f"{found['stem']}-?????-of-{found['count']}.gguf"


def paths_of_parts(file: TensorFile) -> list[Path]:
    """The paths of all parts of a GGUF file, in order; of a file that is whole, its own.

    Args:
        file: any of them.

    Raises `MissingFileError` if a part is missing; `CheckpointError` if the name of the file does not say which part it
    is.
    """
    count = file.header.metadata.get(PARTS, "1")
    if count in ("0", "1"):
        return [file.path]
    found = _PART.fullmatch(file.path.name)
    if found is None or int(found["count"]) != int(count):
        raise CheckpointError(
            f"{file.path} is one of {count} parts, and its name does not say which: give the parts the names "
            f"...-00001-of-{int(count):05}.gguf and so on"
        )
    paths = [file.path.with_name(_name_of(found, number)) for number in range(1, int(count) + 1)]
    missing = [path.name for path in paths if not is_there(path)]
    if missing:
        raise MissingFileError(
            f"{file.path.parent} lacks {missing[0]}{f' and {len(missing) - 1} more' if missing[1:] else ''}, of "
            f"{count} parts of a model: download or copy that file again"
        )
    return paths


def check_part(part: TensorFile, number: int, count: int) -> None:
    """Raises `CheckpointError` if a file is not part `number`, counted from 0, of as many as its name says."""
    metadata = part.header.metadata
    if count > 1 and (metadata.get(PART), metadata.get(PARTS)) != (str(number), str(count)):
        raise CheckpointError(f"{part.path} is not part {number + 1} of {count}, though it is named so")


def with_other_parts(file: TensorFile) -> list[TensorFile]:
    """All parts of a GGUF file, in order; of a file that is whole, only itself.

    Raises: as `paths_of_parts`, `check_part` and `TensorFile.open`.
    """
    paths = paths_of_parts(file)
    opened = [file if path == file.path else TensorFile.open(path) for path in paths]
    for number, part in enumerate(opened):
        check_part(part, number, len(opened))
    return opened


def _name_of(found: re.Match[str], number: int) -> str:
    return f"{found['stem']}-{number:05}-of-{found['count']}.gguf"
