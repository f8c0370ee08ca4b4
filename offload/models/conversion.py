"""A checkpoint in another form: another dtype, other shards, safetensors from whatever it was, an offload folder.

Always true:
- the new folder appears whole or not at all, and the old one is only read
- no value comes into memory as a whole, but a quantized one that is cast
- configuration and tokenizer come along, code and other weights do not
"""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from typing import Any

import torch

from offload.errors import CheckpointError, CorruptFileError
from offload.models.checkpoint import COMPANIONS, INDEX, Checkpoint, open_checkpoint
from offload.models.deferred import deferred
from offload.models.forms.torchao import PARTS_NOTE
from offload.models.saving import save_checkpoint
from offload.progress import progress
from offload.storage.layout import dtype_name
from offload.storage.reasons import reading
from offload.storage.regular import absolute, is_folder
from offload.storage.replacing import put_file, replacing_folder
from offload.storage.state_file import read_json
from offload.tensor.guests import CPU
from offload.tensor.saved import subclass_value
from offload.tensor.wrapper import OffloadedTensor, PathLike

_DTYPE_KEYS = ("dtype", "torch_dtype")


def convert_checkpoint(
    source: PathLike,
    target: PathLike,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    to_offload_folder: bool = False,
) -> Path:
    """Write a checkpoint anew, with the configuration and tokenizer files that are beside it.

    Args:
        source: see `open_checkpoint`.
        target: the new folder; it may be there if it is empty.
        dtype, max_shard_size: see `save_checkpoint`.
        to_offload_folder: one file a name, which can be written to in place, instead of a checkpoint.

    Returns:
        The new folder.

    Raises:
        ForeignFileError: `target` is there and not empty.
        CheckpointError: a quantized checkpoint, in a form that would not outlive this; no JSON in its `config.json`.
        MissingFileError, CorruptFileError, ReadError, and as `open_checkpoint` and `save_checkpoint`.
    """
    opened = open_checkpoint(source)
    with replacing_folder(absolute(target)) as folder:
        if is_folder(opened.path):
            with reading(opened.path):
                _copy_companions(opened.path, folder, dtype)
        if to_offload_folder:
            _write_one_by_one(opened, folder, dtype)
        else:
            save_checkpoint(opened, folder, max_shard_size, dtype=dtype)
    return absolute(target)


def _write_one_by_one(source: Checkpoint, folder: Path, dtype: torch.dtype | None) -> None:
    if any(PARTS_NOTE in value.file.header.metadata for value in source.values()):
        raise CheckpointError(
            f"{source.path} holds quantized weights in torchao's form, which takes notes that an offload folder has no "
            "place for: convert it to safetensors, or load the model and call offload.disk_offload"
        )
    for name, tensor in progress(source.tensors().items(), "converting", total=len(source)):
        if dtype in (None, tensor.dtype) or not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
            OffloadedTensor.from_original_tensor(tensor, name, folder)
        elif subclass_value(tensor) is not None:
            OffloadedTensor.from_original_tensor(tensor.to(dtype), name, folder)
        else:
            deferred(tensor).to(dtype).assembly.in_file(name, folder, CPU)  # type: ignore[attr-defined]


def _copy_companions(source: Path, folder: Path, dtype: torch.dtype | None) -> None:
    for path in sorted(source.iterdir()):
        wanted = any(fnmatch.fnmatch(path.name, pattern) for pattern in COMPANIONS)
        if wanted and not path.name.endswith(INDEX) and path.is_file():
            data = path.read_bytes() if dtype is None or path.name != "config.json" else _config_with(path, dtype)
            put_file(folder / path.name, data)


def _config_with(path: Path, dtype: torch.dtype) -> bytes:
    """A model's configuration with the new dtype: transformers loads what it says, whatever the weights are."""
    try:
        config = read_json(path, "a model's configuration")
    except CorruptFileError as error:
        raise CheckpointError(f"{error}: get it again, or move it away") from error
    quantization = config.get("quantization_config") if isinstance(config, dict) else None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method not in (None, "torchao"):
        raise CheckpointError(
            f"{path} says that the weights are quantized ({method}): "
            f"their scales can't be converted to {dtype}. Leave the dtype as it is."
        )
    config = _with_dtype(config, dtype_name(dtype))
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _with_dtype(config: Any, name: str) -> Any:
    """`config`, and the parts that it has for parts of the model, with another dtype where one is said."""
    if not isinstance(config, dict):
        return config
    return {
        key: name
        if key in _DTYPE_KEYS and isinstance(value, str)
        else value
        if key == "quantization_config"
        else _with_dtype(value, name)
        for key, value in config.items()
    }
