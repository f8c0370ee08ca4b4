"""Adapters over a frozen model on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import offload
from offload.memory import anonymous_bytes

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0, init_lora_weights=False)


def with_adapters(model: Any) -> Any:
    torch.manual_seed(3)
    return get_peft_model(model.float(), LORA)


def train(model: Any, tokens: torch.Tensor, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_adapters_over_a_model_on_disk_train_as_over_one_in_memory(llama_folder: Path, tokens: torch.Tensor) -> None:
    """Equal losses, equal gradients, and the base stays frozen on disk."""
    plain = with_adapters(AutoModelForCausalLM.from_pretrained(llama_folder))
    on_disk = with_adapters(offload.from_pretrained(llama_folder))
    frozen = {name: p for name, p in on_disk.named_parameters() if not p.requires_grad}

    expected, losses = train(plain, tokens, 5), train(on_disk, tokens, 5)

    assert expected == losses
    assert losses[-1] < losses[0]
    assert frozen
    assert all(offload.is_offloaded(p) and p.grad is None for p in frozen.values())
    gradients = {name: p.grad for name, p in on_disk.named_parameters() if p.requires_grad}
    assert gradients
    for name, p in plain.named_parameters():
        if p.requires_grad:
            assert torch.equal(p.grad, gradients[name]), name


def test_the_graph_holds_no_copies_of_frozen_weights(tmp_path: Path) -> None:
    """A forward with a graph through 128 MB of weights takes a small part of that in memory."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=3,
        num_attention_heads=8,
        dtype="float32",
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
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
