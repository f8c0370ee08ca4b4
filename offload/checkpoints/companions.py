"""The files beside the weights of a transformers model: configuration, settings for generation, tokenizer, adapter.

Always true:
- the model is not changed: the files are written from a copy of its configuration
- a configuration that is written says that weights are quantized only if the ones beside it are
- a file that is there is never replaced or removed
- a folder with a configuration and weights is a model, with its adapter of peft if it has one; one without them, but
  with an adapter, stands for the model that the adapter names, its base
"""

from __future__ import annotations

import copy
import fnmatch
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn

from offload.annotations import Config, Pretrained, Settings
from offload.checkpoints import log
from offload.checkpoints.checkpoint import ADAPTER, open_checkpoint
from offload.errors import CheckpointError, CorruptFileError, ForeignFileError
from offload.importing import imported
from offload.storage.layout import dtype_name
from offload.storage.replacing import made_folder, put_file
from offload.storage.state_file import read_json
from offload.system.reasons import first_line, reading
from offload.system.regular import is_file, is_folder, is_there

CONFIG, GENERATION = "config.json", "generation_config.json"
_ADAPTER_CONFIG = "adapter_config.json"
_BASE = "base_model_name_or_path"
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.spm", "*.tiktoken", "tekken.json")
_MOST_LAYERS = 512  # that may be made, however few values there are
_COUNTS_OF_LAYERS = ("layer", "layers", "depth")  # how the names of settings end
_SET_BY_SAVING = {"architectures", "transformers_version", "_name_or_path"}


def is_of_transformers(model: nn.Module) -> TypeGuard[Pretrained]:
    """Whether a model is from transformers, whose checkpoints may use other names than the model."""
    return isinstance(model, imported("transformers.modeling_utils", "PreTrainedModel") or ())


def quantization_of(config: Config) -> Any:
    """The quantization settings in a configuration, or in its text model's: a dictionary, or None."""
    settings: Any = getattr(config, "quantization_config", None)
    if settings is None:
        settings = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    return settings.to_dict() if hasattr(settings, "to_dict") else settings


def refuse_more_layers(settings: Settings, stored: int, path: Path) -> None:
    """Refuse a configuration with many more layers than the values that a checkpoint at `path` stores can fill.

    They would be made for hours. Raises `CheckpointError`.
    """
    most = max(stored, _MOST_LAYERS)
    left: list[tuple[str, Any]] = [("", settings)]
    while left:
        name, setting = left.pop()
        if isinstance(setting, Mapping):
            left.extend((str(key), value) for key, value in setting.items())
        elif name.endswith(_COUNTS_OF_LAYERS) and isinstance(setting, int) and setting > most:
            raise CheckpointError(
                f"{path}: the configuration asks for {setting} layers ({name}), and the checkpoint holds {stored} "
                "values: one of them is damaged, or belongs to another model"
            )


def class_of(config: Config) -> Any:
    """The class of transformers that a model was saved from, according to its configuration.

    The `Auto` class of causal language models if it names none that transformers has for it.
    """
    import transformers

    name = next(iter(config.architectures or ()), None)
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if is_model and isinstance(config, getattr(kind, "config_class", ())):
        return kind
    return transformers.AutoModelForCausalLM


def companions_of(
    model: nn.Module, dtype: torch.dtype | None = None, quantization: Settings | None = None
) -> dict[str, bytes]:
    """The configuration and the settings for generation of a transformers model, by file name; none of other models.

    Args:
        model: a model with adapters has none: its weights have names of their own.
        dtype: of the saved weights; None for the model's.
        quantization: of the saved weights; None if they are dense.
    """
    if not is_of_transformers(model) or getattr(model, "_hf_peft_config_loaded", False):
        return {}
    config = copy.deepcopy(model.config)
    config.dtype = dtype_name(dtype or model.dtype)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    settings = json.loads(config.to_json_string(use_diff=True))
    for key in ("quantization_config", "transformers_weights"):
        settings.pop(key, None)
    if quantization is not None:
        settings["quantization_config"] = quantization
    files = {CONFIG: (json.dumps(settings, indent=2, sort_keys=True) + "\n").encode()}
    if model.can_generate() and model.generation_config is not None:
        files[GENERATION] = model.generation_config.to_json_string(use_diff=True).encode()
    return files


