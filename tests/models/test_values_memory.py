"""Quantizing a checkpoint with the memory for one weight, killed half-way and resumed."""

import json
from pathlib import Path

import pytest

from offload.planning.check import tiny_checkpoint
from tests.processes import run_script

LAYERS = 4

# Forks of a process with everything imported: imports would take longer than the rest.
SCRIPT = """
    import json, os, sys
    from pathlib import Path
    from bench.quantize import Trial, asdict, measured, rehearse
    from tests import processes

    def forked(function, *args):
        into, out = os.pipe()
        pid = processes.forked(lambda: os.write(out, json.dumps(asdict(function(*args))).encode()))
        os.close(out)
        status = processes.ended(pid)
        assert status <= 0
        if status:
            raise RuntimeError("it was killed")
        return Trial(**json.loads(os.read(into, 1 << 16)))

    rehearse()
    folder, scratch, matrices = sys.argv[1:]
    print(json.dumps(measured(Path(folder), Path(scratch), int(matrices), forked)))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 84 MB in bfloat16; 32 MiB each for its embedding and its head."""
    sizes = {"vocab_size": 32_768, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": LAYERS}
    options = {"num_key_value_heads": 4, "dtype": "bfloat16", "max_shard_size": "5GB"}
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"), **sizes, **options)


@pytest.mark.slow(9)
def test_a_checkpoint_is_quantized_in_little_memory_and_a_killed_run_ends_as_one_that_was_not(checkpoint, tmp_path):
    """Like `python -m bench.quantize` with 1 GB."""
    cache = tmp_path / "cache"
    printed = run_script(SCRIPT, checkpoint, tmp_path / "values", 7 * LAYERS, env={"XDG_CACHE_HOME": str(cache)})
    said = json.loads(printed.splitlines()[-1])

    for run in (said["uninterrupted"], said["resumed"]):
        assert run["peak_bytes"] < 3 * run["largest_bytes"]
        assert run["ties_are_kept"]
    assert 7 * LAYERS + 1 == said["uninterrupted"]["replaced"]
    assert 7 * LAYERS // 2 - 1 == said["values when it was killed"] == said["resumed"]["before"]
    assert 7 * LAYERS + 1 == said["resumed"]["before"] + said["resumed"]["replaced"]
    assert [] == said["files that differ"]
