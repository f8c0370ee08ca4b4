"""One answer: a call of `generate` that tells its tokens as they come.

Always true:
- an answer is the one that `generate` gives for its request alone, whatever is answered beside it
- random numbers are the request's own
- a request that nobody waits for any more ends after the pass that it is in
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from offload.annotations import Json, Kwargs
from offload.generation.chat import ONE_ANSWER, Prompt, stops_of
from offload.generation.text import Text
from offload.transformers_api import cache_name, cache_of

_SAMPLING = {"temperature", "top_p", "top_k", "min_p"}  # options that have the same names for `generate`
_SCORED_BYTES = 256 << 20  # of logits, when a prompt is scored


@dataclass(frozen=True)
class Score:
    """A token with its log-probability, and the most probable ones there."""

    token: int
    logprob: float | None  # natural logarithm; None for the first token of a prompt
    top: Sequence[tuple[int, float]] = ()  # the most probable first


@dataclass(frozen=True)
class AnswerPart:
    text: str
    scores: Sequence[Score] = ()
    tokens: int = 0


@dataclass(frozen=True)
class End:
    """The end of an answer: why, in OpenAI's words, or an error."""

    reason: str = ""
    error: Exception | None = None


@dataclass(eq=False)
class Job:
    """One answer that was asked for."""

    prompt: Prompt  # what it begins with, and how many tokens to generate; 0 to score the prompt alone
    tell: Callable[[AnswerPart | End], None]  # called with each part, and then with an `End`, in some thread
    options: Json = field(default_factory=dict)  # those of `bodies.OPTIONS` that are given
    top: int | None = None  # alternatives per token; None for no log-probabilities
    echo: bool = False  # whether the prompt is scored, too
    is_cancelled: bool = False  # nobody waits for it any more
    is_cut: bool = False  # it ends with the tokens that it has
    is_drafted: bool = False
    tokens: list[int] = field(default_factory=list)
    passes: int = 0  # in which its tokens were generated

    @property
    def is_over(self) -> bool:
        return self.is_cancelled or self.is_cut


class Answering:
    """Answers jobs with a model; called in lockstep with others."""

    def __init__(self, model: Any, tokenizer: Any, ends: Collection[int], more: Kwargs, drafts: Kwargs) -> None:
        """`more` are options of each call, `drafts` of those without seed or log-probabilities, which they change."""
        self._model, self._tokenizer, self._ends = model, tokenizer, ends
        self.more, self._drafts = more, drafts

    def __call__(self, job: Job) -> str:
        """Answer a job; returns why it ended: "stop" or "length"."""
        torch.manual_seed(job.options.get("seed", secrets.randbits(63)))  # for this job only, as batches have their own
        tokens = torch.tensor([job.prompt.tokens], device=self._model.device)  # (1, length)
        stops = [*job.options.get("stop", ()), *stops_of(self._model)]
        text = Text(self._tokenizer, stops, self._ends)
        streamer = Streamer(job, text)
        options = self._options(job, streamer)
        if job.echo and job.top is not None:
            if job.prompt.most == 1 and not options.get("do_sample", True):
                options |= {"custom_generate": self._one_token(job, streamer), **dict.fromkeys(self.more)}
            else:
                self._score_prompt(job, tokens)
        if not job.prompt.most or job.is_over:
            return "length"
        self._model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), **options)
        streamer.finish()
        last_one = text.tokens[-1] if text.tokens else None
        return "stop" if text.has_stopped or last_one in self._ends else "length"

    def _options(self, job: Job, streamer: Streamer) -> Kwargs:
        """Options for `generate`: as the model's settings say, or greedy where a temperature of 0 is asked for."""
        asked = job.options
        chosen: Kwargs = {
            **self.more,
            **ONE_ANSWER,
            "max_new_tokens": job.prompt.most,
            "streamer": streamer,
            "stopping_criteria": [streamer.stops],
        }
        if sampling := asked.keys() & _SAMPLING:
            chosen["do_sample"] = asked.get("temperature", 1) > 0
        names = {"repetition_penalty", *(sampling if chosen.get("do_sample") else ())}
        chosen |= {name: asked[name] for name in names & asked.keys()}
        if job.top is not None:
            chosen["logits_processor"] = [streamer.see]
        elif "seed" not in asked:
            chosen |= self._drafts
            job.is_drafted = bool(self._drafts)
        if self._model.generation_config.pad_token_id is None:
            chosen["pad_token_id"] = next(iter(self._ends), 0)
        return chosen

    def _one_token(self, job: Job, streamer: Streamer) -> Callable[..., torch.Tensor]:
        """A way to generate one token, the most probable one: in the pass that scores the prompt."""

        def decode(_model: object, tokens: torch.Tensor, logits_processor: Any, **_: object) -> torch.Tensor:
            logits = self._score_prompt(job, tokens)[None]  # (1, vocabulary)
            if not job.is_over:
                streamer.put(logits_processor(tokens, logits).argmax(-1))
            return tokens

        return decode

    def _score_prompt(self, job: Job, tokens: torch.Tensor) -> torch.Tensor:
        """Tell the log-probabilities of the prompt's tokens; returns the logits of the next one: (vocabulary,)."""
        assert job.top is not None
        prompt = job.prompt.tokens
        job.tell(AnswerPart("", [Score(prompt[0], None)]))
        width = self._model.config.get_text_config().vocab_size
        step = max(_SCORED_BYTES // (4 * width), 16)
        length = tokens.shape[1]
        more: Kwargs = {"use_cache": length > step}
        logits = torch.empty(0)
        for start in range(0, length, step):
            out = self._model(input_ids=tokens[:, start : start + step], **more)
            if length > step:
                more[str(cache_name(self._model.forward))] = cache_of(out)
            logits = out.logits[0].float()  # (tokens, vocabulary)
            scores = torch.log_softmax(logits, dim=-1)
            following = prompt[start + 1 : start + 1 + step]
            told = [_score(one, token, job.top) for one, token in zip(scores, following, strict=False)]
            job.tell(AnswerPart("", told))
            if job.is_over:
                break
        return logits[-1].clone()


class Streamer:
    """Tells what `generate` does: it is its streamer, its stopping criterion, and a logits processor."""

    def __init__(self, job: Job, text: Text) -> None:
        self._job, self._text = job, text
        self._is_prompt = True
        self._scores = torch.empty(0)

    def put(self, value: torch.Tensor) -> None:
        """New tokens; the first ones are the prompt."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self._job.passes += 1
        for token in value.flatten().tolist():
            if self._text.has_stopped or len(self._text.tokens) == self._job.prompt.most:
                return  # drafted tokens after a stop string
            scores = [] if self._job.top is None else [_score(self._scores, token, self._job.top)]
            self._job.tokens.append(token)
            self._job.tell(AnswerPart(self._text.add(token), scores, tokens=1))

    def end(self) -> None:
        """Nothing: the text may have a rest."""

    def finish(self) -> None:
        if rest := self._text.rest():
            self._job.tell(AnswerPart(rest))

    def stops(self, tokens: torch.Tensor, _scores: object, **_: object) -> torch.Tensor:
        is_over = self._text.has_stopped or self._job.is_over
        return torch.full((tokens.shape[0],), is_over, device=tokens.device)

    def see(self, _tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Keep the log-probabilities of the next token, before a temperature changes them."""
        self._scores = torch.log_softmax(scores[0].float(), dim=-1)
        return scores


def _score(scores: torch.Tensor, token: int, top: int) -> Score:
    values, tokens = scores.topk(min(top, len(scores)))
    return Score(token, float(scores[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))
