"""An adapter of peft in a folder: beside the model that it belongs to, or alone.

Always true:
- a folder with a configuration and weights is a model, with its adapter if it has one
- one without them, but with an adapter, stands for the model that the adapter names, its base
"""

from __future__ import annotations

from pathlib import Path

from offload.checkpoints.checkpoint import ADAPTER, open_checkpoint
from offload.errors import CheckpointError
from offload.storage.state_file import read_json
from offload.system.reasons import reading
from offload.system.regular import is_file, is_folder

CONFIG = "adapter_config.json"
_BASE = "base_model_name_or_path"


def has_adapter(folder: Path) -> bool:
    """Whether there is an adapter, with or without a model."""
    return is_folder(folder) and is_file(folder / CONFIG)


def base_of(folder: Path) -> str | None:
    """The folder or name of the model that a lone adapter belongs to; None for a folder with a model, or no adapter.

    Raises `CheckpointError` if the adapter does not name it; `CorruptFileError` if its configuration is damaged.
    """
    if not has_adapter(folder) or (is_file(folder / "config.json") and _has_weights(folder)):
        return None
    found = read_json(folder / CONFIG, "the configuration of an adapter")
    name = found.get(_BASE) if isinstance(found, dict) else None
    if not isinstance(name, str) or not name:
        raise CheckpointError(
            f"{folder} holds an adapter and no model, and its {CONFIG} does not name one as {_BASE}: load the model "
            "that it was trained on, and the adapter with peft.PeftModel.from_pretrained(model, folder)"
        )
    return name


def _has_weights(folder: Path) -> bool:
    try:
        opened = open_checkpoint(folder)
    except CheckpointError:
        return False
    return not all(file.path.name.startswith(ADAPTER) for value in opened.values() for file in value.files)


def refuse_lone_adapter(folder: Path) -> None:
    """Raises `CheckpointError` if there is an adapter, and no model."""
    base = base_of(folder)
    if base is not None:
        raise CheckpointError(
            f"{folder} holds an adapter and no model: write one with `offload merge-lora {base} {folder} TARGET`, or "
            f"give the model, {base}"
        )


def adapter_files(folder: Path) -> dict[str, bytes]:
    """The weights of the adapter in a folder, by the names of their files; empty without one."""
    with reading(folder):
        return {path.name: path.read_bytes() for path in folder.glob(f"{ADAPTER}*")} if has_adapter(folder) else {}
