"""transformers models on disk."""

import copy
import gc
import json
import os
import shutil
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import contents
from safetensors.torch import save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    core_model_loading,
)

import offload
from offload.errors import CheckpointError, ForeignFileError
from tests.equal import assert_equal
from tests.processes import run_script


@pytest.fixture
def in_memory(llama_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(llama_folder)


@pytest.mark.parametrize("max_shard_size", ["1GB", "60KB"])
def test_a_checkpoint_of_torch_save_is_loaded_in_place(llama_folder, in_memory, tokens, tmp_path, max_shard_size):
    """It contains tied weights twice."""
    from huggingface_hub import save_torch_state_dict

    shutil.copy(llama_folder / "config.json", tmp_path)
    state = in_memory.state_dict()
    save_torch_state_dict(state, tmp_path, max_shard_size=max_shard_size, safe_serialization=False)
    before = contents(tmp_path)
    model = offload.from_pretrained(tmp_path)

    assert (max_shard_size == "1GB") == (tmp_path / "pytorch_model.bin").is_file()
    assert {tmp_path} == {weight.offload_path.parent for weight in model.parameters()}
    assert not model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        assert torch.equal(in_memory(tokens).logits, model(tokens).logits)
    assert before == contents(tmp_path)


def test_no_device_map_loads_into_memory(llama_folder, in_memory, tokens):
    """As for transformers and accelerate, whose default is `None`."""
    found = offload.from_pretrained(llama_folder, device_map=None)
    filled = offload.load_checkpoint_and_dispatch(LlamaForCausalLM(in_memory.config), llama_folder, device_map=None)

    for model in (found, filled):
        assert not any(offload.is_offloaded(parameter) for parameter in model.parameters())
    assert torch.equal(in_memory(tokens).logits, found(tokens).logits)


@pytest.mark.parametrize("option", ["load_in_8bit", "load_in_4bit", "quantization_config"])
def test_quantizing_while_loading_is_refused_with_the_way_out(option, llama_folder):
    with pytest.raises(CheckpointError, match=rf"{option}: weights are not quantized.*offload\.quantize_"):
        offload.from_pretrained(llama_folder, **{option: True})

    assert offload.from_pretrained(llama_folder, **{option: False})


def test_a_checkpoint_without_a_head_reports_the_head_as_missing(llama_folder):
    kind = AutoModelForSequenceClassification
    model, info = offload.from_pretrained(llama_folder, model_class=kind, output_loading_info=True)

    assert {"score.weight"} == set(info["missing_keys"])
    assert all(offload.is_offloaded(parameter) for parameter in model.parameters())


@pytest.mark.parametrize("size", ["5GB", "60KB"])
def test_a_model_is_not_saved_over_the_files_that_it_refers_to(size, llama_folder, tmp_path, tokens):
    """Nor files that transformers would remove first; nor by a copy of it with its own values."""
    shutil.copytree(llama_folder, tmp_path / "llama")
    model = offload.from_pretrained(tmp_path / "llama")
    before, expected = contents(tmp_path / "llama"), model(tokens).logits
    for one in (model, copy.deepcopy(model)):
        with pytest.raises(ForeignFileError, match=r"refer.* to .*save to another folder"):
            one.save_pretrained(tmp_path / "llama", max_shard_size=size)

    assert before == contents(tmp_path / "llama")
    assert torch.equal(expected, model(tokens).logits)
    model.save_pretrained(tmp_path / "elsewhere", max_shard_size=size)
    model.save_pretrained(save_directory=tmp_path / "elsewhere", max_shard_size=size)
    assert torch.equal(expected, AutoModelForCausalLM.from_pretrained(tmp_path / "elsewhere")(tokens).logits)


def test_a_pickled_model_saves_itself_without_offload(llama_folder, tmp_path):
    model = offload.from_pretrained(llama_folder)
    expected = weakref.ref(model)
    torch.save(model, tmp_path / "model.pt")
    del model
    gc.collect()
    script = """
        import sys, torch
        sys.modules["offload"] = None
        model = torch.load(sys.argv[1] + "/model.pt", weights_only=False)
        model.save_pretrained(sys.argv[1] + "/saved")
    """
    run_script(script, tmp_path, fresh=True)

    assert expected() is None
    found = offload.load_file(tmp_path / "saved")
    for name, value in offload.load_file(llama_folder).items():
        assert torch.equal(value.materialize(), found[name].materialize())


def test_a_model_and_its_files_go_with_its_last_name(llama_folder):
    """Nothing in it refers to it: no garbage collection is needed."""
    for make in (lambda model: model, copy.deepcopy):
        model = make(offload.from_pretrained(llama_folder, dtype=torch.float16))
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(2)
        gone = weakref.ref(model)
        paths = {weight.offload_path for weight in model.parameters()}
        assert all(path.exists() and path.parent != llama_folder for path in paths)
        del weight
        gc.disable()
        try:
            del model
        finally:
            gc.enable()

        assert gone() is None
        assert not [path for path in paths if path.exists()]


def test_a_model_or_a_copy_of_it_without_a_name_saves_itself(llama_folder, tmp_path):
    model = offload.from_pretrained(llama_folder)
    with torch.no_grad():
        model.model.norm.weight.zero_()
    offload.from_pretrained(llama_folder).save_pretrained(tmp_path / "model")
    copy.deepcopy(model).save_pretrained(tmp_path / "copy")

    assert_equal(offload.load_file(llama_folder), offload.load_file(tmp_path / "model"))
    assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "copy"), model)
    assert not model.model.norm.weight.any()


