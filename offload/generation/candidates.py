"""Drafts for one call of `generate`, in the interface of transformers' candidate generators, and how long they are.

Always true:
- transformers' own generators draft with an assistant; decided here is how many tokens, and whether from the text
- no draft is one of the lengths: the one with the most expected tokens per second is taken
- a length that was not measured lately is estimated from others, and tried once a fiftieth of the time pays for it
- from the text: of the places where the last tokens stand before, the one that agrees on the most is taken, the latest
- what was measured serves later calls with the same model and assistant
- an assistant whose `generation_config` says how many tokens it drafts is left to transformers, as is every other way

Sources: `CandidateGenerator` in transformers' generation/candidate_generator.py, and prompt lookup decoding,
https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

import copy
import weakref
from bisect import bisect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice, takewhile
from typing import Any

import torch
from torch import nn

from offload.budget import keep_assistant
from offload.generation.alike import is_switchable, switch_alike
from offload.system import clock
from offload.system.locks import fork_safe_lock
from offload.transformers_api import given_cache

MOST = 63  # tokens of a draft: with the one before it, as many rows as the kernels multiply at once
_COMPARED = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, MOST)  # lengths
FIRST = 5  # tokens of a draft about which nothing is known
_WEIGHT = 0.3  # of a new measurement
_STALE = 64  # passes after which a measurement says little
_FADE = 0.98  # what an accepted or rejected token counts when the next one is seen
_TRIED = 0.02  # share of the time that may be lost by trying a length


class Source:
    """Where drafts come from: `rate` is a token's likelihood at first, `seconds` what it takes, None until measured."""

    def __init__(self, rate: float, seconds: float | None = 0.0) -> None:
        self.seconds = seconds
        self._accepted, self._seen = 2 * rate, 2.0

    def learn(self, accepted: int, drafted: int) -> None:
        """Of a draft, so many tokens were accepted."""
        for position in range(min(accepted + 1, drafted)):
            self._accepted = self._accepted * _FADE + (position < accepted)
            self._seen = self._seen * _FADE + 1

    def learn_seconds(self, per_token: float) -> None:
        """A draft took so long per token."""
        self.seconds = per_token if self.seconds is None else self.seconds + _WEIGHT * (per_token - self.seconds)

    def expected(self, drafted: int) -> float:
        """The expected tokens of a pass with such a draft: one, and those that are accepted."""
        return sum((self._accepted / self._seen) ** position for position in range(drafted + 1))


@dataclass(frozen=True)
class Draft:
    """A draft that could be made."""

    tokens: int  # 0 for none
    source: Source | None = None
    seconds: float = 0.0  # of the draft and the pass
    rate: float = 0.0  # expected tokens per second


class PassCosts:
    """What passes take, by their tokens: one point for each binary magnitude, and lines between the points."""

    def __init__(self) -> None:
        self._passes = 0
        self._points: dict[int, tuple[float, float, int]] = {}  # by magnitude: tokens, seconds, at which pass
        self._saved = 0.0  # seconds that may be lost by trying a length

    def learn(self, tokens: int, seconds: float) -> None:
        place, was_measured = tokens.bit_length(), self._is_measured(tokens)
        self._passes += 1
        self._saved += _TRIED * seconds
        at, before, _ = self._points.get(place, (0.0, 0.0, 0))
        weight = _WEIGHT if was_measured else 1.0
        self._points[place] = at + weight * (tokens - at), before + weight * (seconds - before), self._passes

    def _is_measured(self, tokens: int) -> bool:
        point = self._points.get(tokens.bit_length())
        return point is not None and self._passes - point[2] <= _STALE

    def seconds(self, tokens: int) -> float:
        """What a pass over so many tokens takes; there is a measurement, of any number."""
        points = sorted(self._points.values())
        after = min(max(bisect(points, (tokens,)), 1), len(points) - 1)
        (low, first, _), (high, second, _) = points[after - 1], points[after]
        if tokens > high:  # it does not take less beyond
            first = min(first, second)
        return second + (second - first) * (tokens - high) / ((high - low) or 1)

    def best(self, sources: Sequence[tuple[Source, int]]) -> Draft:
        """The draft with the most expected tokens per second, or one to try; sources come with the most of each."""
        if not self._points:
            return next((Draft(min(FIRST, most), source) for source, most in reversed(sources)), Draft(0))
        drafts = list(self._drafts(sources))
        if 1 not in self._points:
            return drafts[0]
        best = max(drafts, key=lambda one: one.rate)
        others = [one for one in drafts if not self._is_measured(one.tokens + 1)]
        tried = max(others, key=lambda one: one.rate, default=best)
        loss = tried.seconds * (1 - tried.rate / best.rate)
        if loss > self._saved:
            return best
        self._saved -= loss
        return tried

    def _drafts(self, sources: Sequence[tuple[Source, int]]) -> Iterator[Draft]:
        """No draft first."""
        plain = max(self.seconds(1), 1e-9)
        yield Draft(0, None, plain, 1 / plain)
        for source, most in sources:
            most = min(most, MOST if source.seconds is not None else FIRST)
            for tokens in dict.fromkeys(min(most, one) for one in _COMPARED if most):
                seconds = max(self.seconds(tokens + 1), 1e-9) + tokens * (source.seconds or 0.0)
                yield Draft(tokens, source, seconds, source.expected(tokens) / seconds)


