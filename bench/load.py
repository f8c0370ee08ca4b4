"""What loading costs a tensor: CPU time to fill an empty model of many small tensors from one safetensors file.

python -m bench.load [--tensors 10000]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

from safetensors.torch import save_file
from torch import nn

import offload


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tensors", type=int, default=10_000)
    count = options.parse_args().tensors
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file(many(count).state_dict(), path)
        costs = [load(path, count) for _ in range(5)]
    print(f"{median(costs):.0f} µs of CPU time a tensor (median of {len(costs)} loads of {count} tensors)")


def many(tensors: int) -> nn.Module:
    return nn.ModuleList([nn.Linear(16, 16) for _ in range(tensors // 2)])


def load(path: Path, tensors: int) -> float:
    """Microseconds a tensor."""
    with offload.init_empty_weights():
        model = many(tensors)
    start = time.process_time()
    offload.load_checkpoint_and_dispatch(model, path)
    return (time.process_time() - start) / tensors * 1e6


if __name__ == "__main__":
    main()
