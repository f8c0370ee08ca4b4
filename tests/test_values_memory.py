"""A checkpoint is quantized in the memory of a weight, killed half-way and resumed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.processes import run_script

LAYERS = 4

SCRIPT = """
    import json, sys
    from pathlib import Path
    from bench.quantize import measured

    if __name__ == "__main__":
        print(json.dumps(measured(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 46 MB in bfloat16; its embedding has 16 MiB."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16_384, hidden_size=512, intermediate_size=1024, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=4, dtype="bfloat16",
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("llama")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_checkpoint_is_quantized_in_little_memory_and_a_killed_run_ends_as_one_that_was_not(checkpoint, tmp_path):
    """As `python -m bench.quantize` does with 1 GB."""
    cache = tmp_path / "cache"

    said = json.loads(
        run_script(SCRIPT, checkpoint, tmp_path / "values", 7 * LAYERS, env={"XDG_CACHE_HOME": str(cache)})
    )

    for run in (said["uninterrupted"], said["resumed"]):
        assert run["peak_bytes"] < 3 * run["largest_bytes"]
        assert run["ties_are_kept"]
    assert 7 * LAYERS + 1 == said["uninterrupted"]["replaced"]
    assert 7 * LAYERS // 2 - 1 == said["values when it was killed"] == said["resumed"]["before"]
    assert 7 * LAYERS + 1 == said["resumed"]["before"] + said["resumed"]["replaced"]
    assert [] == said["files that differ"]
