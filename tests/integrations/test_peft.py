"""Adapters of peft over a model on disk: trained, saved, loaded, merged into files of their own."""

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import contents
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

import offload
from offload.memory import anonymous_bytes
from tests.checkpoints.forms import FORMS, PROMPT
from tests.equal import assert_equal
from tests.models.test_loader_memory import checkpoint_of_zeros
from tests.processes import run_script
from tests.tiny import tiny_checkpoint

ONE = {"r": 4, "target_modules": ["q_proj"]}
NOT_NEUTRAL = {"init_lora_weights": False}  # an adapter that changes the output from the start

KINDS: dict[str, Callable[[], Any]] = {
    "lora": lambda: LoraConfig(r=4, target_modules="all-linear", **NOT_NEUTRAL),
    "lora-embedding": lambda: LoraConfig(r=4, target_modules=["embed_tokens", "lm_head"], **NOT_NEUTRAL),
    "lora-parameters": lambda: LoraConfig(target_modules=[], target_parameters=["mlp.gate_proj.weight"], **NOT_NEUTRAL),
    "lora-tokens": lambda: LoraConfig(**ONE, trainable_token_indices=[1, 5], **NOT_NEUTRAL),
    "lora-whole-modules": lambda: LoraConfig(**ONE, modules_to_save=["lm_head", "embed_tokens"], **NOT_NEUTRAL),
    "dora": lambda: LoraConfig(r=4, target_modules="all-linear", use_dora=True, **NOT_NEUTRAL),
    "dora-embedding": lambda: LoraConfig(r=4, target_modules=["embed_tokens"], use_dora=True, **NOT_NEUTRAL),
    "pissa": lambda: LoraConfig(**ONE, init_lora_weights="pissa"),
    "olora": lambda: LoraConfig(**ONE, init_lora_weights="olora"),
    "adalora": lambda: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10, **NOT_NEUTRAL),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
    "loha": lambda: peft.LoHaConfig(**ONE, init_weights=False),
    "lokr": lambda: peft.LoKrConfig(**ONE, init_weights=False),
    "vera": lambda: peft.VeraConfig(**ONE, init_weights=False),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=["q_proj"], init_weights=False),
    "hra": lambda: peft.HRAConfig(**ONE, init_weights=False),
    "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
}


OF_EXPERTS = LoraConfig(
    r=2,
    target_modules=["q_proj"],
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    **NOT_NEUTRAL,
)


def adapter_for(model: Any, config: Any, path: Path) -> Path:
    """A saved adapter that changes the output, with each weight other than at the start."""
    torch.manual_seed(3)
    wrapped = get_peft_model(model, config)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) * 0.1
    wrapped.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {"tie_word_embeddings": False, "dtype": "float32", "max_shard_size": "100KB"}
    return tiny_checkpoint(tmp_path_factory.mktemp("llama32"), **options)


def both(folder: Path, wrap: Callable[[Any], Any], **options: Any) -> tuple[Any, Any]:
    """The model in memory and on disk, each after `wrap` with the same random state."""
    wrapped = []
    for load in (AutoModelForCausalLM.from_pretrained, offload.from_pretrained):
        model = load(folder, **(options if load is offload.from_pretrained else {}))
        torch.manual_seed(3)
        wrapped.append(wrap(model))
    return wrapped[0], wrapped[1]


def all_on_disk(model: Any) -> bool:
    return all(offload.is_offloaded(parameter) for parameter in model.parameters())


def train(model: Any, tokens: torch.Tensor, steps: int = 2) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_graph_holds_no_copies_of_frozen_weights(tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 3}
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=8)).save_pretrained(tmp_path)
    model = get_peft_model(offload.from_pretrained(tmp_path), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    weights = sum(p.numel() * 4 for p in model.parameters() if not p.requires_grad)
    ids = torch.arange(4)[None]
    model(ids, labels=ids).loss.backward()
    before = anonymous_bytes()
    loss = model(ids, labels=ids).loss

    grown = anonymous_bytes() - before
    loss.backward()
    assert weights > 120e6
    assert grown < weights / 8


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_trains_on_disk_as_in_memory_and_merges_into_files_and_out_again(kind, folder, tmp_path, tokens):
    """Equal losses, gradients and values after each act, including those of the base; the checkpoint is unchanged."""
    before = contents(folder)
    plain, on_disk = both(folder, lambda model: get_peft_model(model, copy.deepcopy(KINDS[kind]())))
    start = {name: p.detach().clone() for name, p in plain.named_parameters() if p.requires_grad}

    expected, losses = train(plain, tokens), train(on_disk, tokens)

    assert expected == losses
    assert_equal(plain, on_disk)
    for name, p in plain.named_parameters():
        found = on_disk.get_parameter(name)
        assert found.grad is None if p.grad is None else torch.equal(p.grad, found.grad), name
        assert offload.is_offloaded(found) or p.requires_grad or kind == "adalora", name  # whose ranks are frozen
    assert any(not torch.equal(value, plain.get_parameter(name)) for name, value in start.items())

    on_disk.save_pretrained(tmp_path / "adapter")
    plain, on_disk = both(folder, lambda model: PeftModel.from_pretrained(model, tmp_path / "adapter").eval())
    with torch.no_grad():
        assert torch.equal(plain(input_ids=tokens).logits, on_disk(input_ids=tokens).logits)
    for act in ("merge_adapter", "unmerge_adapter"):
        getattr(plain, act)(), getattr(on_disk, act)()
        assert_equal(plain, on_disk, strides=False)  # a replaced value keeps its strides
    plain, on_disk = plain.merge_and_unload(), on_disk.merge_and_unload()
    assert_equal(plain, on_disk, strides=False)
    assert all_on_disk(on_disk)
    assert before == contents(folder)
    on_disk.save_pretrained(tmp_path / "merged")
    assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), on_disk)


