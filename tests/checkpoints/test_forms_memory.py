"""Packed models of about 100 MB, run under a budget for half of them: what is in memory afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.checkpoints.gguf_files import write_gguf
from tests.checkpoints.pieces import random_bytes, random_scales
from tests.processes import run_script

Pieces = dict[str, torch.Tensor]

# Arguments: a small model, for imports; a large one; the budget.
THREE_FORWARDS = """
    import json, sys, torch, offload
    from offload.memory import anonymous_bytes

    def written():
        with open("/proc/self/io") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))

    prompt = torch.tensor([[1, 2, 3]])
    offload.from_pretrained(sys.argv[1])(prompt)
    before, written_before = anonymous_bytes(), written()
    model = offload.from_pretrained(sys.argv[2], max_memory=sys.argv[3])
    loaded = anonymous_bytes() - before
    with torch.no_grad():
        found = [model(prompt).logits for _ in range(3)]
    on_disk = all(offload.is_offloaded(value) for value in model.parameters() if value.nbytes > 1024)
    said = dict(loaded=loaded, run=anonymous_bytes() - before, written=written() - written_before, on_disk=on_disk)
    finite = bool(found[0].isfinite().all() and found[0].std() > 0)
    print(json.dumps(dict(**said, finite=finite, equal=torch.equal(found[0], found[2]))))
"""


def fp8(name: str, rows: int, columns: int) -> Pieces:
    return {
        name: (random_bytes(rows, columns) & 0xB7).view(torch.float8_e4m3fn),  # below 2, and finite
        f"{name}_scale_inv": random_scales(rows // 128, columns // 128),
    }


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}

LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 16}
EXPERTS = {
    "hidden_size": 1024,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "num_experts": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def empty_model(model_type: str, dtype: torch.dtype, **sizes: Any) -> Any:
    """A model on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **sizes, vocab_size=256, tie_word_embeddings=False, dtype=dtype)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def packed(entry: Callable[[str, int, int], Pieces], quantization: Mapping[str, Any], model_type: str = "llama") -> Any:
    """A function that writes a model of these sizes, with linear weights from `entry`; experts are separate."""

    def write(folder: Path, **sizes: Any) -> Path:
        model = empty_model(model_type, torch.bfloat16, **sizes)
        entries: Pieces = {}
        for name, value in model.state_dict().items():
            if value.dim() == 3:
                entries |= _experts(entry, name, value)
            elif value.dim() == 2 and "proj" in name:
                entries |= entry(name, *value.shape)
            else:
                entries[name] = random_scales(*value.shape, dtype=value.dtype)
        folder.mkdir()
        save_file(entries, folder / "model.safetensors", metadata={"format": "pt"})
        model.config.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
        return folder

    return write


def _experts(entry: Callable[[str, int, int], Pieces], name: str, value: torch.Tensor) -> Pieces:
    stem, _, part = name.rpartition(".")
    count, rows, columns = value.shape
    parts = {"down_proj": rows} if part == "down_proj" else {"gate_proj": rows // 2, "up_proj": rows // 2}
    entries: Pieces = {}
    for number in range(count):
        for projection, height in parts.items():
            entries |= entry(f"{stem}.{number}.{projection}.weight", height, columns)
    return entries


def gguf(folder: Path, **sizes: Any) -> Path:
    """A file of Q4_K with random blocks."""
    model = empty_model("llama", torch.float32, **sizes)
    for module in model.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.ones(1).expand(value.shape), requires_grad=False))
    folder.mkdir()
    return write_gguf(model, folder / "model.gguf", "Q4_K")


@pytest.mark.parametrize(
    ("write", "sizes", "layers"),
    [
        pytest.param(packed(fp8, FP8), LLAMA, 2, id="FP8"),
        pytest.param(packed(fp8, FP8, "qwen3_moe"), EXPERTS, 2, id="experts of FP8"),
        pytest.param(gguf, LLAMA, 3, id="GGUF"),
    ],
)
def test_a_packed_model_past_the_budget_takes_no_more_than_it(
    write: Callable[..., Path], sizes: dict[str, int], layers: int, tmp_path: Path
) -> None:
    """At least 100 MB packed, two to eight times that dense; budget 64 MiB. Nothing is written."""
    small_sizes = {**sizes, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 2}
    small = write(tmp_path / "small", **{**small_sizes, "num_key_value_heads": 2, "num_hidden_layers": 1})
    large = write(tmp_path / "large", **sizes, num_hidden_layers=layers)

    said = json.loads(run_script(THREE_FORWARDS, small, large, "64MiB"))

    assert sum(file.stat().st_size for file in (tmp_path / "large").iterdir()) > 100e6
    assert said["finite"]
    assert said["equal"]
    assert said["on_disk"]
    assert said["written"] < 1 << 16
    assert said["loaded"] < 8 << 20
    assert said["run"] < 80 << 20  # memory for computed values, and 16 MiB for everything else
