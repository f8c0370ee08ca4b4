"""The keys of a `quantization_config`, by method: which are followed, which change no weight, and which are refused.

Always true:
- a key whose value says nothing (None, False, empty) is ignored, as its absence is
- every other key is in a table, or the checkpoint is refused by that key's name: it may change what the weights are

Source: the configuration classes of transformers 5.23 and compressed-tensors 0.20; AutoGPTQ, GPTQModel, AutoAWQ and
auto-round, which write further keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import Any, TypeAlias

from offload.annotations import Settings
from offload.errors import CheckpointError
from offload.storage.reasons import short


class Use(Enum):
    """What is done about a key."""

    READ = auto()  # followed by the decoder
    STORED = auto()  # the pieces themselves say it: their names, dtypes, shapes
    HARMLESS = auto()  # how weights were found, activations, speed, notes: no weight depends on it
    OVERRIDES = auto()  # settings of some layers, which must not be packed in other bits than the rest
    REFUSED = auto()  # not carried out


Keys: TypeAlias = (
    "Mapping[str, Use | tuple[object, ...]]"  # a tuple has the values that are followed; text in lowercase
)
_ALL: Keys = {"quant_method": Use.READ, "modules_to_not_convert": Use.STORED, "dequantize": Use.HARMLESS}
_FP8: Keys = {
    **_ALL,
    **dict.fromkeys(("fmt", "ignored_layers", "modules_to_convert"), Use.STORED),
    "weight_block_size": Use.READ,
    "activation_scheme": Use.HARMLESS,
    "expert_dtype": ("fp8", "fp4"),
    "scale_fmt": ("float", "ue8m0"),
}
_CALIBRATION = (  # keys of GPTQ and AWQ
    *("act_group_aware", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment"),
    *("damp_percent", "dataset", "desc_act", "model_seqlen", "module_name_preceding_first_block", "mse"),
    *("modules_in_block_to_quantize", "pad_token_id", "static_groups", "tokenizer", "true_sequential"),
)
_SPEED = (
    *("backend", "disable_exllama", "do_fuse", "exllama_config", "fuse_max_seq_len", "max_input_length"),
    *("modules_to_fuse", "use_cuda_fp16", "use_exllama"),
)
_NOTES = ("meta", "model_file_base_name", "model_name_or_path", "autoround_version")
_TUNING = (  # of auto-round
    *("act_bits", "act_data_type", "act_dynamic", "act_group_size", "act_sym", "amp", "dynamic_max_gap"),
    *("enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input", "gradient_accumulate_steps", "iters"),
    *("low_gpu_mem_usage", "lr", "lr_scheduler", "minmax_lr", "not_use_best_mse", "nsamples", "seqlen", "train_bs"),
)
_INTEGERS: Keys = {
    **_ALL,
    **dict.fromkeys((*_CALIBRATION, *_SPEED, *_NOTES, *_TUNING), Use.HARMLESS),
    **dict.fromkeys(("dynamic", "extra_config"), Use.OVERRIDES),
    **dict.fromkeys(("is_marlin_format", "rotation"), Use.REFUSED),
    **dict.fromkeys(("lm_head", "scale_dtype", "sym"), Use.STORED),
    "data_type": ("int",),
    "group_size": Use.READ,
    "pack_dtype": ("int32", "torch.int32"),
}
_GPTQ: Keys = {
    **_INTEGERS,
    **dict.fromkeys(("checkpoint_format", "format"), ("gptq", "gptq_v2")),
    "bits": (2, 4, 8),
    "packing_format": ("auto_round:auto_gptq",),
}
_AWQ: Keys = {
    **_INTEGERS,
    **dict.fromkeys(("checkpoint_format", "format", "version"), ("gemm",)),
    "bits": (4,),
    "packing_format": ("auto_round:auto_awq",),
    "zero_point": Use.STORED,
}
_BITSANDBYTES: Keys = {
    **_ALL,
    **dict.fromkeys(("_load_in_4bit", "_load_in_8bit", "load_in_4bit", "load_in_8bit"), Use.READ),
    **dict.fromkeys(("bnb_4bit_quant_storage", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"), Use.STORED),
    **dict.fromkeys(("llm_int8_has_fp16_weight", "llm_int8_skip_modules"), Use.STORED),
    **dict.fromkeys(("llm_int8_enable_fp32_cpu_offload", "llm_int8_threshold"), Use.HARMLESS),
    "bnb_4bit_compute_dtype": Use.HARMLESS,
}
_COMPRESSED: Keys = {
    **_ALL,
    **dict.fromkeys(("config_groups", "format", "quantization_config", "sparsity_config"), Use.READ),
    **dict.fromkeys(("global_compression_ratio", "kv_cache_scheme", "quantization_status"), Use.HARMLESS),
    **dict.fromkeys(("run_compressed", "use_optimized_inference", "version"), Use.HARMLESS),
    **dict.fromkeys(("moe_sparsity_config", "transform_config"), Use.REFUSED),
    "ignore": Use.STORED,
}
GROUP: Keys = {  # of compressed-tensors
    **dict.fromkeys(("format", "targets", "weights"), Use.READ),
    **dict.fromkeys(("input_activations", "output_activations"), Use.HARMLESS),
}
WEIGHTS: Keys = {  # of such a group
    **dict.fromkeys(("block_structure", "group_size", "num_bits", "strategy", "symmetric"), Use.READ),
    **dict.fromkeys(("observer", "observer_kwargs"), Use.HARMLESS),
    **dict.fromkeys(("scale_dtype", "zp_dtype"), Use.STORED),
    "actorder": ("weight", "static"),
    "dynamic": Use.REFUSED,
    "type": ("int", "float"),
}
KEYS: dict[str, Keys] = {
    "awq": _AWQ,
    "bitsandbytes": _BITSANDBYTES,
    "compressed-tensors": _COMPRESSED,
    "fbgemm_fp8": {**_ALL, "activation_scale_ub": Use.HARMLESS},
    "fp8": _FP8,
    "gptq": _GPTQ,
    "mxfp4": _ALL,
    "mxfp8": _FP8,
}


def refuse_other_settings(quantization: Settings, method: str, path: object) -> None:
    """Refuse settings that may say something of the weights that is not carried out.

    Args:
        quantization: the `quantization_config` of a model.
        method: one of `KEYS`.
        path: of a file of the checkpoint, for the message.

    Raises:
        CheckpointError: names the key.
    """
    for within, settings, keys in _parts(quantization, method):
        for key, value in settings.items():
            why = None if _says_nothing(value) else _objection(value, keys.get(key), settings)
            if why is not None:
                setting = f"{within + key!r}: {short(repr(value))}"
                raise CheckpointError(f"the quantization_config of the checkpoint of {path} has {setting}, {why}")


def _parts(quantization: Settings, method: str) -> Iterator[tuple[str, Settings, Keys]]:
    """Settings with their table, and where they are."""
    yield "", quantization, KEYS[method]
    if method != "compressed-tensors":
        return
    inner = quantization.get("quantization_config")
    if isinstance(inner, Mapping):
        yield "quantization_config.", inner, _COMPRESSED
    groups = (inner if isinstance(inner, Mapping) else quantization).get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping):
            yield f"config_groups.{name}.", group, GROUP
            if isinstance(weights := group.get("weights"), Mapping):
                yield f"config_groups.{name}.weights.", weights, WEIGHTS


def _says_nothing(value: object) -> bool:
    return value is None or value is False or (isinstance(value, str | list | tuple | dict) and not value)


def _objection(value: object, use: Use | tuple[object, ...] | None, settings: Settings) -> str | None:
    """Why the value can't be followed; None if it can."""
    if isinstance(use, tuple):
        plain = getattr(value, "value", value)
        plain = plain.lower() if isinstance(plain, str) else plain
        if not isinstance(plain, list | dict | set) and plain in use:
            return None
        return f"and weights are decoded with {' or '.join(map(str, use))}. {_WAY_OUT}"
    if use is Use.REFUSED or (use is Use.OVERRIDES and _has_other_bits(value, settings.get("bits"))):
        return f"which is not carried out here. {_WAY_OUT}"
    if use is None:
        return f"which is not known here, and may change what the weights are. {_WAY_OUT} {_WAY_ON}"
    return None


def _has_other_bits(layers: Any, bits: object) -> bool:
    """Whether some of these layers are packed, in other bits than the rest."""
    each = list(layers.values()) if isinstance(layers, Mapping) else [layers]
    if not all(one is None or isinstance(one, Mapping) for one in each):
        return True
    own = [one["bits"] for one in each if one and one.get("bits") is not None]
    return any(one != bits and not (isinstance(one, int) and one >= _NOT_PACKED) for one in own)


_NOT_PACKED = 16  # bits of a layer that is left as it is
_WAY_OUT = "Get the checkpoint in another form, or dequantize it with the package that packed it, and save that."
_WAY_ON = "If no weight depends on it, remove it from config.json."
