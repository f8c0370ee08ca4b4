"""Saving a model, or named tensors, as a checkpoint: what of a model is saved, and under which names.

Always true:
- the files that `from_pretrained` needs beside a transformers model's weights are written after the weights
- what was loaded from packed weights, and has not been changed, is written as it was packed
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from offload.annotations import Settings
from offload.checkpoints.checkpoint import Checkpoint
from offload.checkpoints.companions import companions_of, is_of_transformers, quantization_of
from offload.checkpoints.forms.formats import packed_state
from offload.checkpoints.writing import Contents, contents_in, contents_of, largest_shard, write_checkpoint
from offload.errors import ArgumentTypeError, UnsupportedOpError
from offload.models.slots import is_whole
from offload.system.regular import absolute
from offload.tensor.arguments import floating_dtype
from offload.tensor.locals import is_dtensor, local_of
from offload.tensor.wrapper import PathLike


def save_checkpoint(
    model_or_state_dict: nn.Module | Mapping[str, torch.Tensor] | Checkpoint,
    folder: PathLike,
    max_shard_size: int | str = "5GB",
    *,
    dtype: torch.dtype | str | None = None,
) -> list[Path]:
    """Write `model.safetensors`, or shards with an index, as `save_pretrained` does, in bounded memory.

    Beside the weights of a transformers model go its configuration, its settings for generation, its own code if it
    has any, and its tokenizer if the folder that it was loaded from is there: `from_pretrained(folder)` loads it again.

    Tied weights are written once. Quantized weights of torchao are written in torchao's own form. What was loaded from
    packed weights, and has not been changed, is written as it was packed, under the names that it had there.

    An earlier checkpoint in the folder is replaced as a whole: a process that is killed leaves it, or the new one.
    Where its shards have the usual names, new ones are called `model-2-00001-of-00003.safetensors`, as the index says.

    Of values that ranks share (DTensors), only those are saved that this rank has whole: call this on one rank. Others
    are saved by `torch.distributed.checkpoint`, from whose folder one process writes a checkpoint like this one.

    Args:
        model_or_state_dict: a module, of which its `state_dict()` is saved; tensors by name; or an opened checkpoint.
        folder: created if needed. An earlier checkpoint in it is replaced if this function wrote it.
        max_shard_size: bytes of the values in a file: "5GB", "500MiB", 4096. A value that is larger has its own file.
        dtype: to convert floating-point values to, piece by piece, by itself or by its name; those of 8 bits and less
            stay as they are.

    Returns:
        The files with the weights, the index last.

    Raises:
        ForeignFileError: `folder` has a checkpoint that offload did not write, or one that live tensors refer to; or
            the configuration of another model, which offload did not write.
        UnsupportedOpError: a value can't be stored in a safetensors file, or this rank has only a share of it.
        UnknownSubclassError: a value is of a tensor subclass that torchao can't store.
        WriteError: the disk is full, the folder is read-only...
        ValueError: `dtype` is not a floating-point one, or `max_shard_size` not an amount.

    Example:
        >>> [path.name for path in save_checkpoint({"w": torch.ones(2)}, "saved")]
        ['model.safetensors']
    """
    source, to = model_or_state_dict, None if dtype is None else floating_dtype(dtype)
    companions = None
    if isinstance(source, nn.Module):
        contents, companions = _of_model(source, to)
    else:
        contents = contents_in(source, to) if isinstance(source, Checkpoint) else _of_tensors(source, to)
    return write_checkpoint(contents, absolute(folder), largest_shard(max_shard_size), companions=companions)


def refuse_shares(tensors: Mapping[str, object]) -> None:
    """Raises `UnsupportedOpError` if this rank has only a share of one of the values."""
    name = next((name for name, tensor in tensors.items() if is_dtensor(tensor) and not is_whole(tensor)), None)
    if name is not None:
        raise UnsupportedOpError(
            f"this rank has only a share of {name!r}: save the ranks with torch.distributed.checkpoint "
            "(dcp.save(model.state_dict(), checkpoint_id=folder)). load_checkpoint_and_dispatch and load_file open "
            "that folder in place; in one process save_checkpoint(load_file(folder), ...) writes a checkpoint of it"
        )


def _of_model(model: nn.Module, dtype: torch.dtype | None) -> tuple[Contents, dict[str, bytes]]:
    tensors = dict(model.state_dict())
    packed = getattr(model, "packed_as", None)
    quantization: Settings | None = None
    if dtype is None and packed is not None and not any(map(is_dtensor, tensors.values())):
        pieces, others = packed_state(tensors)
        if pieces.keys().isdisjoint(others):
            tensors, quantization = {**others, **pieces, **packed.still_beside(others)}, packed.now(others)
    tied = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    contents = _of_tensors(tensors, dtype, discarded=tied)  # names that transformers ties to others, and expects there
    contents = replace(contents, parameters={name: one.numel() for name, one in model.named_parameters()})
    is_plain_again = not contents.metadata and getattr(model, "quantization_method", None) == "torchao"
    if is_of_transformers(model) and not is_plain_again:
        quantization = quantization or quantization_of(model.config)
    return contents, companions_of(model, dtype, quantization)


def _of_tensors(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None, discarded: Iterable[str] = ()
) -> Contents:
    if not isinstance(tensors, Mapping):
        raise ArgumentTypeError(f"a module, tensors by name, or a checkpoint is saved, not a {type(tensors).__name__}")
    refuse_shares(tensors)
    local = {name: local_of(tensor) if is_dtensor(tensor) else tensor for name, tensor in tensors.items()}
    return contents_of(local, dtype, discarded=set(discarded))
