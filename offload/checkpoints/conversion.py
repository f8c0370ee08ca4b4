"""A checkpoint in another form: other dtype, other shards, dequantized, as safetensors, as an offload folder.

Always true:
- the new folder appears complete or not at all, and the old one is only read; a run that dequantizes keeps its finished
  files beside the new folder until then
- no value is in memory as a whole, except a quantized one that is cast
- configuration, tokenizer and an adapter are copied, code and other weights are not
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

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
)
from offload.checkpoints.forms.decoding import method_of
from offload.checkpoints.forms.formats import Form, values_in
from offload.checkpoints.forms.gguf import empty_model
from offload.checkpoints.forms.torchao import PARTS_NOTE
from offload.checkpoints.writing import contents_in, contents_of, largest_shard, write_checkpoint, write_file_by_file
from offload.errors import ArgumentError, CheckpointError, CorruptFileError, ForeignFileError, JournalError
from offload.progress import progress
from offload.storage.folders import file_name
from offload.storage.layout import dtype_name, dtype_named
from offload.storage.replacing import (
    is_filled,
    made_folder,
    refuse_filled,
    remove_folder,
    replacing_folder,
    sync_folder,
)
from offload.storage.state_file import Kind, read_json, read_state, write_state
from offload.system.reasons import reading, writing
from offload.system.regular import absolute, is_file, is_folder
from offload.tensor.deferred import DeferredTensor, deferred
from offload.tensor.guests import CPU
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


@dataclass(frozen=True)
class ModelSource:
    """A model that is to be written anew.

    Attributes:
        tensors: its values, under the names that its class has; they are decoded and cast when they are read.
        companions: the configuration, the tokenizer... that belong beside them, by file name.
    """

    tensors: dict[str, OffloadedTensor]
    companions: dict[str, bytes]


def convert_checkpoint(
    source: PathLike,
    target: PathLike,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    to_offload_folder: bool = False,
    dequantize: bool = False,
    resume: bool = False,
) -> Path:
    """Write a checkpoint anew, with the configuration and tokenizer files beside it; returns the new folder.

    Args:
        source: see `open_checkpoint`.
        target: the new folder; it may be there if it is empty.
        dtype, max_shard_size: see `save_checkpoint`.
        to_offload_folder: one file per name, which can be written to in place, instead of a checkpoint.
        dequantize: for a quantized checkpoint, write the dense one that transformers would have in memory. What is
            packed is in `dtype` then, or, if that is None, in the dtype of the configuration. A GGUF file, whose names
            are llama.cpp's, is always dequantized: in float32 if `dtype` is None. Its tokenizer is written, too.
        resume: go on with a run of `dequantize` that was killed, from the folder `target` + ".partial".

    Raises:
        ForeignFileError: `target` is there and not empty, or in the folder of `source`.
        JournalError: a run of `dequantize` was begun, and is not resumed; or it was one with other arguments.
        CheckpointError: a quantized checkpoint, in a form that would not outlive this, or is not decoded; one that is
            to be dequantized, and is dense; no JSON in its `config.json`.
        OffloadError: as `open_checkpoint` and `save_checkpoint`; `ArgumentError` for `resume` without `dequantize`.
    """
    opened, target = open_checkpoint(source), target_outside(target, source)
    if to_offload_folder and PARTS_NOTE in opened.metadata:
        raise CheckpointError(
            f"{opened.path} holds quantized weights in torchao's form, whose metadata an offload folder can't hold: "
            "convert it to safetensors, or load the model and call offload.disk_offload"
        )
    if dequantize or opened.is_gguf:
        options = {"dtype": None if dtype is None else dtype_name(dtype), "to_offload_folder": to_offload_folder}
        run = {**options, "max_shard_size": max_shard_size, "source": identities_of(opened)}
        _convert_dense(opened, target, dtype, run, resume=resume)
        return target
    if resume:
        raise ArgumentError("resume=True needs dequantize=True: other runs leave nothing behind, so run it again")
    with replacing_folder(target) as folder:
        put_files(folder, companions_beside(opened.path, dtype))
        if to_offload_folder:
            _write_one_by_one(opened.tensors(), folder, dtype)
        else:
            write_checkpoint(contents_in(opened, dtype), folder, largest_shard(max_shard_size))
    return target


def _convert_dense(source: Checkpoint, target: Path, dtype: torch.dtype | None, run: Settings, *, resume: bool) -> None:
    """Write the dense checkpoint, file by file, in the folder of the run, and then put it at the target."""
    made = _dequantized(source, dtype)
    with resumable_folder(target, run, resume=resume) as work:
        new = work / "new"
        made_folder(new)
        if run["to_offload_folder"]:
            _write_one_by_one(made.tensors, new, dtype)
        else:
            write_file_by_file(contents_of(made.tensors, dtype), new, largest_shard(run["max_shard_size"]))
        put_files(new, made.companions)
        with writing(target):
            os.rename(new, target)
        sync_folder(target.parent)


def source_of(source: Checkpoint, dtype: torch.dtype | None) -> ModelSource:
    """A dense model, from a folder or a GGUF file.

    Floating-point values are cast to `dtype`; if that is None, only what is packed in a GGUF file is, to float32.
    Raises `CheckpointError` for a `config.json` that is no JSON, or a GGUF file that transformers can't read;
    `ReadError`.
    """
    if source.is_gguf:
        return _dequantized(source, dtype)
    tensors = source.tensors()
    if dtype is not None:
        tensors = {
            name: tensor if subclass_value(tensor) is not None else _stored(_cast(tensor, dtype), name)
            for name, tensor in tensors.items()
        }
    return ModelSource(tensors, companions_beside(source.path, dtype))


def _dequantized(source: Checkpoint, dtype: torch.dtype | None) -> ModelSource:
    if source.is_gguf:
        model = empty_model(source, dtype)
        values = values_in(source, None, model=model)
        tensors = {name: _stored(tensor, name) for name, tensor in values.tensors.items()}
        return ModelSource(tensors, companions_of(model))
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
    wanted = dtype or _dtype_of(config)
    dense = {name: _stored(_in_dtype(tensor, wanted), name) for name, tensor in values.tensors.items()}
    return ModelSource(dense, companions_beside(source.path, dtype, is_dense=True))


def _in_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A decoded value in another dtype; what was not packed stays as it is."""
    if dtype is not None and is_offloaded(tensor) and handle_of(tensor).composed is not None:
        return deferred(tensor).to(dtype)
    return tensor


