"""Adapters merged into bases on disk: the same as peft in memory, one value at a time, and only once."""

import copy
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import contents
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.pytorch_utils import Conv1D

import offload
from offload.errors import CheckpointError, JournalError, MapError, OffloadError, UnsupportedOpError
from offload.integrations.peft import merge_checkpoint
from offload.planning.check import tiny_checkpoint
from tests.faults import Call, killed_at_each
from tests.integrations.test_peft import KINDS, NOT_NEUTRAL, OF_EXPERTS, ONE, adapter_for
from tests.sizes import SIZES

MORE: dict[str, Callable[[], Any]] = {
    "rslora": lambda: LoraConfig(**ONE, **NOT_NEUTRAL, use_rslora=True),
    "patterns": lambda: LoraConfig(
        r=4, target_modules="all-linear", rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 3}, **NOT_NEUTRAL
    ),
    "boft": lambda: peft.BOFTConfig(boft_block_size=4, target_modules=["q_proj"], init_weights=False),
    "vblora": lambda: peft.VBLoRAConfig(target_modules=["q_proj"], num_vectors=8, vector_length=4, topk=2),
    "miss": lambda: peft.MissConfig(r=4, target_modules=["q_proj"], init_weights=False),
    "randlora": lambda: peft.RandLoraConfig(r=4, target_modules=["q_proj"], init_weights=False),
    "osf": lambda: peft.OSFConfig(target_modules=["q_proj"]),
}
KINDS_THAT_MERGE = KINDS | MORE


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
@pytest.mark.parametrize("kind", KINDS_THAT_MERGE)
def test_a_merge_on_disk_is_that_of_peft_in_memory(kind, of, request, tmp_path):
    """Bit for bit; changed values are in the user's folder, the checkpoint and the random generator are unchanged."""
    base = request.getfixturevalue(of)
    adapter = adapter_for(AutoModelForCausalLM.from_pretrained(base), KINDS_THAT_MERGE[kind](), tmp_path / "adapter")
    expected = merged_in_memory(AutoModelForCausalLM.from_pretrained(base), adapter)
    stood, random = contents(base), torch.get_rng_state()
    model = offload.from_pretrained(base, offload_dir=tmp_path / "values")
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    report = offload.merge_lora(model, adapter)

    assert_same(expected, model)
    assert all(offload.is_offloaded(parameter) for parameter in model.parameters())
    written = {key for path in (tmp_path / "values").glob("*.safetensors") for key in load_file(path)}
    assert written == set(report.replaced)
    assert flags == {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}
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
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    report = offload.merge_lora(model, adapter)

    expected = merged_in_memory(plain, adapter)
    assert_same(expected, model)
    assert {name for name, value in expected.state_dict().items() if not torch.equal(before[name], value)} == set(
        report.replaced
    )
    assert (place == "disk") == offload.is_offloaded(model.linear.weight)


def test_adapters_of_fused_experts_merge_as_in_memory(tmp_path):
    """`target_parameters`: two in one module."""
    tiny_checkpoint(tmp_path / "model", "mixtral", num_local_experts=4)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    adapter = adapter_for(copy.deepcopy(plain), OF_EXPERTS, tmp_path / "adapter")
    model = offload.from_pretrained(tmp_path / "model", offload_dir=tmp_path / "values")
    report = offload.merge_lora(model, adapter)

    assert_same(merged_in_memory(plain, adapter), model)
    assert all(offload.is_offloaded(parameter) for parameter in model.parameters())
    assert 6 == len(report.replaced)


# Once


def three() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(4, 4))


