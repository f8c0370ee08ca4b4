"""Packed numbers are never taken for weights: whatever the configuration says, they are decoded or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import offload
from offload.errors import CheckpointError
from tests.checkpoints.forms import FORMS, empty_model

pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")

LAYER = "model.layers.0.mlp.down_proj.weight"
PACKED = [
    *("fp8-llama", "fp8-tensor-static", "fp8-scale-name", "fp8-fp4-experts", "ct-w4a16", "ct-fp8-channel", "ct-w8a8"),
    *("ct-nvfp4a16", "bnb-nf4", "bnb-int8", "gptq", "awq", "mxfp4-gpt_oss"),
]
SAID: dict[str, dict[str, Any] | None] = {
    "nothing": None,
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fbgemm": {"quant_method": "fbgemm_fp8"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32},
    "8 bits": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "4 bits": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "mxfp4": {"quant_method": "mxfp4"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"all": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}},
    },
}


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors in a folder."""
    values = load_file(folder / "model.safetensors")
    change(values)
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})


def say(folder: Path, quantization: dict[str, Any] | None) -> None:
    """Change how the configuration says that the weights are packed."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    more = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps({**config, **more}))


@pytest.mark.parametrize("form", PACKED)
def test_a_checkpoint_with_the_configuration_of_another_form_is_decoded_or_refused(form: str, tmp_path: Path) -> None:
    """A weight that is not there under the names of that form may be new, as in transformers, which is reported."""
    FORMS[form].write(tmp_path)
    right = {name: offload.materialize(value) for name, value in offload.from_pretrained(tmp_path).state_dict().items()}

    wrong = []
    for said, quantization in SAID.items():
        say(tmp_path, quantization)
        try:
            model, told = offload.from_pretrained(tmp_path, output_loading_info=True)
        except CheckpointError:
            continue
        found = {name: offload.materialize(value) for name, value in model.state_dict().items()}
        wrong += [
            (said, name)
            for name in found.keys() - set(told["missing_keys"])
            if not torch.equal(right[name].float(), found[name].float())
        ]

    assert [] == wrong


def as_dtype(dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda values: values.update({LAYER: values[LAYER].to(dtype)})


def and_dense(values: dict[str, torch.Tensor]) -> None:
    values[LAYER] = torch.ones(128, 256)


def and_dense_experts(values: dict[str, torch.Tensor]) -> None:
    values["model.layers.0.mlp.experts.down_proj"] = torch.ones(4, 256, 128)


REFUSED = {
    "fp8, bytes": ("fp8-llama", as_dtype(torch.uint8), None, "not 8-bit floats"),
    "fp8, integers": ("fp8-llama", as_dtype(torch.int32), None, "not 8-bit floats"),
    "fp8, bfloat16": ("fp8-llama", as_dtype(torch.bfloat16), None, "not 8-bit floats"),
    "FBGEMM, bfloat16": ("ct-fp8-channel", as_dtype(torch.bfloat16), SAID["fbgemm"], "not 8-bit floats"),
    "compressed-tensors, bfloat16": ("ct-fp8-channel", as_dtype(torch.bfloat16), None, "the weight is dense"),
    "compressed-tensors, bytes": ("ct-w8a8", as_dtype(torch.uint8), None, "the weight is dense"),
    "bitsandbytes, bfloat16": ("bnb-int8", as_dtype(torch.bfloat16), None, "the weight is not int8"),
    "GPTQ, dense too": ("gptq", and_dense, None, "packed and dense"),
    "AWQ, dense too": ("awq", and_dense, None, "packed and dense"),
    "MXFP4, dense too": ("mxfp4-gpt_oss", and_dense_experts, None, "packed and dense"),
    "FP8 that is said to be GPTQ": ("fp8-llama", lambda _: None, SAID["gptq"], "says 'gptq', which they are not"),
    "FP8 of which nothing is said": ("fp8-llama", lambda _: None, {}, "does not say how they are packed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_weight_beside_scales_that_is_not_packed_so_is_refused_by_name(case: str, tmp_path: Path) -> None:
    form, change, quantization, words = REFUSED[case]
    FORMS[form].write(tmp_path)
    rewritten(tmp_path, change)
    if quantization is not None:
        say(tmp_path, quantization or None)

    with pytest.raises(CheckpointError, match=words) as raised:
        offload.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError):
        offload.load_checkpoint_and_dispatch(empty_model(tmp_path), tmp_path)
    assert str(tmp_path / "model.safetensors") in str(raised.value)


def test_the_scale_of_a_norm_is_kept_as_it_is(tmp_path: Path) -> None:
    from offload.checkpoints.checkpoint import open_checkpoint
    from offload.checkpoints.forms.formats import values_in

    weight = torch.ones(2, 2).to(torch.float8_e4m3fn)
    stored = {"clip.scale": torch.ones(3), "layer.weight": weight, "layer.scale": torch.full((1, 1), 3.0)}
    save_file(stored, tmp_path / "model.safetensors")

    found = values_in(open_checkpoint(tmp_path), {"quant_method": "fp8"}).tensors

    assert {"clip.scale", "layer.weight"} == set(found)
    assert torch.equal(torch.full((2, 2), 3.0), offload.materialize(found["layer.weight"]))


class Own(nn.Module):
    """A layer that multiplies by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(4, 4, dtype=torch.int8))
        self.register_buffer("weight_scale", torch.zeros(4))


def test_a_model_that_has_the_scales_itself_is_filled_with_both(tmp_path: Path) -> None:
    from transformers import PreTrainedConfig, PreTrainedModel

    class Model(PreTrainedModel):
        config_class = PreTrainedConfig

        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            self.layer = Own()
            self.post_init()

    stored = {"layer.weight": torch.ones(4, 4, dtype=torch.int8), "layer.weight_scale": torch.ones(4)}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})

    model = offload.from_pretrained(tmp_path, Model, config=PreTrainedConfig())

    assert torch.equal(stored["layer.weight"], offload.materialize(model.layer.weight))


def test_a_plain_model_is_not_filled_with_fp8_without_its_scale(tmp_path: Path) -> None:
    stored = {"weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "weight_scale": torch.ones(4)}
    save_file(stored, tmp_path / "model.safetensors")

    with pytest.raises(CheckpointError, match="weight_scale"):
        offload.load_checkpoint_and_dispatch(nn.Linear(4, 4, bias=False, device="meta"), tmp_path)


def test_a_plain_model_that_has_the_scales_itself_is_filled_with_both(tmp_path: Path) -> None:
    stored = {"weight": torch.ones(4, 4, dtype=torch.int8), "weight_scale": torch.ones(4)}
    save_file(stored, tmp_path / "model.safetensors")
    model = Own()

    assert not offload.load_checkpoint_in_model(model, tmp_path).differs
    assert torch.equal(stored["weight"], offload.materialize(model.weight))
