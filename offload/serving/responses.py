"""Answers in OpenAI's form: whole, and as the data of events.

Always true:
- the pieces of a streamed answer, put together, are the whole one

The format is that of https://platform.openai.com/docs/api-reference/chat and .../completions.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from offload.annotations import Json
from offload.generation.answering import AnswerPart, Score


@dataclass
class Choice:
    """One answer, as far as it has come."""

    prompt: str = ""  # before the text, if that is part of the answer
    text: str = ""
    scores: list[Score] = field(default_factory=list)
    tokens: int = 0  # that were generated
    reason: str | None = None  # why it ended; None before

    def add(self, piece: AnswerPart) -> None:
        self.text += piece.text
        self.scores += piece.scores
        self.tokens += piece.tokens


class Response:
    """A response to one request; `choices` are in the order of its prompts."""

    def __init__(
        self, model: str, tokenizer: Any, prompts: Sequence[str], prompt_tokens: int, *, is_chat: bool, scored: bool
    ) -> None:
        """`prompts` are the texts that the answers begin with; `scored` if there are log-probabilities."""
        self.choices = [Choice(prompt) for prompt in prompts]
        self.is_chat = is_chat
        self._tokenizer, self._scored = tokenizer, scored
        self._prompt_tokens = prompt_tokens
        kind, name = ("chatcmpl", "chat.completion") if is_chat else ("cmpl", "text_completion")
        self._head = {"id": f"{kind}-{uuid.uuid4().hex}", "object": name, "created": int(time.time()), "model": model}

    def whole(self) -> Json:
        choices = []
        for index, choice in enumerate(self.choices):
            content: Json = {"text": choice.prompt + choice.text}
            if self.is_chat:
                content = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
            choices.append(self._choice(index, content, choice.scores, choice.reason))
        return {**self._head, "choices": choices, "usage": self.usage()}

    def usage(self) -> Json:
        given, generated = self._prompt_tokens, sum(choice.tokens for choice in self.choices)
        return {"prompt_tokens": given, "completion_tokens": generated, "total_tokens": given + generated}

    def first(self) -> Iterator[Json]:
        """What a stream begins with."""
        for index, choice in enumerate(self.choices):
            if self.is_chat:
                yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}})
            elif choice.prompt:
                yield self._chunk(index, {"text": choice.prompt})

    def piece(self, index: int, piece: AnswerPart) -> Json:
        """A piece of an answer."""
        content = {"delta": {"content": piece.text}} if self.is_chat else {"text": piece.text}
        return self._chunk(index, content, piece.scores)

    def last(self, index: int) -> Json:
        """The end of an answer."""
        return self._chunk(index, {"delta": {}} if self.is_chat else {"text": ""}, reason=self.choices[index].reason)

    def counted(self) -> Json:
        """The last piece of a stream, if it is wanted."""
        return {**self._streamed(), "choices": [], "usage": self.usage()}

    def _streamed(self) -> Json:
        return {**self._head, "object": "chat.completion.chunk" if self.is_chat else "text_completion"}

    def _chunk(self, index: int, content: Json, scores: Sequence[Score] = (), reason: str | None = None) -> Json:
        return {**self._streamed(), "choices": [self._choice(index, content, scores, reason)]}

    def _choice(self, index: int, content: Json, scores: Sequence[Score], reason: str | None) -> Json:
        logprobs = None
        if self._scored:
            logprobs = self._in_chat(scores) if self.is_chat else self._in_text(scores)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def _in_chat(self, scores: Sequence[Score]) -> Json:
        def named(token: int, logprob: float | None) -> Json:
            return {"token": self._named(token), "logprob": logprob, "bytes": None}

        def whole(score: Score) -> Json:
            return {**named(score.token, score.logprob), "top_logprobs": [named(*one) for one in score.top]}

        return {"content": [whole(score) for score in scores], "refusal": None}

    def _in_text(self, scores: Sequence[Score]) -> Json:
        return {
            "tokens": [self._named(score.token) for score in scores],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [self._top(score) for score in scores],
        }

    def _top(self, score: Score) -> Json:
        """None where there is none, as for the first token of a prompt."""
        if score.logprob is None:
            return None
        named: dict[str, float] = {}
        for token, logprob in score.top:
            named.setdefault(self._named(token), logprob)  # the most probable of those with one text
        return named

    def _named(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))
