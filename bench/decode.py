"""Warm decoding with everything on disk against the same model in memory, alternating token by token.

Always true:
- both models are in one process, over the same files in the page cache: the most precise comparison
- the two decode the same token, one right after the other, in alternating order
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.apart import run_apart
from bench.generate import PROMPT
from bench.page_cache import files_in, warm
from bench.peers import IN_MEMORY, OURS, WAYS
from bench.rounds import Figure, Rounds, in_turn
from bench.scale import Scale
from offload.transformers_api import cache_name, cache_of

_WARM_UP = 3


def figures(scale: Scale, scratch: Path) -> list[Figure]:
    """The time per token."""
    folder = scale.model()
    warm(files_in(folder))
    done = run_apart(steps, folder, scratch, scale.pairs)
    limit = done.take(IN_MEMORY)
    return [Figure("decode: a token, in one process", "s", done.results, limit, IN_MEMORY, done.missing)]


def steps(folder: Path, scratch: Path, pairs: int) -> Rounds[float]:
    """Seconds per token for both, after the first few."""
    decoders = {arm: Decoder(WAYS[arm].load(folder, scratch)) for arm in (IN_MEMORY, OURS)}
    done = in_turn({arm: decoder.step for arm, decoder in decoders.items()}, _WARM_UP + pairs, {})
    done.results = {arm: seconds[_WARM_UP:] for arm, seconds in done.results.items()}
    return done


class Decoder:
    """A model, its KV cache, and the tokens so far.

    Attributes:
        first_seconds: of the pass over the prompt.
        tokens: decoded so far.
    """

    def __init__(self, model: Any, prompt: Sequence[int] = PROMPT) -> None:
        self._model = model
        start = time.perf_counter()
        with torch.inference_mode():
            done = model(torch.tensor([prompt]), use_cache=True)
        self.first_seconds = time.perf_counter() - start
        self._cache, self._name = cache_of(done), str(cache_name(model.forward))
        self.tokens = [int(done.logits[0, -1].argmax())]

    def step(self) -> float:
        """Decode one token; returns the seconds it took."""
        start = time.perf_counter()
        with torch.inference_mode():
            done = self._model(torch.tensor([self.tokens[-1:]]), **{self._name: self._cache}, use_cache=True)
            self.tokens.append(int(done.logits[0, -1].argmax()))
        return time.perf_counter() - start
