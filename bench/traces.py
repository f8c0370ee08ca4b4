"""Matrices picked from a stack in synthetic orders, under a budget: how many reads find them in memory.

Always true:
- the stack is one file, read like a model's experts; the same seed gives the same order
- the limit is the best fixed set, chosen with hindsight, and in memory from the start
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

import offload
from offload.prefetch.engine import counts
from offload.prefetch.plan import Pool
from offload.prefetch.value import page_state_of
from offload.tensor.views import handle_of

ROWS, COLUMNS = 68, 256  # of a matrix in float32: 68 KiB, whole pages
PICKS, TOPIC = 4, 200  # matrices that a token picks, and tokens about one topic, where topics change
_ENTRY = "experts"


def orders(count: int, length: int, seed: int = 0) -> dict[str, list[int]]:
    """Sequences of indices below `count`."""
    chance = torch.Generator().manual_seed(seed)

    def drawn(exponent: float) -> torch.Tensor:
        shares = torch.arange(1, count + 1, dtype=torch.float64) ** -exponent
        return torch.multinomial(shares, length, replacement=True, generator=chance)

    def of_topics() -> torch.Tensor:
        """As `drawn(1)`, without repetition in a token; each topic has favourites of its own."""
        shares = torch.arange(1, count + 1, dtype=torch.float64) ** -1.0
        tokens = math.ceil(length / PICKS)
        ranks = torch.multinomial(shares.expand(tokens, count), min(PICKS, count), generator=chance)
        topics = range(math.ceil(tokens / TOPIC))
        favourites = torch.stack([torch.randperm(count, generator=chance) for _ in topics])
        return favourites[torch.arange(tokens)[:, None] // TOPIC, ranks].flatten()[:length]

    places = torch.randperm(count, generator=chance)
    turned = torch.arange(length) * count // length
    return {
        "uniform": places[drawn(0)].tolist(),
        "Zipf 0.8": places[drawn(0.8)].tolist(),
        "Zipf 1.2": places[drawn(1.2)].tolist(),
        "drifting": places[(drawn(1) + turned) % count].tolist(),
        "topics": of_topics().tolist(),
        "circle": (torch.arange(length) % count).tolist(),
    }


def hits_in_hindsight(order: Sequence[int], places: int) -> int:
    """Hits of the best fixed set."""
    return int(torch.tensor(order).bincount().sort(descending=True).values[:places].sum())


def stack(folder: Path, count: int) -> Path:
    """A file with `count` matrices."""
    path = folder / "stack.safetensors"
    save_file({_ENTRY: torch.arange(count * ROWS * COLUMNS, dtype=torch.float32).view(count, ROWS, COLUMNS)}, path)
    return path


@dataclass(frozen=True)
class Replay:
    """The results for an order.

    Attributes:
        hits: reads of matrices that were in memory as planned.
        bytes_read: from the disk.
    """

    hits: int
    bytes_read: int


def replayed(path: Path, order: Sequence[int], places: int) -> Replay:
    """Read the matrices of a `stack` file in this order, with room for `places` of them."""
    nbytes = ROWS * COLUMNS * 4
    tensor = offload.load_file(path)[_ENTRY]
    page_state = page_state_of(handle_of(tensor))
    page_state.pool = Pool(places * nbytes, 0)
    start = handle_of(tensor).extent[0]
    before, hits = counts().bytes_read, 0
    for number in order:
        known = page_state.ranges.get((start + number * nbytes, nbytes))
        hits += known is not None and known.kept and known.checked_until > 0
        tensor[number].amax()
    return Replay(hits, counts().bytes_read - before)