MERGE = """
    import json, os, sys, torch, offload
    from torch import nn
    from peft import IA3Config, LoraConfig, get_peft_model
    from offload.memory import anonymous_bytes

    path, width, layers, kind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]

    def network(width):
        return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])

    names = [str(layer) for layer in range(layers)]
    config = {
        "ia3": IA3Config(target_modules=names, feedforward_modules=[], init_ia3_weights=False),
        "lora": LoraConfig(r=2, target_modules=names, init_lora_weights=False),
        "dora": LoraConfig(r=2, target_modules=names, init_lora_weights=False, use_dora=True),
    }[kind]

    def look(frame, event, _):  # after every call, in Python and in C
        global peak
        if event in ("return", "c_return"):
            peak = max(peak, anonymous_bytes())

    get_peft_model(offload.disk_offload(network(8)), config).merge_and_unload()  # what is imported and allocated once
    with offload.init_empty_weights():
        model = network(width)
    model = get_peft_model(offload.load_checkpoint_and_dispatch(model, path), config)
    adapted = list(model.base_model.model) if kind == "lora" else []
    deltas = [layer.get_delta_weight("default")[:8].clone() for layer in adapted]
    peak = before = anonymous_bytes()
    sys.setprofile(look)
    model = model.merge_and_unload()
    sys.setprofile(None)
    right = all(torch.equal(layer.weight[:8].materialize(), delta) for layer, delta in zip(model, deltas))
    on_disk = all(offload.is_offloaded(p) and str(p.offload_path) != path for p in model.parameters())
    print(json.dumps(dict(peak=peak - before, left=anonymous_bytes() - before, right=right, on_disk=on_disk)))
"""


@pytest.mark.slow(20)
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the kernel does not tell anonymous memory")
@pytest.mark.parametrize(("kind", "weights"), [("lora", 2), ("ia3", 2), ("dora", 4)])
def test_a_merge_takes_the_memory_of_some_weights_and_not_of_the_model(kind, weights, tmp_path):
    """Six weights of 36 MiB: the file is changed through its mapping, and peft's own temporaries are for one weight.

    DoRA creates the delta, the sum, its norm's square and the product for one weight at a time.
    """
    width, layers = 3072, 6
    path = checkpoint_of_zeros(tmp_path / "model.safetensors", layers, width)
    before = path.stat()
    found = json.loads(run_script(MERGE, path, width, layers, kind).splitlines()[-1])

    assert found["right"]
    assert found["on_disk"]
    assert found["peak"] <= weights * width * width * 4 + (16 << 20)
    assert found["left"] <= 16 << 20
    assert (before.st_mtime_ns, before.st_blocks) == (path.stat().st_mtime_ns, path.stat().st_blocks)


@pytest.mark.fused
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize("name", [name for name in ("fp8-llama", "bnb-nf4", "gguf-q4_k_m") if name in FORMS])
def test_an_adapter_over_packed_weights_is_trained_as_over_dense_ones(name, tmp_path):
    """Bit for bit in exact mode; to a thousandth with fused products, in float32: results differ by what is rounded."""
    form = FORMS[name]
    form.write(tmp_path)
    dense, exact = form.plain(tmp_path), offload.from_pretrained(tmp_path, exact=True, **form.options)
    in_float32 = {**form.options, "dtype": torch.float32}

    assert _losses(dense) == _losses(exact)
    expected = _losses(offload.from_pretrained(tmp_path, exact=True, **in_float32))
    found = _losses(offload.from_pretrained(tmp_path, **in_float32))
    assert expected == pytest.approx(found, rel=1e-3)
    assert found[-1] < found[0]


def _losses(model: Any) -> list[float]:
    torch.manual_seed(0)
    trained = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"]))
    optimizer = torch.optim.SGD((one for one in trained.parameters() if one.requires_grad), lr=0.1)
    losses = []
    for _ in range(3):
        logits = trained(PROMPT).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits, PROMPT[0, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses
