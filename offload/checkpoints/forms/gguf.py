"""GGUF files (llama.cpp) as checkpoints of transformers models.

Always true:
- the configuration, tensor names and transformations of values are transformers' own
- what it does to whole values in memory is recorded here over the blocks in the file: nothing is read or written
- dense values are bit-identical to those that transformers loads

transformers has two mechanisms, and uses one for each architecture: tensor processors, working on numpy arrays, for the
older ones, and conversions, as for any other checkpoint, for the newer ones.
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from offload.annotations import Config, Kwargs, Pretrained, Settings
from offload.checkpoints.checkpoint import Checkpoint, open_checkpoint, with_other_parts
from offload.checkpoints.companions import class_of, refuse_more_layers
from offload.checkpoints.forms.decoding import read_now
from offload.errors import CheckpointError, OffloadError
from offload.kernels.packed import GgufRows
from offload.storage.file import TensorFile
from offload.storage.gguf_header import ARCHITECTURE, ROPE, without_vocabulary
from offload.storage.handle import Handle
from offload.storage.layout import contiguous
from offload.system.reasons import first_line, reading
from offload.system.regular import as_file, open_regular, owned
from offload.tensor.decoded import Decoded
from offload.tensor.deferred import deferred
from offload.tensor.guests import CPU
from offload.tensor.recipes import Piece
from offload.tensor.runs import Decode, Decoder
from offload.tensor.views import handle_of, view_spec_of
from offload.tensor.wrapper import OffloadedTensor, is_offloaded, wrap_handle

Dense: TypeAlias = "dict[str, torch.Tensor]"


def settings_in(path: Path) -> Settings:
    """The configuration in a file, as read by transformers.

    Raises `CheckpointError` if transformers does not support the architecture, or something is missing;
    `CorruptFileError`; `MissingFileError` if a part is missing.
    """
    parts = with_other_parts(TensorFile.open(path))
    path, metadata = parts[0].path, parts[0].header.metadata
    names = [name for part in parts for name in part.entries]
    from offload.transformers_api import GGUF_CONFIG_ARCHS, get_gguf_config, load_gguf_checkpoint, read_gguf_metadata

    try:
        if metadata.get(ARCHITECTURE) in GGUF_CONFIG_ARCHS:
            return dict(get_gguf_config(read_gguf_metadata(str(path))[0], tuple(names)))
        with reading(path), as_file(open_regular(path)) as file:
            head, tokens = without_vocabulary(file, names)
        with owned(os.memfd_create, "header") as copy_of_it:  # with a whole vocabulary, its reader takes 10 s
            os.write(copy_of_it.fileno(), head)
            settings = load_gguf_checkpoint(f"/proc/self/fd/{copy_of_it.fileno()}")["config"]
        return {"vocab_size": tokens, **settings} if tokens is not None else dict(settings)
    except OffloadError:
        raise
    except Exception as error:  # it can raise anything for input that it does not expect
        raise CheckpointError(f"transformers can't read a configuration from {path}: {first_line(error)}") from error


def config_of(path: Path, **options: object) -> tuple[Config, Kwargs]:
    """The configuration of a file, in the model's class, and options that are not part of it.

    Raises: as `settings_in`.
    """
    from transformers import AutoConfig

    settings = settings_in(path)
    config_class = type(AutoConfig.for_model(settings["model_type"]))
    config, options = config_class.from_dict(settings, return_unused_kwargs=True, **options)
    _stretch(config.get_text_config(decoder=True), open_checkpoint(path))
    return config, options


def _stretch(config: Config, source: Checkpoint) -> None:
    """Have a configuration say how a file's rotary embeddings are stretched, where transformers does not read it.

    Source: llama.cpp's `rope.scaling.*`; `rope_freqs.weight` has the factors of Llama 3.

    Raises `CheckpointError` if the configuration can't say that.
    """
    said = {key.split(".rope.", 1)[1]: value for key, value in source.metadata.items() if any(map(key.count, ROPE))}
    names = [name for name in source if name.startswith("rope_")]
    rope: Any = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if not (said or names) or rope.get("rope_type", "default") != "default":  # transformers knows this architecture's
        return
    try:
        factors = torch.ones(1)
        if names == [_FREQUENCIES]:
            factors = read_now(source.tensors(None, {_FREQUENCIES: CPU})[_FREQUENCIES]).to(torch.float64)
        wanted = _stretching({key.removeprefix("scaling."): value for key, value in said.items()}, float(factors.max()))
        if (names not in ([], [_FREQUENCIES])) or (wanted and "rope_theta" not in rope):
            raise ValueError("there is no place for it")
        rope.update(wanted)
        if wanted.get("rope_type") == "llama3":
            _check_factors(config, rope["rope_theta"], factors)
    except (KeyError, ValueError) as error:
        known = ", ".join([*(f"rope.{key} = {value}" for key, value in said.items()), *names])
        raise CheckpointError(
            f"{source.path} stretches its rotary embeddings in a way that is not followed here ({known}): pass config= "
            f"with the rope_parameters of the model ({first_line(error)})"
        ) from error


def _stretching(said: Settings, most: float) -> dict[str, Any]:
    """The parameters in transformers' words, with the largest of the file's factors; empty if nothing is stretched."""
    left = {key: value for key, value in said.items() if key != "finetuned" and (key, value) != ("attn_factor", "1.0")}
    factor = float(left.pop("factor", None) or left.pop("scale_linear", None) or 1)
    kind, before = left.pop("type", "linear"), int(left.pop("original_context_length", 0))
    wanted: dict[str, Any] = {"rope_type": kind, "factor": factor} if kind != "none" and factor != 1 else {}
    if wanted and kind == "yarn":
        attention = float(left.pop("attn_factor", 1)) * (0.1 * math.log(factor) + 1)
        betas = {key: float(left.pop(f"yarn_{key}")) for key in ("beta_fast", "beta_slow") if f"yarn_{key}" in left}
        wanted |= {"original_max_position_embeddings": before, "attention_factor": attention, **betas}
    if most != 1 and not (wanted or left):
        low = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        wanted = {"rope_type": "llama3", "factor": most, "original_max_position_embeddings": before or _BEFORE, **low}
    elif most != 1 or left or kind not in ("linear", "none", "yarn") or (wanted and kind == "yarn" and not before):
        raise ValueError("these can't be said together")
    return wanted


_FREQUENCIES = "rope_freqs.weight"
_BEFORE = 8192  # tokens that all models of Llama 3 were trained with at first; their files do not say so


def _check_factors(config: Config, base: float, factors: torch.Tensor) -> None:
    from offload.transformers_api import ROPE_INIT_FUNCTIONS

    usual = base ** -(torch.arange(len(factors), dtype=torch.float64) / len(factors))
    llama3 = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
    if llama3.shape != usual.shape or not torch.allclose(usual / factors, llama3.double(), rtol=1e-3, atol=0):
        raise ValueError("other factors than those of Llama 3")


def empty_model(source: Checkpoint, dtype: torch.dtype | None) -> Pretrained:
    """The model in a file, on the meta device. Raises: as `config_of`."""
    config, _ = config_of(source.path)
    refuse_more_layers(config.to_dict(), len(source.keys()), source.path)
    with torch.device("meta"):
        kind = class_of(config)
        make = getattr(kind, "from_config", None) or kind._from_config  # of an Auto class, or a model's
        empty: Pretrained = make(config, dtype=dtype or usual_dtype(source))
        return empty


def is_new(source: Checkpoint) -> bool:
    """Whether transformers loads it by conversions."""
    from offload.transformers_api import is_gguf_arch_supported

    return bool(is_gguf_arch_supported(architecture_of(source)))


def architecture_of(source: Checkpoint) -> str:
    """The file's name for its architecture."""
    return str(source.metadata.get(ARCHITECTURE))


