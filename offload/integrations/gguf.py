"""GGUF files, as llama.cpp has them, as checkpoints of transformers' models.

Always true:
- the configuration, the names of tensors, and what is done to values are transformers' own
- what it does to whole values in memory is recorded here, over the blocks in the file: nothing is read or written
- dense values are bit for bit those that transformers loads

transformers has two ways, and each architecture goes one of them: older ones by its tensor processors, which work on
numpy arrays, newer ones by conversions, as for any other checkpoint.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from offload.errors import CheckpointError
from offload.models.checkpoint import Checkpoint
from offload.models.deferred import DeferredTensor, deferred
from offload.storage.handle import Handle
from offload.storage.layout import contiguous
from offload.storage.reasons import first_line
from offload.tensor.guests import CPU
from offload.tensor.recipes import Decode, Decoded, Piece
from offload.tensor.wrapper import OffloadedTensor, current_twin, handle_of, wrap_handle

Dense: TypeAlias = "dict[str, OffloadedTensor | DeferredTensor]"
Step: TypeAlias = "Callable[[OffloadedTensor, str, Mapping[str, Any]], OffloadedTensor | DeferredTensor]"


def config_of(path: Path) -> tuple[dict[str, Any], Any]:
    """The configuration of a file as transformers reads it: as a dictionary, and as the model's class has it.

    Raises:
        CheckpointError: it does not know the architecture, or something is missing.
    """
    from transformers import AutoConfig, PreTrainedConfig

    said, _ = PreTrainedConfig.get_config_dict(path.parent, gguf_file=path.name)
    return said, AutoConfig.for_model(**said)


def is_new(source: Checkpoint) -> bool:
    """Whether transformers loads it by conversions."""
    from transformers.integrations.gguf import is_gguf_arch_supported

    return bool(is_gguf_arch_supported(architecture_of(source)))


def architecture_of(source: Checkpoint) -> str:
    """What the file calls its architecture."""
    [file] = {value.file for value in source.values()}
    return str(file.header.metadata.get("general.architecture"))


def usual_dtype(source: Checkpoint) -> torch.dtype:
    """The dtype of the weights where none is asked for: that of a file of floats, else float32."""
    stored = {entry.layout.dtype for value in source.values() for entry in [value.file.entries[value.key]]}
    if is_new(source) and torch.uint8 not in stored:
        return next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in stored), torch.float32)
    return torch.float32 if is_new(source) else torch.get_default_dtype()


def dense(
    source: Checkpoint, tensors: Mapping[str, OffloadedTensor], empty: Any, said: Mapping[str, Any], dtype: torch.dtype
) -> Dense:
    """The tensors of a file as those of a checkpoint that transformers has saved, by the names that it would have.

    Args:
        tensors: those of `source`, dense.
        empty: the model, on the meta device.
        said: the configuration that is in the file.
        dtype: that is asked for.

    Raises:
        CheckpointError: transformers does with this architecture what is not known here.
    """
    try:
        if is_new(source):
            return _by_conversions(source, tensors, empty, dtype)
        return _by_processors(source, tensors, empty, said)
    except (NotImplementedError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"transformers can't map the tensors of {source.path}: {first_line(error)}") from error


# The older way


def _by_processors(
    source: Checkpoint, tensors: Mapping[str, OffloadedTensor], empty: Any, said: Mapping[str, Any]
) -> Dense:
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    kind = TENSOR_PROCESSORS.get(architecture_of(source), TensorProcessor)
    if kind.__name__ not in _STEPS:
        raise CheckpointError(f"{source.path}: transformers' {kind.__name__} is not known here")
    names = get_gguf_hf_weights_map(empty, kind(config=dict(said)))
    found: Dense = {}
    halves: dict[str, dict[str, DeferredTensor]] = {}
    for name, tensor in tensors.items():
        experts = _EXPERTS.fullmatch(name) if kind.__name__ in _WITH_EXPERTS else None
        if experts is not None and experts["part"] != "down":
            halves.setdefault(names[experts["stem"]], {})[experts["part"]] = deferred(tensor)
        elif experts is not None:
            found[names[experts["stem"]]] = tensor
        elif name == "output.weight" and kind.__name__ == "GPT2TensorProcessor":
            found["lm_head.weight"] = tensor
        elif name in names:
            found[names[name]] = _STEPS[kind.__name__](tensor, name, said)
    for name, parts in halves.items():
        found[name] = torch.cat([parts["gate"], parts["up"]], 1)  # type: ignore[assignment]
    return found


_WITH_EXPERTS = ("Qwen2MoeTensorProcessor", "MiniMaxM2TensorProcessor")
_EXPERTS = re.compile(r"(?P<stem>.*\.ffn_(?P<part>gate|down|up)_exps)\.weight")


def _as_it_is(tensor: OffloadedTensor, name: str, said: Mapping[str, Any]) -> OffloadedTensor:
    return tensor


def _llama(tensor: OffloadedTensor, name: str, said: Mapping[str, Any]) -> OffloadedTensor:
    """Rows of queries and keys, which llama.cpp has in pairs, in halves of their heads."""
    heads, groups = said.get("num_attention_heads"), said.get("num_key_value_heads")
    if heads is None or groups is None:
        return tensor
    if ".attn_q." in name:
        return _rows_by_heads(tensor, _unpaired, heads)
    return _rows_by_heads(tensor, _unpaired, groups) if ".attn_k." in name else tensor


def _bloom(tensor: OffloadedTensor, name: str, said: Mapping[str, Any]) -> OffloadedTensor | DeferredTensor:
    """Queries, keys and values of a head together."""
    if "attn_qkv" not in name:
        return tensor
    parts = [part.unflatten(0, (said["n_head"], -1)) for part in deferred(tensor).chunk(3)]
    return torch.stack(parts, 1).flatten(0, 2)  # type: ignore[return-value]


def _gpt2(tensor: OffloadedTensor, name: str, said: Mapping[str, Any]) -> OffloadedTensor | DeferredTensor:
    is_turned = any(part in name for part in ("attn_qkv.w", "ffn_down.w", "ffn_up.w", "attn_output.w"))
    return deferred(tensor).t() if is_turned else tensor  # type: ignore[return-value]


def _mamba(tensor: OffloadedTensor, name: str, said: Mapping[str, Any]) -> OffloadedTensor | DeferredTensor:
    if "ssm_conv1d.weight" in name:
        return deferred(tensor).unsqueeze(1)  # type: ignore[return-value]
    return _rows_by_heads(tensor, _log_of_negated, len(tensor)) if "ssm_a" in name else tensor


def _norms_plus_one(tensor: OffloadedTensor, name: str, said: Mapping[str, Any]) -> OffloadedTensor | DeferredTensor:
    return deferred(tensor) - 1 if "norm.weight" in name else tensor


def _shared_gate(tensor: OffloadedTensor, name: str, said: Mapping[str, Any]) -> OffloadedTensor | DeferredTensor:
    return deferred(tensor).unsqueeze(0) if "ffn_gate_inp_shexp" in name else tensor  # type: ignore[return-value]


def _convolution(tensor: OffloadedTensor, name: str, said: Mapping[str, Any]) -> OffloadedTensor | DeferredTensor:
    return deferred(tensor).unsqueeze(1) if "shortconv.conv.weight" in name else tensor  # type: ignore[return-value]


_STEPS: dict[str, Step] = {
    "TensorProcessor": _as_it_is,
    "T5TensorProcessor": _as_it_is,
    "MiniMaxM2TensorProcessor": _as_it_is,
    "Qwen2MoeTensorProcessor": _shared_gate,
    "LlamaTensorProcessor": _llama,
    "BloomTensorProcessor": _bloom,
    "GPT2TensorProcessor": _gpt2,
    "MambaTensorProcessor": _mamba,
    "NemotronTensorProcessor": _norms_plus_one,
    "Gemma2TensorProcessor": _norms_plus_one,
    "Lfm2TensorProcessor": _convolution,
}


def _rows_by_heads(tensor: OffloadedTensor, change: Decode, heads: int) -> OffloadedTensor:
    """What `change` makes of the rows of each head; of those that are packed, before they are decoded."""
    height, left = divmod(len(tensor), heads)
    if left or not height:
        raise ValueError(f"{handle_of(tensor).name!r} has {len(tensor)} rows, which are not those of {heads} heads")
    made = handle_of(tensor).composed
    if isinstance(made, Decoded) and change is _unpaired:
        recipe = Decoded(
            made.layout, partial(_unpaired, decode=made.decode, rows=height), made.pieces, granule=height, per=(height,)
        )
    else:
        piece = Piece(handle_of(tensor), current_twin(tensor))
        layout = contiguous(tensor.dtype, tuple(tensor.shape))
        recipe = Decoded(layout, partial(change, rows=height), [piece], granule=height, per=(height,))
    return wrap_handle(Handle.compose(recipe, handle_of(tensor).name, handle_of(tensor).folder), CPU)


def _unpaired(values: torch.Tensor, *, rows: int, decode: Decode | None = None) -> torch.Tensor:
    pairs = values.unflatten(0, (-1, rows // 2, 2))
    values = pairs.transpose(1, 2).flatten(0, 2)
    return values if decode is None else decode(values)


def _log_of_negated(values: torch.Tensor, *, rows: int) -> torch.Tensor:
    """By numpy, as transformers does: the bits differ from torch's."""
    return torch.from_numpy(np.log(-values.numpy()))


