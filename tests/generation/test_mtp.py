"""Layers with which a checkpoint drafts for its own model: on disk, and as transformers has them in memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.modeling_layers import MtpModel

import offload
from offload.errors import ArgumentError, CheckpointError
from offload.generation import mtp
from offload.generation.candidates import draft_summary
from offload.generation.mtp import mtp_candidates
from offload.prefetch.value import page_state_of
from offload.tensor.views import handle_of

PROMPT = torch.tensor([[1, 2, 3, 4]])
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
LAYERS = 61  # transformers takes the layers to draft with of DeepSeek-V3 by this number
CONFIG = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS}
CONFIG |= {
    "moe_intermediate_size": 32,
    "first_k_dense_replace": LAYERS,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
CONFIG |= {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 16}
CONFIG |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1}
CONFIG |= {"initializer_range": 0.2, "num_experts_per_tok": 2}

needs_layers_from_disk = pytest.mark.skipif(
    not hasattr(MtpModel, "get_mtp_weights_regex"), reason="needs transformers 5.20: before, it alone loads such layers"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model whose checkpoint has a layer more than the model."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**CONFIG))
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    for name, value in MtpModel(model, 1).layers[0].state_dict().items():
        stored = name.replace("mtp_block.", "").replace("post_norm", "shared_head.norm")
        drawn = torch.randn(value.shape) / 5 + (value.dim() == 1)
        _, inside, projection = stored.rpartition("experts.")
        if inside and not name.endswith(".weight"):
            parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[projection]
            for expert, of_one in enumerate(drawn):
                for part, values in zip(parts, of_one.chunk(len(parts)), strict=True):
                    state[f"model.layers.{LAYERS}.mlp.experts.{expert}.{part}.weight"] = values
        else:
            state[f"model.layers.{LAYERS}.{stored}"] = drawn
    _put(folder, state)
    return folder


def _put(folder: Path, state: dict[str, torch.Tensor]) -> None:
    copied = {name: value.clone().contiguous() for name, value in state.items()}
    save_file(copied, folder / "model.safetensors", metadata={"format": "pt"})


def _layers(model: Any) -> Any:
    return mtp_candidates(model, {"generation_config": model.generation_config}).mtp_model


@needs_layers_from_disk
def test_the_layers_are_on_disk_in_the_models_budget_and_equal_those_in_memory(made):
    plain = MtpModel.from_pretrained(AutoModelForCausalLM.from_pretrained(made), device_map={"": "cpu"})
    model = offload.from_pretrained(made, max_memory="1MiB")
    layers = _layers(model)

    state = layers.state_dict()
    assert plain.state_dict().keys() == state.keys()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, state[name]), name
    weights = [value for name, value in state.items() if name.startswith("layers.") and value.dim() > 1]
    assert all(map(offload.is_offloaded, weights))
    pool = page_state_of(handle_of(model.lm_head.weight)).pool
    assert pool is not None
    assert {pool} == {page_state_of(handle_of(weight)).pool for weight in weights}


@needs_layers_from_disk
def test_it_drafts_what_transformers_drafts(made, monkeypatch):
    drafted: list[list[torch.Tensor]] = []
    forward = MtpModel.forward

    def watched(self: Any, *args: Any, **options: Any) -> Any:
        found = forward(self, *args, **options)
        drafted[-1].append(found[1].clone())
        return found

    monkeypatch.setattr(MtpModel, "forward", watched)
    texts = []
    for model in (AutoModelForCausalLM.from_pretrained(made), offload.from_pretrained(made)):
        drafted.append([])
        texts.append(model.generate(PROMPT, **GREEDY, use_mtp=True).tolist())

    assert texts[0] == texts[1] == model.generate(PROMPT, **GREEDY).tolist()
    assert len(drafted[0]) == len(drafted[1]) > 4
    assert all(torch.equal(one, other) for one, other in zip(*drafted, strict=True))
    summary = draft_summary(model)
    assert summary.passes > 4
    assert summary.drafted == len(drafted[1])


@needs_layers_from_disk
def test_layers_in_fp8_are_decoded_as_they_are_used(made, tmp_path):
    """As in the checkpoints of DeepSeek."""
    state = load_file(made / "model.safetensors")
    dense = dict(state)
    for name in [name for name in state if ".experts." in name]:
        scale = state[name].abs().max() / 448
        state[f"{name}_scale_inv"] = scale.reshape(1, 1)
        state[name] = (state[name] / scale).to(torch.float8_e4m3fn)
        dense[name] = state[name].float() * scale
    for folder, values in ((tmp_path / "fp8", state), (tmp_path / "dense", dense)):
        folder.mkdir()
        _put(folder, values)
        (folder / "config.json").write_text((made / "config.json").read_text())
    config = json.loads((made / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    plain = MtpModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "dense"), device_map={"": "cpu"})
    layers = _layers(offload.from_pretrained(tmp_path / "fp8"))

    for name, value in plain.layers[0].state_dict().items():
        assert torch.equal(value, layers.layers[0].state_dict()[name]), name


@needs_layers_from_disk
def test_a_checkpoint_that_lacks_them_is_refused(made, tmp_path):
    state = load_file(made / "model.safetensors")
    _put(tmp_path, {name: value for name, value in state.items() if f".{LAYERS}." not in name})
    (tmp_path / "config.json").write_text((made / "config.json").read_text())
    model = offload.from_pretrained(tmp_path)

    with pytest.raises(CheckpointError, match=r"has no layers to draft with: layers\.0\..* is missing"):
        model.generate(PROMPT, **GREEDY, use_mtp=True)
    assert model not in mtp._LAYERS

    model.config.num_nextn_predict_layers = 0
    with pytest.raises(ValueError, match="num_mtp_layers"):
        model.generate(PROMPT, **GREEDY, use_mtp=True)


def test_a_transformers_that_alone_loads_them_is_refused(made, monkeypatch):
    """As those before 5.20."""
    monkeypatch.delattr(MtpModel, "get_mtp_weights_regex", raising=False)
    model = offload.from_pretrained(made)

    with pytest.raises(ArgumentError, match=r"transformers 5\.20 or later"):
        model.generate(PROMPT, **GREEDY, use_mtp=True)