def test_a_model_that_is_gone_leaves_its_names_to_the_next(llama_folder, tmp_path):
    for _ in range(2):
        model = offload.from_pretrained(llama_folder, offload_dir=tmp_path)
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        del model


def test_an_adapter_may_be_saved_beside_the_model_that_it_is_for(llama_folder, tmp_path):
    shutil.copytree(llama_folder, tmp_path / "llama")
    before = contents(tmp_path / "llama")
    model = offload.from_pretrained(tmp_path / "llama")
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    try:
        model.add_adapter(config)
    except ValueError:  # from 5.24 on, transformers wants peft 0.22 for its own methods
        model = peft.get_peft_model(model, config)
    model.save_pretrained(tmp_path / "llama")

    after = contents(tmp_path / "llama")
    assert all(before[name] == after[name] for name in before if name.startswith("model"))
    assert (tmp_path / "llama" / "adapter_model.safetensors").is_file()


def test_a_checkpoint_of_another_model_is_refused(llama_folder, tmp_path):
    (tmp_path / "config.json").write_text((llama_folder / "config.json").read_text())
    save_file({"encoder.w": torch.ones(2)}, tmp_path / "model.safetensors")

    with pytest.raises(CheckpointError, match="belongs to another model than LlamaForCausalLM"):
        offload.from_pretrained(tmp_path)


def test_a_folder_without_a_configuration_or_a_name_without_a_folder_is_refused(tmp_path):
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")

    with pytest.raises(CheckpointError, match=rf"can't make a model from {tmp_path}: .*config\.json"):
        offload.from_pretrained(tmp_path)
    for name in ("nobody/nothing-like-this", str(tmp_path / "nowhere")):
        with pytest.raises(CheckpointError, match=r"nothing-like-this|nowhere"):
            offload.from_pretrained(name)


def test_a_name_on_the_hub_is_found_in_the_local_cache(llama_folder, in_memory, tmp_path, tokens):
    """Without a network, in the layout of huggingface_hub's cache."""
    stored = tmp_path / "models--someone--a-llama"
    shutil.copytree(llama_folder, stored / "snapshots" / ("a" * 40))
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("a" * 40)
    model = offload.from_pretrained("someone/a-llama", cache_dir=tmp_path, local_files_only=True)

    assert "someone/a-llama" == model.config.name_or_path
    assert torch.equal(in_memory(tokens).logits, model(tokens).logits)


