"""Sizes of small language models of transformers, and such models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def tiny_checkpoint(
    folder: Path, model_type: str = "llama", *, seed: int = 0, max_shard_size: str = "60KB", **config: object
) -> Path:
    """A causal language model with few, random weights, saved in shards; the random generators are left as they were.

    `config` is what else the model's configuration takes, beside `SIZES`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SIZES, **config}))
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder
