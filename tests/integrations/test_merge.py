"""Adapters merged into bases on disk: the same as peft in memory, one value at a time, and only once."""

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import contents
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.pytorch_utils import Conv1D

import offload
from offload.errors import CheckpointError, MapError, OffloadError, UnsupportedOpError
from tests.integrations.test_peft import KINDS, NOT_NEUTRAL, OF_EXPERTS, ONE, adapter_for
from tests.sizes import SIZES
from tests.tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("llama32"), tie_word_embeddings=False, dtype="float32")


def merged_in_memory(model: nn.Module, adapter: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(model, adapter).merge_and_unload()


def assert_same(expected: nn.Module, found: nn.Module) -> None:
    left, right = dict(expected.state_dict()), offload.materialize(dict(found.state_dict()))
    assert list(left) == list(right)
    torch.testing.assert_close(right, left, rtol=0, atol=0)
    assert [one.__class__ for one in expected.modules()] == [one.__class__ for one in found.modules()]


@pytest.mark.parametrize("of", ["folder", "llama_folder"], ids=["float32", "tied, in bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_merge_on_disk_is_that_of_peft_in_memory(kind, of, request, tmp_path):
    """Bit for bit; changed values are in the user's folder, the checkpoint and the random generator are unchanged."""
    base = request.getfixturevalue(of)
    adapter = adapter_for(AutoModelForCausalLM.from_pretrained(base), KINDS[kind](), tmp_path / "adapter")
    expected = merged_in_memory(AutoModelForCausalLM.from_pretrained(base), adapter)
    stood, random = contents(base), torch.get_rng_state()
    model = offload.from_pretrained(base, offload_dir=tmp_path / "values")
    offload.merge_lora(model, adapter)

    assert_same(expected, model)
    assert all(offload.is_offloaded(parameter) for parameter in model.parameters())
    written = {key for path in (tmp_path / "values").glob("*.safetensors") for key in load_file(path)}
    plain = AutoModelForCausalLM.from_pretrained(base).state_dict()
    changed = {name for name, value in expected.named_parameters() if not torch.equal(value, plain[name])}
    assert changed
    assert changed <= written
    assert stood == contents(base)
    assert torch.equal(random, torch.get_rng_state())
    assert not hasattr(model, "peft_config")


class Mixed(nn.Module):
    """Every kind of layer that peft has an adapter for, some in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.turned = Conv1D(8, 8)
        self.image = nn.Conv2d(3, 8, 2)
        self.line = nn.Conv1d(8, 8, 2)
        self.linear = nn.Linear(8, 4)
        self.head = nn.Linear(4, 4)


LAYERS = {
    "all": {"target_modules": ["embedding", "image", "line", "linear"]},
    "turned": {"target_modules": ["turned"], "fan_in_fan_out": True},
    "biases": {"target_modules": ["linear", "image"], "lora_bias": True},
    "dora": {"target_modules": ["embedding", "image", "line", "linear"], "use_dora": True},
    "whole": {"target_modules": ["linear"], "modules_to_save": ["head"]},
    "all biases": {"target_modules": ["linear"], "bias": "all"},
}


@pytest.mark.parametrize("place", ["disk", "cpu"])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_of_all_kinds_merge_as_in_memory(kind, place, tmp_path):
    torch.manual_seed(0)
    source = Mixed()
    offload.save_checkpoint(source, tmp_path / "model")
    adapter = adapter_for(source, LoraConfig(r=2, **LAYERS[kind], **NOT_NEUTRAL), tmp_path / "adapter")
    plain, model = Mixed(), Mixed()
    offload.load_checkpoint_in_model(plain, tmp_path / "model", "cpu")
    offload.load_checkpoint_in_model(model, tmp_path / "model", {"": "disk", "linear": place})
    offload.merge_lora(model, adapter)

    assert_same(merged_in_memory(plain, adapter), model)
    assert (place == "disk") == offload.is_offloaded(model.linear.weight)


def test_adapters_of_fused_experts_merge_as_in_memory(tmp_path):
    """`target_parameters`: two in one module."""
    tiny_checkpoint(tmp_path / "model", "mixtral", num_local_experts=4)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    adapter = adapter_for(copy.deepcopy(plain), OF_EXPERTS, tmp_path / "adapter")
    model = offload.from_pretrained(tmp_path / "model", offload_dir=tmp_path / "values")
    offload.merge_lora(model, adapter)

    assert_same(merged_in_memory(plain, adapter), model)
    assert all(offload.is_offloaded(parameter) for parameter in model.parameters())


# Once


def three() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(4, 4))


def failing_after(calls: int, error: BaseException) -> Callable[..., Any]:
    """A method of peft's layers that works this many times."""
    real, left = peft.tuners.lora.Linear.get_delta_weight, [calls]

    def failing(*args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise error
        return real(*args)

    return failing


@pytest.mark.parametrize(("error", "kind"), [(ValueError("no"), MapError), (KeyboardInterrupt(), KeyboardInterrupt)])
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_after_a_failure_the_base_is_without_adapters_and_no_layer_is_merged_twice(
    place, error, kind, tmp_path, monkeypatch
):
    adapter = adapter_for(three(), LoraConfig(r=2, target_modules=["0", "1"], **NOT_NEUTRAL), tmp_path / "adapter")
    torch.manual_seed(0)
    base = three()
    expected = merged_in_memory(copy.deepcopy(base), adapter)
    model = offload.disk_offload(copy.deepcopy(base), tmp_path / "values") if place == "disk" else copy.deepcopy(base)
    with monkeypatch.context() as patched:
        patched.setattr(peft.tuners.lora.Linear, "get_delta_weight", failing_after(1, error))
        with pytest.raises(kind, match="no.*load the base again" if kind is MapError else None):
            offload.merge_lora(model, adapter)

    assert [nn.Linear] * 3 == [type(layer) for layer in model]
    assert model(torch.ones(6)).isfinite().all()
    assert_merges_no_more(model, adapter)
    assert_merges_no_more(copy.deepcopy(model), adapter)
    again = offload.disk_offload(base, tmp_path / "again") if place == "disk" else base
    offload.merge_lora(again, adapter)
    assert_same(expected, again)


def assert_merges_no_more(model: nn.Module, adapter: Path) -> None:
    before = offload.materialize(dict(model.state_dict()))
    with pytest.raises(UnsupportedOpError, match=r"adapter into this Sequential failed half-way.*load the base again"):
        offload.merge_lora(model, adapter)
    torch.testing.assert_close(offload.materialize(dict(model.state_dict())), before, rtol=0, atol=0)


# Refused


REFUSED: dict[str, Callable[[], Any]] = {
    "PROMPT_TUNING": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "PREFIX_TUNING": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "POLY": lambda: peft.PolyConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "ADAPTION_PROMPT": lambda: peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_adapters_that_peft_does_not_merge_are_refused_by_name(kind, folder, tmp_path):
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), REFUSED[kind]()).save_pretrained(tmp_path / "adapter")
    model = offload.from_pretrained(folder, offload_dir=tmp_path / "values")
    kinds = [type(module) for module in model.modules()]

    with pytest.raises(UnsupportedOpError, match=f"of kind {kind} can't be merged into this base"):
        offload.merge_lora(model, tmp_path / "adapter")

    assert kinds == [type(module) for module in model.modules()]
    assert not list((tmp_path / "values").glob("*.safetensors"))


def test_a_base_with_a_quantized_layer_is_refused_before_any_is_merged(folder, tmp_path):
    torchao = pytest.importorskip("torchao.quantization")
    adapter = adapter_for(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(**ONE), tmp_path / "adapter")
    model = offload.from_pretrained(folder)
    last = f"model.layers.{len(model.model.layers) - 1}.self_attn.q_proj"
    offload.quantize_(model, torchao.Int8WeightOnlyConfig(), lambda _, name: name == last)
    before = {name: offload.materialize(value) for name, value in model.named_parameters() if last not in name}

    with pytest.raises(UnsupportedOpError, match=f"'{last}.weight' is quantized"):
        offload.merge_lora(model, adapter)

    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters() if last not in name)
    assert "LlamaAttention" == type(model.model.layers[0].self_attn).__name__
    assert nn.Linear is type(model.model.layers[0].self_attn.q_proj)


@pytest.mark.parametrize(("layers", "kind", "words"), [(0, UnsupportedOpError, "never"), (1, MapError, "again")])
def test_a_merge_that_peft_refuses_at_its_first_layer_changes_nothing(layers, kind, words, tmp_path, monkeypatch):
    adapter = adapter_for(three(), LoraConfig(r=2, target_modules=["0", "1"], **NOT_NEUTRAL), tmp_path / "adapter")
    model, expected = three().train(), three()
    model.load_state_dict(expected.state_dict())
    with monkeypatch.context() as patched:
        failing = failing_after(layers, NotImplementedError("never"))
        patched.setattr(peft.tuners.lora.Linear, "get_delta_weight", failing)
        with pytest.raises(kind, match=words):
            offload.merge_lora(model, adapter)

    if layers:
        assert_merges_no_more(model, adapter)
    else:
        assert_same(expected, model)
        offload.merge_lora(model, adapter)
        assert_same(merged_in_memory(expected, adapter), model)
    assert {True} == {module.training for module in model} | {value.requires_grad for value in model.parameters()}


def test_an_adapter_of_another_model_or_a_missing_one_is_refused(folder, tmp_path):
    adapter = adapter_for(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(**ONE), tmp_path / "adapter")
    smaller = LlamaConfig(**{**SIZES, "hidden_size": 32}, tie_word_embeddings=False)
    other = offload.disk_offload(AutoModelForCausalLM.from_config(smaller))

    for model, kind, words in ((other, "LlamaForCausalLM", ", or it is damaged: .*[^:]$"), (three(), "Sequential", "")):
        with pytest.raises(CheckpointError, match=rf"is not an adapter for this {kind}{words}"):
            offload.merge_lora(model, adapter)
    with pytest.raises(CheckpointError, match=r"should be a folder with an adapter_config.json"):
        offload.merge_lora(other, tmp_path)
    assert nn.Linear is type(other.model.layers[0].self_attn.q_proj)
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "NOVEL"}))
    with pytest.raises(OffloadError):
        offload.merge_lora(other, adapter)


