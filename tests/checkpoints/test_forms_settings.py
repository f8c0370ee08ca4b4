"""Every key of a `quantization_config` is followed, or changes no weight, or is refused by name."""

from __future__ import annotations

import inspect
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.checkpoints.forms.decoding import _MODULES
from offload.checkpoints.forms.settings import GROUP, KEYS, WEIGHTS, Use, refuse_other_settings
from offload.errors import CheckpointError
from tests.checkpoints.forms import FORMS
from tests.checkpoints.test_forms_raw import empty_model, say

pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")

CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "awq": ("AwqConfig", {}),
    "bitsandbytes": ("BitsAndBytesConfig", {"load_in_8bit": True}),
    "compressed-tensors": ("CompressedTensorsConfig", {}),
    "fbgemm_fp8": ("FbgemmFp8Config", {}),
    "fp8": ("FineGrainedFP8Config", {}),
    "gptq": ("GPTQConfig", {"bits": 4}),
    "mxfp4": ("Mxfp4Config", {}),
    "mxfp8": ("FineGrainedFP8Config", {"quant_method": "mxfp8"}),
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "DeepSeek": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    "DeepSeek, exponents": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "Mistral": {
        "activation_scheme": "static",
        "dequantize": False,
        "quant_method": "fp8",
        "weight_block_size": None,
        "modules_to_not_convert": ["model.vision_tower", "lm_head"],
    },
    "MiniMax": {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "ignored_layers": ["gate", "lm_head"],
    },
    "Llama, FBGEMM": {"activation_scale_ub": 1200.0, "modules_to_not_convert": [], "quant_method": "fbgemm_fp8"},
    "gpt-oss": {"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"], "quant_method": "mxfp4"},
    "AutoGPTQ": {
        "bits": 4,
        "group_size": 128,
        "damp_percent": 0.1,
        "desc_act": True,
        "static_groups": False,
        "sym": True,
        "true_sequential": True,
        "model_name_or_path": None,
        "model_file_base_name": "model",
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "is_marlin_format": False,
    },
    "GPTQModel": {
        "bits": 4,
        "dynamic": {"-:.*gate$": {}},
        "group_size": 128,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "meta": {"quantizer": ["gptqmodel:2.2.0"], "uri": "https://github.com", "damp_percent": 0.05, "mse": 0.0},
    },
    "auto-round": {
        "amp": True,
        "autoround_version": "0.4",
        "batch_size": 8,
        "bits": 4,
        "data_type": "int",
        "desc_act": False,
        "enable_minmax_tuning": True,
        "enable_quanted_input": True,
        "gradient_accumulate_steps": 1,
        "iters": 200,
        "group_size": 128,
        "lr": 0.005,
        "minmax_lr": 0.005,
        "low_gpu_mem_usage": True,
        "nsamples": 128,
        "quant_method": "gptq",
        "scale_dtype": "torch.float16",
        "seqlen": 2048,
        "sym": True,
        "damp_percent": 0.01,
        "true_sequential": False,
        "extra_config": {"lm_head": {"bits": 16}},
    },
    "AutoAWQ": {
        "bits": 4,
        "group_size": 128,
        "modules_to_not_convert": ["visual"],
        "quant_method": "awq",
        "version": "GEMM",
        "zero_point": True,
    },
    "bitsandbytes": {
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": ["lm_head"],
        "load_in_4bit": True,
        "load_in_8bit": False,
        "quant_method": "bitsandbytes",
    },
    "bitsandbytes, unnamed": {"load_in_8bit": True},
    "llm-compressor": {
        "config_groups": {
            "group_0": {
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": "weight",
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": 128,
                    "num_bits": 4,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "strategy": "group",
                    "symmetric": True,
                    "type": "int",
                },
            }
        },
        "format": "pack-quantized",
        "global_compression_ratio": 1.89,
        "ignore": ["lm_head"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.3",
    },
}


def test_every_method_that_is_decoded_has_a_table() -> None:
    assert set(_MODULES) == set(KEYS)
    assert set(CLASSES) == set(KEYS)


@pytest.mark.parametrize("method", CLASSES)
def test_every_key_that_transformers_writes_or_takes_is_in_the_table(method: str) -> None:
    from transformers.utils import quantization_config

    name, options = CLASSES[method]
    cls = getattr(quantization_config, name)
    made = cls(**options)
    taken = inspect.signature(cls.__init__).parameters.keys() - {"self", "kwargs"}

    assert set() == (taken | vars(made).keys() | made.to_dict().keys()) - KEYS[method].keys()