def computing_dtype(source: Checkpoint) -> torch.dtype:
    """The dtype to compute a file's model in: that of most of its bytes; bfloat16, as models are made in, if packed."""
    sizes: Counter[torch.dtype] = Counter()
    for value in source.values():
        sizes[value.file.entries[value.key].layout.dtype] += value.nbytes
    dtype = max(sizes, key=sizes.__getitem__, default=torch.uint8)
    return dtype if dtype.is_floating_point else torch.bfloat16


def usual_dtype(source: Checkpoint) -> torch.dtype:
    """The default dtype of the weights: that of a file of floats, otherwise float32."""
    stored = {entry.layout.dtype for value in source.values() for entry in [value.file.entries[value.key]]}
    if is_new(source) and torch.uint8 not in stored:
        return next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in stored), torch.float32)
    return torch.float32 if is_new(source) else torch.get_default_dtype()


def as_saved(
    source: Checkpoint, tensors: Mapping[str, OffloadedTensor], empty: Pretrained, dtype: torch.dtype
) -> Dense:
    """The dense tensors of a file as in a checkpoint saved by transformers, by the names that it would have.

    `empty` is the model, on the meta device. Raises `CheckpointError` if transformers treats this architecture in a way
    that is not supported here.
    """
    try:
        if is_new(source):
            return _by_conversions(source, tensors, empty, dtype)
        return _by_processors(source, tensors, empty, settings_in(source.path), dtype)
    except OffloadError:
        raise
    except (NotImplementedError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"transformers can't map the tensors of {source.path}: {first_line(error)}") from error


