"""huggingface_hub: the local folder of a named model.

Always true:
- a local folder needs no network
- only configuration, tokenizer and weights are downloaded, never code: .safetensors, or .bin if there are none, or the
  requested GGUF file
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offload.checkpoints.checkpoint import COMPANIONS, first_part, pattern_of
from offload.checkpoints.companions import base_of
from offload.errors import CheckpointError, MissingFileError
from offload.storage.gguf_header import MAGIC
from offload.system.reasons import first_line, reading
from offload.system.regular import as_file, is_folder, is_there, open_regular, text_of

_WANTED = [*COMPANIONS, "*.safetensors"]
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_PICKLED = ["*.bin"]
_NOT_PICKLED = ["*/*", "training_args.bin", "optimizer.bin", "scheduler.bin"]  # other formats, and training state


def folder_of(name_or_path: str | os.PathLike[str], gguf_file: str | None = None, **hub_options: object) -> Path:
    """The folder of a model, local or downloaded; a GGUF file's path, or its first part's.

    The options are those of `huggingface_hub.snapshot_download`. Raises `CheckpointError` if it is another kind of
    file, or neither a folder nor a model on the hub or in its cache; `MissingFileError` for a GGUF file that is not
    there.
    """
    folder = Path(text_of(name_or_path))
    gguf_file = None if gguf_file is None else text_of(gguf_file)
    if is_folder(folder):
        return folder.absolute() if gguf_file is None else _gguf(folder.absolute() / gguf_file)
    if is_there(folder):
        if gguf_file is None and is_gguf(folder):
            return first_part(folder.absolute())
        raise CheckpointError(f"{name_or_path} is a file: give the folder of the model, {folder.absolute().parent}")
    from huggingface_hub import snapshot_download

    with _asking(name_or_path):
        if gguf_file is not None:
            parts = snapshot_download(str(name_or_path), allow_patterns=[pattern_of(gguf_file)], **hub_options)
            return _gguf(Path(parts) / gguf_file)
        folder = Path(snapshot_download(str(name_or_path), allow_patterns=_WANTED, **hub_options))
        if not any(folder.glob("*.safetensors")):
            wanted = {"allow_patterns": _PICKLED, "ignore_patterns": _NOT_PICKLED}
            folder = Path(snapshot_download(str(name_or_path), **wanted, **hub_options))
        return folder


def base_folder(folder: Path, **hub_options: object) -> Path:
    """The folder of the model that a lone adapter belongs to; of any other folder, itself. Errors: see `folder_of`."""
    name = base_of(folder)
    if name is None:
        return folder
    hub_options.pop("revision", None)  # of the adapter
    with finding_base(folder, name):
        return folder_of(name, None, **hub_options)


@contextmanager
def finding_base(folder: Path, name: str) -> Iterator[None]:
    """In this context, errors are about the base of an adapter."""
    try:
        yield
    except (CheckpointError, MissingFileError) as error:
        raise CheckpointError(f"{folder} holds an adapter of {name!r}, and that is not found: {error}") from error


def headers_of(name: str, **hub_options: object) -> tuple[Path, dict[str, tuple[str, int]]]:
    """The folder with the configuration of a model on the hub, and dtype and bytes of each tensor by its headers."""
    from huggingface_hub import get_safetensors_metadata, snapshot_download
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    try:
        with _asking(name):
            # Unlike hf_hub_download (2.4), it does not retry for half a minute where there is no network.
            folder = Path(snapshot_download(name, allow_patterns=["config.json"], **hub_options))
            files = get_safetensors_metadata(name, **hub_options).files_metadata.values()
    except (NotASafetensorsRepoError, SafetensorsParsingError) as error:
        raise CheckpointError(f"{name} has no safetensors whose headers can be read: download it first") from error
    infos = {key: info for file in files for key, info in file.tensors.items()}
    return folder, {
        key: (_DTYPES.get(info.dtype, info.dtype.lower()), info.data_offsets[1] - info.data_offsets[0])
        for key, info in infos.items()
    }


@contextmanager
def _asking(name: str | os.PathLike[str]) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except HFValidationError as error:
        raise CheckpointError(f"{name} is neither a folder nor a name on the hub ({error})") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{name} is not a folder here, and fetching it from the hub failed: {first_line(error).rstrip('.')}. "
            "Check the name, the network and your token, or give a folder."
        ) from error


def is_gguf(path: Path) -> bool:
    with reading(path), as_file(open_regular(path)) as file:
        return file.read(len(MAGIC)) == MAGIC


def _gguf(path: Path) -> Path:
    if not is_gguf(path):
        raise CheckpointError(f"{path} is not a GGUF file: leave gguf_file out for a checkpoint of another form")
    return first_part(path)
