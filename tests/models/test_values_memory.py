"""Quantizing a checkpoint with the memory for one weight, killed half-way and resumed."""

import json
import signal
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from offload.planning.check import tiny_checkpoint
from tests.processes import run_script

LAYERS = 4

# Forks of a process with everything imported: imports would take longer than the rest.
SCRIPT = """
    import json, os, sys
    from pathlib import Path
    from tests import processes
    from tests.models.quantized import quantized, rehearse

    def forked(*args):
        into, out = os.pipe()
        pid = processes.forked(lambda: os.write(out, json.dumps(quantized(*args)).encode()))
        os.close(out)
        status = processes.ended(pid)
        return json.loads(os.read(into, 1 << 16)) if status == 0 else status

    rehearse()
    checkpoint, whole, halves, dies_at = sys.argv[1:]
    once, killed = forked(checkpoint, whole), forked(checkpoint, halves, int(dies_at))
    left = len([*Path(halves).glob("*.safetensors")])
    print(json.dumps([once, killed, left, forked(checkpoint, halves)]))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 84 MB in bfloat16; 32 MiB each for its embedding and its head."""
    sizes = {"vocab_size": 32_768, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": LAYERS}
    options = {"num_key_value_heads": 4, "dtype": "bfloat16", "max_shard_size": "5GB"}
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"), **sizes, **options)


@pytest.mark.slow(9)
def test_a_checkpoint_is_quantized_in_little_memory_and_a_killed_run_ends_as_one_that_was_not(checkpoint, tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    printed = run_script(SCRIPT, checkpoint, whole, halves, 7 * LAYERS // 2, env=env)
    once, killed, left, resumed = json.loads(printed.splitlines()[-1])

    assert -signal.SIGKILL == killed
    for run in (once, resumed):
        assert run["peak"] < 3 * run["largest"]
        assert run["ties"]
    assert 7 * LAYERS + 1 == once["replaced"]
    assert 7 * LAYERS // 2 - 1 == left == resumed["before"]
    assert 7 * LAYERS + 1 == resumed["before"] + resumed["replaced"]
    assert contents(whole) == contents(halves)


def contents(folder: Path) -> dict[str, dict[str, bytes]]:
    """The bytes of each tensor of each file."""
    files = ((path.name, load_file(path)) for path in folder.glob("*.safetensors"))
    return {name: {key: tensor.tobytes() for key, tensor in tensors.items()} for name, tensors in files}
