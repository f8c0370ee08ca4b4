"""Loading a checkpoint that is large: what it takes, and what it writes."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

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
    """Zeros of these shapes; most of the file is a hole."""
    entries, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
    return path


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_large_checkpoint_is_loaded_and_run_in_little_memory_and_without_writing(tmp_path: Path) -> None:
    """2 GiB on disk; under 32 MB of anonymous memory, also after every weight was used."""
    large = checkpoint_of_zeros(tmp_path / "large.safetensors", LAYERS, WIDTH)
    small = checkpoint_of_zeros(tmp_path / "small.safetensors", 1, 8)

    command = [sys.executable, "-B", "-c", SCRIPT, str(large), str(small)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout)

    assert measured["result"] == 0
    assert measured["loaded"] < 32e6
    assert measured["run"] < 32e6
    assert measured["written"] == 0
