"""Memory and disk writes when loading a large checkpoint."""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bench.models import fp8_experts, toy_fp8_experts
from tests.processes import run_script


def checkpoint_of_zeros(path: Path, layers: int, width: int) -> Path:
    return hollow_checkpoint(path, {f"{layer}.weight": (width, width) for layer in range(layers)}, "F32", 4)


def hollow_checkpoint(path: Path, shapes: Mapping[str, Sequence[int]], dtype: str, itemsize: int) -> Path:
    """Zeros with these shapes; most of the file is a hole."""
    entries, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
    return path


# Arguments: a small checkpoint, for imports and first calls; the large one; a folder for values; and their dtype.
SCRIPT = """
    import json, os, sys, torch, offload
    from offload.memory import anonymous_bytes
    from tests.peak import Peak
    from torch import nn

    small, large, offload_dir, dtype = sys.argv[1:]

    def written():
        with open("/proc/self/io") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))

    def load(path, layers, width):
        if dtype == "packed":
            return offload.from_pretrained(path)
        with offload.init_empty_weights():
            empty = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).eval()
        return offload.load_checkpoint_and_dispatch(empty, path, offload_dir=offload_dir, dtype=dtype)

    def run(model):
        if dtype != "packed":
            with torch.no_grad():
                model(torch.ones(1, model[0].in_features, dtype=model[0].weight.dtype))

    warm = load(small, 1, 8)
    run(warm)
    next(warm.parameters()).clone()  # torch imports DTensor at the first op that is dispatched, 40 MB
    before, written_before = anonymous_bytes(), written()
    with Peak() as loading:
        model = load(large, 16, 2048)
    said = dict(loading=loading.nbytes, loaded=anonymous_bytes() - before, written=written() - written_before)
    run(model)
    said.update(run=anonymous_bytes() - before, files=os.path.exists(offload_dir))
    if dtype == "packed":
        said.update(recipes=sum(offload.is_offloaded(value) for value in model.parameters() if value.dim() == 3))
    else:
        write, seen = os.pwrite, [0]
        os.pwrite = lambda *args: seen.append(anonymous_bytes()) or write(*args)  # what is to be written is there
        with torch.no_grad():
            for weight in model.parameters():
                weight[1, 1] = 0
        numbers = [weight[0, 0].item() for weight in model.parameters()]
        said.update(numbers=numbers, writing=max(seen) - before, changed=len(os.listdir(offload_dir)))
    print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """256 MB in 16 weights and 4 shards from torch.save."""
    folder = tmp_path_factory.mktemp("shards")
    places = {}
    for shard in range(4):
        weights = {f"{number}.weight": torch.full((2048, 2048), number % 7.0) for number in range(shard, 16, 4)}
        torch.save(weights, folder / f"pytorch_model-{shard}.bin")
        places.update(dict.fromkeys(weights, f"pytorch_model-{shard}.bin"))
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def as_safetensors(folder: Path, path: Path) -> Path:
    weights = {}
    for shard in folder.glob("*.bin"):
        weights.update(torch.load(shard, weights_only=True, mmap=True))
    save_file(weights, path)
    return path


@pytest.mark.parametrize(
    ("form", "dtype"), [("torch.save", "float32"), ("torch.save", "bfloat16"), ("safetensors", "bfloat16")]
)
def test_a_checkpoint_is_loaded_and_run_in_little_memory_without_writing_and_written_by_blocks(
    shards, tmp_path, form, dtype
):
    """A weight is 16 MiB, or 8 in bfloat16, which is converted when it is read, and at its first write."""
    source = shards if form == "torch.save" else as_safetensors(shards, tmp_path / "model.safetensors")
    small = checkpoint_of_zeros(tmp_path / "small.safetensors", 1, 8)
    said = json.loads(run_script(SCRIPT, small, source, tmp_path / "values", dtype))

    assert said["loaded"] < 6 << 20
    assert said["run"] < 32e6
    assert said["written"] < 1 << 16
    assert not said["files"]
    assert 16 == said["changed"]
    assert [number % 7 for number in range(16)] == said["numbers"]
    assert said["writing"] < 24 << 20
    assert dtype == "float32" or 1 << 20 <= said["writing"]


def test_a_large_mixture_of_packed_experts_is_loaded_in_little_memory_and_without_writing(tmp_path):
    """20 GB: 12,288 matrices in 32 layers, each with its scales. Only the progress bar is written."""
    large = fp8_experts(tmp_path / "large", 20, is_hollow=True)
    small = toy_fp8_experts(tmp_path / "small", 0, is_hollow=True)
    said = json.loads(run_script(SCRIPT, small, large, tmp_path / "values", "packed"))

    assert 64 == said["recipes"]
    assert said["written"] < 1 << 16
    assert said["loading"] < 96e6
