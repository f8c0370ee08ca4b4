"""Warm decoding with everything on disk against the same model in memory, token by token, interleaved.

Both models are in one process, over the same files in the page cache; each pair decodes the same token with one and
then with the other (the order alternates). What is printed is the median of the ratios of pairs.

    python -m bench.decode [--pairs 60]
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import torch

from bench.arms import in_memory, offloaded
from bench.models import llama


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--pairs", type=int, default=60)
    options.add_argument("--gigabytes", type=float, default=1.0)
    chosen = options.parse_args()
    folder = llama(chosen.gigabytes)
    arms = {"in memory": Decoder(in_memory(folder)), "offload": Decoder(offloaded(folder))}
    ratios = []
    for pair in range(-3, chosen.pairs):
        order = list(arms) if pair % 2 else list(reversed(arms))
        seconds = {arm: arms[arm].step() for arm in order}
        if pair >= 0:
            ratios.append(seconds["offload"] / seconds["in memory"])
    ratios.sort()
    figures = {
        "pairs": len(ratios),
        "median": median(ratios),
        "low": ratios[len(ratios) // 10],
        "high": ratios[-len(ratios) // 10],
    }
    print(json.dumps({"time per token, offload / in memory": figures}))


class Decoder:
    """One model, its cache of keys and values, and its last token."""

    def __init__(self, model: Any) -> None:
        self._model = model
        with torch.inference_mode():
            done = model(torch.arange(1, 9)[None], use_cache=True)
        self._cache, self._token = done.past_key_values, done.logits[:, -1:].argmax(-1)

    def step(self) -> float:
        """Decode one token; gives the seconds it took."""
        start = time.perf_counter()
        with torch.inference_mode():
            done = self._model(self._token, past_key_values=self._cache, use_cache=True)
            self._token = done.logits[:, -1:].argmax(-1)
        return time.perf_counter() - start


if __name__ == "__main__":
    main()
