"""A checkpoint in another form: other dtype, other shards, dequantized, as safetensors.

Always true:
- the new folder appears complete or not at all, and the files of the old one are only read
- no value is in memory as a whole
- configuration, tokenizer and an adapter are copied, code and other weights are not
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import torch

from offload.annotations import Json, Settings
from offload.checkpoints.checkpoint import ADAPTER, COMPANIONS, INDEX, Checkpoint, open_checkpoint
from offload.checkpoints.companions import (
    CONFIG,
    companions_of,
    files_like,
    has_adapter,
    put_files,
    refuse_lone_adapter,
    tokenizer_files,
)
from offload.checkpoints.forms.decoding import method_of
from offload.checkpoints.forms.formats import Form, values_in
from offload.checkpoints.forms.gguf import empty_model
from offload.checkpoints.writing import contents_in, contents_of, largest_shard, write_checkpoint
from offload.errors import CheckpointError, CorruptFileError, ForeignFileError, JournalError
from offload.storage.layout import dtype_name, dtype_named
from offload.storage.replacing import is_filled, made_folder, refuse_filled, remove_folder, replacing_folder
from offload.storage.state_file import Kind, read_json, read_state, write_state
from offload.system.reasons import reading
from offload.system.regular import absolute, is_file, is_folder
from offload.tensor.deferred import DeferredTensor, as_dtype
from offload.tensor.saved import subclass_value
from offload.tensor.views import handle_of
from offload.tensor.wrapper import OffloadedTensor, PathLike, is_offloaded

_DTYPE_KEYS = ("dtype", "torch_dtype")
_PARTS = "modules.json"  # of sentence-transformers: names folders with configurations, and layers
_RUN = ".offload-run"  # no value's file name begins with a dot
_KIND = Kind(
    what="a run under way",
    stamp={"run": 1},
    foreign=ForeignFileError,
    missing="the folder exists, and holds no run that could be resumed: it is left as it is. Name another target.",
)


_Source: TypeAlias = "tuple[dict[str, OffloadedTensor], dict[str, bytes]]"


def convert_checkpoint(
    source: PathLike,
    target: PathLike,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    dequantize: bool = False,
) -> Path:
    """Write a checkpoint anew, with the configuration and tokenizer files beside it; returns the new folder.

    Args:
        source: see `open_checkpoint`.
        target: the new folder; it may be there if it is empty.
        dtype, max_shard_size: see `save_checkpoint`.
        dequantize: for a quantized checkpoint, write the dense one that transformers would have in memory. What is
            packed is in `dtype` then, or, if that is None, in the dtype of the configuration. A GGUF file, whose names
            are llama.cpp's, is always dequantized: in float32 if `dtype` is None. Its tokenizer is written, too.

    Raises:
        ForeignFileError: `target` is there and not empty.
        CheckpointError: a quantized checkpoint, in a form that would not outlive this, or is not decoded; one that is
            to be dequantized, and is dense; no JSON in its `config.json`.
        OffloadError: as `open_checkpoint` and `save_checkpoint`.
    """
    opened, target = open_checkpoint(source), absolute(target)
    if dequantize or opened.is_gguf:
        tensors, companions = _dequantized(opened, dtype)
        contents = contents_of(tensors, dtype)
    else:
        contents, companions = contents_in(opened, dtype), companions_beside(opened.path, dtype)
    with replacing_folder(target) as folder:
        put_files(folder, companions)
        write_checkpoint(contents, folder, largest_shard(max_shard_size))
    return target


def source_of(source: Checkpoint, dtype: torch.dtype | None) -> _Source:
    """The values of a dense model, from a folder or a GGUF file, and the files that belong beside them.

    Floating-point values are cast to `dtype`; if that is None, only what is packed in a GGUF file is, to float32.
    Raises `CheckpointError` for a `config.json` that is no JSON, or a GGUF file that transformers can't read;
    `ReadError`.
    """
    if source.is_gguf:
        return _dequantized(source, dtype)
    tensors = source.tensors()
    if dtype is not None:
        tensors = {name: _stored(_cast(tensor, dtype), name) for name, tensor in tensors.items()}
    return tensors, companions_beside(source.path, dtype)


def _dequantized(source: Checkpoint, dtype: torch.dtype | None) -> _Source:
    if source.is_gguf:
        model = empty_model(source, dtype)
        values = values_in(source, None, model=model)
        tensors = {name: _stored(tensor, name) for name, tensor in values.tensors.items()}
        return tensors, {**tokenizer_files(source.path), **companions_of(model)}
    path = source.path / CONFIG
    config = _read_config(path) if is_folder(source.path) and is_file(path) else {}
    quantization = _parts_of(config, "quantization_config")
    if not quantization:
        raise CheckpointError(f"{source.path} is not quantized, according to its {CONFIG}: leave out dequantize")
    values = values_in(source, quantization[0])
    if values.form is not Form.DECODED:
        raise CheckpointError(
            f"the weights of {source.path} are packed for special kernels ({method_of(quantization[0])}), "
            "and are not decoded: load the model, and save the result of its dequantize()"
        )
    wanted, dense = dtype or _dtype_of(config), {}
    for name, tensor in values.tensors.items():  # what was not packed keeps its dtype
        is_packed = is_offloaded(tensor) and handle_of(tensor).composed is not None
        dense[name] = _stored(_cast(tensor, wanted) if wanted and is_packed else tensor, name)
    return dense, companions_beside(source.path, dtype, is_dense=True)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A value on disk in another dtype, if it is one of numbers that can be cast."""
    if not is_offloaded(tensor) or not tensor.is_floating_point() or tensor.itemsize == 1:
        return tensor
    return tensor if subclass_value(tensor) is not None else as_dtype(tensor, dtype)


