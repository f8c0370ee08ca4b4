"""huggingface_hub: a model's name as a folder on this machine.

Always true:
- a local folder needs no network
- only configuration, tokenizer and weights are fetched, never code: .safetensors, and .bin where there are none
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from offload.errors import CheckpointError
from offload.models.checkpoint import COMPANIONS
from offload.storage.reasons import first_line
from offload.storage.regular import is_folder, is_there, text_of

_WANTED = [*COMPANIONS, "*.safetensors"]
_PICKLED = ["*.bin"]
_NOT_PICKLED = ["*/*", "training_args.bin", "optimizer.bin", "scheduler.bin"]  # other forms, and what trained it


def folder_of(name_or_path: str | os.PathLike[str], **hub_options: Any) -> Path:
    """The folder of a model: the local one, or the hub's in the local cache, fetched with a progress bar.

    Args:
        name_or_path: a folder, or "organization/name".
        hub_options: for `huggingface_hub.snapshot_download`: revision, token, cache_dir, local_files_only...

    Raises:
        CheckpointError: a file, or neither a folder nor a model that the hub, or its cache, has.
    """
    folder = Path(text_of(name_or_path))
    if is_folder(folder):
        return folder.absolute()
    if is_there(folder):
        raise CheckpointError(f"{name_or_path} is a file, and a model is a folder: give {folder.absolute().parent}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(str(name_or_path), allow_patterns=_WANTED, **hub_options))
        if not any(folder.glob("*.safetensors")):
            wanted = {"allow_patterns": _PICKLED, "ignore_patterns": _NOT_PICKLED}
            folder = Path(snapshot_download(str(name_or_path), **wanted, **hub_options))
        return folder
    except HFValidationError as error:
        raise CheckpointError(f"{name_or_path} is neither a folder nor a name on the hub ({error})") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{name_or_path} is not a folder here, and the hub did not give it: {first_line(error).rstrip('.')}. "
            "Check the name, the network and your token, or give a folder."
        ) from error
