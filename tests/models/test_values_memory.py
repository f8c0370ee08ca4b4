"""Quantizing a checkpoint with the memory for one weight."""

import json
from pathlib import Path

import pytest

from tests.processes import run_script
from tests.tiny import tiny_checkpoint

LAYERS = 4

SCRIPT = """
    import json, sys
    from tests.models.quantized import quantized, rehearse

    rehearse()
    print(json.dumps(quantized(*sys.argv[1:])))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 84 MB in bfloat16; 32 MiB each for its embedding and its head."""
    sizes = {"vocab_size": 32_768, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": LAYERS}
    options = {"num_key_value_heads": 4, "dtype": "bfloat16", "max_shard_size": "5GB"}
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"), **sizes, **options)


@pytest.mark.slow(5)
def test_a_checkpoint_is_quantized_in_little_memory(checkpoint, tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    run = json.loads(run_script(SCRIPT, checkpoint, tmp_path / "values", env=env).splitlines()[-1])

    assert run["peak"] < 3 * run["largest"]
    assert run["ties"]
    assert 7 * LAYERS + 1 == run["replaced"] == len([*(tmp_path / "values").glob("*.safetensors")])
