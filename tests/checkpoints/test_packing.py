"""A quantized model is saved as it was packed: the same bytes, under the same names, with the same configuration."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import offload
from offload import is_offloaded
from offload.tensor.views import handle_of
from tests.checkpoints.forms import FORMS, outcome

SAVED = ["fp8-llama", "fp8-llama-shards", "fp8-qwen3_moe", "fp8-tensor-static", "fp8-scale-name", "fp8-fp4-experts"]
SAVED += ["ct-w4a16", "ct-w4a16-qwen3_moe", "ct-fp8-tensor", "ct-nvfp4a16", "bnb-nf4-double", "bnb-int8"]


def _files(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def _written(folder: Path, form: str) -> tuple[Path, Any]:
    folder.mkdir()
    FORMS[form].write(folder)
    return folder, offload.from_pretrained(folder, **FORMS[form].options)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def _quantization(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text()).get("quantization_config")


@pytest.mark.parametrize("form", SAVED)
def test_unchanged_values_are_saved_as_they_were_packed(tmp_path: Path, form: str) -> None:
    source, model = _written(tmp_path / "source", form)
    wanted = outcome(FORMS[form].plain(source))
    model.save_pretrained(tmp_path / "saved")
    before, after = _files(source), _files(tmp_path / "saved")
    assert before.keys() == after.keys()
    assert all(_equal(before[name], after[name]) for name in before)
    assert _quantization(tmp_path / "saved") == _quantization(source)
    again = outcome(FORMS[form].plain(tmp_path / "saved"))
    assert torch.equal(again.logits, wanted.logits)
    assert not any(handle_of(one).owned for one in model.parameters() if is_offloaded(one))


@pytest.mark.parametrize("form", ["fp8-llama", "fp8-qwen3_moe", "ct-w4a16", "ct-fp8-tensor", "bnb-nf4", "bnb-int8"])
def test_changed_values_are_saved_dense_and_the_others_packed(tmp_path: Path, form: str) -> None:
    source, model = _written(tmp_path / "source", form)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.mul_(2)
    wanted = outcome(model)
    model.save_pretrained(tmp_path / "saved")
    before, after = _files(source), _files(tmp_path / "saved")
    module = "model.layers.0.self_attn.o_proj"
    assert {one for one in after if one.startswith(module)} == {f"{module}.weight"}
    assert after[f"{module}.weight"].dtype == torch.bfloat16
    others = {one for one in before if not one.startswith(module)}
    assert others == after.keys() - {f"{module}.weight"}
    assert all(_equal(before[one], after[one]) for one in others)
    quantization = _quantization(tmp_path / "saved")
    left_out = quantization[{"f": "modules_to_not_convert", "c": "ignore", "b": "llm_int8_skip_modules"}[form[0]]]
    assert {module, "lm_head"} <= set(left_out)
    for again in (FORMS[form].plain(tmp_path / "saved"), offload.from_pretrained(tmp_path / "saved")):
        assert torch.equal(outcome(again).logits, wanted.logits)


def test_experts_one_of_which_was_changed_are_dense(tmp_path: Path) -> None:
    _, model = _written(tmp_path / "source", "fp8-qwen3_moe")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj[1].mul_(2)
    wanted = outcome(model)
    model.save_pretrained(tmp_path / "saved")
    after = _files(tmp_path / "saved")
    gates = [name for name in after if ".1.mlp.experts." in name and "gate_proj" in name]
    assert gates
    assert all(after[name].dtype == torch.bfloat16 for name in gates)
    assert torch.equal(outcome(offload.from_pretrained(tmp_path / "saved")).logits, wanted.logits)


def test_a_copy_is_saved_as_the_model_is(tmp_path: Path) -> None:
    source, model = _written(tmp_path / "source", "fp8-llama")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.lm_head.weight.zero_()
    copied.save_pretrained(tmp_path / "copied")
    model.save_pretrained(tmp_path / "saved")
    before = _files(source)
    for folder in ("copied", "saved"):
        after = _files(tmp_path / folder)
        assert all(_equal(before[name], after[name]) for name in before if name != "lm_head.weight")


def test_a_model_whose_values_all_changed_is_not_saved_as_quantized(tmp_path: Path) -> None:
    _, model = _written(tmp_path / "source", "fp8-llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1)
    model.save_pretrained(tmp_path / "saved")
    assert _quantization(tmp_path / "saved") is None
    assert not any(name.endswith("_scale_inv") for name in _files(tmp_path / "saved"))


@pytest.mark.parametrize("form", ["fp8-llama", "fp8-qwen3_moe", "fp8-tensor-static"])
def test_save_checkpoint_writes_the_packed_pieces(tmp_path: Path, form: str) -> None:
    source, model = _written(tmp_path / "source", form)
    offload.save_checkpoint(model, tmp_path / "saved")
    before, after = _files(source), _files(tmp_path / "saved")
    assert before.keys() == after.keys()
    assert all(_equal(before[name], after[name]) for name in before)


def test_with_a_dtype_save_checkpoint_writes_dense_values(tmp_path: Path) -> None:
    _, model = _written(tmp_path / "source", "fp8-llama")
    offload.save_checkpoint(model, tmp_path / "saved", dtype=torch.float32)
    saved = _files(tmp_path / "saved")
    assert {value.dtype for value in saved.values()} == {torch.float32}
    weight = model.model.layers[0].self_attn.o_proj.weight
    assert isinstance(weight, nn.Parameter)
    assert torch.equal(saved["model.layers.0.self_attn.o_proj.weight"], offload.materialize(weight).float())
