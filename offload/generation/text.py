"""Tokens as text, as they come.

Always true:
- the pieces, joined, are the text of all tokens up to the first stop string
- a piece never ends inside a character, nor inside what may become a stop string
- no space is taken out before punctuation, as some tokenizers do afterwards: what is given does not change any more
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

_UNFINISHED = "\ufffd"  # what a tokenizer makes of a part of a character


class Text:
    """The text of an answer, token by token."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), ends: Collection[int] = ()) -> None:
        """`ends` are tokens after which nothing follows. Neither they nor special tokens have a text."""
        self.tokens: list[int] = []
        self.has_stopped = False
        self._tokenizer, self._stops, self._ends = tokenizer, stops, ends
        self._start = self._done = 0  # tokens before which text does not matter any more, and that were given
        self._held: list[tuple[str, bool]] = []  # letters that may become a stop string; whether they are text

    def add(self, token: int) -> str:
        """Add a token; returns the text that is certain now."""
        self.tokens.append(token)
        if token in self._ends:
            return ""
        return self._up_to_stop(self._complete(), self._hidden(token))

    def rest(self) -> str:
        """What was held back, once there are no more tokens."""
        if self.has_stopped:
            return ""
        last = self._decoded(self._start, len(self.tokens))[len(self._decoded(self._start, self._done)) :]
        self._start = self._done = len(self.tokens)
        return self._up_to_stop(last) + _shown(self._held)

    def _complete(self) -> str:
        """What is new of the text, but for a part of a character at its end."""
        before = self._decoded(self._start, self._done)
        text = self._decoded(self._start, len(self.tokens))
        if len(text) <= len(before) or text.endswith(_UNFINISHED):
            return ""
        self._start, self._done = self._done, len(self.tokens)
        return text[len(before) :]

    def _decoded(self, start: int, stop: int) -> str:
        tokens = [token for token in self.tokens[start:stop] if token not in self._ends]
        how = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(tokens, **how)) if tokens else ""

    def _hidden(self, token: int) -> str:
        """What a special token is called: it may be, or end, a stop string."""
        if not self._stops or self._tokenizer.decode([token], skip_special_tokens=True):
            return ""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def _up_to_stop(self, text: str, hidden: str = "") -> str:
        if self.has_stopped:
            return ""
        held = [*self._held, *((letter, True) for letter in text), *((letter, False) for letter in hidden)]
        searched = "".join(letter for letter, _ in held)
        places = [searched.find(stop) for stop in self._stops if stop in searched]
        self.has_stopped = bool(places)
        end = len(held) - max((_overlap(searched, stop) for stop in self._stops), default=0)
        self._held = [] if places else held[end:]
        return _shown(held[: min(places, default=end)])


def _shown(letters: Sequence[tuple[str, bool]]) -> str:
    return "".join(letter for letter, is_text in letters if is_text)


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text are the beginning of a stop string."""
    return next((count for count in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:count])), 0)
