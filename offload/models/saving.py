"""Saving a model, or named tensors, as a checkpoint: what of a model is saved, and under which names.

Always true:
- the files that `from_pretrained` needs beside a transformers model's weights are written after the weights
- what was loaded from packed weights, and has not been changed, is written as it was packed
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.annotations import Settings
from offload.checkpoints.checkpoint import Checkpoint
from offload.checkpoints.companions import companions_of, is_of_transformers, quantization_of
from offload.checkpoints.forms.packing import packed_state
from offload.checkpoints.writing import Contents, contents_in, contents_of, largest_shard, write_checkpoint
from offload.distributed.together import Ranks
from offload.errors import ArgumentTypeError
from offload.models.collective import own_parts, write_together
from offload.storage.regular import absolute
from offload.tensor.arguments import floating_dtype
from offload.tensor.locals import is_dtensor, local_of
from offload.tensor.wrapper import PathLike


def save_checkpoint(
    model_or_state_dict: nn.Module | Mapping[str, torch.Tensor] | Checkpoint,
    folder: PathLike,
    max_shard_size: int | str = "5GB",
    *,
    dtype: torch.dtype | str | None = None,
    process_group: Any = None,
) -> list[Path]:
    """Write `model.safetensors`, or shards with an index, as `save_pretrained` does, in bounded memory.

    Beside the weights of a transformers model go its configuration, its settings for generation, its own code if it
    has any, and its tokenizer if the folder that it was loaded from is there: `from_pretrained(folder)` loads it again.

    Tied weights are written once. Quantized weights of torchao are written in torchao's own form. What was loaded from
    packed weights, and has not been changed, is written as it was packed, under the names that it had there.

    An earlier checkpoint in the folder is replaced as a whole: a process that is killed leaves it, or the new one.
    Where its shards have the usual names, new ones are called `model-2-00001-of-00003.safetensors`, as the index says.

    DTensors are saved whole, by all ranks together: each calls this, with a folder that all of them see, and writes the
    ranges of the files that it has. A value that several ranks have is written by one of them. An error on one rank is
    an error on all, and leaves nothing behind.

    Args:
        model_or_state_dict: a module, of which its `state_dict()` is saved; tensors by name; or an opened checkpoint.
        folder: created if needed. An earlier checkpoint in it is replaced if this function wrote it.
        max_shard_size: bytes of the values in a file: "5GB", "500MiB", 4096. A value that is larger has its own file.
        dtype: to convert floating-point values to, piece by piece, by itself or by its name; those of 8 bits and less
            stay as they are.
        process_group: of the ranks that save together; None for all, where a value is a DTensor, else this process
            alone. Give one where ranks have stages of a model, and no DTensors.

    Returns:
        The files with the weights, the index last.

    Raises:
        ForeignFileError: `folder` has a checkpoint that offload did not write, or one that live tensors refer to; or
            the configuration of another model, which offload did not write.
        UnsupportedOpError: a value can't be stored in a safetensors file.
        UnknownSubclassError: a value is of a tensor subclass that torchao can't store.
        WriteError: the disk is full, the folder is read-only...
        RankError: one of these happened on another rank, or that rank has exited.
        ValueError: `dtype` is not a floating-point one, or `max_shard_size` not an amount.

    Example:
        >>> [path.name for path in save_checkpoint({"w": torch.ones(2)}, "saved")]
        ['model.safetensors']
    """
    ranks = Ranks.of(_values(model_or_state_dict), process_group)
    source, folder = model_or_state_dict, absolute(folder)

    def planned() -> tuple[Contents, dict[str, bytes] | None, int]:
        to = None if dtype is None else floating_dtype(dtype)
        if isinstance(source, nn.Module):
            return *_of_model(source, to), largest_shard(max_shard_size)
        if isinstance(source, Checkpoint):
            return contents_in(source, to), None, largest_shard(max_shard_size)
        return _of_tensors(source, to), None, largest_shard(max_shard_size)

    if ranks.size == 1:
        contents, companions, most = planned()
        return write_checkpoint(contents, folder, most, companions=companions)
    return write_together(ranks, planned, folder)


def _of_model(model: nn.Module, dtype: torch.dtype | None) -> tuple[Contents, dict[str, bytes]]:
    """A model's values, and the files that it needs beside them."""
    tensors = dict(model.state_dict())
    packed = getattr(model, "packed_as", None)
    quantization: Settings | None = None
    if dtype is None and packed is not None and not any(map(is_dtensor, tensors.values())):
        pieces, others = packed_state(tensors)
        if pieces.keys().isdisjoint(others):
            tensors, quantization = {**others, **pieces, **packed.still_beside(others)}, packed.now(others)
    contents = _of_tensors(tensors, dtype, discarded=_discarded_names(model))
    contents = replace(contents, parameters={name: one.numel() for name, one in model.named_parameters()})
    is_plain_again = not contents.metadata and getattr(model, "quantization_method", None) == "torchao"
    if is_of_transformers(model) and not is_plain_again:
        quantization = quantization or quantization_of(model.config)
    return contents, companions_of(model, dtype, quantization)


def _of_tensors(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None, discarded: Iterable[str] = ()
) -> Contents:
    """Named tensors; of DTensors, what this rank has."""
    if not isinstance(tensors, Mapping):
        raise ArgumentTypeError(
            f"a module, tensors by name, or a checkpoint can be saved, not a {type(tensors).__name__}"
        )
    outers = {name: tensor for name, tensor in tensors.items() if is_dtensor(tensor)}
    local = {name: local_of(tensor) if name in outers else tensor for name, tensor in tensors.items()}
    contents = contents_of(local, dtype, discarded=set(discarded))
    return own_parts(contents, outers) if outers else contents


def _discarded_names(model: nn.Module) -> Iterable[str]:
    """The names that a transformers model ties to others, and expects under those."""
    tied: Iterable[str] | None = getattr(model, "all_tied_weights_keys", None)
    return tied or getattr(model, "_tied_weights_keys", None) or ()


def _values(source: object) -> Iterable[object]:
    if isinstance(source, nn.Module):
        return chain(source.parameters(), source.buffers())
    return source.values() if isinstance(source, Mapping) else ()