def files_like(folder: Path, *patterns: str) -> dict[str, bytes]:
    """The files in a folder whose names match one of the patterns, by name. Raises `ReadError`."""
    with reading(folder):
        return {
            path.name: path.read_bytes()
            for path in sorted(folder.iterdir())
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns) and is_file(path)
        }


def tokenizer_files(path: Path) -> dict[str, bytes]:
    """The tokenizer in a GGUF file, as files. None, with a warning, if transformers can't load it."""
    try:
        tokenizer = tokenizer_in(path)
    except CheckpointError as error:
        log.warning("%s: no tokenizer is written", error)
        return {}
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        return files_like(Path(scratch), "*")


def tokenizer_in(place: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer in a model's folder, or in its GGUF file; for a lone adapter without one, that of its base.

    Raises `CheckpointError` if there is none that can be loaded.
    """
    from transformers import AutoTokenizer

    file: dict[str, str] = {} if is_folder(place) else {"gguf_file": place.name}
    folder = place.parent if file else place
    with reading(folder):
        has_one = any(any(folder.glob(pattern)) for pattern in _TOKENIZERS)
    source = folder if file or has_one else base_of(folder) or folder
    try:
        loaded = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **file)
        if len(loaded) <= len(loaded.all_special_tokens):  # without files, some classes make one that knows no words
            raise ValueError("it has no tokens")
        return loaded
    except Exception as error:  # it can raise anything for damaged files, or if a package is missing or broken
        root = error
        while isinstance(root.__cause__, Exception):
            root = root.__cause__
        raise CheckpointError(
            f"{place if file else source} has no tokenizer that transformers can load ({first_line(root)}): put the "
            "tokenizer of the model there (tokenizer.json and tokenizer_config.json)"
        ) from error


def put_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files, each as a whole. Raises `WriteError`."""
    for name, data in files.items():
        if "/" in name:
            made_folder((folder / name).parent)
        put_file(folder / name, data)


def missing_in(folder: Path, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Those of a model's configuration files that a folder does not have yet; the others stay as they are.

    Raises `ForeignFileError` if its `config.json` is of another model, or of this one with other settings.
    """
    there = [name for name in files if is_there(folder / name)]
    if CONFIG in there and not _says(folder / CONFIG, files[CONFIG]):
        raise ForeignFileError(
            f"{folder / CONFIG} describes another model than the one to be saved, or other settings: it is left as it "
            "is. Save to another folder, or move it away first."
        )
    return {name: data for name, data in files.items() if name not in there}


def _says(path: Path, data: bytes) -> bool:
    """Whether a configuration says the same of a model."""
    try:
        stored, wanted = read_json(path, "a model's configuration"), json.loads(data)
    except CorruptFileError:
        return False
    if not isinstance(stored, dict):
        return False
    keys = {*stored, *wanted} - _SET_BY_SAVING
    return all(stored.get(key) == wanted.get(key) for key in keys)


def has_adapter(folder: Path) -> bool:
    """Whether there is an adapter, with or without a model."""
    return is_folder(folder) and is_file(folder / _ADAPTER_CONFIG)


def base_of(folder: Path) -> str | None:
    """The folder or name of the model that a lone adapter belongs to; None for a folder with a model, or no adapter.

    Raises `CheckpointError` if the adapter does not name it; `CorruptFileError` if its configuration is damaged.
    """
    if not has_adapter(folder) or (is_file(folder / CONFIG) and _has_weights(folder)):
        return None
    settings = read_json(folder / _ADAPTER_CONFIG, "the configuration of an adapter")
    name = settings.get(_BASE) if isinstance(settings, dict) else None
    if not isinstance(name, str) or not name:
        raise CheckpointError(
            f"{folder} holds an adapter and no model, and its {_ADAPTER_CONFIG} does not name one as {_BASE}: load the "
            "model that it was trained on, and the adapter with peft.PeftModel.from_pretrained(model, folder)"
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