def _cast(tensor: OffloadedTensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A value in another dtype, if it is one of numbers that can be cast; a quantized one in memory."""
    if dtype in (None, tensor.dtype) or not tensor.is_floating_point() or tensor.itemsize == 1:
        return tensor
    return (deferred(tensor) if subclass_value(tensor) is None else tensor).to(dtype)


def _stored(tensor: torch.Tensor, name: str) -> OffloadedTensor:
    if isinstance(tensor, DeferredTensor):
        return tensor.stored(name)
    return tensor if is_offloaded(tensor) else OffloadedTensor.from_original_tensor(tensor, name)


def _write_one_by_one(tensors: Mapping[str, OffloadedTensor], folder: Path, dtype: torch.dtype | None) -> None:
    """One file per value; those that are there already are not made again."""
    done = os.listdir(folder)
    for name, tensor in progress(tensors.items(), "converting", total=len(tensors)):
        cast = _cast(tensor, dtype) if file_name(name) not in done else None
        if isinstance(cast, DeferredTensor):
            cast.in_file(name, folder, CPU)
        elif cast is not None:
            OffloadedTensor.from_original_tensor(cast, name, folder)


@contextmanager
def resumable_folder(target: Path, run: Settings, *, resume: bool) -> Iterator[Path]:
    """The folder `target` + ".partial", which keeps the progress of a run while the block, or the next run, goes on.

    When the block succeeds, which puts the new folder at `target`, it is removed; so it is if the block fails before
    there is any progress. `run` identifies the run, as JSON.

    Raises:
        JournalError: there is a run that should not be resumed, or another one.
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
        if not resume:
            raise JournalError(
                f"{work} has an unfinished run: continue it (resume=True, --resume), or remove the folder"
            )
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


def target_outside(target: PathLike, *sources: PathLike) -> Path:
    """The path of a new folder, which is in none of the folders that are read.

    Raises `ForeignFileError` if it is in one of them.
    """
    path = absolute(target)
    around = next(
        (one for one in map(absolute, sources) if is_folder(one) and one.resolve() in path.resolve().parents), None
    )
    if around is not None:
        raise ForeignFileError(f"{path} is in {around}, which is only read: name a folder outside of it")
    return path


def identities_of(source: Checkpoint) -> dict[str, list[int]]:
    """The files of a checkpoint, its configuration too, with size and modification time, to recognise it later."""
    files = {file.path: file.identity for value in source.values() for file in value.files}
    found = {str(path): [identity.size, identity.modified] for path, identity in files.items()}
    config = source.path / CONFIG
    if is_folder(source.path) and is_file(config):  # it says how the files are to be read
        with reading(config):
            status = config.stat()
        found[str(config)] = [status.st_size, status.st_mtime_ns]
    return found


def companions_beside(source: Path, dtype: torch.dtype | None = None, *, is_dense: bool = False) -> dict[str, bytes]:
    """The configuration and tokenizer files in a model's folder (`COMPANIONS`), by name; none beside a lone file.

    An adapter that is there belongs to them, with its weights; and the folders of a sentence-transformers model. The
    configuration is to say this dtype, if one is given, and with `is_dense` nothing of quantization. Raises
    `CheckpointError` if there is no JSON in `config.json`, or there is an adapter alone; `ReadError`.
    """
    if not is_folder(source):
        return {}
    refuse_lone_adapter(source)
    found = files_like(source, f"{ADAPTER}*") if has_adapter(source) else {}
    parts = read_json(source / _PARTS, "the parts of a model") if is_file(source / _PARTS) else []
    names = {part.get("path") for part in parts if isinstance(part, dict)} if isinstance(parts, list) else set()
    with reading(source):
        folders = [path for path in source.iterdir() if path.name in names and is_folder(path)]
        inside = [path for folder in folders for path in sorted(folder.rglob("*")) if is_file(path)]
        found.update((str(path.relative_to(source)), path.read_bytes()) for path in inside)
    own = files_like(source, *COMPANIONS)
    found.update((name, data) for name, data in own.items() if not name.endswith(INDEX))
    if CONFIG in own and (dtype is not None or is_dense):
        found[CONFIG] = _rewritten(source / CONFIG, dtype, is_dense=is_dense)
    return found


def dtype_in(folder: Path) -> str | None:
    """The name of the dtype that a model's folder says it computes in.

    Raises `CheckpointError` if there is no JSON in its `config.json`.
    """
    path = folder / CONFIG
    found = _dtype_of(_read_config(path)) if is_file(path) else None
    return None if found is None else dtype_name(found)


def _dtype_of(config: Json) -> torch.dtype | None:
    names = (name for key in _DTYPE_KEYS for name in _parts_of(config, key) if isinstance(name, str))
    return next((found for found in map(dtype_named, names) if found is not None), None)


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
    if method not in (None, "torchao"):
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
    found = [config[key]] if config.get(key) is not None else []
    return found + [one for value in config.values() for one in _parts_of(value, key)]
