"""What an atomic update costs: `update_values` against a raw write, fsync and rename of the same bytes.

python -m bench.update [--folder .] [--megabytes 64 512] [--rounds 9]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

import offload


def raw_update(path: Path, data: memoryview) -> None:
    """The limit: one buffered write of everything, fsync, rename, fsync of the folder."""
    temporary = path.with_suffix(".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    done = 0
    while done < len(data):
        done += os.write(fd, data[done:])
    os.fsync(fd)
    os.close(fd)
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--folder", default=".", help="on the file system to be measured")
    options.add_argument("--megabytes", type=int, nargs="+", default=[64, 512])
    options.add_argument("--rounds", type=int, default=9)
    chosen = options.parse_args()
    for megabytes in chosen.megabytes:
        with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
            print(f"{megabytes} MB: {compared(Path(folder), megabytes << 20, chosen.rounds)}")


def compared(folder: Path, nbytes: int, rounds: int) -> str:
    """Both in turn, and who begins changes; the median of the rounds' ratios."""
    values = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    stored = offload.OffloadedTensor.from_original_tensor(values, "w", folder)
    arms: dict[str, Callable[[], None]] = {
        "raw": lambda: raw_update(folder / "raw", memoryview(values.numpy())),
        "update": lambda: stored.update_values(values),
    }
    arms["raw"]()
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds):
        for name in sorted(arms, reverse=turn % 2 == 0):
            start = time.perf_counter()
            arms[name]()
            times[name].append(time.perf_counter() - start)
    ratio = median(raw / update for raw, update in zip(times["raw"], times["update"], strict=True))
    rates = ", ".join(f"{name} {nbytes / median(taken) / 1e6:.0f} MB/s" for name, taken in times.items())
    return f"{rates}; update_values at {ratio:.2f}x of the speed of raw (median of {rounds} pairs)"


if __name__ == "__main__":
    main()
