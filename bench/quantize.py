"""Quantize a model on disk to int8, weight by weight; also killed half-way and resumed.

Always true:
- each run is a separate process that loads the checkpoint anew
- the killed run dies inside the function, as if by `kill -9`; the results of both ways are compared bit for bit
- memory is anonymous memory above that before loading the checkpoint
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from bench.apart import run_apart
from bench.models import cache_folder, llama, toy_llama
from bench.process import MemoryTrace
from offload.integrations.transformers import from_pretrained
from offload.models.values import map_values
from offload.storage.subclasses import is_subclass_value

_BLOCK = 1 << 20  # bytes of a weight to quantize at a time
MATRICES = "*proj.weight"
TABLE = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Trial:
    """The result of a run, its time in seconds, and peak anonymous memory in bytes."""

    replaced: int
    before: int
    seconds: float
    peak_bytes: int
    largest_bytes: int
    ties_are_kept: bool


def to_int8(_: str, weight: torch.Tensor) -> torch.Tensor:
    """torchao's int8 with a scale per row, some rows at a time."""
    from torchao.quantization import Int8Tensor, PerRow

    data = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight), 1)
    rows = max(1, _BLOCK // (weight[0].numel() * weight.itemsize))
    for start in range(0, len(weight), rows):
        part = Int8Tensor.from_hp(weight[start : start + rows] + 0, PerRow())
        data[start : start + rows], scales[start : start + rows] = part.qdata, part.scale
    return Int8Tensor(data, scales, [1, weight.shape[1]], weight.dtype)


def quantized(checkpoint: Path, offload_dir: Path, dies_at: int | None = None) -> Trial:
    """Quantize the matrices of a Llama, including its tied embeddings; resumes an earlier run that was killed."""
    rehearse()
    with MemoryTrace(0.002) as memory:
        model = from_pretrained(checkpoint, offload_dir=offload_dir)
        model.lm_head.weight = model.model.embed_tokens.weight
        start = time.perf_counter()
        fn = to_int8 if dies_at is None else _Dying(dies_at)
        done = map_values(fn, model, select=[MATRICES, TABLE], resume="int8")
        seconds = time.perf_counter() - start
    largest = max(weight.numel() * weight.itemsize for weight in model.parameters())
    ties = model.lm_head.weight is model.model.embed_tokens.weight
    ties = ties and is_subclass_value(model.lm_head.weight._handle.base())
    return Trial(len(done.replaced), len(done.before), seconds, memory.peak, largest, ties)


class _Dying:
    """Like `to_int8`, until it has been called that many times."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    def __call__(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)
        return to_int8(name, weight)


def rehearse() -> None:
    """Do the imports and allocations of first calls."""
    map_values(to_int8, {"w": torch.ones(64, 64, dtype=torch.bfloat16)}, progress=False)
    small = from_pretrained(toy_llama())
    map_values(to_int8, small, select=MATRICES)


def differences(folder: Path, other: Path) -> list[str]:
    """The files that differ between two offload folders."""
    names = {path.name for place in (folder, other) for path in place.glob("*.safetensors")}
    return sorted(name for name in names if not _are_equal(folder / name, other / name))


def _are_equal(path: Path, second: Path) -> bool:
    if not (path.is_file() and second.is_file()):
        return False
    with safe_open(path, "pt") as file, safe_open(second, "pt") as same:
        keys = list(file.keys())
        return keys == list(same.keys()) and all(
            torch.equal(file.get_tensor(key), same.get_tensor(key)) for key in keys
        )


def measured(checkpoint: Path, scratch: Path, matrices: int, apart: Callable[..., Trial] = run_apart) -> dict[str, Any]:
    """An uninterrupted run, and one that is killed half-way and resumed.

    Args:
        apart: runs a function in a separate process; raises `RuntimeError` if that is killed.

    Raises:
        RuntimeError: the run that should have been killed was not.
    """
    whole, halves = scratch / "whole", scratch / "halves"
    once = apart(quantized, checkpoint, whole)
    try:
        apart(quantized, checkpoint, halves, matrices // 2)
    except RuntimeError:
        pass
    else:
        raise RuntimeError("the run was not killed")
    left = len(list(halves.glob("*.safetensors")))
    resumed = apart(quantized, checkpoint, halves)
    return {
        "uninterrupted": asdict(once),
        "times the largest": round(once.peak_bytes / once.largest_bytes, 2),
        "values when it was killed": left,
        "resumed": asdict(resumed),
        "files that differ": differences(whole, halves),
    }


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m bench.quantize", description=__doc__.splitlines()[0])
    options.add_argument("--model", type=Path, help="the folder of a Llama; a made one of 1 GB if not given")
    chosen = options.parse_args()
    checkpoint = chosen.model or llama()
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
        layers = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
        print(json.dumps(measured(checkpoint, Path(scratch), 7 * layers), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
