"""transformers: pretrained models whose weights stay on disk.

Always true:
- transformers' own loader names, renames, ties and initializes; it is given tensors on disk
- a weight stored in the requested dtype is referenced in its checkpoint; others are recipes over it
"""

from __future__ import annotations

import copy
import logging
import os
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch

from offload.annotations import Config, Kwargs, Pretrained, Settings
from offload.budget import Amount, MaxMemory, pool_for
from offload.checkpoints.checkpoint import Checkpoint, open_checkpoint
from offload.checkpoints.companions import class_of, has_adapter, quantization_of, refuse_more_layers
from offload.checkpoints.forms.decoding import method_of
from offload.checkpoints.forms.formats import Form, values_in
from offload.checkpoints.forms.gguf import config_of, usual_dtype
from offload.errors import ArgumentTypeError, CheckpointError, OffloadError
from offload.integrations.adapters import load_adapter
from offload.integrations.hub import base_folder, folder_of
from offload.memory import return_freed
from offload.models.device_map import AUTOMATIC, ON_DISK, DeviceMap, infer_device_map
from offload.models.experts import NAME, prefer_experts, register_experts
from offload.models.loader import finish_loading, refuse_other_names, refuse_to_store_nowhere, report_of
from offload.models.pretrained import filled, note_form, waiting, without_quantization
from offload.models.slots import tensor_slots
from offload.storage.state_file import read_json
from offload.system.modes import no_inference
from offload.system.reasons import first_line, reading, some
from offload.system.regular import is_folder
from offload.tensor.arguments import floating_dtype
from offload.torch_api import buffers_of, unsaved_buffers_of
from offload.transformers_api import check_attributes

log = logging.getLogger("offload.integrations")

_ELSEWHERE = {  # options of transformers, and what is given here
    "torch_dtype": "give dtype",
    "offload_folder": "give offload_dir",
    "subfolder": "give that folder",
    "variant": "give a folder with that variant alone",
    "state_dict": "fill an empty model with offload.load_checkpoint_and_dispatch",
    "offload_state_dict": "leave it out",
}
_QUANTIZING = ("quantization_config", "load_in_8bit", "load_in_4bit")
_OF_RANKS = ("tp_plan", "tp_size", "distributed_config", "device_mesh")
_HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download")


def init_empty_weights(include_buffers: bool = False) -> AbstractContextManager[Any]:
    """accelerate's context: a model that is built inside has parameters on the meta device, which take no memory.

    Args:
        include_buffers: whether buffers are on the meta device, too.

    Returns:
        A context manager.

    Example:
        >>> with init_empty_weights():
        ...     model = torch.nn.Linear(10_000, 10_000)
        >>> model.weight.device
        device(type='meta')
    """
    from accelerate import init_empty_weights as context

    entered: AbstractContextManager[Any] = context(include_buffers=include_buffers)
    return entered