def _by_processors(
    source: Checkpoint,
    tensors: Mapping[str, OffloadedTensor],
    empty: Pretrained,
    settings: Settings,
    dtype: torch.dtype,
) -> Dense:
    from offload.transformers_api import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    kind = TENSOR_PROCESSORS.get(architecture_of(source), TensorProcessor)
    if kind.__name__ not in _KNOWN:
        raise CheckpointError(f"{source.path}: transformers' {kind.__name__} is not supported here")
    names = get_gguf_hf_weights_map(_Outline(empty), kind(config=dict(settings)))
    dense: Dense = {}
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        experts = _EXPERTS.fullmatch(name) if kind.__name__ in _WITH_EXPERTS else None
        if experts is not None and experts["part"] != "down":
            halves.setdefault(names[experts["stem"]], {})[experts["part"]] = deferred(tensor)
        elif experts is not None:
            dense[names[experts["stem"]]] = tensor
        elif name in names:
            changed = _processed(tensor, name, kind.__name__, settings)
            dense[names[name]] = (deferred(changed) if is_offloaded(changed) else changed).to(dtype)
    for name, parts in halves.items():
        dense[name] = torch.cat([parts["gate"], parts["up"]], 1)
    return dense


class _Outline:
    """A model without the modules in its blocks, whose names transformers finds from above.

    It makes a table of all names of all blocks for each module that it visits: 4 s for a model of 30 blocks.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.config = getattr(module, "config", None)
        self.state_dict = module.state_dict

    def named_children(self) -> list[tuple[str, _Outline]]:
        if isinstance(self._module, torch.nn.ModuleList):
            return []
        return [(name, _Outline(child)) for name, child in self._module.named_children()]


_WITH_EXPERTS = ("Qwen2MoeTensorProcessor", "MiniMaxM2TensorProcessor")
_EXPERTS = re.compile(r"(?P<stem>.*\.ffn_(?P<part>gate|down|up)_exps)\.weight")
_KNOWN = {*(f"{name}TensorProcessor" for name in ("", "T5", "Llama", "Nemotron", "Gemma2", "Lfm2")), *_WITH_EXPERTS}


def _processed(tensor: OffloadedTensor, name: str, kind: str, settings: Settings) -> torch.Tensor:
    match kind.removesuffix("TensorProcessor"):
        case "Llama" if ".attn_q." in name or ".attn_k." in name:
            return _unpaired_heads(tensor, name, settings)
        case "Nemotron" | "Gemma2" if "norm.weight" in name:
            return deferred(tensor) - 1
        case "Qwen2Moe" if "ffn_gate_inp_shexp" in name:
            return deferred(tensor).unsqueeze(0)
        case "Lfm2" if "shortconv.conv.weight" in name:
            return deferred(tensor).unsqueeze(1)
    return tensor


def _unpaired_heads(tensor: OffloadedTensor, name: str, settings: Settings) -> OffloadedTensor:
    """Rows of queries and keys: from llama.cpp's interleaved pairs to the two halves of each head."""
    heads, groups = settings.get("num_attention_heads"), settings.get("num_key_value_heads")
    if heads is None or groups is None:
        return tensor
    count = heads if ".attn_q." in name else groups
    height, left = divmod(len(tensor), count)
    if left or height % 2:
        raise ValueError(f"{name!r} has {len(tensor)} rows, which do not fit {count} heads")
    handle = handle_of(tensor)
    old, packed = handle.composed, None
    change, pieces = partial(_unpaired, rows=height), [Piece(handle, view_spec_of(tensor))]
    if isinstance(old, Decoded):  # packed rows change places before they are decoded
        change, pieces, packed = partial(change, decode=old.decoder.decode), [*old.pieces], old.decoder.packed
        packed = replace(packed, heads=height) if isinstance(packed, GgufRows) else None
    layout = contiguous(tensor.dtype, tuple(tensor.shape))
    recipe = Decoded(layout, Decoder(change, (height,), height, packed=packed), pieces)
    return wrap_handle(Handle.compose(recipe, handle.name, handle.folder), CPU)