# The newer way


def _by_conversions(
    source: Checkpoint, tensors: Mapping[str, OffloadedTensor], empty: Any, dtype: torch.dtype
) -> Dense:
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    from transformers.integrations.gguf import get_gguf_conversion_mapping

    mapping = get_gguf_conversion_mapping(architecture_of(source), empty.config)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    found: Dense = {}
    collected: dict[str, Any] = {}
    for name in sorted(tensors, key=dot_natural_key):
        kind = source[name].file.header.kinds.get(source[name].key)
        tensor = deferred(_in_dtype(tensors[name], kind, dtype))
        renamed, pattern = rename_source_key(name, renamings, converters)
        if pattern is None:
            found[renamed] = tensor
        else:
            converter = collected.setdefault(renamed, copy.deepcopy(by_pattern[pattern]))
            converter.add_tensor(renamed, name, pattern, tensor)
    for name, converter in collected.items():
        found.update(converter.convert(name, model=empty, config=empty.config))
    return found


def _in_dtype(tensor: OffloadedTensor, kind: str | None, dtype: torch.dtype) -> OffloadedTensor:
    """A packed value whose arithmetic is in a dtype, as transformers' `Dequantize` has it."""
    from transformers.integrations.gguf.dequant import GGML_NAME

    number = next((number for number, name in GGML_NAME.items() if name == kind), None)
    made = handle_of(tensor).composed
    if number is None or dtype == torch.float32 or not isinstance(made, Decoded):
        return tensor
    layout = contiguous(dtype, made.layout.shape)
    recipe = Decoded(layout, partial(_decode_in, number=number, dtype=dtype), made.pieces, per=(1,))
    handle = Handle.compose(recipe, handle_of(tensor).name, handle_of(tensor).folder)
    return wrap_handle(handle, CPU).view(tensor.shape)


def _decode_in(rows: torch.Tensor, *, number: int, dtype: torch.dtype) -> torch.Tensor:
    from transformers.integrations.gguf.dequant import dequantize

    return dequantize(rows, number, dtype).view(len(rows), -1)
