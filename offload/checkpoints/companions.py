"""The files beside the weights of a transformers model: configuration, tokenizer, and custom code.

Always true:
- the model is not changed: the files are written from a copy of its configuration
- a configuration that is written says that weights are quantized only if the ones beside it are
- a file that offload did not write, or that was edited since, is never replaced or removed: the checkpoint stores a
  hash of each file it wrote
- a folder with a configuration and weights is a model, with its adapter of peft if it has one; one without them, but
  with an adapter, stands for the model that the adapter names, its base
"""

from __future__ import annotations

import copy
import fnmatch
import hashlib
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
from offload.storage.state_file import MOST_JSON, parse_json, read_json
from offload.system.reasons import first_line, reading
from offload.system.regular import is_file, is_folder, is_there, read_regular

CONFIG, GENERATION = "config.json", "generation_config.json"
_ADAPTER_CONFIG = "adapter_config.json"
_BASE = "base_model_name_or_path"
NOTE = "offload.companions"  # in the metadata of a safetensors file
_OF_TOKENIZERS = (
    *("*token*.json", "*vocab*", "merges.txt", "*.model", "*.tiktoken", "*.jinja", "chat_template.json"),
    *("*processor_config.json", "normalizer.json"),
)
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.spm", "*.tiktoken", "tekken.json")
_MOST_LAYERS = 512  # that may be made, however few values there are
_COUNTS_OF_LAYERS = {
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers", "num_nextn_predict_layers"),
}
_SET_BY_SAVING = {"architectures", "transformers_version", "_name_or_path"}


def is_of_transformers(model: nn.Module) -> TypeGuard[Pretrained]:
    """Whether a model is from transformers, whose checkpoints may use other names than the model."""
    return isinstance(model, imported("transformers.modeling_utils", "PreTrainedModel") or ())


def quantization_of(config: Config) -> Any:
    """The quantization settings in a configuration, or in its text model's: a dictionary, or None."""
    found: Any = getattr(config, "quantization_config", None)
    if found is None:
        found = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    return found.to_dict() if hasattr(found, "to_dict") else found


def refuse_more_layers(settings: Settings, stored: int, path: Path) -> None:
    """Refuse a configuration with many more layers than the values that a checkpoint at `path` stores can fill.

    They would be made for hours. Raises `CheckpointError`.
    """
    most = max(stored, _MOST_LAYERS)
    left: list[tuple[str, Any]] = [("", settings)]
    while left:
        name, found = left.pop()
        if isinstance(found, Mapping):
            left.extend((str(key), value) for key, value in found.items())
        elif name in _COUNTS_OF_LAYERS and isinstance(found, int) and found > most:
            raise CheckpointError(
                f"{path}: the configuration asks for {found} layers ({name}), and the checkpoint holds {stored} "
                "values: one of them is damaged, or belongs to another model"
            )


def class_of(config: Config) -> Any:
    """The class of transformers that a model was saved from, according to its configuration.

    The `Auto` class of causal language models if it names none that transformers has for it.
    """
    import transformers

    name = next(iter(config.architectures or ()), None)
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    if is_model and isinstance(config, getattr(found, "config_class", ())):
        return found
    return transformers.AutoModelForCausalLM


def companions_of(
    model: nn.Module, dtype: torch.dtype | None = None, quantization: Settings | None = None
) -> dict[str, bytes]:
    """The files that `from_pretrained` needs beside a transformers model's weights, by name; empty for other models.

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
    code = _code_of(model, config)
    settings = json.loads(config.to_json_string(use_diff=True))
    for key in ("quantization_config", "transformers_weights"):
        settings.pop(key, None)
    if quantization is not None:
        settings["quantization_config"] = quantization
    found = {CONFIG: (json.dumps(settings, indent=2, sort_keys=True) + "\n").encode()}
    if model.can_generate() and model.generation_config is not None:
        found[GENERATION] = model.generation_config.to_json_string(use_diff=True).encode()
    return {**_tokenizer_of(model), **code, **found}


def _code_of(model: Pretrained, config: Config) -> dict[str, bytes]:
    """The modules of a model with custom code; sets in `config` which class is in which module."""
    if not model.is_remote_code() and config._auto_class is None:
        return {}
    from offload.transformers_api import custom_object_save

    with tempfile.TemporaryDirectory() as scratch:
        if model.is_remote_code():
            custom_object_save(model, scratch, config=config)
        if config._auto_class is not None:
            custom_object_save(config, scratch, config=config)
        return files_like(Path(scratch), "*.py")


def _tokenizer_of(model: Pretrained) -> dict[str, bytes]:
    """The tokenizer and processor files of the folder, or GGUF file, that a model was loaded from, if it is known."""
    loaded_from: Path | None = getattr(model, "loaded_from", None)
    folder = loaded_from or Path(model.name_or_path or "")
    if loaded_from is not None and is_there(loaded_from) and not is_folder(loaded_from):
        return _written_tokenizer(loaded_from)
    return {} if folder == Path() or not is_folder(folder) else files_like(folder, *_OF_TOKENIZERS)


def files_like(folder: Path, *patterns: str) -> dict[str, bytes]:
    """The files in a folder whose names match one of the patterns, by name. Raises `ReadError`."""
    with reading(folder):
        return {
            path.name: path.read_bytes()
            for path in sorted(folder.iterdir())
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns) and is_file(path)
        }


def _written_tokenizer(path: Path) -> dict[str, bytes]:
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
    base = None if file or has_one else base_of(folder)
    source = base or folder
    try:
        found = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **file)
        if len(found) <= len(found.all_special_tokens):  # without files, some classes make one that knows no words
            raise ValueError("it has no tokens")
        return found
    except ImportError as error:
        root: Exception = error
        while isinstance(root.__cause__, Exception):
            root = root.__cause__
        raise CheckpointError(
            f"the tokenizer of {place} needs a package that is missing or broken: {first_line(root)}"
        ) from error
    except Exception as error:  # it can raise anything for damaged files
        unread = f" that transformers can load ({first_line(error)})"
        if file:
            raise CheckpointError(f"{place} has no tokenizer{unread}") from error
        of_base = f", and {base}, the base of its adapter, none{unread}" if base else ""
        raise CheckpointError(
            f"{folder} has no tokenizer{unread if has_one else of_base}: put the tokenizer of the model there "
            "(tokenizer.json and tokenizer_config.json)"
        ) from error


def put_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files, each as a whole. Raises `WriteError`."""
    for name, data in files.items():
        if "/" in name:
            made_folder((folder / name).parent)
        put_file(folder / name, data)