ONCE: dict[str, dict[str, Any]] = {
    "weights, biases and whole modules": {"target_modules": ["q_proj"], "modules_to_save": ["o_proj"], "bias": "all"},
    "embeddings": {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "tied embeddings": {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "of the base's own factors": {"target_modules": ["q_proj"], "init_lora_weights": "pissa"},
}


@pytest.mark.parametrize("kind", ONCE)
def test_a_merge_that_was_killed_resumes_and_merges_nothing_twice(kind, private_place):
    """At each call that changes files. Embeddings that peft stores beside the adapter are copied back each time."""
    base, target = private_place / "base", private_place / "new"
    torch.manual_seed(0)
    tied = {"tie_word_embeddings": kind == "tied embeddings", "attention_bias": True}
    AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, "num_hidden_layers": 1}, **tied)).save_pretrained(base)
    config = LoraConfig(**{"r": 2, **NOT_NEUTRAL, **ONCE[kind]})
    adapter = adapter_for(AutoModelForCausalLM.from_pretrained(base), config, private_place / "adapter")
    expected = merged_in_memory(AutoModelForCausalLM.from_pretrained(base), adapter)

    def begin() -> None:
        for folder in (target, private_place / "new.partial"):
            shutil.rmtree(folder, ignore_errors=True)

    def check(_: None, call: Call) -> None:
        if not target.exists():
            merge_checkpoint(base, adapter, target, resume=True)
        assert_same(expected, AutoModelForCausalLM.from_pretrained(target))

    died_at = killed_at_each(begin, lambda _: merge_checkpoint(base, adapter, target), check)

    assert {"os.replace", "os.pwrite", "os.rename"} <= {call.name for call in died_at}


def test_an_adapter_is_known_by_its_content(folder, tmp_path, monkeypatch):
    """It may be moved between a kill and the next run; a different one is a different run."""
    config, target = LoraConfig(**ONE, **NOT_NEUTRAL), tmp_path / "new"
    adapter = adapter_for(AutoModelForCausalLM.from_pretrained(folder), config, tmp_path / "adapter")
    with monkeypatch.context() as patched:
        patched.setattr(peft.tuners.lora.Linear, "get_delta_weight", failing_after(1))
        with pytest.raises(MapError, match=r"1 layers are merged, .*--resume\) goes on"):
            merge_checkpoint(folder, adapter, target)
    (tmp_path / "moved").mkdir()
    moved = Path(shutil.move(adapter, tmp_path / "moved" / "adapter"))
    other = Path(shutil.copytree(moved, tmp_path / "other"))
    state = load_file(other / "adapter_model.safetensors")
    save_file({key: value + 1 for key, value in state.items()}, other / "adapter_model.safetensors")

    with pytest.raises(JournalError, match="another adapter"):
        merge_checkpoint(folder, other, target, resume=True)
    report = merge_checkpoint(folder, moved, target, resume=True)

    weights = tuple(f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1))
    assert (weights[1:], weights[:1]) == (report.replaced, report.before)


