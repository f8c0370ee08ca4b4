"""Checkpoints whose names and formats differ from the model's: fused experts, casts, quantized weights."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import contents
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, BertForMaskedLM, BertModel

import offload
from offload.errors import CheckpointError
from offload.models import pretrained
from offload.tensor.views import handle_of
from tests.equal import assert_equal
from tests.tiny import tiny_checkpoint

SMALL: dict[str, Any] = {"intermediate_size": 96, "num_experts_per_tok": 2, "max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 32, "head_dim": 16, "tie_word_embeddings": True},
}


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A mixture of experts in float32, one matrix per expert."""
    options = {**SMALL, **MODELS[request.param], "max_shard_size": "5GB"}
    return tiny_checkpoint(tmp_path / "checkpoint", request.param, **options)


def keys_of(folder: Path) -> set[str]:
    return {key for path in folder.glob("*.safetensors") for key in load_file(path)}


def empty(folder: Path) -> Any:
    with offload.init_empty_weights():
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def assert_same(expected: torch.nn.Module, model: torch.nn.Module, tokens: torch.Tensor) -> None:
    assert list(expected.state_dict()) == list(model.state_dict())
    assert_equal(expected, model)
    with torch.no_grad():
        assert torch.equal(expected(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_fused_experts_are_put_together_when_they_are_read(folder, tmp_path, tokens, dtype):
    """Also in an empty model that is filled, whatever the checkpoint calls its weights."""
    before, options = contents(tmp_path), {"dtype": dtype, "offload_dir": tmp_path / "offload"}
    models = [offload.from_pretrained(folder, **options)]
    if dtype == "auto":
        models.append(offload.load_checkpoint_and_dispatch(empty(folder), folder, strict=True).eval())

    for model in models:
        assert_same(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), model, tokens)
        assert all(offload.is_offloaded(parameter) for parameter in model.parameters())
    assert before == contents(tmp_path)


def test_experts_that_are_written_to_have_a_file_in_the_offload_folder(folder, tmp_path):
    before = contents(folder)
    model = offload.from_pretrained(folder, offload_dir=tmp_path / "offload")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    experts = model.get_parameter(name)
    expected = experts.materialize()
    with torch.no_grad():
        for tensor in (experts, expected):
            tensor[1, 2] = 0

    assert [f"{name}.safetensors"] == [path.name for path in (tmp_path / "offload").iterdir()]
    assert torch.equal(expected, load_file(tmp_path / "offload" / f"{name}.safetensors")[name])
    assert torch.equal(expected, model.get_parameter(name).materialize())
    assert before == contents(folder)


def test_a_model_that_is_loaded_or_filled_in_inference_mode_trains(folder, tokens):
    filled = empty(folder)
    with torch.inference_mode():
        loaded = offload.from_pretrained(folder)
        offload.load_checkpoint_and_dispatch(filled, folder, {"": "disk", "model.layers.0": "cpu"})
        loaded(tokens)

    for model in (loaded, filled):
        model(tokens, labels=tokens).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("narrow", ["norm", "proj"])
def test_a_checkpoint_of_two_dtypes_is_not_rounded_and_what_fits_stays_where_it_is(folder, tmp_path, tokens, narrow):
    """In any order: here the half-precision values come first."""
    tensors, model = load_file(folder / "model.safetensors"), empty(folder)
    values = {name: value.bfloat16() for name, value in tensors.items() if narrow in name}
    torch.save({**values, **{name: value for name, value in tensors.items() if name not in values}}, tmp_path / "x.bin")
    for name, parameter in list(model.named_parameters()):
        if name in values:
            model.get_parameter(name).data = parameter.bfloat16()
    offload.load_checkpoint_and_dispatch(model, tmp_path / "x.bin", offload_dir=tmp_path / "values")

    assert not (tmp_path / "values").exists()
    for name, parameter in model.named_parameters():
        assert tmp_path / "x.bin" == parameter.offload_path
        assert (handle_of(parameter).composed is not None) == ("experts" in name), name  # type: ignore[arg-type]
        if name in tensors:
            assert torch.equal(values.get(name, tensors[name]), parameter.materialize()), name


def test_an_expert_that_is_missing_is_an_error_of_the_checkpoint(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors[next(name for name in tensors if ".experts.1." in name)]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    with pytest.raises(CheckpointError, match=r"can't make a .*ForCausalLM from "):
        offload.from_pretrained(folder)


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_the_folder_of_a_checkpoint_is_refused_as_offload_dir(folder, form):
    """With a .bin and some files of ours, these would be the checkpoint, and all other weights random."""
    if form == "bin":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    before = contents(folder)
    for load, *model in (
        (offload.from_pretrained,),
        (offload.load_checkpoint_and_dispatch, empty(folder)),
        (offload.load_file,),
    ):
        with pytest.raises(CheckpointError, match=r"is a checkpoint's own folder.*Give another offload_dir"):
            load(*model, folder, offload_dir=folder)

    assert before == contents(folder)


def store(source: Path, folder: Path) -> None:
    """The values of a checkpoint as an offload folder, with its configuration."""
    for path in source.glob("*.safetensors"):
        for name, value in load_file(path).items():
            offload.OffloadedTensor.from_original_tensor(value, name, folder)
    for path in source.glob("*.json"):
        if not path.name.endswith("index.json"):
            shutil.copy(path, folder)


def test_an_offload_folder_does_not_get_what_a_model_makes_of_it(folder, tmp_path):
    """It would contain each expert twice, and not load again."""
    values = tmp_path / "values"
    store(folder, values)
    before = contents(values)
    for load in (
        lambda: offload.from_pretrained(values, offload_dir=values, dtype=torch.bfloat16),
        lambda: offload.load_checkpoint_and_dispatch(empty(folder), values, offload_dir=values),
    ):
        with pytest.raises(CheckpointError, match=r"[46] tensors in another form.*experts.*Give another offload_dir"):
            load()

    assert before == contents(values)


def test_an_offload_folder_is_cast_in_place(llama_folder, tmp_path, tokens):
    store(llama_folder, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    model = offload.from_pretrained(tmp_path, offload_dir=tmp_path, dtype=torch.float64)

    assert_same(AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float64), model, tokens)
    assert names == {path.name for path in tmp_path.iterdir()}
    assert {torch.float64} == {value.dtype for value in offload.load_file(tmp_path).values()}


in_memory = AutoModelForCausalLM.from_pretrained
WAYS: dict[str, Any] = {
    "loaded": offload.from_pretrained,
    "copied": lambda folder: copy.deepcopy(offload.from_pretrained(folder)),
    "filled": lambda folder: offload.load_checkpoint_and_dispatch(in_memory(folder), folder),
    "moved twice": lambda folder: offload.disk_offload(offload.disk_offload(in_memory(folder))),
}


@pytest.mark.parametrize(("way", "size"), [("loaded", "30KB"), *((way, "5GB") for way in WAYS)])
def test_saving_takes_experts_apart_and_holds_none_in_memory(folder, tmp_path, tokens, monkeypatch, way, size):
    """However they came to disk: transformers splits deferred tensors."""
    model, deferred, real = WAYS[way](folder), [], pretrained.deferred
    monkeypatch.setattr(pretrained, "deferred", lambda tensor: deferred.append(tensor) or real(tensor))
    model.save_pretrained(tmp_path / "saved", max_shard_size=size)

    assert {3} == {tensor.dim() for tensor in deferred}
    assert 2 * 2 == len(deferred)  # of each of two layers, once each
    assert keys_of(folder) == keys_of(tmp_path / "saved")
    largest = max(path.stat().st_size for path in (tmp_path / "saved").glob("*.safetensors"))
    assert (largest < 60_000) == (size == "30KB")
    assert_same(in_memory(tmp_path / "saved"), model, tokens)


def test_the_current_values_are_saved(folder, tmp_path):
    model = offload.from_pretrained(folder)
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        experts.gate_up_proj[1].mul_(2)
    experts.down_proj.update_values(experts.down_proj.materialize() + 1)
    model.save_pretrained(tmp_path / "saved")

    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").model.layers[0].mlp.experts
    assert torch.equal(experts.gate_up_proj, reloaded.gate_up_proj)
    assert torch.equal(experts.down_proj, reloaded.down_proj)


def test_a_base_model_is_filled_from_a_checkpoint_with_a_head(tmp_path, tokens):
    torch.manual_seed(0)
    config = BertConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    expected = BertModel.from_pretrained(tmp_path, add_pooling_layer=False)
    with offload.init_empty_weights():
        model = BertModel(config, add_pooling_layer=False)
    report = offload.load_checkpoint_in_model(model, tmp_path)

    assert [] == report.missing_keys
    assert any(name.startswith("cls.") for name in report.unexpected_keys)
    with torch.no_grad():
        assert torch.equal(expected(tokens).last_hidden_state, model.eval()(tokens).last_hidden_state)


def test_values_of_other_shapes_are_refused_under_the_names_of_the_model(folder):
    tensors, model = load_file(folder / "model.safetensors"), empty(folder)
    name = next(name for name in tensors if "o_proj" in name)
    tensors[name] = tensors[name][:5].contiguous()
    tensors["model.layers.7.stray.weight"] = torch.ones(2)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    with pytest.raises(CheckpointError, match=r"model\.layers\.7\.stray\.weight; .*o_proj.*\(5, 64\).*\(64, 64\)"):
        offload.load_checkpoint_in_model(model, folder)


def test_weights_that_a_model_keeps_in_float32_are_not_rounded_on_the_way(tmp_path):
    """T5 keeps `wo` in float32 if the rest is in half precision."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    model = offload.from_pretrained(tmp_path, T5ForConditionalGeneration, dtype=torch.float16)

    expected = T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)
    assert {torch.float16, torch.float32} == {parameter.dtype for parameter in expected.parameters()}
    for (name, one), other in zip(expected.named_parameters(), model.parameters(), strict=True):
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other.materialize()), name


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_a_quantized_checkpoint_is_on_disk_and_gives_the_same(llama_folder, tmp_path, tokens, config):
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    method = TorchAoConfig(getattr(quantization, config)(version=2))
    quantized = AutoModelForCausalLM.from_pretrained(llama_folder, quantization_config=method)
    quantized.save_pretrained(tmp_path / "quantized")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "quantized")

    with torch.device("meta"):  # the default device has no effect
        model = offload.from_pretrained(tmp_path / "quantized")

    weight = model.model.layers[0].self_attn.q_proj.weight
    assert all(offload.is_offloaded(parameter) for parameter in model.parameters())
    assert "Int8Tensor" == type(weight.materialize()).__name__
    torch.save(model.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=False)
    assert torch.equal(weight.materialize().dequantize(), state["model.layers.0.self_attn.q_proj.weight"].dequantize())
    model.save_pretrained(tmp_path / "again", save_original_format=False)
    with torch.no_grad():
        for found in (model, AutoModelForCausalLM.from_pretrained(tmp_path / "again")):
            assert torch.equal(expected(tokens).logits, found(tokens).logits)


def test_no_deferred_tensor_stays_in_the_model(folder):
    model = offload.from_pretrained(folder, device_map={"": "cpu", "model.layers.1": "meta"})

    kinds: dict[str, Any] = {name: type(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    assert {torch.nn.Parameter} == set(kinds.values())
    assert all(parameter.is_meta for parameter in model.model.layers[1].parameters())
