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
from offload.serving.chat import ONE_ANSWER, stops_of
from offload.serving.text import Text
from offload.transformers_api import cache_name, cache_of

_SCORED_BYTES = 256 << 20  # of logits, when a prompt is scored


@dataclass(frozen=True)
class Score:
    """A token with its log-probability, and the most probable ones there.

    Attributes:
        token: which.
        logprob: natural logarithm; None for the first token of a prompt.
        top: tokens and their log-probabilities, the most probable first.
    """

    token: int
    logprob: float | None
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True)
class Piece:
    """What was added to an answer."""

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
    """One answer that was asked for.

    Attributes:
        prompt: its tokens.
        most: how many tokens to generate; 0 to score the prompt alone.
        tell: called with each `Piece`, and then with an `End`, in some thread.
        options: temperature, top_p, seed, stop, as far as given.
        top: alternatives per token; None for no log-probabilities.
        echo: whether the prompt is scored, too.
        is_cancelled: nobody waits for it any more.
        is_cut: it ends with the tokens that it has.
    """

    prompt: list[int]
    most: int
    tell: Callable[[Piece | End], None]
    options: Json = field(default_factory=dict)
    top: int | None = None
    echo: bool = False
    is_cancelled: bool = False
    is_cut: bool = False

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be generated."""
        return self.is_cancelled or self.is_cut


class Answering:
    """Answers jobs with a model; called in lockstep with others."""

    def __init__(self, model: Any, tokenizer: Any, ends: Collection[int], more: Kwargs, drafts: Kwargs) -> None:
        """`more` are options for each call of `generate`, `drafts` those with which it drafts.

        How long a draft is depends on what passes cost, and so does what is drawn with a seed. With drafts, a token's
        log-probabilities are not told where it is: both are for answers without.
        """
        self._model, self._tokenizer, self._ends = model, tokenizer, ends
        self._more, self._drafts = more, drafts

    def __call__(self, job: Job) -> str:
        """Answer a job; returns why it ended: "stop" or "length"."""
        torch.manual_seed(job.options.get("seed", secrets.randbits(63)))  # for this job only, as batches have their own
        tokens = torch.tensor([job.prompt], device=self._model.device)  # (1, length)
        if job.echo and job.top is not None:
            last = self._score_prompt(job, tokens)
            if not job.most or job.is_over:
                return "length"
            if job.most == 1 and job.options.get("temperature") == 0:
                return self._tell_one(job, last)
        text = Text(self._tokenizer, self._stops(job), self._ends)
        streamer = Streamer(job, text)
        self._model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), **self._options(job, streamer))
        streamer.finish()
        last_one = text.tokens[-1] if text.tokens else None
        return "stop" if text.has_stopped or last_one in self._ends else "length"

    def _stops(self, job: Job) -> list[str]:
        return [*job.options.get("stop", ()), *stops_of(self._model)]

    def _options(self, job: Job, streamer: Streamer) -> Kwargs:
        """Options for `generate`: as the model's settings say, or greedy where a temperature of 0 is asked for."""
        asked = job.options
        chosen: Kwargs = {
            **self._more,
            **ONE_ANSWER,
            "max_new_tokens": job.most,
            "streamer": streamer,
            "stopping_criteria": [streamer.stops],
        }
        if "temperature" in asked:
            chosen["do_sample"] = asked["temperature"] > 0
        elif "top_p" in asked:
            chosen["do_sample"] = True
        if chosen.get("do_sample"):
            chosen |= {name: float(asked[name]) for name in ("temperature", "top_p") if name in asked}
        if job.top is not None:
            chosen["logits_processor"] = [streamer.see]
        elif "seed" not in asked:
            chosen |= self._drafts
        if self._model.generation_config.pad_token_id is None:
            chosen["pad_token_id"] = next(iter(self._ends), 0)
        return chosen

    def _score_prompt(self, job: Job, tokens: torch.Tensor) -> torch.Tensor:
        """Tell the log-probabilities of the prompt's tokens; returns those of the token after it: (vocabulary,)."""
        assert job.top is not None
        job.tell(Piece("", [Score(job.prompt[0], None)]))
        width = self._model.config.get_text_config().vocab_size
        step = max(_SCORED_BYTES // (4 * width), 16)
        length = tokens.shape[1]
        more: Kwargs = {"use_cache": length > step}
        scores = torch.empty(0)
        for start in range(0, length, step):
            out = self._model(input_ids=tokens[:, start : start + step], **more)
            if length > step:
                more[str(cache_name(self._model.forward))] = cache_of(out)
            scores = torch.log_softmax(out.logits[0].float(), dim=-1)  # (tokens, vocabulary)
            following = job.prompt[start + 1 : start + 1 + len(scores)]
            job.tell(Piece("", [_score(scores[at], token, job.top) for at, token in enumerate(following)]))
            if job.is_over:
                break
        return scores[-1].clone()

    def _tell_one(self, job: Job, scores: torch.Tensor) -> str:
        """Tell the most probable token: what a greedy answer of one token is."""
        token = int(scores.argmax())
        text = Text(self._tokenizer, self._stops(job), self._ends)
        added = text.add(token) + text.rest()
        job.tell(Piece(added, [_score(scores, token, job.top or 0)], tokens=1))
        return "stop" if text.has_stopped or token in self._ends else "length"


class Streamer:
    """Tells what `generate` does: it is its streamer, its stopping criterion, and a logits processor.

    Attributes:
        passes: in which tokens were generated.
    """

    def __init__(self, job: Job, text: Text) -> None:
        self.passes = 0
        self._job, self._text = job, text
        self._is_prompt = True
        self._scores = torch.empty(0)

    def put(self, value: torch.Tensor) -> None:
        """New tokens; the first ones are the prompt."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self.passes += 1
        for token in value.flatten().tolist():
            if self._text.has_stopped or len(self._text.tokens) == self._job.most:
                return  # drafted tokens after a stop string
            text = self._text.add(token)
            scores = [] if self._job.top is None else [_score(self._scores, token, self._job.top)]
            self._job.tell(Piece(text, scores, tokens=1))

    def end(self) -> None:
        """Nothing: the text may have a rest."""

    def finish(self) -> None:
        """Tell the rest of the text."""
        rest = self._text.rest()
        if rest:
            self._job.tell(Piece(rest))

    def stops(self, tokens: torch.Tensor, _scores: object, **_: object) -> torch.Tensor:
        """Whether the answer ends here."""
        is_over = self._text.has_stopped or self._job.is_over
        return torch.full((tokens.shape[0],), is_over, device=tokens.device)

    def see(self, _tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Keep the log-probabilities of the next token, before a temperature changes them."""
        self._scores = torch.log_softmax(scores[0].float(), dim=-1)
        return scores


def _score(scores: torch.Tensor, token: int, top: int) -> Score:
    """From the log-probabilities of all tokens."""
    values, tokens = scores.topk(min(top, len(scores)))
    return Score(token, float(scores[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))


def bytes_per_token(model: Any) -> int:
    """What keys and values take per token, at most; 0 if the configuration does not say."""
    config = model.config.get_text_config()
    layers, heads, width = (
        getattr(config, name, 0) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    if not all(type(value) is int and value > 0 for value in (layers, heads, width)):
        return 0
    size = getattr(config, "head_dim", None) or width // heads
    heads_of_keys = getattr(config, "num_key_value_heads", None) or heads
    dtype = model.dtype if isinstance(model.dtype, torch.dtype) else torch.float32
    return int(2 * layers * heads_of_keys * size * dtype.itemsize)