def test_every_key_of_compressed_tensors_is_in_the_tables() -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    base = import_module("compressed_tensors.base")  # the package has another attribute of that name

    top = {value for name, value in vars(base).items() if name.endswith("_NAME")}

    assert "transform_config" in top
    assert set() == top - KEYS["compressed-tensors"].keys()
    assert set() == quantization.QuantizationConfig.model_fields.keys() - KEYS["compressed-tensors"].keys()
    assert GROUP.keys() == quantization.QuantizationScheme.model_fields.keys()
    assert WEIGHTS.keys() == quantization.QuantizationArgs.model_fields.keys()


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_settings_of_published_models_are_accepted(model: str) -> None:
    settings = PUBLISHED[model]

    refuse_other_settings(settings, settings.get("quant_method", "bitsandbytes"), "model.safetensors")


HADAMARD = {"u": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}}
REFUSED: dict[str, tuple[str, tuple[str, ...], Any]] = {
    "rotated weights": ("ct-w4a16", ("transform_config",), {"config_groups": HADAMARD}),
    "experts left out": ("ct-w4a16", ("moe_sparsity_config",), {"sparsity_structure": "2:4"}),
    "columns in another order": ("ct-w4a16", ("config_groups", "group_0", "weights", "actorder"), "group"),
    "weights quantized at each use": ("ct-w4a16", ("config_groups", "group_0", "weights", "dynamic"), True),
    "another kind of number": ("ct-w4a16", ("config_groups", "group_0", "weights", "type"), "posit"),
    "a new key of a group": ("ct-w4a16", ("config_groups", "group_0", "rounding"), "stochastic"),
    "a new key of its weights": ("ct-w4a16", ("config_groups", "group_0", "weights", "rounding"), "stochastic"),
    "a new key, compressed-tensors": ("ct-w8a8", ("rotation",), "hadamard"),
    "a new key, FP8": ("fp8-llama", ("weight_permutation",), [1, 0]),
    "another format of scales": ("fp8-llama", ("scale_fmt",), "e3m4"),
    "a new key, GPTQ": ("gptq", ("smooth",), {"alpha": 0.5}),
    "rotated GPTQ": ("gptq", ("rotation",), "hadamard"),
    "some layers in 8 bits, GPTQModel": ("gptq", ("dynamic",), {"+:.*down_proj.*": {"bits": 8}}),
    "some layers in 8 bits, auto-round": ("gptq", ("extra_config",), {"model.layers.0.mlp.up_proj": {"bits": 8}}),
    "a kernel's form": ("gptq", ("checkpoint_format",), "marlin"),
    "a kernel's form, by the new name": ("gptq", ("format",), "bitblas"),
    "3 bits": ("gptq", ("bits",), 3),
    "words of 16 bits": ("gptq", ("pack_dtype",), "int16"),
    "AWQ for another kernel": ("awq", ("version",), "gemv"),
    "AWQ for another kernel, by the new name": ("awq", ("format",), "gemv_fast"),
    "a new key, bitsandbytes": ("bnb-nf4", ("bnb_4bit_rotation",), "random"),
    "a new key, MXFP4": ("mxfp4-gpt_oss", ("swizzle",), 4),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_are_not_carried_out_are_refused_by_name(case: str, tmp_path: Path) -> None:
    form, way, value = REFUSED[case]
    FORMS[form].write(tmp_path)
    set_in(tmp_path, way, value)

    with pytest.raises(CheckpointError, match=f"{value if isinstance(value, str) else way[-1]}") as raised:
        offload.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError):
        offload.load_checkpoint_and_dispatch(empty_model(tmp_path), tmp_path)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize("form", ["fp8-llama", "ct-w4a16", "gptq", "awq", "bnb-nf4", "mxfp4-gpt_oss"])
def test_keys_whose_values_say_nothing_are_ignored(form: str, tmp_path: Path) -> None:
    FORMS[form].write(tmp_path)
    for number, value in enumerate([None, False, {}, [], ""]):
        set_in(tmp_path, (f"to_come_{number}",), value)

    offload.from_pretrained(tmp_path)


def set_in(folder: Path, way: tuple[str, ...], value: Any) -> None:
    """Change a setting."""
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    within = quantization
    for key in way[:-1]:
        within = within[key]
    within[way[-1]] = value
    say(folder, quantization)


