"""A token from a GGUF file, in the page cache or in less memory: beside llama.cpp, and transformers with dense weights.

Always true:
- all compute with the same file and the same number of threads, in turn, each in a process of its own
- a value is the median over some tokens, after the first few
- transformers decodes all blocks when it loads: its weights are dense, in memory, in the dtype of the case
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import offload
from bench.apart import stepping_apart
from bench.decode import Decoder
from bench.gguf_models import llama_of, write_gguf
from bench.models import smollm2
from bench.page_cache import warm
from bench.peers import OURS
from bench.rounds import Figure, in_turn
from bench.scale import Scale, Timed
from bench.tokens_apart import LLAMA_CPP, PROMPT, absent, trial

_DENSE = "transformers, dense"
_WARM_UP = 3
_SHARES = (1.0, 0.75)  # of a file, as memory for everything
_LEAST = 700 << 20  # bytes that Python, torch and transformers need


def figures(scale: Scale, scratch: Path) -> list[Figure]:
    """Seconds per token of SmolLM2 in two dtypes, and of a larger model of random blocks."""
    found = []
    larger = write_gguf(scratch / f"llama-{scale.gguf_layers}-layers.Q4_K_M.gguf", llama_of(scale.gguf_layers))
    cases = (
        ("SmolLM2-135M, Q4_1, float32", smollm2(), torch.float32),
        ("SmolLM2-135M, Q4_1, bfloat16", smollm2(), torch.bfloat16),
        (f"{larger.stat().st_size / 1e9:.1f} GB, Q4_K_M, bfloat16", larger, torch.bfloat16),
    )
    for name, path, dtype in cases:
        warm([path])
        found.append(_figure(f"gguf: a token, {name}", path, dtype, scale))
    found += [_capped_figure(larger, share, scale) for share in _SHARES]
    larger.unlink()
    return found


def _figure(case: str, path: Path, dtype: torch.dtype, scale: Scale) -> Figure:
    with ExitStack() as stack:
        arms: dict[str, Callable[[], float]] = {
            arm: stack.enter_context(stepping_apart(_steps, arm, path, dtype, scale.packed_pairs))
            for arm in (_DENSE, OURS)
        }
        arms[LLAMA_CPP] = lambda: trial(LLAMA_CPP, path, None, Timed(_WARM_UP, scale.packed_pairs)).seconds
        done = in_turn(arms, scale.rounds, absent())
    limit = done.take(_DENSE)
    return Figure(case, "s", done.results, limit, _DENSE, done.missing)


def _capped_figure(path: Path, share: float, scale: Scale) -> Figure:
    """Seconds per token in a process whose memory, with the page cache, is this share of the file."""
    limit, timed = max(int(share * path.stat().st_size), _LEAST), Timed(_WARM_UP, scale.packed_pairs)
    case = f"gguf, capped: a token, {path.stat().st_size / 1e9:.1f} GB, Q4_K_M, in {limit / 1e6:,.0f} MB"
    arms = {arm: partial(trial, arm, path, limit, timed) for arm in (OURS, LLAMA_CPP)}
    done = in_turn(arms, scale.rounds, absent())
    return Figure(case, "s", done.values(lambda one: one.seconds), [], "", done.missing)


def _steps(arm: str, path: Path, dtype: torch.dtype, tokens: int) -> Iterator[float]:
    decoder = Decoder(_loaded(arm, path, dtype), PROMPT)
    for _ in range(_WARM_UP):
        decoder.step()
    while True:
        yield median(decoder.step() for _ in range(tokens))


def _loaded(arm: str, path: Path, dtype: torch.dtype) -> Any:
    if arm == OURS:
        return offload.from_pretrained(path, dtype=dtype)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
