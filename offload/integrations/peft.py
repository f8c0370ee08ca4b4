"""peft: merging an adapter into a base on disk.

Always true:
- peft itself merges, one layer after the other; a value on disk stays there, and its checkpoint is not written to
- after a failure the model is without adapters; if values may be merged it says so, and no adapter is merged into it
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.checkpoints.companions import companions_of, has_adapter, put_files, refuse_lone_adapter, tokenizer_files
from offload.checkpoints.conversion import companions_beside
from offload.errors import CheckpointError, MapError, OffloadError, UnsupportedOpError
from offload.integrations.adapters import layers_over
from offload.integrations.transformers import from_pretrained
from offload.models.slots import Slot
from offload.models.values import Replacing, values_of
from offload.storage.replacing import remove, replacing_folder, sync_whole, temporary_for
from offload.system.reasons import first_line
from offload.system.regular import absolute, is_folder, is_same_folder, text_of
from offload.tensor.saved import subclass_value
from offload.tensor.views import handle_of
from offload.tensor.wrapper import PathLike, is_offloaded
from offload.torch_api import version_of

_HALF = "_offload_half_merged"  # attribute of a model: the adapter whose merge failed


def merge_lora(model: nn.Module, adapter: PathLike, *, progress: bool = True) -> None:
    """Merge an adapter of peft into its base, layer by layer; values on disk stay on disk.

    The values are those of `PeftModel.from_pretrained(model, adapter).merge_and_unload()`, bit for bit, for every kind
    of adapter that peft merges: LoRA in all its forms, IA3, LoHa, OFT..., also with `modules_to_save`, trainable tokens
    and adapted experts. Only what peft needs for one layer, and the adapter, is in memory.

    A merge that was interrupted is repeated with the base loaded again, as a new model; its checkpoint is not written
    to. The command `offload merge-lora` writes a new checkpoint.

    Args:
        model: the base, on disk, in memory, or both; each value stays where it is.
        adapter: a folder that peft saved, or a name on the hub.
        progress: show a bar, on a terminal.

    Raises:
        CheckpointError: there is no adapter, or it belongs to another model.
        UnsupportedOpError: peft does not merge adapters of this kind, or into such a base, as a quantized one; the base
            has an adapter, or an earlier merge into it failed. Nothing is changed.
        MapError: peft failed to merge. The base has to be loaded again.
        MetaTensorError, WriteError

    Example:
        >>> from peft import LoraConfig, get_peft_model
        >>> base = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> config = LoraConfig(target_modules=["0"], init_lora_weights=False)
        >>> get_peft_model(nn.Sequential(*base), config).save_pretrained("adapter")
        >>> before = base[0].weight.clone()
        >>> merge_lora(base, "adapter")
        >>> torch.equal(before, base[0].weight)
        False
    """
    adapter = text_of(adapter)
    if _layers_of(model):
        raise UnsupportedOpError(
            f"this {type(model).__name__} has an adapter already: load its base by from_pretrained(..., adapter=False)"
        )
    if _HALF in vars(model):
        raise UnsupportedOpError(
            f"merging {vars(model)[_HALF]} into this {type(model).__name__} failed half-way, and its first layers "
            "would be merged twice: load the base again, as a new model"
        )
    values, places, kind = values_of(model), Replacing(model, "merged"), _kind_of(adapter)
    quantized = next((value.name for value in values if subclass_value(value.tensor) is not None), None)
    if quantized is not None:
        raise UnsupportedOpError(
            f"{quantized!r} is quantized, and takes no adapter: merge into the dense base, then offload.quantize_ it"
        )
    before, is_begun = _states_of(values), False
    grads = {name: tensor.requires_grad for name, tensor in model.named_parameters(remove_duplicate=False)}
    training = [(module, module.training) for module in model.modules()]
    try:
        tuner, is_begun = layers_over(model, adapter).base_model, True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from peft, that embeddings are untied: the documentation says so
            _merge_by(tuner, adapter, kind, shown=progress and sys.stderr.isatty())
        places.finish()
    except BaseException as error:
        is_begun = is_begun and not isinstance(error, UnsupportedOpError)
        if is_begun or before != _states_of(values):  # reading the adapter can change some, too, as of PiSSA
            vars(model)[_HALF] = adapter
        raise
    finally:
        _unload(model)
        for module, was in training:
            module.training = was
        for name, tensor in model.named_parameters(remove_duplicate=False):
            tensor.requires_grad_(grads.get(name, tensor.requires_grad))


def merge_checkpoint(
    source: PathLike,
    adapter: PathLike,
    target: PathLike,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a checkpoint of transformers anew, with an adapter of peft merged into it.

    `source` is a folder, or a GGUF file, which is decoded first; `target` may be there if it is empty. `dtype` is
    that the model computes and is merged in; None for the one it has, which is float32 for a packed GGUF file.
    Raises `ForeignFileError` if `target` is not empty; and as `merge_lora`.
    """
    folder, target = absolute(source), absolute(target)
    refuse_lone_adapter(folder)
    if has_adapter(folder) and not is_same_folder(folder, adapter):
        raise CheckpointError(
            f"{folder} holds an adapter of its own: merge that first (offload merge-lora {folder} {folder} MERGED), "
            "then the other into the result"
        )
    merged = temporary_for(target)  # values, until they are saved
    try:
        with replacing_folder(target) as partial_folder:
            model = from_pretrained(folder, dtype=dtype, offload_dir=merged, adapter=False)
            files = companions_beside(folder, dtype)
            if not is_folder(folder):  # a GGUF file has them within
                files = {**tokenizer_files(folder), **companions_of(model)}
            put_files(partial_folder, {name: data for name, data in files.items() if not name.startswith("adapter_")})
            merge_lora(model, adapter)
            model.save_pretrained(partial_folder, max_shard_size=max_shard_size)
            sync_whole(partial_folder)
    finally:
        remove(merged)