def from_pretrained(
    name_or_path: str | os.PathLike[str],
    model_class: Any = None,
    device_map: DeviceMap = ON_DISK,
    *,
    gguf_file: str | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    config: Config | None = None,
    offload_buffers: bool = False,
    max_memory: MaxMemory = None,
    read_ahead: Amount | bool | None = None,
    output_loading_info: bool = False,
    store: bool = False,
    exact: bool = False,
    adapter: bool = True,
    trust_remote_code: bool = False,
    **options: object,
) -> Any:
    """A pretrained transformers model whose weights are on disk, or where the device map says.

    Args:
        name_or_path: a folder with a checkpoint (see `open_checkpoint`), a GGUF file, or a model on the hub.
        model_class: a model class of transformers, or one of its `Auto` classes. None for the class that the
            configuration names first in its `architectures`, which the weights were saved from, or
            `AutoModelForCausalLM` if it names none.
        device_map: see `offload.load_checkpoint_and_dispatch`.
        gguf_file: the name of the GGUF file in that folder, or in that model's on the hub, whose weights are taken.
        offload_dir: where weights go that are stored or later written to; None for a private folder.
        dtype: of the floating-point weights; None or "auto" for the one in the model's configuration. What a
            bitsandbytes checkpoint has not packed, or an FP8 one before transformers 5.24, keeps the dtype that it is
            stored in, as in transformers.
        config: a configuration to use in place of the checkpoint's.
        offload_buffers: whether buffers are on disk too.
        max_memory, read_ahead: see `offload.load_checkpoint_and_dispatch`.
        output_loading_info: also return transformers' report, which has `LoadReport.forms` too.
        store: see `offload.load_checkpoint_and_dispatch`.
        exact: whether products with packed weights, and with experts, are plain transformers' with the dense weights,
            bit for bit: see `offload.exact`.
        adapter: whether an adapter of peft in the folder is loaded with the model, unmerged and frozen, as transformers
            does, which needs peft. A folder with an adapter alone stands for the model that the adapter names.
        trust_remote_code: whether code that comes with the model may run, which can do whatever you can.
        options: for the hub (revision, token, cache_dir, local_files_only), for the configuration (num_labels...), and
            for the class's own `from_pretrained`: there a `distributed_config`, or `tp_plan="auto"`, has each rank of
            torch.distributed have its share, on disk as all else; an `experts_implementation` of transformers computes
            experts as it does in memory. By default, those on disk are multiplied where they lie, all of a layer in one
            call, on the CPU: faster, and with other last bits.

    Returns:
        The model, in evaluation mode; with `output_loading_info` a pair of it and a dictionary.

    Raises:
        CheckpointError: there is no checkpoint, it is of another model, weights would have to be quantized, the adapter
            can't be loaded, or the model has code of its own, and `trust_remote_code` is False.
        TypeError: an option of transformers that has another name here, or no meaning.
        ModuleNotFoundError, MissingFileError, CorruptFileError, ReadError, DeviceMapError

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
        >>> LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained("llama")
        >>> model = from_pretrained("llama")
        >>> model(torch.tensor([[1, 2]])).logits.shape
        torch.Size([1, 2, 9])
    """
    experts = options.get("experts_implementation") or getattr(config, "_experts_implementation", None)
    if exact and experts == NAME:
        options["experts_implementation"] = None
    _refuse_options(options)
    register_experts()
    refuse_to_store_nowhere(offload_dir, store=store)
    pool = pool_for(None if device_map in AUTOMATIC else max_memory, read_ahead)
    hub_options = {key: options.pop(key) for key in _HUB_OPTIONS if key in options}
    folder = folder_of(name_or_path, gguf_file, **hub_options)
    beside = folder if gguf_file is None else folder.parent
    if (model_folder := base_folder(folder, **hub_options)) != folder:
        name_or_path = folder = model_folder
    of_ranks = {key: options.pop(key) for key in _OF_RANKS if options.get(key) is not None}
    source = open_checkpoint(folder)
    empty, config, options = model_on_meta(
        folder, model_class, config, stored=len(source.keys()), trust_remote_code=trust_remote_code, **options
    )
    options["trust_remote_code"] = trust_remote_code  # else transformers asks on standard input
    options.update(of_ranks)
    source.refuse_own_folder(offload_dir)
    is_asked, dtype = dtype not in (None, "auto"), _requested_dtype(dtype, empty.config, source)
    values = values_in(source, quantization_of(empty.config), offload_dir, model=empty, dtype=dtype)
    if values.form is Form.LEFT:
        if has_adapter(folder):  # transformers would load it, before values are on disk
            raise CheckpointError(
                f"{folder} holds an adapter beside weights that transformers loads itself: move adapter_* to a folder "
                "of their own, load the model, and the adapter with peft.PeftModel.from_pretrained(model, that_folder)"
            )
        log.info("%s is quantized: its values are loaded by transformers, and then placed", folder)
        with no_inference(), torch.device("cpu"):  # as in `filled`
            model, info = type(empty).from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    else:
        config = empty.config
        if values.form is Form.DECODED:
            return_freed()
            log.info("%s is quantized (%s): its weights are recipes", folder, method_of(values.quantization or {}))
            config = without_quantization(config)
        tensors = values.tensors if is_asked else waiting(values)
        model, info = filled(type(empty), config, source.path, tensors, dtype, **options)
    _fill_unsaved(model, dtype)
    if values.form in (Form.PLAIN, Form.MAPPED):
        refuse_other_names(source, ((slot.names, slot.tensor) for slot in tensor_slots(model)), offload_dir)
    report = report_of(info)
    names = {name for slot in tensor_slots(model) for name in slot.keys}
    if names and names <= set(report.missing_keys):
        raise CheckpointError(
            f"{source.path} belongs to another model than {type(model).__name__}: give its model_class= ({report})"
        )
    model.name_or_path = model.config.name_or_path = str(name_or_path)
    complete = infer_device_map(model, device_map, max_memory=max_memory, offload_buffers=offload_buffers)
    how: Kwargs = {"offload_dir": offload_dir, "offload_buffers": offload_buffers, "store": store, "exact": exact}
    skipped = getattr(model, "_skip_keys_device_placement", None)
    report = finish_loading(model, complete, report, pool=pool, skip_keys=skipped, **how)
    note_form(model, values)
    if not exact and experts is None:
        prefer_experts(model)
    if adapter and has_adapter(beside):
        load_adapter(model, str(beside))
    return (model, {**info, "forms": report.forms}) if output_loading_info else model


