"""Generating with everything on disk and in the page cache, each way of loading in a separate process.

Always true:
- every way loads the same folder in the same dtype, and decodes the same tokens, or has no figures
- the model in memory maps the same files, as transformers does by default: it is the limit
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.apart import run_apart
from bench.models import as_pickles
from bench.page_cache import files_in, warm
from bench.peers import IN_MEMORY, PACKAGES, WAYS, absent
from bench.process import MemoryTrace, written_bytes
from bench.rounds import Figure, in_turn
from bench.scale import Scale

PROMPT = list(range(1, 9))


@dataclass
class Trial:
    """The results of one way. Times in seconds, memory in bytes above that of a process after all imports."""

    arm: str
    load_seconds: float
    first_token_seconds: float
    token_seconds: float
    bytes_written: int
    peak_bytes: int
    loaded_bytes: int
    tokens: list[int]
    trace: list[tuple[float, int]] = field(repr=False, default_factory=list)


def figures(scale: Scale, scratch: Path) -> list[Figure]:
    """A sharded Llama."""
    return figures_of("generate", scale.model(), scale, scratch)


def figures_of(case: str, folder: Path, scale: Scale, scratch: Path) -> list[Figure]:
    """Loading, the first token, the following ones, and memory."""
    warm(files_in(folder))
    trials = {arm: partial(run_apart, trial, arm, folder, scratch, PROMPT, scale.tokens) for arm in WAYS}
    done = in_turn(trials, scale.rounds, absent(PACKAGES))
    in_memory = done.take(IN_MEMORY)
    done.strike(lambda one: one.tokens, in_memory[0].tokens, "tokens")

    def figure(what: str, unit: str, value: Callable[[Trial], float]) -> Figure:
        limit = [value(one) for one in in_memory]
        return Figure(f"{case}: {what}", unit, done.values(value), limit, IN_MEMORY, done.missing)

    return [
        figure("load", "s", lambda one: one.load_seconds),
        figure("bytes written by loading", "B", lambda one: one.bytes_written),
        figure("first token", "s", lambda one: one.first_token_seconds),
        figure("a token", "s", lambda one: one.token_seconds),
        replace(
            figure("peak anonymous memory", "B", lambda one: one.peak_bytes),
            traces={one.arm: one.trace for one in (in_memory[0], *(results[0] for results in done.results.values()))},
        ),
    ]


def typical(trials: list[Trial]) -> Trial:
    """The medians of several trials of one way; the trace of the first."""
    numbers = [name for name, value in asdict(trials[0]).items() if isinstance(value, (int, float))]
    return replace(trials[0], **{name: median(getattr(trial, name) for trial in trials) for name in numbers})


def trial(arm: str, folder: Path, scratch: Path, prompt: list[int], tokens: int) -> Trial:
    """Load, generate the first token, decode the others; everything measured."""
    ids = torch.tensor([prompt])
    rehearse(arm, folder, scratch)
    with tempfile.TemporaryDirectory(dir=scratch) as own, torch.inference_mode(), MemoryTrace() as memory:
        written = written_bytes()
        start = time.perf_counter()
        model = WAYS[arm].load(folder, Path(own))
        loaded = time.perf_counter()
        bytes_written, loaded_bytes = written_bytes() - written, memory.now()
        decode(model, ids, 1)
        first_done = time.perf_counter()
        generated = decode(model, ids, tokens)
        end = time.perf_counter()
    return Trial(
        arm=arm,
        load_seconds=loaded - start,
        first_token_seconds=first_done - loaded,
        token_seconds=(end - first_done) / tokens,
        bytes_written=bytes_written,
        peak_bytes=memory.peak,
        loaded_bytes=loaded_bytes,
        tokens=generated,
        trace=memory.samples,
    )


def rehearse(arm: str, folder: Path, scratch: Path) -> None:
    """Load and run a small model of the same class: imports and first calls should not be measured."""
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    config = AutoConfig.from_pretrained(folder, **small, num_key_value_heads=2, head_dim=8, vocab_size=64)
    if hasattr(config, "num_experts"):
        config.update(experts)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    with tempfile.TemporaryDirectory(dir=scratch) as made, tempfile.TemporaryDirectory(dir=scratch) as own:
        AutoModelForCausalLM.from_config(config).save_pretrained(made)
        if not any(folder.glob("*.safetensors")):
            as_pickles(Path(made))
        decode(WAYS[arm].load(Path(made), Path(own)), torch.tensor([[1, 2]]), 2)


def decode(model: Any, ids: Any, tokens: int) -> list[int]:
    """The next tokens, greedily."""
    done = model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return [int(token) for token in done[0, ids.shape[1] :]]
