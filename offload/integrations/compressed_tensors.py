"""compressed-tensors: quantizing a checkpoint from file to file.

Always true:
- the package's own compressors quantize and pack: round to nearest, without calibration data
- one weight at a time is in memory, with its quantized form
- the new folder appears complete; until then, results are in a folder beside it, from which a killed run is resumed
"""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.checkpoints.checkpoint import Checkpoint, open_checkpoint
from offload.checkpoints.companions import put_files
from offload.checkpoints.conversion import identities_of, resumable_folder, source_of
from offload.errors import CheckpointError
from offload.integrations.transformers import model_on_meta
from offload.memory import count_freed
from offload.models.saving import save_checkpoint
from offload.progress import progress_in_bytes
from offload.storage.replacing import put_file, replacing_folder
from offload.storage.state_file import read_json
from offload.system.reasons import reading
from offload.system.regular import absolute
from offload.tensor.saved import subclass_value
from offload.tensor.wrapper import OffloadedTensor, PathLike

log = logging.getLogger("offload.integrations")

# A scheme of the package, of which only the weights' part is used; the format that it is stored in; and whether each
# group of columns has its own scale.
FORMS = {
    "int8": ("W8A16", "pack-quantized", True),
    "int4": ("W4A16", "pack-quantized", True),
    "fp8": ("FP8_DYNAMIC", "float-quantized", False),
}
_LEAST_GROUP = 32  # columns: kernels of inference servers take no smaller groups
_PACKED = (".weight_packed", ".weight")  # the piece of a weight that is stored last


def quantize_checkpoint(
    source: PathLike,
    target: PathLike,
    form: str,
    *,
    group_size: int = 128,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    progress: bool = True,
) -> list[str]:
    """Write a checkpoint of transformers anew with quantized linear layers, in the format of compressed-tensors.

    Linear layers and experts that are stored apart are quantized; embeddings, the output layer, norms, routers, and
    experts that are stored as one tensor are not. What is written
    is read by `offload.from_pretrained`, transformers, vLLM and others.

    Args:
        source: the folder of a model that is not quantized, or a GGUF file, which is decoded first.
        target: the new folder; it may be there if it is empty. A run that was killed leaves the folder `target` +
            ".partial": the same call goes on from there.
        form: "int8" or "int4", with a scale for each row and group of columns; "fp8" (E4M3) with a scale for each row.
        group_size: columns that share a scale, for "int8" and "int4". A layer whose columns are no multiple of it has
            groups of the largest size that divides both, or stays as it is if that is less than 32.
        dtype: that the model computes in, and of what is not quantized; None for the one it has, which is float32 for
            a GGUF file that is packed.
        max_shard_size: see `save_checkpoint`.
        progress: show a bar, on a terminal.

    Returns:
        The linear layers that were left as they are, but for the output layer; and experts that are stored as one.

    Raises:
        CheckpointError: the model is quantized already, or has no layer that can be.
        ForeignFileError: `target` is there and not empty.
        JournalError: a run with other arguments was begun.
        ModuleNotFoundError: the package compressed-tensors is not installed.
        WriteError, and as `open_checkpoint`

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
        >>> LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained("llama")
        >>> quantize_checkpoint("llama", "llama-int4", "int4", group_size=32)
        []
    """
    opened, target = open_checkpoint(source), absolute(target)
    tensors, companions = source_of(opened, dtype)
    chosen, left = _layers(opened, tensors, group_size if FORMS[form][2] else None)
    schemes = {size: _scheme(form, size) for size in sorted(set(chosen.values()), reverse=True)}
    scheme_of = {name: schemes[size] for name, size in chosen.items()}
    run = {"form": form, "group_size": group_size, "dtype": str(dtype), "source": identities_of(opened)}
    with resumable_folder(target, run) as work:
        done, quantized = _done_in(work), dict[str, torch.Tensor]()
        total = sum(tensors[name].nbytes for name in scheme_of)
        with progress_in_bytes(total, "quantizing", shown=progress) as advance:
            for name, scheme in scheme_of.items():
                if name not in done:
                    done[name] = _stored(name.removesuffix("weight"), tensors[name].materialize(), scheme, work)
                    count_freed(tensors[name].nbytes)
                quantized |= done[name]
                advance(tensors[name].nbytes)
        others = {name: tensor for name, tensor in tensors.items() if name not in chosen}
        with replacing_folder(target) as folder:
            put_files(folder, companions)
            _note(folder, scheme_of, FORMS[form][1], left)
            save_checkpoint(dict(sorted(quantized.items())) | others, folder, max_shard_size)
    log.info("quantized %d layers of %s, and left %d as they are", len(chosen), source, len(left))
    return [name for name, is_output in left.items() if not is_output]


