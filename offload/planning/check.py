"""Whether this torch and this transformers give from disk what they give in memory.

Always true:
- tiny models are made, run and compared in a temporary folder; nothing else is written
- a check that fails says why, and the others are made all the same
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from offload.integrations.transformers import from_pretrained
from offload.system.reasons import first_line

_BLOCK = 64  # rows and columns with one scale
_SIZES: dict[str, Any] = {"hidden_size": 2 * _BLOCK, "intermediate_size": 2 * _BLOCK, "max_shard_size": "1GB"}
_PACKED = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [_BLOCK, _BLOCK]}


def check() -> Iterator[tuple[str, str | None]]:
    """Compare tiny models on disk with the same ones in memory, bit for bit. Takes some 20 s.

    Yields:
        What was compared, and how it failed; None if it did not.
    """
    for what, compare in _CHECKS.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                compare(Path(folder))
            except Exception as error:  # anything is what it looks for
                yield what, f"{type(error).__name__}: {first_line(error)}"
            else:
                yield what, None


def tiny_checkpoint(
    folder: Path,
    model_type: str = "llama",
    *,
    seed: int = 0,
    max_shard_size: str = "60KB",
    **config: object,
) -> Path:
    """A causal language model of transformers with few, random weights, saved: some hundred kilobytes in shards.

    Args:
        folder: for the checkpoint; made if it is not there.
        model_type: as transformers names it: "llama", "mixtral", "gpt2"...
        seed: of the weights. The random generators of the process are left as they were.
        max_shard_size: of a file.
        config: what else the model's configuration takes. Sizes that are not given are small: vocab_size=96,
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2.

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


def _experts(folder: Path) -> None:
    experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
    same: dict[str, Any] = {"experts_implementation": "grouped_mm"}
    _compare(tiny_checkpoint(folder, "mixtral", **_SIZES, **experts), same, **same)


def _packed(folder: Path) -> None:
    """A checkpoint in FP8, with a scale per block, made by hand."""
    from transformers import FineGrainedFP8Config

    file, settings = tiny_checkpoint(folder, **_SIZES) / "model.safetensors", folder / "config.json"
    stored: dict[str, torch.Tensor] = {}
    for name, weight in load_file(file).items():
        stored[name] = weight
        if ".layers." in name and weight.dim() == 2:
            blocks = weight.float().unflatten(1, (-1, _BLOCK)).unflatten(0, (-1, _BLOCK))  # (rows, 64, columns, 64)
            scales = blocks.abs().amax((1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
            stored[name] = (blocks / scales).view(weight.shape).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales[:, 0, :, 0].contiguous()
    save_file(stored, file, {"format": "pt"})
    settings.write_bytes(json.dumps({**json.loads(settings.read_bytes()), "quantization_config": _PACKED}).encode())
    _compare(folder, {"quantization_config": FineGrainedFP8Config(dequantize=True)}, exact=True)


@torch.no_grad()
def _compare(folder: Path, in_memory: dict[str, Any], **on_disk: Any) -> None:
    """With options for the one and the other `from_pretrained`; AssertionError if logits or generated tokens differ."""
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(7)[None]  # (1, 7)
    plain = AutoModelForCausalLM.from_pretrained(folder, **in_memory).eval()
    model = from_pretrained(folder, **on_disk).eval()
    assert torch.equal(plain(tokens).logits, model(tokens).logits), "logits differ"
    expected, answer = (
        one.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=0) for one in (plain, model)
    )
    assert torch.equal(expected, answer), "generated tokens differ"


_CHECKS: dict[str, Callable[[Path], None]] = {
    "a dense model": lambda folder: _compare(tiny_checkpoint(folder, **_SIZES), {}),
    "a mixture of experts": _experts,
    "packed weights": _packed,
}
