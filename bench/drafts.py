"""Decoding with drafts: their length follows the cost of a pass, against each fixed length, and against none.

Always true:
- the model and its assistant are told the text; the assistant errs at a rate, the model never: acceptance is exact, and
  no luck with random weights decides
- both compute and read all that they would: just the scores are replaced
- the limit is the best fixed length, none included, with hindsight
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import offload
from bench.apart import run_apart
from bench.limits import MIB
from bench.models import bytes_of_a_pass
from bench.peers import OURS
from bench.process import read_bytes
from bench.rounds import Figure, in_turn
from bench.scale import Scale

FIXED = (2, 4, 8, 16, 32)  # tokens of a draft
_PROMPT = 16  # tokens
_ASSISTANT = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass(frozen=True)
class Case:
    """What is drafted for.

    Attributes:
        name: in the table.
        folder: of the model.
        budget: bytes that may stay in memory; None for all.
        right: how often the assistant is right.
    """

    name: str
    folder: Path
    budget: int | None
    right: float


@dataclass(frozen=True)
class DraftTrial:
    """Seconds and bytes read per token, and tokens per pass."""

    seconds: float
    bytes_read: float
    tokens_per_pass: float


def figures(scale: Scale, _: Path) -> list[Figure]:
    """Seconds per token."""
    dense, mixture = scale.draft_model(), scale.experts()
    third = _third_of(dense)
    cases = [Case(f"dense, a third fits, {right:g} accepted", dense, third, right) for right in (0.5, 0.8, 0.95)]
    cases += [Case(f"dense, in memory, {right:g} accepted", dense, None, right) for right in (0.5, 0.8)]
    cases.append(Case("mixture, a third fits, 0.8 accepted", mixture, _third_of(mixture), 0.8))
    return [figure for case in cases for figure in _figures_of(case, scale)]


def _third_of(folder: Path) -> int:
    """A third of a model, or the least budget."""
    return max(MIB, bytes_of_a_pass(folder) // 3)


def _figures_of(case: Case, scale: Scale) -> list[Figure]:
    fixed = FIXED if case.budget is not None and "dense" in case.name else ()
    arms: dict[str, Callable[[], DraftTrial]] = {
        OURS: partial(run_apart, trial, case, None, scale.drafted_tokens),
        "no draft": partial(run_apart, trial, case, 0, max(2, scale.drafted_tokens // 4)),
        **{f"{length} tokens": partial(run_apart, trial, case, length, scale.drafted_tokens) for length in fixed},
    }
    done = in_turn(arms, scale.rounds, {})
    seconds = done.values(lambda one: one.seconds)
    others = [values for arm, values in seconds.items() if arm != OURS]
    best = [min(values) for values in zip(*others, strict=True)]
    per_pass = {
        arm: {"tokens per 100 passes": round(100 * one[-1].tokens_per_pass)} for arm, one in done.results.items()
    }
    read = done.values(lambda one: one.bytes_read)
    return [
        Figure(f"drafts: {case.name}: a token", "s", seconds, best, "the best fixed length", done.missing, per_pass),
        Figure(f"drafts: {case.name}: bytes read, a token", "B", read, [], "", done.missing),
    ]


def trial(case: Case, length: int | None, tokens: int) -> DraftTrial:
    """Generate the text that both are told; None for drafts whose length follows the cost of a pass."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = offload.from_pretrained(case.folder, max_memory=case.budget)
    vocabulary = model.config.vocab_size
    assistant = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **_ASSISTANT)).to(model.dtype).eval()
    if length:
        settings = assistant.generation_config
        settings.num_assistant_tokens, settings.assistant_confidence_threshold = length, 0.0
    text = random.Random(1).choices(range(3, vocabulary), k=_PROMPT + 3 * tokens + 64)
    forced = _forced(text, case.right, vocabulary, model, assistant)
    prompt = torch.tensor([text[:_PROMPT]])

    def generated(count: int) -> None:
        options = {} if length == 0 else {"assistant_model": assistant}
        found = model.generate(
            prompt, max_new_tokens=count, do_sample=False, eos_token_id=None, logits_processor=[forced], **options
        )
        assert found[0].tolist() == text[: _PROMPT + count], "the text is the one that was told"

    generated(2)  # what stays is in memory then
    passes: list[int] = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    read, started = read_bytes(), time.perf_counter()
    generated(tokens)
    seconds = time.perf_counter() - started
    return DraftTrial(seconds / tokens, (read_bytes() - read) / tokens, tokens / len(passes))


def _forced(text: list[int], right: float, vocabulary: int, model: Any, assistant: Any) -> Any:
    """A processor of scores that leaves the next token of the text alone, or another one after a pass that errs."""
    from transformers import LogitsProcessor

    class Forced(LogitsProcessor):  # type: ignore[misc]
        drafts = False

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            place = input_ids.shape[1]
            errs = self.drafts and random.Random(place).random() >= right
            token = (text[place] + errs) % vocabulary
            alone = torch.full_like(scores, -torch.inf)
            alone[:, token] = 0.0
            return alone

    forced = Forced()
    model.register_forward_pre_hook(lambda *_: setattr(forced, "drafts", False))
    assistant.register_forward_pre_hook(lambda *_: setattr(forced, "drafts", True))
    return forced
