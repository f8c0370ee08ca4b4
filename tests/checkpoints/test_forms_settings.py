"""Settings and pieces that a form does not carry out are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import offload
from offload.checkpoints.forms.formats import FORMATS, unpacked
from offload.errors import CheckpointError
from tests.checkpoints.forms import FORMS, empty_model
from tests.checkpoints.pieces import stored
from tests.checkpoints.test_forms_raw import say

pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")

PUBLISHED: dict[str, dict[str, Any]] = {  # settings that are carried out, as the packages write them
    "GPTQModel": {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*gate$": {}}, "pack_dtype": "int32", "meta": {}},
    "auto-round": {"quant_method": "gptq", "bits": 4, "data_type": "int", "extra_config": {"lm_head": {"bits": 16}}},
    "AutoAWQ": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "GEMM", "zero_point": True},
    "bitsandbytes, unnamed": {"load_in_8bit": True},
    "llm-compressor": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"actorder": "weight", "dynamic": False, "group_size": 128, "num_bits": 4, "type": "int"},
            }
        },
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        "sparsity_config": {},
        "transform_config": {},
    },
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_settings_of_published_models_are_accepted(model: str) -> None:
    assert {} == unpacked({}, PUBLISHED[model])


HADAMARD = {"u": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}}
REFUSED: dict[str, tuple[str, tuple[str, ...], Any]] = {
    "rotated weights": ("ct-w4a16", ("transform_config",), {"config_groups": HADAMARD}),
    "experts left out": ("ct-w4a16", ("moe_sparsity_config",), {"sparsity_structure": "2:4"}),
    "columns in another order": ("ct-w4a16", ("config_groups", "group_0", "weights", "actorder"), "group"),
    "another kind of number": ("ct-w4a16", ("config_groups", "group_0", "weights", "type"), "posit"),
    "weights quantized at each use": ("ct-w4a16", ("config_groups", "group_0", "weights", "dynamic"), True),
    "floats in GPTQ": ("gptq", ("data_type",), "mx_fp"),
    "auto-round's own words": ("gptq", ("packing_format",), "auto_round:exllamav2"),
    "words of 16 bits": ("awq", ("pack_dtype",), "int16"),
    "rotated weights, within settings": ("ct-w4a16", ("quantization_config",), {"rotation": 1}),
    "rotated GPTQ": ("gptq", ("rotation",), "hadamard"),
    "a kernel's form": ("gptq", ("checkpoint_format",), "marlin"),
    "a kernel's form, by the new name": ("gptq", ("format",), "bitblas"),
    "3 bits": ("gptq", ("bits",), 3),
    "AWQ for another kernel": ("awq", ("version",), "gemv"),
    "AWQ for another kernel, by the new name": ("awq", ("format",), "gemv_fast"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_are_not_carried_out_are_refused_by_name(case: str, tmp_path: Path) -> None:
    form, way, value = REFUSED[case]
    FORMS[form].write(tmp_path)
    set_in(tmp_path, way, value)

    with pytest.raises(CheckpointError, match=f"{value if isinstance(value, str) else way[-1]}.* not ") as raised:
        offload.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError):
        offload.load_checkpoint_and_dispatch(empty_model(tmp_path), tmp_path)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize("value", [None, False, {}, [], ""])
def test_settings_whose_values_say_nothing_are_ignored(value: Any) -> None:
    for method in FORMATS:
        assert {} == unpacked({}, {"quant_method": method, "rotation": value, "checkpoint_format": value})


PIECES = {
    "fp8-llama": "weight_scale_2",
    "ct-w4a16": "weight_rotation",
    "gptq": "weight_permutation",
    "awq": "weight.smooth",
    "bnb-nf4": "weight.rotation",
    "mxfp4-gpt_oss": "down_proj_swizzle",
}


@pytest.mark.parametrize("form", PIECES)
def test_a_piece_that_the_form_does_not_have_is_refused_by_name(form: str, tmp_path: Path) -> None:
    """It may change what the weight is. A tensor of another name in the layer, as a bias, is a value of the model."""
    FORMS[form].write(tmp_path)
    layer = "model.layers.1.mlp." + ("experts." if "gpt_oss" in form else "down_proj.")
    file = tmp_path / "model.safetensors"
    values = {**load_file(file), f"{layer}lora": torch.ones(2)}
    quantization = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    allowed = unpacked(stored(tmp_path, values), quantization)

    assert allowed is not None
    assert f"{layer}lora" in allowed
    with pytest.raises(CheckpointError, match=rf"{layer}.*{PIECES[form]}.*is not known here") as raised:
        unpacked(stored(tmp_path, {**values, layer + PIECES[form]: torch.ones(2)}), quantization)
    assert str(file) in str(raised.value)


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
    "gptq": {("bits",): 8, ("group_size",): 64, ("checkpoint_format",): "gptq_v2", ("quant_method",): "awq"},
    "awq": {("bits",): 8, ("group_size",): 64, ("quant_method",): "gptq"},
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


@pytest.mark.parametrize(("stored_in", "said"), [(8, 4), (2, 4), (4, 8), (4, 2)])
def test_a_layer_of_gptq_in_other_bits_is_refused_by_its_shapes(stored_in: int, said: int, tmp_path: Path) -> None:
    """Where `dynamic` of GPTQModel, or `extra_config` of auto-round, gives a layer bits of its own."""
    pieces = {
        "qweight": torch.zeros(96 * stored_in // 32, 64, dtype=torch.int32),
        "qzeros": torch.zeros(1, 64 * stored_in // 32, dtype=torch.int32),
        "scales": torch.ones(1, 64).half(),
        "g_idx": torch.zeros(96, dtype=torch.int32),
    }
    settings = {"quant_method": "gptq", "bits": said, "dynamic": {"+:.*layer.*": {"bits": stored_in}}}

    with pytest.raises(CheckpointError, match="do not make 1 groups of 64 outputs"):
        unpacked(stored(tmp_path, {f"layer.{name}": piece for name, piece in pieces.items()}), settings)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: offload.materialize(value) for name, value in offload.from_pretrained(folder).state_dict().items()}


def test_a_layer_that_no_group_fits_or_several_do_is_refused(tmp_path: Path) -> None:
    """`test_forms_compressed_tensors` has the groups that are meant."""
    FORMS["ct-w4a16"].write(tmp_path)
    groups = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["config_groups"]
    wide = {**groups["group_0"], "weights": {**groups["group_0"]["weights"], "num_bits": 8}}
    attention, others = ["re:.*self_attn.*"], ["re:.*mlp.*"]
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


def test_settings_within_settings_are_followed(tmp_path: Path) -> None:
    FORMS["ct-w4a16"].write(tmp_path)
    right = weights(tmp_path)
    inner = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    say(tmp_path, {"quant_method": inner.pop("quant_method"), "quantization_config": inner})

    assert all(torch.equal(right[name], value) for name, value in weights(tmp_path).items())


@pytest.mark.parametrize("method", ["aqlm", "auto-round", "eetq", "hqq", "quanto", "quark", "spqr", "vptq", "modelopt"])
def test_a_form_that_is_not_decoded_is_refused_by_name(method: str, tmp_path: Path) -> None:
    """Before anything is loaded, so that forward does not fail."""
    FORMS["llama"].write(tmp_path)
    say(tmp_path, {"quant_method": method, "bits": 4})

    with pytest.raises(CheckpointError, match=f"packed by '{method}'") as raised:
        offload.from_pretrained(tmp_path)

    assert str(tmp_path) in str(raised.value)
