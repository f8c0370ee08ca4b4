"""What a request asks for: the fields of OpenAI's API that have a meaning here.

Always true:
- a field that changes an answer and has no meaning here is refused, and never ignored
- a refusal has the words that clients know: a status, a type, a code, and the field

The format is that of https://platform.openai.com/docs/api-reference/chat and .../completions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from offload.annotations import Json
from offload.errors import OffloadError

OPTIONS = {"temperature", "top_p", "seed", "stop"}
_MOST_CHOICES = 16  # answers for one prompt
_MOST_TOP = 20  # alternatives per token
_MOST_STOPS, _LONGEST_STOP = 16, 256  # strings, and characters of one
_LEAST_TEMPERATURE = 0.001  # smaller ones divide by nothing
_UNSUPPORTED: dict[str, tuple[object, ...]] = {  # fields, and the values that ask for nothing
    "tools": ([],),
    "functions": ([],),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),  # this one and the next four: of other servers
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "suffix": ("",),
}


class Refused(OffloadError, ValueError):
    """A request that can't be answered, and why.

    Attributes:
        status: of HTTP.
        kind: OpenAI's `type`.
        code: OpenAI's, or None.
        param: the field, or None.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.code, self.param = status, kind, code, param

    def body(self) -> Json:
        """The error in OpenAI's form."""
        return error_body(str(self), self.kind, self.code, self.param)


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> Json:
    """An error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class Asked:
    """What a request asks for.

    Attributes:
        messages: of a chat; None if there are prompts.
        prompts: each a text, or its tokens.
        max_tokens: most tokens of an answer; None for the server's default.
        choices: answers per prompt.
        options: temperature, top_p, seed, stop, as far as given.
        top: alternatives per token whose log-probabilities are wanted; None for no log-probabilities.
        echo: whether the prompt is part of the answer.
        streams: whether the answer comes in pieces.
        with_usage: whether a last piece counts the tokens.
    """

    messages: list[Json] | None
    prompts: Sequence[str | list[int]] = ()
    max_tokens: int | None = None
    choices: int = 1
    options: Json = field(default_factory=dict)
    top: int | None = None
    echo: bool = False
    streams: bool = False
    with_usage: bool = False

    def options_of(self, choice: int) -> Json:
        """The options of one of a prompt's answers, which have seeds of their own."""
        seed = self.options.get("seed")
        return self.options if seed is None else {**self.options, "seed": (seed + choice) % 2**63}


def chat_body(data: bytes, models: Sequence[str]) -> Asked:
    """What the body of /v1/chat/completions asks for.

    Raises:
        Refused: it is invalid, or asks for something unsupported.
    """
    body = _object(data, models)
    messages = messages_in(body)
    if messages is None:
        raise Refused("messages are missing", param="messages")
    wanted = _flag(body, "logprobs")
    top = _number(body, "top_logprobs", 0, _MOST_TOP)
    return Asked(messages=[_plain(one) for one in messages], top=(top or 0) if wanted else None, **_common(body))


def text_body(data: bytes, models: Sequence[str]) -> Asked:
    """What the body of /v1/completions asks for.

    Raises:
        Refused: it is invalid, or asks for something unsupported.
    """
    body = _object(data, models)
    best, choices = body.get("best_of"), body.get("n")
    if best is not None and best != (choices or 1):
        raise Refused("best_of is not supported: ask for n answers", param="best_of")
    common = {**_common(body), "echo": _flag(body, "echo")}
    if body.get("max_tokens") == 0 and common["echo"]:  # to score a prompt
        common["max_tokens"] = 0
    return Asked(
        messages=None, prompts=_prompts(body.get("prompt")), top=_number(body, "logprobs", 0, _MOST_TOP), **common
    )


