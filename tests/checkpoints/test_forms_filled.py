"""An empty transformers model filled from a quantized checkpoint is the same as from `from_pretrained`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import offload
from offload.errors import CheckpointError
from offload.tensor.views import handle_of
from tests.checkpoints.forms import FORMS, outcome

FP8 = [name for name in FORMS if name.startswith("fp8")]
GGUF = [
    "gguf-q4_k_m",
    "gguf-q4_k_m-bfloat16",
    "gguf-tied",
    "gguf-qwen3_moe",
    "gguf-lfm2-q4_k",
    "gguf-qwen3_5_moe-bfloat16",
]
TORCHAO = [name for name in FORMS if name.startswith("torchao")]


def empty_model(folder: Path) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(folder)
    with offload.init_empty_weights():
        return AutoModelForCausalLM.from_config(config, dtype=config.dtype)


@pytest.mark.parametrize("name", [*FP8, *TORCHAO])
def test_an_empty_model_is_filled_with_what_is_packed(name: str, tmp_path: Path) -> None:
    """Its results are plain transformers'; every weight stays packed in place."""
    form = FORMS[name]
    form.write(tmp_path)

    model = offload.load_checkpoint_and_dispatch(empty_model(tmp_path), tmp_path)

    expected, actual = outcome(form.plain(tmp_path)), outcome(model.eval())
    assert torch.equal(expected.logits, actual.logits)
    assert torch.equal(expected.tokens, actual.tokens)
    assert all(offload.is_offloaded(value) and not handle_of(value).owned for value in model.parameters())


@pytest.mark.parametrize("name", GGUF)
def test_an_empty_model_is_filled_from_a_gguf_file(name: str, tmp_path: Path) -> None:
    """With llama.cpp's names; the model keeps its own dtype."""
    form = FORMS[name]
    form.write(tmp_path)
    plain = form.plain(tmp_path)
    expected = outcome(plain)
    with offload.init_empty_weights():
        empty, again = (AutoModelForCausalLM.from_config(plain.config, dtype=plain.dtype) for _ in range(2))
    file = tmp_path / form.options["gguf_file"]

    model = offload.load_checkpoint_and_dispatch(empty, file)
    report = offload.load_checkpoint_in_model(again, file)

    actual = outcome(model.eval())
    assert torch.equal(expected.logits, actual.logits)
    assert torch.equal(expected.tokens, actual.tokens)
    assert all(offload.is_offloaded(value) and not handle_of(value).owned for value in model.parameters())
    assert [] == report.missing_keys


@pytest.mark.parametrize("name", [FP8[0], *TORCHAO])
def test_a_filled_model_is_saved_as_it_was_packed(name: str, tmp_path: Path) -> None:
    FORMS[name].write(tmp_path / "packed")
    model = offload.load_checkpoint_and_dispatch(empty_model(tmp_path / "packed"), tmp_path / "packed")

    model.save_pretrained(tmp_path / "saved")

    expected, actual = (load_file(tmp_path / name / "model.safetensors") for name in ("packed", "saved"))
    assert expected.keys() == actual.keys()
    assert all(torch.equal(value.view(torch.uint8), actual[key].view(torch.uint8)) for key, value in expected.items())
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("packed", "saved")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


def test_a_scale_that_is_missing_is_an_error_though_every_name_of_the_model_is_there(tmp_path: Path) -> None:
    FORMS[FP8[0]].write(tmp_path)
    values = load_file(tmp_path / "model.safetensors")
    left = {key: value for key, value in values.items() if not key.endswith("scale_inv")}
    save_file(left, tmp_path / "model.safetensors", {"format": "pt"})

    with pytest.raises(CheckpointError, match="scale_inv"):
        offload.load_checkpoint_and_dispatch(empty_model(tmp_path), tmp_path)


def test_a_file_gives_the_pieces_as_they_are_packed(tmp_path: Path) -> None:
    FORMS[FP8[0]].write(tmp_path)

    found = offload.load_file(tmp_path)

    stored = load_file(tmp_path / "model.safetensors")
    assert {key: value.dtype for key, value in stored.items()} == {key: value.dtype for key, value in found.items()}


def test_modules_of_another_kind_than_the_weights_need_are_not_filled(tmp_path: Path) -> None:
    """BitNet's modules quantize activations; an empty model created from the configuration has the usual ones."""
    FORMS["bitnet-bitlinear-offline"].write(tmp_path)

    with pytest.raises(CheckpointError, match=r"quantized by bitnet.*use offload\.from_pretrained"):
        offload.load_checkpoint_and_dispatch(empty_model(tmp_path), tmp_path)
