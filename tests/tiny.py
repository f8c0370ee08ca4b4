"""Tiny models of transformers, saved."""

from __future__ import annotations

from pathlib import Path

import torch


def tiny_checkpoint(
    folder: Path, model_type: str = "llama", *, seed: int = 0, max_shard_size: str = "60KB", **config: object
) -> Path:
    """A causal language model with few, random weights: some hundred kilobytes in shards.

    Args:
        folder: for the checkpoint; made if it is not there.
        model_type: as transformers names it: "llama", "mixtral", "gpt2"...
        seed: of the weights. The random generators of the process are left as they were.
        max_shard_size: of a file.
        config: what else the model's configuration takes; sizes that are not given are small.

    Returns:
        The folder.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**sizes, **heads, **config}))
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder
