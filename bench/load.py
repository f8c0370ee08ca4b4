"""What loading costs a tensor: CPU time to fill an empty model of many tiny tensors from one safetensors file.

Always true:
- making the empty model is not counted
- the limit is the model in memory: safetensors maps the file, and the values are assigned
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path

from safetensors.torch import save_file
from torch import nn

import offload
from bench.apart import run_apart
from bench.peers import IN_MEMORY, PACKAGES, WAYS, absent
from bench.rounds import Figure, in_turn
from bench.scale import Scale

_FILE = "model.safetensors"


def figures(scale: Scale, scratch: Path) -> list[Figure]:
    """CPU time a tensor."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        save_file(many(scale.load_tensors).state_dict(), Path(folder) / _FILE, metadata={"format": "pt"})
        arms = {arm: partial(run_apart, cost, arm, Path(folder), scale.load_tensors) for arm in WAYS}
        done = in_turn(arms, scale.rounds, absent(PACKAGES))
    limit = done.take(IN_MEMORY)
    case = f"load: CPU time a tensor, {scale.load_tensors} tensors"
    return [Figure(case, "µs", done.results, limit, IN_MEMORY, done.missing)]


def many(tensors: int) -> nn.Module:
    return nn.ModuleList([nn.Linear(16, 16) for _ in range(tensors // 2)])


def cost(arm: str, folder: Path, tensors: int) -> float:
    """Microseconds a tensor, once first calls are over."""
    save_file(many(4).state_dict(), folder / f"{arm}.safetensors", metadata={"format": "pt"})
    _seconds(arm, folder / f"{arm}.safetensors", 4)
    return _seconds(arm, folder / _FILE, tensors) / tensors * 1e6


def _seconds(arm: str, file: Path, tensors: int) -> float:
    with offload.init_empty_weights():
        model = many(tensors)
    with tempfile.TemporaryDirectory(dir=file.parent) as own:
        start = time.process_time()
        WAYS[arm].fill(model, file, Path(own))
        return time.process_time() - start
