"""What requests say, in tokens: messages in the form that a model was trained on.

Always true:
- a chat template, which is a program from the checkpoint, runs within limits
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offload.annotations import Json
from offload.errors import CheckpointError
from offload.serving.bodies import Asked, Refused
from offload.serving.limited import within_limits
from offload.storage.reasons import first_line

ONLY_TOKENS = {"return_token_type_ids": False}
"""For a tokenizer: language models take no segment ids, which some tokenizers return by default."""
ONE_ANSWER = {"return_dict_in_generate": False, "num_beams": 1, "num_return_sequences": 1, "stop_strings": None}
"""For `generate`, whatever the model's generation settings ask for: tokens are told one by one as they come.

transformers' own criterion for stop strings (5.23) does not work with every tokenizer: see `stops_of`.
"""

_NO_TEMPLATE = "the model has no chat template: give a prompt (of /v1/completions) instead of messages"


def in_chat(tokenizer: Any, messages: list[Json]) -> Any:
    """Messages in tokens, in the form of the model's chat template, up to where the model answers.

    Raises:
        ArgumentError: the template refuses them, or takes too long.
    """
    text = within_limits(
        lambda: tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False), "the chat template"
    )
    return tokenizer(text, add_special_tokens=False, return_tensors="pt", **ONLY_TOKENS)


def ends_of(model: Any, folder: Path) -> list[int]:
    """The tokens after which nothing follows.

    Raises:
        CheckpointError: the model's generation settings say something else.
    """
    eos = model.generation_config.eos_token_id
    ends = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(end) is int for end in ends):
        raise CheckpointError(
            f"{folder} says in its generation_config.json, or in its config.json, that the eos_token_id is {eos!r}: "
            "it should be the number of a token, or a list of them"
        )
    return ends


def stops_of(model: Any) -> list[str]:
    """The stop strings of the model's generation settings."""
    stops = getattr(model.generation_config, "stop_strings", None) or []
    return [stops] if isinstance(stops, str) else [str(stop) for stop in stops if stop]


class Prompts:
    """What requests say, in tokens."""

    def __init__(self, tokenizer: Any, longest: int | None, most_new: int) -> None:
        """`longest` is the model's context, in tokens; `most_new` of an answer whose request does not say."""
        self.tokenizer = tokenizer
        self._longest, self._most_new = longest, most_new
        self._vocabulary = len(tokenizer)
        tokenizer("", **ONLY_TOKENS)  # the first call sets truncation and padding: later ones, in threads, only read

    def of(self, asked: Asked) -> list[tuple[list[int], int]]:
        """The tokens of each prompt, and how many may follow.

        Raises:
            Refused: the template or the tokenizer refuses it, or it is too long.
        """
        if asked.messages is not None:
            return [self._with_limit(self._in_chat(asked.messages), asked)]
        return [self._with_limit(self._tokens(prompt), asked) for prompt in asked.prompts]

    def _in_chat(self, messages: list[Json]) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            raise Refused(_NO_TEMPLATE, param="messages")
        try:
            return [int(token) for token in in_chat(self.tokenizer, messages)["input_ids"][0]]
        except OSError:  # the system's; a template has nothing to do with it
            raise
        except Exception as error:  # chat templates and tokenizers can raise anything
            raise Refused(f"the model's chat template refuses it: {first_line(error)}", param="messages") from error

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            if not all(0 <= token < self._vocabulary for token in prompt):
                raise Refused(f"a token is not one of the model's {self._vocabulary}", param="prompt")
            return prompt
        try:
            return [int(token) for token in self.tokenizer(prompt, **ONLY_TOKENS)["input_ids"]]
        except OSError:
            raise
        except Exception as error:  # half of a character, for example
            raise Refused(f"the model's tokenizer refuses it: {first_line(error)}", param="prompt") from error

    def _with_limit(self, tokens: list[int], asked: Asked) -> tuple[list[int], int]:
        if not tokens:
            raise Refused("the prompt has no tokens for this model")
        most = self._most_new if asked.max_tokens is None else asked.max_tokens
        if self._longest is None:
            return tokens, most
        if asked.max_tokens is None:
            most = min(most, max(self._longest - len(tokens), 1))
        if len(tokens) + most > self._longest:
            message = f"the model's context has {self._longest} tokens: {len(tokens)} of the prompt and {most} more"
            raise Refused(f"{message} are too many", code="context_length_exceeded")
        return tokens, most
