"""The files that `save_checkpoint` writes beside a transformers model's weights: the folder can be loaded again."""

from __future__ import annotations

import importlib
import json
import logging
import shutil
from collections.abc import Iterator
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

TOKENIZER = {"tokenizer.json": "{}", "tokenizer_config.json": '{"a": 1}', "chat_template.jinja": "{{ messages }}"}


@pytest.fixture
def source(llama_folder: Path, tmp_path: Path) -> Path:
    """A tiny Llama with tokenizer files, a generation config, and unrelated files."""
    folder = Path(shutil.copytree(llama_folder, tmp_path / "source"))
    for name, text in {**TOKENIZER, "quantize_config.json": "{}", "README.txt": "no"}.items():
        (folder / name).write_text(text)
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**settings, "top_k": 7, "do_sample": True}))
    return folder


def said_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_model_is_loaded_again_with_its_tokenizer_and_settings(
    source: Path, tmp_path: Path, tokens: torch.Tensor
) -> None:
    from transformers import AutoModelForCausalLM

    model = offload.from_pretrained(source)

    save_checkpoint(model, tmp_path / "saved")

    beside = {"config.json", "generation_config.json", *TOKENIZER}
    assert {"model.safetensors", *beside} == names_in(tmp_path / "saved")
    assert all((tmp_path / "saved" / name).read_text() == text for name, text in TOKENIZER.items())
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


def test_a_model_in_memory_has_a_tokenizer_if_its_folder_is_known(source: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source)
    save_checkpoint(model, tmp_path / "saved")
    shutil.rmtree(source)
    save_checkpoint(model, tmp_path / "again")

    assert names_in(tmp_path / "again") | set(TOKENIZER) == names_in(tmp_path / "saved")
    assert names_in(tmp_path / "again").isdisjoint(TOKENIZER)


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A model class from a module outside of transformers."""
    package = tmp_path / "code/made_for_a_test"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "modeling_made.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class MadeConfig(LlamaConfig):\n    model_type = 'made'\n\n\n"
        "class MadeForCausalLM(LlamaForCausalLM):\n    config_class = MadeConfig\n"
    )
    monkeypatch.syspath_prepend(package.parent)
    module = importlib.import_module("made_for_a_test.modeling_made")
    module.MadeConfig.register_for_auto_class()
    module.MadeForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    return module


def test_code_of_a_model_goes_along_as_transformers_copies_it(own_code: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = own_code.MadeForCausalLM(own_code.MadeConfig(**sizes, vocab_size=9))

    save_checkpoint(model, tmp_path / "saved")
    model.save_pretrained(tmp_path / "theirs")

    assert names_in(tmp_path / "theirs") == names_in(tmp_path / "saved")
    assert said_in(tmp_path / "theirs") == said_in(tmp_path / "saved")
    code = "modeling_made.py"
    assert (tmp_path / "theirs" / code).read_bytes() == (tmp_path / "saved" / code).read_bytes()


def test_a_configuration_of_another_model_is_an_error_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/config.json").write_text('{"model_type": "llama", "hidden_size": 4096}')

    with pytest.raises(ForeignFileError, match=r"config\.json is not from offload"):
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


def test_a_foreign_tokenizer_stays_with_a_warning(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/tokenizer.json").write_text("theirs")

    with caplog.at_level(logging.WARNING, "offload"):
        save_checkpoint(offload.from_pretrained(source), tmp_path / "saved")
        save_checkpoint(offload.from_pretrained(source), tmp_path / "saved")

    assert "theirs" == (tmp_path / "saved/tokenizer.json").read_text()
    assert 2 == sum("tokenizer.json is not from offload" in one.getMessage() for one in caplog.records)
    assert TOKENIZER["tokenizer_config.json"] == (tmp_path / "saved/tokenizer_config.json").read_text()


@pytest.mark.parametrize("size", ["5GB", "60KB"])
def test_files_of_an_earlier_save_are_replaced_or_removed(source: Path, tmp_path: Path, size: str) -> None:
    model = offload.from_pretrained(source)
    save_checkpoint(model, tmp_path / "saved", size)
    model.resize_token_embeddings(64)
    save_checkpoint(model, tmp_path / "saved", size)
    assert 64 == said_in(tmp_path / "saved")["vocab_size"]
    assert 64 == len(offload.from_pretrained(tmp_path / "saved").get_input_embeddings().weight)

    save_checkpoint(nn.Linear(2, 3), tmp_path / "saved", size)

    assert {"model.safetensors"} == names_in(tmp_path / "saved")


def test_a_state_dict_takes_nothing_from_beside_the_weights(source: Path, tmp_path: Path) -> None:
    model = offload.from_pretrained(source)
    save_checkpoint(model, tmp_path / "saved")
    before = names_in(tmp_path / "saved")
    values = {name: value.materialize() for name, value in model.state_dict().items()}
    values["model.norm.weight"] = values["model.norm.weight"] + 1

    save_checkpoint(values, tmp_path / "saved")

    assert before == names_in(tmp_path / "saved")
    assert torch.equal(values["model.norm.weight"], offload.from_pretrained(tmp_path / "saved").model.norm.weight)
    model.resize_token_embeddings(64)
    save_checkpoint(model, tmp_path / "saved")
    assert 64 == said_in(tmp_path / "saved")["vocab_size"]


def test_edited_files_are_neither_replaced_nor_removed(source: Path, tmp_path: Path) -> None:
    model = offload.from_pretrained(source)
    save_checkpoint(model, tmp_path / "saved")
    edited = {**said_in(tmp_path / "saved"), "rope_theta": 5.0}
    (tmp_path / "saved/config.json").write_text(json.dumps(edited))

    with pytest.raises(ForeignFileError, match="was edited"):
        save_checkpoint(model, tmp_path / "saved")
    save_checkpoint(nn.Linear(2, 3), tmp_path / "saved")

    assert {"model.safetensors", "config.json"} == names_in(tmp_path / "saved")
    assert edited == said_in(tmp_path / "saved")


def test_a_save_that_failed_between_weights_and_configuration_can_be_done_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = offload.from_pretrained(source)
    save_checkpoint(model, tmp_path / "saved")
    model.resize_token_embeddings(64)
    with monkeypatch.context() as patched:
        patched.setattr(companions, "put_file", _fail)
        with pytest.raises(WriteError):
            save_checkpoint(model, tmp_path / "saved")

    save_checkpoint(model, tmp_path / "saved")

    assert 64 == said_in(tmp_path / "saved")["vocab_size"]


def _fail(path: Path, *_: Any) -> None:
    raise WriteError(28, "No space left on device", str(path))