OTHERS: dict[str, dict[tuple[str, ...], Any]] = {
    "fp8-llama": {("weight_block_size",): [64, 64], ("quant_method",): "gptq"},
    "gptq": {
        ("bits",): 8,
        ("group_size",): 64,
        ("checkpoint_format",): "gptq_v2",
        ("quant_method",): "awq",
    },
    "awq": {("bits",): 8, ("group_size",): 64, ("quant_method",): "gptq"},
    "bnb-nf4": {("load_in_8bit",): True, ("_load_in_8bit",): True, ("quant_method",): "gptq"},
    "bnb-int8": {("load_in_4bit",): True, ("_load_in_4bit",): True},
    "ct-w4a16": {
        ("quant_method",): "gptq",
        ("config_groups",): {},
        ("config_groups", "group_0", "format"): "nvfp4-pack-quantized",
        ("config_groups", "group_0", "weights"): None,
        ("config_groups", "group_0", "weights", "num_bits"): 8,
        ("config_groups", "group_0", "weights", "group_size"): 64,
        ("config_groups", "group_0", "weights", "strategy"): "channel",
        ("config_groups", "group_0", "weights", "symmetric"): False,
        ("sparsity_config",): {"format": "sparse-24-bitmask"},
    },
    "ct-fp8-block": {("config_groups", "group_0", "weights", "block_structure"): [64, 64]},
}


@pytest.mark.parametrize(("form", "way"), [(form, way) for form, ways in OTHERS.items() for way in ways])
def test_another_value_of_a_key_that_is_followed_gives_other_weights_or_an_error(
    form: str, way: tuple[str, ...], tmp_path: Path
) -> None:
    FORMS[form].write(tmp_path)
    right = weights(tmp_path)
    set_in(tmp_path, way, OTHERS[form][way])

    try:
        found = weights(tmp_path)
    except CheckpointError:
        return
    assert any(not torch.equal(right[name], found[name]) for name in right)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: offload.materialize(value) for name, value in offload.from_pretrained(folder).state_dict().items()}


def test_every_key_that_is_said_to_be_followed_is_tried() -> None:
    tried = {way[-1] for ways in OTHERS.values() for way in ways}
    followed = {key for keys in (*KEYS.values(), GROUP, WEIGHTS) for key, use in keys.items() if use is Use.READ}

    assert set() == followed - tried - {"quantization_config", "targets"}


def test_a_layer_is_decoded_by_the_group_that_names_it_or_not_at_all(tmp_path: Path) -> None:
    FORMS["ct-w4a16"].write(tmp_path)
    right = weights(tmp_path)
    groups = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["config_groups"]
    wide = {**groups["group_0"], "weights": {**groups["group_0"]["weights"], "num_bits": 8}}
    attention, others = ["re:.*self_attn.*"], ["re:.*mlp.*"]
    in_groups = {"a": {**groups["group_0"], "targets": attention}, "b": {**groups["group_0"], "targets": ["re:.*"]}}
    set_in(tmp_path, ("config_groups",), in_groups)

    found = weights(tmp_path)

    assert not [name for name in right if not torch.equal(right[name], found[name])]
    for one, other in ((attention, others), (["re:nothing"], ["re:nobody"]), (["Linear"], ["Embedding"])):
        in_groups = {"wide": {**wide, "targets": one}, "narrow": {**groups["group_0"], "targets": other}}
        set_in(tmp_path, ("config_groups",), in_groups)
        with pytest.raises(CheckpointError):
            weights(tmp_path)


def test_the_second_version_of_gptq_is_known_by_either_name(tmp_path: Path) -> None:
    FORMS["gptq"].write(tmp_path)
    found = []
    for settings in ({"checkpoint_format": "gptq_v2"}, {"checkpoint_format": None, "format": "gptq_v2"}):
        for key, value in settings.items():
            set_in(tmp_path, (key,), value)
        found.append(weights(tmp_path))
    set_in(tmp_path, ("format",), "gptq")
    first = weights(tmp_path)

    assert not [name for name in first if not torch.equal(found[0][name], found[1][name])]
    assert [name for name in first if not torch.equal(found[0][name], first[name])]


def test_settings_within_settings_are_looked_at_too(tmp_path: Path) -> None:
    FORMS["ct-w4a16"].write(tmp_path)
    inner = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    inner.pop("quant_method")
    say(tmp_path, {"quant_method": "compressed-tensors", "quantization_config": {**inner, "rotation": 1}})

    with pytest.raises(CheckpointError, match=r"quantization_config\.rotation"):
        offload.from_pretrained(tmp_path)