def failing_after(calls: int) -> Callable[..., Any]:
    """A method of peft's layers that works this many times."""
    real, left = peft.tuners.lora.Linear.get_delta_weight, [calls]

    def failing(*args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise ValueError("no")
        return real(*args)

    return failing


def failing_at(layer: nn.Module, error: BaseException) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    layer.weight.materialize = fail


@pytest.mark.parametrize(("error", "kind"), [(ValueError("no"), MapError), (KeyboardInterrupt(), KeyboardInterrupt)])
def test_after_a_failure_the_base_is_without_adapters_and_can_be_loaded_again(error, kind, tmp_path):
    source = three()
    offload.save_checkpoint(source, tmp_path / "model")
    adapter = adapter_for(source, LoraConfig(r=2, target_modules=["0", "1"], **NOT_NEUTRAL), tmp_path / "adapter")
    plain = three()
    offload.load_checkpoint_in_model(plain, tmp_path / "model", "cpu")

    def load(place: str) -> Any:
        empty = three().to("meta")
        return offload.load_checkpoint_and_dispatch(empty, tmp_path / "model", offload_dir=tmp_path / place)

    model = load("values")
    failing_at(model[1], error)

    with pytest.raises(kind, match=r"at '1'.*1 layers are merged, and stay; load the base again"):
        offload.merge_lora(model, adapter)
    assert [nn.Linear] * 3 == [type(layer) for layer in model]
    assert model(torch.ones(6)).isfinite().all()
    assert_merges_no_more(model, adapter)
    model = load("again")
    offload.merge_lora(model, adapter)

    assert_same(merged_in_memory(plain, adapter), model)


def assert_merges_no_more(model: nn.Module, adapter: Path) -> None:
    before = offload.materialize(dict(model.state_dict()))
    with pytest.raises(UnsupportedOpError, match=r"adapter into this Sequential failed half-way.*load the base again"):
        offload.merge_lora(model, adapter)
    torch.testing.assert_close(offload.materialize(dict(model.state_dict())), before, rtol=0, atol=0)


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_no_layer_is_merged_twice_into_a_model_whose_merge_failed(place, tmp_path, monkeypatch):
    """One that failed before the first value can be merged again."""
    adapter = adapter_for(three(), LoraConfig(r=2, target_modules=["0", "1"], **NOT_NEUTRAL), tmp_path / "adapter")
    torch.manual_seed(0)
    base = three()
    expected = merged_in_memory(copy.deepcopy(base), adapter)
    model = offload.disk_offload(base, tmp_path / "values") if place == "disk" else base
    half = copy.deepcopy(model)
    for done, each, kind in ((0, model, UnsupportedOpError), (1, half, MapError)):
        with monkeypatch.context() as patched:
            patched.setattr(peft.tuners.lora.Linear, "get_delta_weight", failing_after(done))
            with pytest.raises(kind, match="no"):
                offload.merge_lora(each, adapter)
    offload.merge_lora(model, adapter)

    assert_same(expected, model)
    assert_merges_no_more(half, adapter)
    assert_merges_no_more(copy.deepcopy(half), adapter)


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

    with pytest.raises(UnsupportedOpError, match=f"of kind {kind} can't be merged"):
        offload.merge_lora(model, tmp_path / "adapter")

    assert kinds == [type(module) for module in model.modules()]
    assert not list((tmp_path / "values").glob("*.safetensors"))


def test_a_quantized_base_is_refused(folder, tmp_path):
    torchao = pytest.importorskip("torchao.quantization")
    adapter = adapter_for(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(**ONE), tmp_path / "adapter")
    model = offload.from_pretrained(folder)
    offload.quantize_(model, torchao.Int8WeightOnlyConfig())

    with pytest.raises(UnsupportedOpError, match=r"is quantized.*merge into the dense base"):
        offload.merge_lora(model, adapter)

    assert "LlamaAttention" == type(model.model.layers[0].self_attn).__name__
    assert nn.Linear is type(model.model.layers[0].self_attn.q_proj)


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


def _as_pickle(folder: Path, value: object, *, cut: bool = False) -> None:
    (folder / "adapter_model.safetensors").unlink()
    torch.save(value, folder / "adapter_model.bin")
    if cut:
        _cut(folder, "adapter_model.bin")


class Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code was run",)


DAMAGED, NO_SETTINGS = "or it is damaged", "should be a folder with an adapter_config"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "code": (lambda folder: _as_pickle(folder, {"w": Code()}), "holds something other than tensors"),
    "no tensors": (lambda folder: _as_pickle(folder, [1, 2]), DAMAGED),
    "a cut pickle": (lambda folder: _as_pickle(folder, {}, cut=True), "damaged|code"),
    "cut weights": (lambda folder: _cut(folder, "adapter_model.safetensors"), DAMAGED),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b""), DAMAGED),
    "cut settings": (lambda folder: _cut(folder, "adapter_config.json"), NO_SETTINGS),
    "settings in a list": (lambda folder: (folder / "adapter_config.json").write_text("[1]"), NO_SETTINGS),
    "other settings": (
        lambda folder: (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": "4"}'),
        DAMAGED,
    ),
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