def _scheme(form: str, group_size: int) -> Any:
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    name, stored_as, has_groups = FORMS[form]
    scheme = preset_name_to_scheme(name, ["Linear"])
    if has_groups:
        scheme.weights = scheme.weights.model_copy(update={"group_size": group_size})
    scheme.input_activations, scheme.format = None, stored_as
    return scheme


def _layers(
    source: Checkpoint, tensors: Mapping[str, OffloadedTensor], group_size: int | None
) -> tuple[dict[str, int], dict[str, bool]]:
    """The weights to quantize, with their groups' size or 0; and layers to leave, with whether it is the output's."""
    model, config, _ = model_on_meta(source.path, stored=len(source.keys()))
    if getattr(config, "quantization_config", None) is not None:
        raise CheckpointError(f"{source.path} is quantized already: quantize the model that it was made from")
    head = model.get_output_embeddings()
    modules = {f"{name}.weight": module for name, module in model.named_modules() if hasattr(module, "weight")}
    chosen, left = {}, {}
    least = min(_LEAST_GROUP, group_size or 0)
    for name, tensor in tensors.items():
        if tensor.ndim == 3 and ".experts." in name:
            left[name] = False
        is_matrix = tensor.ndim == 2 and tensor.is_floating_point() and subclass_value(tensor) is None
        if not is_matrix or not name.endswith(".weight"):
            continue
        module = modules.get(name)
        is_linear = isinstance(module, nn.Linear) if module is not None else ".experts." in name
        size = math.gcd(tensor.shape[1], group_size) if group_size else 0
        if is_linear and module is not head and size >= least:
            chosen[name] = size
        elif is_linear or (module is not None and not isinstance(module, nn.Embedding)):
            left[name.removesuffix(".weight")] = module is head or not is_linear
    if not chosen:
        columns = f" whose columns divide into groups of {least} or more" if group_size else ""
        raise CheckpointError(f"{source.path} has no linear layers{columns}: nothing in it can be quantized")
    return chosen, left


def _done_in(work: Path) -> dict[str, dict[str, OffloadedTensor]]:
    done: dict[str, dict[str, OffloadedTensor]] = defaultdict(dict)
    with reading(work):
        has_files = any(work.glob("*.safetensors"))
    for name, piece in open_checkpoint(work).tensors().items() if has_files else ():
        done[f"{name.rpartition('.')[0]}.weight"][name] = piece
    return {name: pieces for name, pieces in done.items() if any(piece.endswith(_PACKED) for piece in pieces)}


def _stored(prefix: str, weight: torch.Tensor, scheme: Any, work: Path) -> dict[str, OffloadedTensor]:
    """The pieces of a weight; the packed one is written last, so that its presence means all are there."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    width = scheme.weights.group_size or weight.shape[1]
    groups = weight.unflatten(1, (-1, width))  # (rows, groups, columns per group)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    pieces = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme)
    return {
        f"{prefix}{key}": OffloadedTensor.from_original_tensor(piece, f"{prefix}{key}", work, exist_ok=True)
        for key, piece in sorted(pieces.items(), key=lambda item: f".{item[0]}" in _PACKED)
    }


def _note(folder: Path, schemes: Mapping[str, Any], stored_as: str, left: Mapping[str, bool]) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    by_size = {scheme.weights.group_size: scheme for scheme in schemes.values()}
    if len(by_size) > 1:
        for size, scheme in by_size.items():
            names = [name for name, one in schemes.items() if one.weights.group_size == size]
            scheme.targets = [name.removesuffix(".weight") for name in names]
    groups = {f"group_{number}": scheme for number, scheme in enumerate(by_size.values())}
    settings = QuantizationConfig(
        config_groups=groups, format=stored_as, quantization_status="compressed", ignore=list(left)
    )
    config = read_json(folder / "config.json", "a model's configuration")
    config["quantization_config"] = settings.model_dump(mode="json", exclude_none=True)
    put_file(folder / "config.json", (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode())
