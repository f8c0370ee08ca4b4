"""The files that `save_checkpoint` writes beside a transformers model's weights: the folder can be loaded again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import save_checkpoint
from offload.checkpoints import companions
from offload.errors import ForeignFileError, WriteError
from tests.checkpoints.forms import outcome
from tests.checkpoints.pieces import loaded_from_new


@pytest.fixture
def source(llama_folder: Path, tmp_path: Path) -> Path:
    """A tiny Llama with settings for generation, and a tokenizer."""
    folder = Path(shutil.copytree(llama_folder, tmp_path / "source"))
    (folder / "tokenizer.json").write_text("{}")
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**settings, "top_k": 7, "do_sample": True}))
    return folder


def said_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_model_is_loaded_again_with_its_settings(source: Path, tmp_path: Path, tokens: torch.Tensor) -> None:
    from transformers import AutoModelForCausalLM

    model = offload.from_pretrained(source)

    save_checkpoint(model, tmp_path / "saved")

    assert {"model.safetensors", "config.json", "generation_config.json"} == names_in(tmp_path / "saved")
    expected = AutoModelForCausalLM.from_pretrained(source)(tokens).logits
    for load in (AutoModelForCausalLM.from_pretrained, offload.from_pretrained):
        again = load(tmp_path / "saved")
        assert torch.equal(expected, again(tokens).logits)
        assert (7, True) == (again.generation_config.top_k, again.generation_config.do_sample)
        assert torch.bfloat16 == again.dtype


@pytest.mark.parametrize("form", ["fp8-llama", "torchao-int8"])
def test_a_model_saved_dense_does_not_claim_to_be_quantized(form: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = loaded_from_new(tmp_path / "source", form)
    offload.map_values(
        lambda _, weight: (weight.dequantize() if hasattr(weight, "dequantize") and weight.ndim > 1 else weight) * 1,
        model,
        strict_dtype=False,
    ) if form != "torchao-int8" else _dequantize(model)
    expected = outcome(model).logits

    save_checkpoint(model, tmp_path / "saved")

    assert "quantization_config" not in said_in(tmp_path / "saved")
    assert torch.equal(expected, outcome(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")).logits)


def _dequantize(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = offload.materialize(module.weight)
            if type(weight.data) is not torch.Tensor:
                module.weight = nn.Parameter(weight.dequantize(), requires_grad=False)


def test_a_model_that_was_quantized_here_is_loaded_again(source: Path, tmp_path: Path, tokens: torch.Tensor) -> None:
    from torchao.quantization import Int8WeightOnlyConfig

    model = offload.from_pretrained(source)
    offload.quantize_(model, Int8WeightOnlyConfig(set_inductor_config=False))

    save_checkpoint(model, tmp_path / "saved")

    assert "torchao" == said_in(tmp_path / "saved")["quantization_config"]["quant_method"]
    again = offload.from_pretrained(tmp_path / "saved")
    assert torch.equal(model(tokens).logits, again(tokens).logits)


def test_the_configuration_says_the_dtype_that_is_saved_and_the_model_keeps_its_own(
    source: Path, tmp_path: Path
) -> None:
    model = offload.from_pretrained(source)
    before = model.config.to_dict()

    save_checkpoint(model, tmp_path / "saved", dtype="float32")

    assert "float32" == said_in(tmp_path / "saved")["dtype"]
    assert torch.float32 == offload.from_pretrained(tmp_path / "saved").dtype
    assert before == model.config.to_dict()


def test_another_module_has_nothing_beside_it(tmp_path: Path) -> None:
    save_checkpoint(nn.Linear(2, 3), tmp_path)

    assert {"model.safetensors"} == names_in(tmp_path)


def test_a_configuration_of_another_model_is_an_error_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/config.json").write_text('{"model_type": "llama", "hidden_size": 4096}')

    with pytest.raises(ForeignFileError, match=r"config\.json describes another model"):
        save_checkpoint(offload.from_pretrained(source), tmp_path / "saved")

    assert {"config.json"} == names_in(tmp_path / "saved")
    assert 4096 == said_in(tmp_path / "saved")["hidden_size"]


def test_a_configuration_of_the_same_model_stays_as_it_is(source: Path, tmp_path: Path) -> None:
    model = offload.from_pretrained(source)
    model.config.save_pretrained(tmp_path / "saved")
    config = tmp_path / "saved/config.json"
    config.write_text(json.dumps({**said_in(tmp_path / "saved"), "transformers_version": "1.2.3"}))
    before = config.read_bytes()

    for _ in range(2):
        save_checkpoint(model, tmp_path / "saved")

    assert before == config.read_bytes()


@pytest.mark.parametrize("size", ["5GB", "60KB"])
def test_a_changed_model_is_not_saved_over_the_configuration_of_an_earlier_save(
    source: Path, tmp_path: Path, size: str
) -> None:
    """Which a user may have edited. A model of other values, and a state dict, are saved there."""
    model = offload.from_pretrained(source)
    save_checkpoint(model, tmp_path / "saved", size)
    before = said_in(tmp_path / "saved")
    model.model.norm.weight.update_values(torch.full((64,), 3.0, dtype=torch.bfloat16))
    model.generation_config.max_length = 7  # it stays as it was saved
    save_checkpoint(model, tmp_path / "saved", size)
    assert 3 == offload.from_pretrained(tmp_path / "saved").model.norm.weight[0]
    save_checkpoint({name: value * 2 for name, value in model.state_dict().items()}, tmp_path / "saved", size)
    assert 6 == offload.from_pretrained(tmp_path / "saved").model.norm.weight[0]
    model.resize_token_embeddings(48)

    with pytest.raises(ForeignFileError, match=r"config\.json describes another model"):
        save_checkpoint(model, tmp_path / "saved", size)

    assert before == said_in(tmp_path / "saved")
    assert 6 == offload.from_pretrained(tmp_path / "saved").model.norm.weight[0]


def test_a_save_that_failed_between_weights_and_configuration_can_be_done_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = offload.from_pretrained(source)
    with monkeypatch.context() as patched:
        patched.setattr(companions, "put_file", _fail)
        with pytest.raises(WriteError):
            save_checkpoint(model, tmp_path / "saved")

    save_checkpoint(model, tmp_path / "saved")

    assert {"config.json", "generation_config.json"} < names_in(tmp_path / "saved")


def _fail(path: Path, *_: Any) -> None:
    raise WriteError(28, "No space left on device", str(path))
