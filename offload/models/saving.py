"""Saving a model, or named tensors, as a checkpoint: what of a model is saved, and under which names.

Always true:
- the files that `from_pretrained` needs beside a transformers model's weights are written after the weights
- a model that was loaded from packed weights, none of which was changed, is written as it was packed
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

from offload.annotations import Settings
from offload.checkpoints.companions import companions_of, is_of_transformers, quantization_of
from offload.checkpoints.forms.formats import Packed
from offload.checkpoints.writing import Contents, contents_of, largest_shard, write_checkpoint
from offload.errors import ArgumentTypeError, UnsupportedOpError
from offload.system.regular import absolute
from offload.tensor.arguments import floating_dtype
from offload.tensor.locals import is_dtensor
from offload.tensor.wrapper import PathLike


def save_checkpoint(
    model_or_state_dict: nn.Module | Mapping[str, torch.Tensor],
    folder: PathLike,
    max_shard_size: int | str = "5GB",
    *,
    dtype: torch.dtype | str | None = None,
) -> list[Path]:
    """Write `model.safetensors`, or shards with an index, as `save_pretrained` does, in bounded memory.

    Beside the weights of a transformers model go its configuration and its settings for generation, so that
    `from_pretrained(folder)` loads it again. A tokenizer and custom code are not written.

    Tied weights are written once. Quantized weights of torchao are written in torchao's own form. A model that was
    loaded from packed weights is written as it was packed, under the names that it had there, if none of these weights
    was changed; otherwise all of it is written dense.

    An earlier checkpoint in the folder is replaced as a whole: a process that is killed leaves it, or the new one.
    Where its shards have the usual names, new ones are called `model-2-00001-of-00003.safetensors`, as the index says.

    Values that ranks share (DTensors) are saved by `torch.distributed.checkpoint`, from whose folder one process writes
    a checkpoint like this one.

    Args:
        model_or_state_dict: a module, of which its `state_dict()` is saved; or tensors by name.
        folder: created if needed. An earlier checkpoint in it is replaced if this function wrote it.
        max_shard_size: bytes of the values in a file: "5GB", "500MiB", 4096. A value that is larger has its own file.
        dtype: to convert floating-point values to, piece by piece, by itself or by its name; those of 8 bits and less
            stay as they are.

    Returns:
        The files with the weights, the index last.

    Raises:
        ForeignFileError: `folder` has a checkpoint that offload did not write, or one that live tensors refer to; or a
            `config.json` of another model, or with other settings. A `generation_config.json` there stays as it is.
        UnsupportedOpError: a value can't be stored in a safetensors file, or is a DTensor.
        UnknownSubclassError: a value is of a tensor subclass that torchao can't store.
        WriteError: the disk is full, the folder is read-only...
        ValueError: `dtype` is not a floating-point one, or `max_shard_size` not an amount.

    Example:
        >>> [path.name for path in save_checkpoint({"w": torch.ones(2)}, "saved")]
        ['model.safetensors']
    """
    source, to = model_or_state_dict, None if dtype is None else floating_dtype(dtype)
    companions: dict[str, bytes] = {}
    if isinstance(source, nn.Module):
        contents, companions = _of_model(source, to)
    else:
        contents = _of_tensors(source, to)
    return write_checkpoint(contents, absolute(folder), largest_shard(max_shard_size), companions=companions)


def refuse_shares(tensors: Mapping[str, object]) -> None:
    """Raises `UnsupportedOpError` if ranks share one of the values."""
    name = next((name for name, tensor in tensors.items() if is_dtensor(tensor)), None)
    if name is not None:
        raise UnsupportedOpError(
            f"{name!r} is shared by ranks (a DTensor): save it with torch.distributed.checkpoint "
            "(dcp.save(model.state_dict(), checkpoint_id=folder)). load_checkpoint_and_dispatch and load_file open "
            "that folder in place; in one process save_checkpoint(load_file(folder), ...) writes a checkpoint of it"
        )


def _of_model(model: nn.Module, dtype: torch.dtype | None) -> tuple[Contents, dict[str, bytes]]:
    tensors = dict(model.state_dict())
    refuse_shares(tensors)
    packed: Packed | None = getattr(model, "packed_as", None)
    quantization: Settings | None = None
    if dtype is None and packed is not None:
        pieces, others = packed.split(tensors)
        if pieces:
            tensors, quantization = {**others, **pieces}, packed.quantization
    tied = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    contents = _of_tensors(tensors, dtype, discarded=tied)  # names that transformers ties to others, and expects there
    is_plain_again = not contents.metadata and getattr(model, "quantization_method", None) == "torchao"
    if is_of_transformers(model) and not is_plain_again:
        quantization = quantization or quantization_of(model.config)
    return contents, companions_of(model, dtype, quantization)


def _of_tensors(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None, discarded: Iterable[str] = ()
) -> Contents:
    if not isinstance(tensors, Mapping):
        raise ArgumentTypeError(f"a module, or tensors by name, are saved, not a {type(tensors).__name__}")
    refuse_shares(tensors)
    return contents_of(tensors, dtype, discarded=set(discarded))
