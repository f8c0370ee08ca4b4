"""Tokens as text, as they come.

Always true:
- the pieces, joined, are the text of all tokens up to the first stop string
- a piece never ends inside a character, nor inside what may become a stop string; where the tokenizer takes out spaces
  before punctuation, nor inside what later tokens may still change
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

_UNFINISHED = "\ufffd"  # what a tokenizer makes of a part of a character
_CHANGING = 8  # characters at the end of a text whose spaces depend on what follows, at most


class Text:
    """The text of an answer, token by token.

    Attributes:
        tokens: so far.
        has_stopped: whether there was a stop string; nothing follows.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), ends: Collection[int] = ()) -> None:
        """`ends` are tokens after which nothing follows; they have no text."""
        self.tokens: list[int] = []
        self.has_stopped = False
        self._tokenizer, self._stops, self._ends = tokenizer, stops, ends
        self._start = self._done = 0  # tokens before which text does not matter any more, and that were given
        self._held = ""  # may become a stop string
        self._cleans, self._cleaned = _cleans_up(tokenizer), 0  # the latter: characters that were given

    def add(self, token: int) -> str:
        """Add a token; returns the text that is certain now."""
        self.tokens.append(token)
        if token in self._ends:
            return ""
        if self._cleans:
            return self._up_to_stop(self._given(_CHANGING))
        before = self._decoded(self._start, self._done)
        text = self._decoded(self._start, len(self.tokens))
        if len(text) <= len(before) or text.endswith(_UNFINISHED):
            return ""
        self._start, self._done = self._done, len(self.tokens)
        return self._up_to_stop(text[len(before) :])

    def rest(self) -> str:
        """What was held back, once there are no more tokens."""
        if self.has_stopped:
            return ""
        if self._cleans:
            last = self._given(0)
        else:
            last = self._decoded(self._start, len(self.tokens))[len(self._decoded(self._start, self._done)) :]
        self._start = self._done = len(self.tokens)
        text = self._up_to_stop(last)
        held, self._held = self._held, ""
        return text + held

    def _given(self, held: int) -> str:
        """What is new of the text of all tokens, but for so many characters at its end."""
        text = self._decoded(0, len(self.tokens))
        start, self._cleaned = self._cleaned, max(len(text) - held, self._cleaned)
        return text[start : self._cleaned]

    def _decoded(self, start: int, stop: int) -> str:
        tokens = [token for token in self.tokens[start:stop] if token not in self._ends]
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)) if tokens else ""

    def _up_to_stop(self, text: str) -> str:
        if self.has_stopped:
            return ""
        text = self._held + text
        places = [text.find(stop) for stop in self._stops if stop in text]
        if places:
            self.has_stopped, self._held = True, ""
            return text[: min(places)]
        overlap = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - overlap :]
        return text[: len(text) - overlap]


def _cleans_up(tokenizer: Any) -> bool:
    """Whether the tokenizer takes spaces out of the text of tokens. transformers (5.23) does not for one of BPE."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    backend = getattr(tokenizer, "backend_tokenizer", None)
    is_forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    return bool(is_forced) or type(getattr(backend, "model", None)).__name__ != "BPE"


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text are the beginning of a stop string."""
    return next((count for count in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:count])), 0)