def edited(folder: Path, **settings: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return folder


@pytest.mark.parametrize("names", [None, [], ["NoSuchModel"], ["AutoModel"], ["pipeline"], ["BertModel"]])
def test_a_configuration_that_names_no_class_of_its_own_means_a_causal_language_model(llama_folder, tmp_path, names):
    folder = edited(shutil.copytree(llama_folder, tmp_path / "llama"), architectures=names)

    assert LlamaForCausalLM is offload.from_pretrained(folder).__class__


def test_an_error_about_the_class_names_the_argument_that_gives_another(tmp_path):
    """There is no causal language model of that kind, and the configuration names no class."""
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ViTModel(ViTConfig(**sizes)).save_pretrained(tmp_path)
    edited(tmp_path, architectures=None)

    with pytest.raises(CheckpointError, match="give it in Python as model_class="):
        offload.from_pretrained(tmp_path)

    assert ViTModel is offload.from_pretrained(tmp_path, model_class=AutoModel).__class__


@pytest.mark.parametrize("name", ["torch_dtype", "subfolder", "variant", "state_dict", "offload_folder"])
def test_an_option_that_would_be_ignored_is_refused(llama_folder, name):
    with pytest.raises(TypeError, match=f"does not take '{name}': "):
        offload.from_pretrained(llama_folder, **{name: "any"})


@pytest.mark.parametrize("before", [None, "0"])
def test_nothing_is_converted_in_threads_and_the_environment_is_as_it_was_once_all_loadings_ended(
    llama_folder, monkeypatch, before
):
    """One load begins during another, as in two threads, and fails."""
    name, converting, converted = "HF_DEACTIVATE_ASYNC_LOAD", core_model_loading._materialize_copy, []
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)

    def convert(tensor: Any, *args: Any) -> Any:
        if not converted:
            converted.append(threading.current_thread())
            with pytest.raises(CheckpointError, match="can't make a Failing"):
                offload.from_pretrained(llama_folder, model_class=Failing)
        converted.append(threading.current_thread())
        return converting(tensor, *args)

    monkeypatch.setattr(core_model_loading, "_materialize_copy", convert)
    offload.from_pretrained(llama_folder)

    assert len(converted) > 2
    assert {threading.main_thread()} == set(converted)
    assert before == os.environ.get(name)


class Failing(LlamaForCausalLM):
    """Raises when it is filled, but not when it is created empty."""

    def tie_weights(self, *args: Any, **options: Any) -> Any:
        if any(not value.is_meta for value in self.parameters()):
            raise ZeroDivisionError
        return super().tie_weights(*args, **options)


@pytest.mark.parametrize("count", [1_000_000, 10**12])
@pytest.mark.parametrize("load", [offload.from_pretrained, offload.plan])
def test_more_layers_than_there_are_values_are_refused_before_they_are_made(load, count, llama_folder, tmp_path):
    folder = edited(shutil.copytree(llama_folder, tmp_path / "model"), num_hidden_layers=count)

    with pytest.raises(CheckpointError, match=rf"asks for {count} layers \(num_hidden_layers\), and the checkpoint"):
        load(folder)


@pytest.mark.parametrize("model_class", ["AutoModel", torch.nn.Linear, None.__class__])
def test_an_invalid_model_class_is_refused(llama_folder, model_class):
    with pytest.raises(TypeError, match="model_class should be a model class of transformers"):
        offload.from_pretrained(llama_folder, model_class=model_class)


def test_options_of_the_configuration_are_taken_which_may_be_a_folder(llama_folder, tmp_path):
    config = LlamaForCausalLM.config_class.from_pretrained(llama_folder)
    config.rope_parameters["rope_theta"] = 77.0
    config.save_pretrained(tmp_path)
    other = offload.from_pretrained(llama_folder, config=tmp_path)
    model = offload.from_pretrained(llama_folder, AutoModelForSequenceClassification, num_labels=5, use_cache=False)

    assert (5, False) == (len(model.score.weight), model.config.use_cache)
    assert 77.0 == other.config.rope_parameters["rope_theta"]