def _cut(folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])


def _as_pickle(folder: Path, value: object) -> None:
    (folder / "adapter_model.safetensors").unlink()
    torch.save(value, folder / "adapter_model.bin")


class Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code was run",)


DAMAGED, NO_SETTINGS = "or it is damaged", "should be a folder with an adapter_config"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "code": (lambda folder: _as_pickle(folder, {"w": Code()}), DAMAGED),
    "cut weights": (lambda folder: _cut(folder, "adapter_model.safetensors"), DAMAGED),
    "cut settings": (lambda folder: _cut(folder, "adapter_config.json"), NO_SETTINGS),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_adapter_or_one_with_code_is_refused_and_changes_nothing(damage, folder, tmp_path, capsys):
    adapter = adapter_for(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(**ONE), tmp_path / "adapter")
    spoil, words = DAMAGES[damage]
    spoil(adapter)
    model = offload.from_pretrained(folder)
    before = {name: type(module) for name, module in model.named_modules()}

    with pytest.raises(CheckpointError, match=words) as raised:
        offload.merge_lora(model, adapter)

    assert str(adapter) in str(raised.value)
    assert "code was run" not in capsys.readouterr().out
    assert before == {name: type(module) for name, module in model.named_modules()}
    assert_same(AutoModelForCausalLM.from_pretrained(folder), model)
