"""The table of well-known models on the home page: what each needs, and the time per token.

Always true:
- a model's numbers are derived from its architecture in transformers, without weights, with the code of `offload plan`
- nothing is measured: the machine is `MACHINE`, which the page describes

`python -m bench.model_sizes` prints it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from offload.planning.estimate import IN_FLIGHT, Estimate
from offload.planning.machine import Computing
from offload.planning.sizes import ModelSizes, StoredTensor, sizes_from


@dataclass(frozen=True)
class Machine:
    """A machine with 16 GB of memory. Bytes, and bytes per second.

    Packed numbers are multiplied 1.4 times as fast as dense ones in 8 bits, 1.8 times in 4, as measured on another one
    (`--only forms`): in bytes, that is 0.7 and 0.48 times as fast.
    """

    budget: int = 12 * 10**9
    disk_rate: float = 2e9
    computing: Computing = Computing(streams=40e9, multiplies=1e12, packed=19e9, call=0.0)  # noqa: RUF009 - it is frozen
    in_8_bits: float = 28e9


MACHINE = Machine()


def llama(hidden: int, between: int, layers: int, heads: int) -> LlamaConfig:
    """A configuration in the style of Llama 3.1."""
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=between,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=128_256,
    )


def qwen3_moe(hidden: int, between: int, layers: int, heads: int) -> Qwen3MoeConfig:
    """A configuration with 128 experts, eight per token."""
    return Qwen3MoeConfig(
        hidden_size=hidden,
        moe_intermediate_size=between,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151_936,
    )


# By name: the format of the published checkpoint, and the configuration.
MODELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "Llama 3.1 8B": ("bfloat16", lambda: llama(4096, 14336, 32, 32)),
    "gpt-oss 20B": (
        "mxfp4",
        lambda: GptOssConfig(num_hidden_layers=24, num_local_experts=32, num_experts_per_tok=4),
    ),
    "Gemma 3 27B": (
        "bfloat16",
        lambda: Gemma3TextConfig(
            hidden_size=5376,
            intermediate_size=21504,
            num_hidden_layers=62,
            num_attention_heads=32,
            num_key_value_heads=16,
            head_dim=128,
            vocab_size=262_208,
        ),
    ),
    "Qwen3 30B-A3B": ("bfloat16", lambda: qwen3_moe(2048, 768, 48, 32)),
    "Qwen3 32B": (
        "bfloat16",
        lambda: Qwen3Config(
            hidden_size=5120,
            intermediate_size=25600,
            num_hidden_layers=64,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151_936,
        ),
    ),
    "Mixtral 8x7B": ("bfloat16", MixtralConfig),
    "Llama 3.1 70B": ("bfloat16", lambda: llama(8192, 28672, 80, 64)),
    "gpt-oss 120B": (
        "mxfp4",
        lambda: GptOssConfig(num_hidden_layers=36, num_local_experts=128, num_experts_per_tok=4),
    ),
    "Qwen3 235B-A22B": ("bfloat16", lambda: qwen3_moe(4096, 1536, 94, 64)),
    "DeepSeek-V3 671B": ("fp8", DeepseekV3Config),
    "Llama 3.1 405B": ("bfloat16", lambda: llama(16384, 53248, 126, 128)),
}
_BITS = {"bfloat16": 16.0, "fp8": 8.0, "mxfp4": 4.25}


@cache
def sizes_of(name: str) -> ModelSizes:
    """The sizes of a model in the format in which it is published."""
    form, config_of = MODELS[name]
    config = config_of()
    config.dtype = torch.bfloat16
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    entries = {key: _entry(key, value, form) for key, value in model.named_parameters()}
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return replace(sizes_from(name, Path(folder), entries, form=form), ops=0)  # on another machine


def _entry(name: str, value: torch.Tensor, form: str) -> StoredTensor:
    is_packed = (
        ".experts." in name if form == "mxfp4" else value.ndim > 1 and "embed" not in name and "head" not in name
    )
    dtype = form if is_packed and value.ndim > 1 else "bfloat16"
    return StoredTensor(dtype, int(value.numel() * _BITS[dtype] / 8))


def table() -> str:
    """The table in Markdown."""
    lines = [
        f"| model | form | size | one token reads | per token | per token, {IN_FLIGHT} in flight |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, (form, _) in MODELS.items():
        sizes = sizes_of(name)
        computing = replace(MACHINE.computing, packed=MACHINE.in_8_bits) if form == "fp8" else MACHINE.computing
        estimate = Estimate(sizes, MACHINE.budget, MACHINE.disk_rate, computing)
        alone, together = (estimate.of("", in_flight=count) for count in (1, IN_FLIGHT))
        cells = (
            name,
            form,
            f"{sizes.stored / 1e9:.0f} GB",
            f"{alone.reads / 1e9:.1f} GB",
            _seconds(alone.token_seconds),
            _seconds(together.token_seconds),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


if __name__ == "__main__":
    print(table())