def _object(data: bytes, models: Sequence[str]) -> Json:
    """The body, which asks for one of these models, or names none."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused("the body is not a JSON object")
    name = body.get("model")
    if name is not None and name not in models:
        known = f"this server has {models[0]!r}"
        raise Refused(f"there is no model {str(name)[:200]!r}: {known}", 404, code="model_not_found", param="model")
    for key, nothing in _UNSUPPORTED.items():
        if body.get(key) is not None and body[key] not in nothing:
            raise Refused(f"{key} is not supported", param=key)
    return body


def _common(body: Json) -> dict[str, Json]:
    options = options_in(body)
    stops = options.get("stop", [])
    if len(stops) > _MOST_STOPS or any(len(stop) > _LONGEST_STOP for stop in stops):
        raise Refused(f"stop has more than {_MOST_STOPS} strings, or one of over {_LONGEST_STOP} characters")
    if 0 < options.get("temperature", 0) < _LEAST_TEMPERATURE:
        raise Refused("temperature is too small: 0 takes the most likely token", param="temperature")
    streams = body.get("stream_options")
    if streams is not None and not isinstance(streams, dict):
        raise Refused("stream_options is not a JSON object", param="stream_options")
    return {
        "max_tokens": None if body.get("max_tokens") == 0 and _flag(body, "echo") else max_tokens_in(body),
        "choices": _number(body, "n", 1, _MOST_CHOICES) or 1,
        "options": options,
        "streams": _flag(body, "stream"),
        "with_usage": bool(streams) and _flag(streams, "include_usage"),
    }


def _plain(message: Json) -> Json:
    """A message whose content is text alone."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part["text"] for part in content if _is_text(part)]
        if len(parts) < len(content):
            raise Refused("a part of a message is not text: images and sound are not supported", param="messages")
        content = "".join(parts)
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise Refused("the content of a message is not text", param="messages")
    return {**message, "content": content}


def _is_text(part: Json) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _prompts(given: Json) -> list[str | list[int]]:
    """The prompts of a request: a text, its tokens, or a list of either."""
    many = given if isinstance(given, list) and given and not _are_tokens(given) else [given]
    for prompt in many:
        if not (isinstance(prompt, str) and prompt) and not _are_tokens(prompt):
            raise Refused("prompt is not text, nor a list of tokens, nor a list of these", param="prompt")
    return many


def _are_tokens(given: Json) -> bool:
    return isinstance(given, list) and bool(given) and all(type(token) is int for token in given)


def _flag(body: Json, name: str) -> bool:
    found = body.get(name)
    if found is not None and type(found) is not bool:
        raise Refused(f"{name} is {found!r}, not true or false"[:200], param=name)
    return bool(found)


def _number(body: Json, name: str, least: int, most: int) -> int | None:
    found = body.get(name)
    if found is not None and (type(found) is not int or not least <= found <= most):
        raise Refused(f"{name} is {str(found)[:40]}, not a number from {least} to {most}", param=name)
    return found


def messages_in(body: Json) -> list[Json] | None:
    """The messages of a request; None if it has none.

    Raises:
        Refused: they are no messages.
    """
    if "messages" not in body:
        return None
    found = body["messages"]
    if not isinstance(found, list) or not found:
        raise Refused("messages is not a list of messages")
    for message in found:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refused("a message has no role")
    return found


def max_tokens_in(body: Json) -> int | None:
    """The most tokens of an answer; None if a request does not say.

    Raises:
        Refused: it is not a positive integer.
    """
    found = body.get("max_tokens") if body.get("max_completion_tokens") is None else body["max_completion_tokens"]
    if found is not None and (type(found) is not int or found < 1):
        raise Refused(f"max_tokens is {found!r}, not a positive integer")
    return found


def options_in(body: Json) -> Json:
    """Temperature, top_p, seed and stop strings, as far as a request has them.

    Raises:
        Refused: one is invalid.
    """
    options = {name: body[name] for name in OPTIONS if body.get(name) is not None}
    for name, least, most in (("temperature", 0, 100), ("top_p", 0, 1)):
        value = options.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise Refused(f"{name} is {value!r}, not a number from {least} to {most}")
    seed = options.get("seed", 0)
    if type(seed) is not int or not -(2**63) <= seed < 2**64:  # the range that torch accepts
        raise Refused(f"seed is {seed!r}, not a 64-bit integer")
    stop = options.get("stop", [])
    options |= {"stop": [stop] if isinstance(stop, str) else stop} if stop else {}
    if not isinstance(stop, str) and not (isinstance(stop, list) and all(isinstance(one, str) for one in stop)):
        raise Refused(f"stop is {stop!r}, not a string or a list of strings")
    if "stop" in options:
        options["stop"] = [one for one in options["stop"] if one]
    return options