def _stored(tensor: torch.Tensor, name: str) -> OffloadedTensor:
    if isinstance(tensor, DeferredTensor):
        return tensor.stored(name)
    return tensor if is_offloaded(tensor) else OffloadedTensor.from_original_tensor(tensor, name)


@contextmanager
def resumable_folder(target: Path, run: Settings) -> Iterator[Path]:
    """The folder `target` + ".partial", which keeps the progress of a run while the block, or the next run, goes on.

    When the block succeeds, which puts the new folder at `target`, it is removed; so it is if the block fails before
    there is any progress. `run` identifies the run, as JSON.

    Raises:
        JournalError: another run was begun.
        MissingFileError, ForeignFileError: the folder belongs to something else, and is left as it is; or `target` is
            there and not empty.
        WriteError
    """
    refuse_filled(target)
    work = target.with_name(f"{target.name}.partial")
    if is_folder(work):
        made_folder(work)
    if is_filled(work):
        before = read_state(work / _RUN, _KIND)
        other = next((key for key, value in run.items() if before.get(key) != value), None)
        if other is not None:
            raise JournalError(
                f"{work} has an unfinished run with another {other}: finish that run, or remove the folder"
            )
    else:
        with replacing_folder(work) as begun:
            write_state(begun / _RUN, _KIND, run)
    try:
        yield work
    except BaseException:
        with suppress(OSError):
            if os.listdir(work) == [_RUN]:
                remove_folder(work)
        raise
    with suppress(OSError):  # the new folder is complete
        remove_folder(work)


def identities_of(source: Checkpoint) -> dict[str, list[int]]:
    """The files of a checkpoint, with size and modification time, to recognise it later."""
    files = {file.path: file.identity for value in source.values() for file in value.files}
    return {str(path): [identity.size, identity.modified] for path, identity in files.items()}


def companions_beside(source: Path, dtype: torch.dtype | None = None, *, is_dense: bool = False) -> dict[str, bytes]:
    """The configuration and tokenizer files in a model's folder (`COMPANIONS`), by name; none beside a lone file.

    An adapter that is there belongs to them, with its weights; and the folders of a sentence-transformers model. The
    configuration is to say this dtype, if one is given, and with `is_dense` nothing of quantization. Raises
    `CheckpointError` if there is no JSON in `config.json`, or there is an adapter alone; `ReadError`.
    """
    if not is_folder(source):
        return {}
    refuse_lone_adapter(source)
    files = files_like(source, f"{ADAPTER}*") if has_adapter(source) else {}
    parts = read_json(source / _PARTS, "the parts of a model") if is_file(source / _PARTS) else []
    names = {part.get("path") for part in parts if isinstance(part, dict)} if isinstance(parts, list) else set()
    with reading(source):
        folders = [path for path in source.iterdir() if path.name in names and is_folder(path)]
        inside = [path for folder in folders for path in sorted(folder.rglob("*")) if is_file(path)]
        files.update((str(path.relative_to(source)), path.read_bytes()) for path in inside)
    own = files_like(source, *COMPANIONS)
    files.update((name, data) for name, data in own.items() if not name.endswith(INDEX))
    if CONFIG in own and (dtype is not None or is_dense):
        files[CONFIG] = _rewritten(source / CONFIG, dtype, is_dense=is_dense)
    return files


def _dtype_of(config: Json) -> torch.dtype | None:
    names = (name for key in _DTYPE_KEYS for name in _parts_of(config, key) if isinstance(name, str))
    return next((dtype for dtype in map(dtype_named, names) if dtype is not None), None)


def _read_config(path: Path) -> Json:
    try:
        return read_json(path, "a model's configuration")
    except CorruptFileError as error:
        raise CheckpointError(f"{error}: download or copy it again, or move it away") from error


def _rewritten(path: Path, dtype: torch.dtype | None, *, is_dense: bool) -> bytes:
    """A model's configuration with the new dtype: transformers loads in the dtype it says, whatever the weights are."""
    config = _read_config(path)
    quantization = config.get("quantization_config") if isinstance(config, dict) and not is_dense else None
    method = method_of(quantization) if isinstance(quantization, dict) else None
    if method is not None:
        raise CheckpointError(
            f"{path} says that the weights are quantized ({method}): "
            f"their scales can't be converted to {dtype}. Leave the dtype as it is, or dequantize them."
        )
    new = _with(config, None if dtype is None else dtype_name(dtype), is_dense=is_dense)
    return (json.dumps(new, indent=2, ensure_ascii=False) + "\n").encode()


def _with(config: Json, dtype: str | None, *, is_dense: bool) -> Json:
    """`config` and its sub-configurations, with another dtype wherever one is given, dense if asked for."""
    if not isinstance(config, dict):
        return config
    new: dict[str, Json] = {}
    for key, value in config.items():
        if key == "quantization_config":
            new.update({} if is_dense else {key: value})
        elif key in _DTYPE_KEYS and isinstance(value, str) and dtype is not None:
            new[key] = dtype
        else:
            new[key] = _with(value, dtype, is_dense=is_dense)
    return new


def _parts_of(config: Json, key: str) -> list[Json]:
    """The values of a key in a configuration and in its sub-configurations."""
    if not isinstance(config, dict):
        return []
    parts = [config[key]] if config.get(key) is not None else []
    return parts + [one for value in config.values() for one in _parts_of(value, key)]
