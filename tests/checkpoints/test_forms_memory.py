"""Packed models of about 100 MB, run under a budget for half of them: what is in memory afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.models import fp8_experts, toy_fp8_experts
from tests.checkpoints.gguf_files import write_gguf
from tests.processes import run_script

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


def experts(folder: Path, *, is_small: bool) -> Path:
    """A mixture in FP8."""
    sizes = {"vocab_size": 256, "hidden_size": 1024, "intermediate_size": 512, "moe_intermediate_size": 512}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 8, "num_experts": 32}
    return toy_fp8_experts(folder, 0) if is_small else fp8_experts(folder, 0, layers=2, sizes=sizes)


def gguf(folder: Path, *, is_small: bool) -> Path:
    """A file of Q4_K with random blocks."""
    width = 256 if is_small else 2048
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": width // 128}
    config = LlamaConfig(**sizes, vocab_size=256, num_hidden_layers=1 if is_small else 3)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for module in model.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.ones(1).expand(value.shape), requires_grad=False))
    folder.mkdir()
    return write_gguf(model, folder / "model.gguf", "Q4_K")


@pytest.mark.parametrize("write", [experts, gguf])
def test_a_packed_model_past_the_budget_takes_no_more_than_it(write: Callable[..., Path], tmp_path: Path) -> None:
    """At least 100 MB packed, two to eight times that dense; budget 64 MiB. Nothing is written."""
    small, large = write(tmp_path / "small", is_small=True), write(tmp_path / "large", is_small=False)

    said = json.loads(run_script(THREE_FORWARDS, small, large, "64MiB"))

    assert sum(file.stat().st_size for file in (tmp_path / "large").iterdir()) > 100e6
    assert said["finite"]
    assert said["equal"]
    assert said["on_disk"]
    assert said["written"] < 1 << 16
    assert said["loaded"] < 8 << 20
    assert said["run"] < 80 << 20  # memory for computed values, and 16 MiB for everything else