def _kind_of(adapter: str) -> str:
    """The adapter's peft method, if it can be merged; does not touch the model."""
    if "/" not in adapter and not is_folder(Path(adapter)):  # every adapter on the hub has an organization
        raise CheckpointError(f"there is no folder {adapter}: give one of peft, or organization/name on the hub")
    from peft import PeftConfig
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    try:
        config = PeftConfig.from_pretrained(adapter)
    except Exception as error:  # peft can raise anything for settings that it does not expect
        raise CheckpointError(
            f"{adapter} should be a folder with an adapter_config.json, as peft saves an adapter, or a name on the hub "
            f"({first_line(error)})"
        ) from error
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if not hasattr(PEFT_TYPE_TO_TUNER_MAPPING.get(config.peft_type), "merge_and_unload"):
        raise _unmergeable(adapter, kind, "peft does not support it")
    return kind


def _unmergeable(adapter: str, kind: str, why: str) -> UnsupportedOpError:
    said = f"an adapter of kind {kind} can't be merged into this base ({why})"
    return UnsupportedOpError(f"{adapter}: {said}: run the model with it unmerged")


def _states_of(values: list[Slot]) -> list[object]:
    tensors = [value.tensor for value in values]
    return [(handle_of(one).file.identity if is_offloaded(one) else None, version_of(one)) for one in tensors]


def _merge_by(tuner: Any, adapter: str, kind: str, *, shown: bool) -> None:
    count = len(_layers_of(tuner))
    try:
        tuner.merge_and_unload(progressbar=shown)
    except Exception as error:  # peft's layers can raise anything
        if isinstance(error, NotImplementedError) and len(_layers_of(tuner)) == count:
            raise _unmergeable(adapter, kind, first_line(error) or "peft does not support it") from error
        if isinstance(error, OffloadError) and not isinstance(error, UnsupportedOpError):
            raise
        said = f"{type(error).__name__}: {error}"
        raise MapError(f"peft failed to merge {adapter}, of kind {kind} ({said}): load the base again") from error


def _layers_of(model: nn.Module) -> dict[str, Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


def _unload(model: nn.Module) -> None:
    """Put the base's own modules back wherever peft's are left."""
    layers = _layers_of(model)
    wrapped = {name: module for name, module in model.named_modules() if hasattr(module, "original_module")}
    for name, module in {**layers, **wrapped}.items():
        parent_name, _, attribute = name.rpartition(".")
        try:
            parent = model.get_submodule(parent_name)
        except AttributeError:  # it was inside another one
            continue
        own = module.original_module if name in wrapped else module.get_base_layer()
        setattr(parent, attribute, own)
    if hasattr(model, "peft_config"):
        del model.peft_config
