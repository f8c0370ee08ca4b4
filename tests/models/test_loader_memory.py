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

LAYERS, WIDTH = 32, 4096  # float32: 2 GiB

SCRIPT = f"""
import json, sys, torch, offload
from torch import nn
from offload.memory import anonymous_bytes

def written():
    with open("/proc/self/io") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))

def empty(layers, width):
    with offload.init_empty_weights():
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).eval()

small = empty(1, 8)
offload.load_checkpoint_and_dispatch(small, sys.argv[2])(torch.ones(1, 8))  # imports, first calls
model = empty({LAYERS}, {WIDTH})
before, written_before = anonymous_bytes(), written()
offload.load_checkpoint_and_dispatch(model, sys.argv[1])
loaded = anonymous_bytes() - before
with torch.no_grad():
    result = model(torch.ones(1, {WIDTH}))
run = anonymous_bytes() - before
print(json.dumps(dict(loaded=loaded, run=run, written=written() - written_before, result=result.abs().sum().item())))
"""


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


def test_a_large_checkpoint_is_loaded_and_run_in_little_memory_and_without_writing(tmp_path):
    """2 GiB on disk, with less than 32 MB of anonymous memory, even after using every weight.

    The system may count one page of its own as written: the inode's, when it updates the access time.
    """
    large = checkpoint_of_zeros(tmp_path / "large.safetensors", LAYERS, WIDTH)
    small = checkpoint_of_zeros(tmp_path / "small.safetensors", 1, 8)
    measured = json.loads(run_script(SCRIPT, large, small))

    assert measured["result"] == 0
    assert measured["loaded"] < 32e6
    assert measured["run"] < 32e6
    assert measured["written"] < 1 << 16


PICKLED = """
    import gc, json, os, sys, torch, offload
    from offload.memory import anonymous_bytes
    from torch import nn

    folder, offload_dir, dtype, layers, width = sys.argv[1], sys.argv[2], sys.argv[3], *map(int, sys.argv[4:])

    def written():
        with open("/proc/self/io") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))

    def empty(layers, width):
        with offload.init_empty_weights():
            return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).eval()

    write = os.pwrite

    def watched(*args):
        seen.append(anonymous_bytes())  # what is to be written is there
        return write(*args)

    dtype = getattr(torch, dtype)
    torch.save(empty(1, 8).to_empty(device="cpu").state_dict(), offload_dir + ".bin")
    offload.load_checkpoint_and_dispatch(empty(1, 8), offload_dir + ".bin", dtype=dtype)  # imports, first calls
    os.pwrite = watched
    before, written_before, seen = anonymous_bytes(), written(), [0]
    model = offload.load_checkpoint_and_dispatch(empty(layers, width), folder, offload_dir=offload_dir, dtype=dtype)
    took, wrote = anonymous_bytes() - before, written() - written_before

    def files():
        return len(os.listdir(offload_dir)) if os.path.exists(offload_dir) else 0

    def right():
        return all(weight[0, 0].item() == number % 7 for number, weight in enumerate(model.parameters()))

    said = dict(took=took, written=wrote, files=files(), right=right())
    with torch.no_grad():
        for weight in model.parameters():
            weight[1, 1] = 0
    print(json.dumps({**said, "changed": dict(files=files(), right=right(), peak=max(seen) - before)}))
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


def test_shards_of_torch_save_are_loaded_in_little_memory_and_without_writing(shards, tmp_path):
    """One weight is 16 MiB."""
    said = json.loads(run_script(PICKLED, shards, tmp_path / "values", "float32", 16, 2048))

    assert said["right"]
    assert 0 == said["files"]
    assert said["written"] < 1 << 16
    assert said["took"] < 6 << 20


@pytest.mark.parametrize("form", ["torch.save", "safetensors"])
def test_another_dtype_is_converted_when_it_is_read_and_written_in_the_memory_of_a_block(shards, tmp_path, form):
    """8 MiB per weight in bfloat16, 128 MiB in all."""
    source = shards if form == "torch.save" else as_safetensors(shards, tmp_path / "model.safetensors")
    said = json.loads(run_script(PICKLED, source, tmp_path / "values", "bfloat16", 16, 2048))

    assert said["right"]
    assert 0 == said["files"]
    assert said["written"] < 1 << 16
    assert said["took"] < 6 << 20
    assert 16 == said["changed"]["files"]
    assert said["changed"]["right"]
    assert 1 << 20 <= said["changed"]["peak"] < 16 << 20


def as_safetensors(folder: Path, path: Path) -> Path:
    weights = {}
    for shard in folder.glob("*.bin"):
        weights.update(torch.load(shard, weights_only=True, mmap=True))
    save_file(weights, path)
    return path


EXPERTS = """
    import json, sys, offload
    from tests.peak import Peak

    def written():
        with open("/proc/self/io") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))

    offload.from_pretrained(sys.argv[1])  # imports, first calls
    before = written()
    with Peak() as peak:
        model = offload.from_pretrained(sys.argv[2])
    recipes = sum(offload.is_offloaded(value) for value in model.parameters() if value.dim() == 3)
    print(json.dumps(dict(peak=peak.nbytes, written=written() - before, recipes=recipes)))
"""


def test_a_large_mixture_of_packed_experts_is_loaded_in_little_memory_and_without_writing(tmp_path):
    """20 GB: 12,288 matrices in 32 layers, each with its scales. Only the progress bar is written."""
    large = fp8_experts(tmp_path / "large", 20, is_hollow=True)
    small = toy_fp8_experts(tmp_path / "small", 0, is_hollow=True)
    said = json.loads(run_script(EXPERTS, small, large))

    assert 64 == said["recipes"]
    assert said["written"] < 1 << 16
    assert said["peak"] < 96e6