def companions_in(
    folder: Path, files: Mapping[str, bytes] | None, noted: Mapping[str, str]
) -> tuple[dict[str, bytes], dict[str, str], list[Path]]:
    """What has to be done so that a folder has these files, where the metadata of its earlier checkpoint was `noted`.

    An existing tokenizer or generation config from elsewhere is kept, with a warning. Without `files`, nothing is known
    of the model, as for a state dict: what is there stays. Raises `ForeignFileError` if there is a different
    configuration, or code, that offload did not write; `ReadError`.

    Returns: the files to write, by name; a note for the new metadata, so that a later save recognises ours; and the
        files of the earlier save that are to be removed.
    """
    known = _hashes(noted)
    if files is None:
        return {}, {NOTE: noted[NOTE]} if known else {}, []
    existing = {name: data for name in {*files, *known} if (data := _content(folder / name)) is not None}
    ours = {name for name, data in existing.items() if _hash(data) in known.get(name, ())}
    new = {
        name: data for name, data in files.items() if name not in existing or (name in ours and existing[name] != data)
    }
    for name in sorted(files.keys() & existing.keys() - ours):
        if existing[name] == files[name] or (name == CONFIG and _is_same_model(existing[name], files[name])):
            continue
        if name == CONFIG or name.endswith(".py"):
            raise ForeignFileError(
                f"{folder / name} is not from offload, or was edited, and describes another model than the one to be "
                "saved: it is left as it is. Save to another folder, or move it away first."
            )
        log.warning("%s is not from offload, or was edited: it is left as it is", folder / name)
    hashes = {  # of the old content, too: a killed process may leave it beside the new weights
        name: sorted({_hash(one[name]) for one in (files, existing) if name in one})
        for name in {*new} | ours & {*files}
    }
    note = {NOTE: json.dumps(hashes, sort_keys=True)} if hashes else {}
    return new, note, [folder / name for name in sorted(ours - files.keys())]


def _hashes(metadata: Mapping[str, str]) -> dict[str, list[str]]:
    try:
        found = parse_json(metadata.get(NOTE, "{}"))
    except (ValueError, RecursionError):
        return {}
    plain = isinstance(found, dict) and all(isinstance(one, list) and "/" not in name for name, one in found.items())
    return found if plain else {}


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _content(path: Path) -> bytes | None:
    """None if there is no such file."""
    if not is_there(path):
        return None
    try:
        return read_regular(path, MOST_JSON)
    except CorruptFileError:  # a folder, a device, or larger than any of ours
        return b""


def _is_same_model(one: bytes, other: bytes) -> bool:
    """Whether two configurations are of the same model, saved the same way."""
    try:
        first, second = parse_json(one), parse_json(other)
    except (ValueError, RecursionError):
        return False
    if not isinstance(first, dict):
        return False
    keys = (first.keys() | second.keys()) - _SET_BY_SAVING
    return all(first.get(key) == second.get(key) for key in keys)


# Adapters of peft, in a folder with or without their model


def has_adapter(folder: Path) -> bool:
    """Whether there is an adapter, with or without a model."""
    return is_folder(folder) and is_file(folder / _ADAPTER_CONFIG)


def base_of(folder: Path) -> str | None:
    """The folder or name of the model that a lone adapter belongs to; None for a folder with a model, or no adapter.

    Raises `CheckpointError` if the adapter does not name it; `CorruptFileError` if its configuration is damaged.
    """
    if not has_adapter(folder) or (is_file(folder / CONFIG) and _has_weights(folder)):
        return None
    found = read_json(folder / _ADAPTER_CONFIG, "the configuration of an adapter")
    name = found.get(_BASE) if isinstance(found, dict) else None
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