def _unpaired(values: torch.Tensor, *, rows: int, decode: Decode | None = None) -> torch.Tensor:
    """The first rows of all pairs, then the second ones, per head of `rows` rows."""
    pairs = values.unflatten(0, (-1, rows // 2, 2))
    values = pairs.transpose(1, 2).flatten(0, 2)
    return values if decode is None else decode(values)


def _by_conversions(
    source: Checkpoint, tensors: Mapping[str, OffloadedTensor], empty: Pretrained, dtype: torch.dtype
) -> Dense:
    from offload.transformers_api import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        get_gguf_conversion_mapping,
        rename_source_key,
    )

    mapping = get_gguf_conversion_mapping(architecture_of(source), empty.config)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    dense: Dense = {}
    collected: dict[str, Any] = {}
    for name in sorted(tensors, key=dot_natural_key):
        kind = source[name].file.header.kinds.get(source[name].key)
        tensor = deferred(_in_dtype(tensors[name], kind, dtype))
        renamed, pattern = rename_source_key(name, renamings, converters)
        if pattern is None:
            dense[renamed] = tensor
        else:
            converter = collected.setdefault(renamed, copy.deepcopy(by_pattern[pattern]))
            converter.add_tensor(renamed, name, pattern, tensor)
    for name, converter in collected.items():
        dense.update(converter.convert(name, model=empty, config=empty.config))
    return dense


def _in_dtype(tensor: OffloadedTensor, kind: str | None, dtype: torch.dtype) -> OffloadedTensor:
    """A packed value computed in a given dtype, as in transformers' `Dequantize`."""
    from offload.transformers_api import GGML_NAME

    number = next((number for number, name in GGML_NAME.items() if name == kind), None)
    old = handle_of(tensor).composed
    if number is None or dtype == torch.float32 or not isinstance(old, Decoded):
        return tensor
    layout = contiguous(dtype, old.layout.shape)
    packed = old.decoder.packed
    packed = replace(packed, is_rounded=True) if isinstance(packed, GgufRows) else None
    recipe = Decoded(layout, Decoder(partial(_decode_in, number=number, dtype=dtype), (1,), packed=packed), old.pieces)
    handle = Handle.compose(recipe, handle_of(tensor).name, handle_of(tensor).folder)
    dense: OffloadedTensor = wrap_handle(handle, CPU).view(tensor.shape)  # type: ignore[assignment]
    return dense


def _decode_in(rows: torch.Tensor, *, number: int, dtype: torch.dtype) -> torch.Tensor:
    from offload.transformers_api import dequantize

    values: torch.Tensor = dequantize(rows, number, dtype)
    return values.view(len(rows), -1)