def _fill_unsaved(model: Pretrained, dtype: torch.dtype) -> None:
    """The buffers that are in no checkpoint, of a class that is not from transformers, as the class makes them.

    transformers has `_init_weights` fill them, which other code does not: they would be what was in memory before.
    Raises `CheckpointError` if the class can't make them without the other values.
    """
    unsaved = [(name, key) for name, module in model.named_modules() for key in sorted(unsaved_buffers_of(module))]
    if not unsaved or type(model).__module__.startswith("transformers."):
        return
    try:
        with init_empty_weights(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
            filled = model.__class__._from_config(  # type: ignore[attr-defined]
                copy.deepcopy(model.config), dtype=dtype
            )
        for name, key in unsaved:
            buffers_of(model.get_submodule(name))[key] = buffers_of(filled.get_submodule(name))[key]
    except Exception as error:  # code of others can raise anything
        names = some([".".join(filter(None, place)) for place in unsaved])
        raise CheckpointError(
            f"buffers of {type(model).__name__} are in no checkpoint, and its code can't make them "
            f"({first_line(error)}): {names}. Make the model, and fill it with offload.load_checkpoint_and_dispatch"
        ) from error


def model_on_meta(
    folder: Path,
    model_class: Any = None,
    config: Config | None = None,
    *,
    stored: int,
    trust_remote_code: bool = False,
    **options: object,
) -> tuple[Pretrained, Config, Kwargs]:
    """The model in a folder or GGUF file without values, its configuration, and the options not used for it."""
    import transformers

    check_attributes()
    is_gguf = not is_folder(folder)
    try:
        if is_gguf and config is None:
            config, options = config_of(folder, **options)
        elif not isinstance(config, transformers.PreTrainedConfig):
            if config is None:
                refuse_more_layers(_as_it_is(folder / "config.json"), stored, folder)  # some classes list their layers
            own: Any = getattr(model_class, "config_class", None)  # which need not be in transformers' table
            is_known = own is None or own.model_type in transformers.CONFIG_MAPPING
            config, options = (transformers.AutoConfig if is_known else own).from_pretrained(
                config or folder, return_unused_kwargs=True, trust_remote_code=trust_remote_code, **options
            )
        refuse_more_layers(config.to_dict(), stored, folder)
        empty = _empty_model(model_class or class_of(config), config, trust_remote_code=trust_remote_code)
        return empty, config, {**_generation_config(type(empty), folder), **options}
    except OffloadError:
        raise
    except Exception as error:  # transformers can raise anything for a damaged configuration or another kind of model
        if not trust_remote_code and "trust_remote_code=True" in str(error):
            raise CheckpointError(
                f"{folder} has code of its own, which does not run unless you ask for it. Read it first; then pass "
                "trust_remote_code=True, or --trust-remote-code on the command line"
            ) from error
        reason = f"{first_line(error).rstrip('.')}. If it needs another class, give it in Python as model_class="
        raise CheckpointError(f"transformers can't make a model from {folder}: {reason}") from error


def _as_it_is(path: Path) -> Settings:
    """A configuration before transformers sees it; empty if it is damaged, which transformers says."""
    with suppress(OffloadError):
        if isinstance(settings := read_json(path, "a model's configuration"), dict):
            return settings
    return {}


def writes_text(model: Any) -> bool:
    """Whether a model of transformers, or a class, continues text by generating text."""
    return bool(model.can_generate()) and model.main_input_name == "input_ids" and "text" in model.output_modalities


def _refuse_options(options: Kwargs) -> None:
    for name in _QUANTIZING:
        if options.pop(name, None):
            raise CheckpointError(
                f"{name}: weights are not quantized while they are loaded, and packed ones are used as they are. Load "
                "the model, then quantize it on disk with offload.quantize_(model, config) and a configuration of "
                "torchao, such as Int8WeightOnlyConfig()"
            )
    for name in _ELSEWHERE.keys() & options.keys():
        raise ArgumentTypeError(f"offload.from_pretrained does not take {name!r}: {_ELSEWHERE[name]}")


def _empty_model(model_class: Any, config: Config, *, trust_remote_code: bool) -> Pretrained:
    if not isinstance(model_class, type) or not hasattr(model_class, "from_pretrained"):
        raise ArgumentTypeError(f"model_class should be a model class of transformers, or an Auto one: {model_class!r}")
    with torch.device("meta"):
        config = copy.deepcopy(config)
        from_config = getattr(model_class, "from_config", None)  # of an Auto class
        if from_config is None:
            empty: Pretrained = model_class(config)
        else:
            empty = from_config(config, trust_remote_code=trust_remote_code)
    return empty


def _requested_dtype(dtype: torch.dtype | str | None, config: Config, source: Checkpoint) -> torch.dtype:
    if dtype is not None and dtype != "auto":
        return floating_dtype(dtype)
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    if not is_folder(source.path):
        return usual_dtype(source)
    layouts = (value.layout for value in source.values())
    return next((layout.dtype for layout in layouts if layout and layout.dtype.is_floating_point), torch.float32)


def _generation_config(model_class: Any, folder: Path) -> Kwargs:
    with reading(folder):
        is_one = (folder / "generation_config.json").is_file()
    if not is_one or not model_class.can_generate():
        return {}
    from transformers import GenerationConfig

    kind = getattr(model_class, "generation_config_class", GenerationConfig)  # older versions have one for all
    return {"generation_config": kind.from_pretrained(folder)}