_CAUGHT_UP = 16  # tokens without a draft that an assistant goes through quickly: more tell nothing about drafting
_LOOKED_UP = {1: 0.2, 2: 0.4, 4: 0.6, 8: 0.8}  # from how long a match on, and what is assumed to be accepted
_OF_ASSISTANT = 0.7  # the same of an assistant


@dataclass(eq=False)
class Measured:
    """What is known of a model: what its passes take, and what drafts for it are worth. Used under its lock."""

    costs: PassCosts = field(default_factory=PassCosts)
    # Sources of drafts from the text, by the least length of the match.
    lookups: dict[int, Source] = field(
        default_factory=lambda: {least: Source(rate) for least, rate in _LOOKED_UP.items()}
    )
    assistants: weakref.WeakKeyDictionary[nn.Module, Source] = field(default_factory=weakref.WeakKeyDictionary)
    lock: Any = field(default_factory=fork_safe_lock)


_MEASURED: weakref.WeakKeyDictionary[nn.Module, Measured] = weakref.WeakKeyDictionary()
_LOCK = fork_safe_lock()


def measured(model: nn.Module) -> Measured:
    with _LOCK:
        if model not in _MEASURED:
            _MEASURED[model] = Measured()
        return _MEASURED[model]


class Drafts:
    """Drafts for one call, whose length follows the cost of a pass, in transformers' interface."""

    requires_model_outputs = False

    def __init__(
        self, model: nn.Module, inner: Any = None, *, max_length: int, most: int = MOST, ends: Any = None
    ) -> None:
        """`inner` drafts with an assistant, if any; up to `most` tokens come from the text, none after `ends`."""
        self._known = measured(model)
        self._inner = inner
        self._max_length = max_length
        self._most = min(most, MOST)
        self._ends = set() if ends is None else set(ends.reshape(-1).tolist())
        self._source: Source | None = None
        self._drafted: list[int] = []
        self._begun = 0.0
        self._length = self._caught_up = 0
        self._is_first = True
        self._assistant: Source | None = None
        if inner is not None:
            with self._known.lock:
                self._assistant = self._known.assistants.setdefault(inner.assistant_model, Source(_OF_ASSISTANT, None))
            for config in (inner.generation_config, inner.assistant_generation_config):
                config.assistant_confidence_threshold = 0.0  # the length is decided here

    def get_candidates(self, input_ids: torch.Tensor, **_: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The text so far (1, tokens) with a draft after it, and the assistant's scores (1, drafted, vocabulary)."""
        self._length = input_ids.shape[1]
        candidates, scores = self._drafted_after(input_ids)
        self._drafted = candidates[0, self._length :].tolist()
        switch_alike(on=bool(self._drafted))
        self._begun = clock.now()
        return candidates, scores

    def _drafted_after(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        left = self._max_length - self._length - 1
        self._source = None
        if left <= 0 or (self._is_first and is_switchable()):  # all tokens of a prompt are computed as without
            return input_ids, None
        copied, matched = looked_up(input_ids[0].tolist(), min(self._most, left), self._ends)
        lookups = self._known.lookups
        sources = [(lookups[max(least for least in lookups if least <= matched)], len(copied))] if copied else []
        if self._assistant is not None:
            sources.append((self._assistant, min(MOST, left)))
        with self._known.lock:
            draft = self._known.costs.best(sources)
        self._source = draft.source
        if draft.source is None:
            return input_ids, None
        if draft.source is self._assistant:
            return self._from_assistant(input_ids, draft.tokens)
        followed = torch.tensor([copied[: draft.tokens]], dtype=input_ids.dtype, device=input_ids.device)
        return torch.cat([input_ids, followed], dim=1), None

    def _from_assistant(self, input_ids: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        started, self._inner.num_assistant_tokens = clock.now(), tokens
        given = self._inner.assistant_kwargs
        if given.get(given_cache(given) or "") is None:
            _continue(given, self._length)
        candidates: torch.Tensor
        candidates, scores = self._inner.get_candidates(input_ids)
        drafted = candidates.shape[1] - self._length
        assert self._assistant is not None
        if drafted > 0 and self._length - self._caught_up <= _CAUGHT_UP:
            with self._known.lock:
                self._assistant.learn_seconds((clock.now() - started) / drafted)
        self._caught_up = self._length + drafted
        return candidates, scores

    def update_candidate_strategy(self, input_ids: torch.Tensor, *_: object) -> None:
        """Learn from a pass: the text is what was accepted, and the model's own token."""
        seconds, drafted = clock.now() - self._begun, len(self._drafted)
        new = input_ids[0, self._length :].tolist()
        agreed = takewhile(lambda pair: pair[0] == pair[1], zip(new, self._drafted, strict=False))
        accepted = len(list(agreed))  # an accepted token that ends the text counts as the model's own
        with self._known.lock:
            if not self._is_first:  # that of the prompt finds less in memory than later ones
                self._known.costs.learn(drafted + 1, seconds)
            if self._source is not None:
                self._source.learn(accepted, drafted)
        self._is_first = False


def _continue(inputs: dict[str, Any], length: int) -> None:
    """Extend what an assistant is given beside the text, if the model has gone on without it."""
    for name in ("attention_mask", "decoder_attention_mask", "token_type_ids", "position_ids"):
        given = inputs.get(name)
        if given is not None and (missing := length - given.shape[-1]) > 0:
            steps = torch.arange(1, missing + 1, device=given.device) * (name == "position_ids")
            inputs[name] = torch.cat([given, given[..., -1:] + steps.to(given.dtype)], dim=-1)


def drafts_for(model: Any, make: Callable[..., object], given: dict[str, Any]) -> Any:
    """Transformers' generator of candidates, as `make` gives it for these arguments, or ours in its place."""
    options = {name: value for name, value in given.items() if name not in ("self", "generation_config")}
    generation_config = given["generation_config"]
    assistant, most = options.get("assistant_model"), generation_config.prompt_lookup_num_tokens
    if assistant is not None and most is not None:  # transformers has one or the other
        generation_config = copy.copy(generation_config)
        generation_config.prompt_lookup_num_tokens = None
    inner = make(generation_config=generation_config, **options)
    if (assistant is None and most is None) or type(inner).__name__ not in _WITH_LENGTH:
        return inner
    if assistant is not None:
        keep_assistant(model, assistant)
        settings = assistant.generation_config
        if settings.num_assistant_tokens is not None or settings.num_assistant_tokens_schedule is not None:
            return inner
    return Drafts(
        model,
        None if assistant is None else inner,
        max_length=generation_config.max_length,
        most=(most or MOST) if generation_config.assistant_ensemble_weight is None else 0,
        ends=generation_config._eos_token_tensor,
    )


_WITH_LENGTH = (
    *("AssistedCandidateGenerator", "AssistedCandidateGeneratorDifferentTokenizers"),
    *("UniversalSpeculativeDecodingGenerator", "PromptLookupCandidateGenerator"),
)


MOST_MATCHED = 16  # tokens beyond which a longer match says no more


def looked_up(tokens: Sequence[int], most: int, ends: Collection[int] = ()) -> tuple[list[int], int]:
    """Up to `most` tokens, but no `ends`, that followed the last ones before; and how many of these stood there."""
    end, matched = len(tokens), 1
    places = [place for place in range(end - 1) if tokens[place] == tokens[-1]] if most else []
    if not places:
        return [], 0
    while matched < min(MOST_MATCHED, end):
        longer = [place for place in places if place >= matched and tokens[place - matched] == tokens[-1 - matched]]
        if not longer:
            break
        places, matched = longer, matched + 1
    repeated = cycle(tokens[places[-1] + 1 :])  # it goes on as it repeats itself
    return list(takewhile(lambda token: token not in ends, islice(repeated, most))), matched
