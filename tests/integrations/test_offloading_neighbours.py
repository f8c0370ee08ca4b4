"""Inside `offloading`, what other libraries create and load is on disk: torchao's weights, adapters, whole models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import is_offloaded

pytest.importorskip("transformers")


def tiny() -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def test_a_model_made_inside_is_on_disk_and_generates_the_same(tokens):
    expected = tiny().generate(tokens, max_new_tokens=4, do_sample=False)

    with offload.offloading(min_bytes="4KiB"):
        model = tiny()
        found = model.generate(tokens, max_new_tokens=4, do_sample=False)

    assert torch.equal(expected, found)
    assert all(is_offloaded(weight) for name, weight in model.named_parameters() if "norm" not in name)


def test_adapters_that_peft_makes_and_loads_are_on_disk(tokens, tmp_path):
    peft = pytest.importorskip("peft")

    def adapted(base: Any) -> Any:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=16, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        return peft.get_peft_model(base, config).eval()

    base = tiny()
    plain = adapted(copy.deepcopy(base))
    expected = plain(tokens).logits
    plain.save_pretrained(tmp_path / "adapter")

    with offload.offloading(min_bytes="4KiB"):
        made = adapted(copy.deepcopy(base))
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter")
        loaded.load_adapter(tmp_path / "adapter", "second")
    loaded.set_adapter("second")

    for model in (made, loaded):
        adapters = [weight for name, weight in model.named_parameters() if "lora_" in name]
        assert adapters
        assert all(map(is_offloaded, adapters))
        assert torch.equal(expected, model(tokens).logits)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", ["memory", "disk"])
def test_weights_that_torchao_quantizes_inside_are_on_disk(start):
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).bfloat16()
    x = torch.randn(4, 256).bfloat16()
    expected = copy.deepcopy(layers)
    quantization.quantize_(expected, quantization.Int8WeightOnlyConfig())
    model = copy.deepcopy(layers)
    if start == "disk":
        offload.disk_offload(model)

    with offload.offloading(min_bytes="16KiB"):
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())

    assert all(is_offloaded(layer.weight) for layer in (model[0], model[2]))
    assert type(model[0].weight.materialize()) is type(expected[0].weight.data)
    assert torch.equal(expected(x), model(x))
