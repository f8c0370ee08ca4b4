"""`offload quantize` and `offload merge-lora`: whole models, written from file to file."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import contents
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

import offload
from offload import cli
from offload.checkpoints.conversion import convert_checkpoint
from tests.checkpoints.forms import FORMS
from tests.checkpoints.test_forms_converted import CHAT, chat_gguf
from tests.processes import ended, forked
from tests.sizes import SIZES

HALF = {**SIZES, "head_dim": 16, "dtype": "bfloat16"}
TOKENS = torch.tensor([[1, 5, 9]])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense model and a mixture of experts, saved by transformers; the dense one with a tokenizer file."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("models")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    for name, config in {"dense": LlamaConfig(**HALF), "experts": Qwen3MoeConfig(**HALF, **experts)}.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(place / name)
    (place / "dense" / "tokenizer_config.json").write_text("{}")
    return {name: place / name for name in ("dense", "experts")}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found


def data_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("name", ["dense", "experts"])
def test_a_quantized_model_equals_that_of_transformers_and_is_near_the_original(name, form, models, tmp_path, capsys):
    before = contents(models[name])

    assert 0 == cli.main(["quantize", str(models[name]), str(tmp_path / "new"), f"--{form}", "--group-size", "32"])

    assert f"{tmp_path / 'new'}: written (1 file, " in capsys.readouterr().out
    assert ["new"] == os.listdir(tmp_path)
    assert before == contents(models[name])
    found = offload.from_pretrained(tmp_path / "new")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype="bfloat16")), logits(found))
    plain = AutoModelForCausalLM.from_pretrained(models[name]).state_dict()
    steps = {"int8": 2**7, "int4": 2**3, "fp8": 2**3}[form]  # from 0 to the largest value; for fp8, mantissa steps
    for key, value in found.state_dict().items():
        weight, expected = value.materialize().float(), plain[key].float()
        assert (weight - expected).abs().max() <= 1.01 * expected.abs().max() / steps, key
        is_kept = "proj" not in key
        assert is_kept == torch.equal(weight, expected), key


def test_companions_are_copied_and_the_configuration_names_form_and_dtype(models, tmp_path):
    words = ["quantize", str(models["dense"]), str(tmp_path / "new"), "--int4", "--group-size", "64"]

    assert 0 == cli.main([*words, "--dtype", "float32"])

    assert "{}" == (tmp_path / "new" / "tokenizer_config.json").read_text()
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert "float32" == config["dtype"]
    assert torch.float32 == load_file(tmp_path / "new" / "model.safetensors")["model.norm.weight"].dtype
    said = config["quantization_config"]
    assert ("compressed-tensors", "pack-quantized", ["lm_head"]) == (
        said["quant_method"],
        said["format"],
        said["ignore"],
    )
    assert (4, 64) == tuple(said["config_groups"]["group_0"]["weights"][key] for key in ("num_bits", "group_size"))


def test_a_layer_that_groups_do_not_divide_has_smaller_ones(models, tmp_path, capsys):
    """128 columns in one group, 64 in one of 64: the largest size that divides both."""
    assert 0 == cli.main(["quantize", str(models["dense"]), str(tmp_path / "new"), "--int4"])

    assert "left as they are" not in capsys.readouterr().err
    found = load_file(tmp_path / "new" / "model.safetensors")
    names = {name: f"model.layers.1.mlp.{name}" for name in ("down_proj", "up_proj")}
    assert [1, 1] == [found[f"{name}.weight_scale"].shape[1] for name in names.values()]
    groups = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]["config_groups"]
    by_size = {group["weights"]["group_size"]: group["targets"] for group in groups.values()}
    assert {64, 128} == by_size.keys()
    assert names["down_proj"] in by_size[128]
    assert names["up_proj"] in by_size[64]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype="bfloat16")
    assert torch.equal(logits(plain), logits(offload.from_pretrained(tmp_path / "new")))


def test_layers_that_no_group_divides_are_left_and_named(tmp_path, capsys):
    """48 columns and groups of 32: these have 16 columns in common, fewer than kernels take."""
    torch.manual_seed(0)
    config = LlamaConfig(**{**HALF, "hidden_size": 48})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")

    assert 0 == cli.main(["quantize", str(tmp_path / "model"), str(tmp_path / "new"), "--int8", "--group-size", "32"])

    assert "left as they are: 10 layers whose columns do not divide into groups" in capsys.readouterr().err
    found = load_file(tmp_path / "new" / "model.safetensors")
    assert "model.layers.0.mlp.down_proj.weight_packed" in found
    assert "model.layers.0.mlp.up_proj.weight" in found
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype="bfloat16")
    assert torch.equal(logits(plain), logits(offload.from_pretrained(tmp_path / "new")))


def _stopping_after(calls: int, real: Any) -> Any:
    """`real`, limited to that many calls; and the number of calls so far."""
    count = []

    def stopping(*args: Any, **options: Any) -> Any:
        if len(count) == calls:
            raise RuntimeError("stopped")
        count.append(0)
        return real(*args, **options)

    return stopping, count


def test_fused_experts_are_left_and_named(tmp_path, capsys):
    from transformers import GptOssConfig

    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2}
    AutoModelForCausalLM.from_config(GptOssConfig(**HALF, **sizes)).save_pretrained(tmp_path / "model")

    assert 0 == cli.main(["quantize", str(tmp_path / "model"), str(tmp_path / "new"), "--int8", "--group-size", "32"])

    assert "whose experts are stored as one tensor (model.layers.0.mlp.experts" in capsys.readouterr().err


ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "head": {"target_modules": ["lm_head"]},
    "embedding": {"target_modules": ["embed_tokens"]},
    "embedding, head and others": {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "whole head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "of the base's own factors": {"target_modules": ["q_proj"], "init_lora_weights": "pissa"},
}


def adapter_of(kind: str, base: Path, place: Path) -> Path:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(**{"r": 4, "init_lora_weights": False, **ADAPTERS[kind]})
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    get_peft_model(model, config).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def adapter(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapter_of("attention", models["dense"], tmp_path_factory.mktemp("adapter"))


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_merged_model_equals_that_of_peft(kind, models, tmp_path):
    from peft import PeftModel

    before, adapter = contents(models["dense"]), adapter_of(kind, models["dense"], tmp_path / "adapter")

    words = ["merge-lora", str(models["dense"]), str(adapter), str(tmp_path / "new"), "--dtype", "float32"]
    assert 0 == cli.main(words)

    base = AutoModelForCausalLM.from_pretrained(models["dense"], dtype=torch.float32)
    expected = PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "new").state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert (tmp_path / "new" / "tokenizer_config.json").exists()
    assert before == contents(models["dense"])
    assert ["adapter", "new"] == sorted(os.listdir(tmp_path))


@pytest.mark.parametrize(
    ("command", "dtype"), [("convert", None), ("quantize", None), ("merge-lora", None), ("merge-lora", "float32")]
)
def test_a_gguf_file_becomes_a_folder_that_generates(command, dtype, tmp_path, capsys):
    """As its dense model does: in bfloat16, or as told, with the tokenizer and its chat template."""
    from peft import LoraConfig, get_peft_model

    file, options = chat_gguf(tmp_path), [] if dtype is None else ["--dtype", dtype]
    dense, target, expected = (str(tmp_path / name) for name in ("dense", "new", "expected"))
    convert_checkpoint(file, dense, dtype=getattr(torch, dtype or "bfloat16"))
    base = AutoModelForCausalLM.from_pretrained(dense)
    get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).save_pretrained(tmp_path / "x")
    between = [str(tmp_path / "x")] if command == "merge-lora" else []
    form = ["--int8", "--group-size", "32"] if command == "quantize" else []

    assert 0 == cli.main([command, str(file), *between, target, *form, *options])
    assert 0 == cli.main([command, dense, *between, expected, *form])
    for folder in (target, expected):
        assert 0 == cli.main(["generate", folder, "--prompt", "!!", "--max-new-tokens", "3", "--json"])

    of_file, of_folder = map(json.loads, capsys.readouterr().out.splitlines()[-2:])
    assert of_folder["tokens"] == of_file["tokens"]
    first, second = (load_file(Path(folder) / "model.safetensors") for folder in (expected, target))
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert CHAT == (Path(target) / "chat_template.jinja").read_text()


def test_a_stopped_run_of_quantize_goes_on_when_it_is_called_again(models, tmp_path, monkeypatch, capsys):
    """Finished work is not repeated; meanwhile a different run is refused."""
    from compressed_tensors.compressors import BaseCompressor

    packing = BaseCompressor.get_value_from_registry("pack-quantized")
    words = ["quantize", str(models["dense"]), str(tmp_path / "new"), "--int4", "--group-size", "32"]
    assert 0 == cli.main([*words[:2], str(tmp_path / "expected"), *words[3:]])
    real = packing.compress
    monkeypatch.setattr(packing, "compress", _stopping_after(5, real)[0])

    assert [1, 1] == [cli.main(words), cli.main([*words, "--dtype", "float32"])]
    assert "has an unfinished run with another dtype" in capsys.readouterr().err
    again, count = _stopping_after(1000, real)
    monkeypatch.setattr(packing, "compress", again)
    assert 0 == cli.main(words)

    assert 9 == len(count)
    assert data_of(tmp_path / "expected") == data_of(tmp_path / "new")
    assert ["expected", "new"] == sorted(os.listdir(tmp_path))


@pytest.mark.parametrize("command", ["quantize", "merge-lora", "convert"])
def test_a_command_killed_at_its_first_write_succeeds_when_it_is_called_again(command, models, adapter, tmp_path):
    FORMS["fp8-llama"].write(tmp_path / "packed")
    before, target = os.listdir(tmp_path), str(tmp_path / "new")
    words = {
        "quantize": [command, str(models["dense"]), target, "--int8", "--group-size", "32"],
        "merge-lora": [command, str(models["dense"]), str(adapter), target],
        "convert": [command, str(tmp_path / "packed"), target, "--dequantize"],
    }[command]

    def stopped() -> None:
        os.pwrite = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        cli.main(words)

    assert -signal.SIGKILL == ended(forked(stopped))
    assert 0 == cli.main(words)
    assert sorted([*before, "new"]) == sorted(os.listdir(tmp_path))
