"""What a request asks for: the fields of OpenAI's API that have a meaning here.

Always true:
- every field is in one of three tables: it is followed, or changes no answer, or is refused; others are refused
- a refusal has the words that clients know: a status, a type, a code, and the field

The format is that of https://platform.openai.com/docs/api-reference/chat and .../completions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from offload.annotations import Json
from offload.errors import OffloadError

_MOST_TOP = 20  # alternatives per token
_MOST_STOPS, _LONGEST_STOP = 16, 256  # strings, and characters of one
_MOST_TOKENS = 2**31 - 1  # of an answer
_LEAST_TEMPERATURE = 0.001  # smaller ones divide by nothing
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
}
OPTIONS = {*_RANGES, "top_k", "seed", "stop"}
"""Fields that say how an answer is generated."""
_STREAMS = {"stream", "stream_options", "stream_options.include_usage"}
_BOTH = {*OPTIONS, *_STREAMS, "model", "max_tokens", "max_completion_tokens", "logprobs"}
FOLLOWED = {"chat": {*_BOTH, "messages", "top_logprobs", "chat_template_kwargs"}, "text": {*_BOTH, "prompt", "echo"}}
"""The fields that are followed, of /v1/chat/completions and of /v1/completions."""
WITHOUT_MEANING = {
    *("user", "safety_identifier", "metadata", "store", "service_tier", "prediction", "parallel_tool_calls"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "stream_options.include_obfuscation"),
    *("cache_prompt", "cache_salt", "priority", "request_id"),  # of other servers
}
"""Fields that change no answer: they are accepted, and nothing more."""
REFUSED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("audio", "moderation", "reasoning_effort", "web_search_options"), ()),
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs"), (0,)),
    **dict.fromkeys(("n", "best_of"), (1,)),
    "echo": (False,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "suffix": ("",),
}
"""Fields that are refused, and the values with which they ask for nothing. What is in no table is refused, too."""


INVALID = "invalid_request_error"


class Refused(OffloadError, ValueError):
    """A request that can't be answered, and why; `kind` is OpenAI's `type`, `param` the field."""

    def __init__(
        self, message: str, status: int = 400, kind: str = INVALID, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.code, self.param = status, kind, code, param

    def body(self) -> Json:
        return error_body(str(self), self.kind, self.code, self.param)


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> Json:
    """An error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class Asked:
    """What a request asks for."""

    messages: list[Json] | None = None  # of a chat; None if there are prompts
    prompts: Sequence[str | list[int]] = ()  # each a text, or its tokens
    max_tokens: int | None = None  # of an answer; None for the server's default
    options: Json = field(default_factory=dict)  # those of `OPTIONS` that are given
    template: Json = field(default_factory=dict)  # variables of the chat template
    top: int | None = None  # alternatives per token; None for no log-probabilities
    echo: bool = False  # whether the prompt is part of the answer
    streams: bool = False  # whether the answer comes in pieces
    with_usage: bool = False  # whether a last piece counts the tokens


def chat_body(body: Json, models: Sequence[str] | None = None) -> Asked:
    """What the body of /v1/chat/completions asks of one of these models, or of any; raises `Refused`."""
    _refuse_others(body, models, "chat")
    asked = _asked_in(body, least=1)
    top = _number(body, "top_logprobs", 0, _MOST_TOP) or 0
    variables = _mapping(body, "chat_template_kwargs")
    return replace(asked, messages=_messages(body), template=variables, top=top if _flag(body, "logprobs") else None)


def text_body(body: Json, models: Sequence[str] | None = None) -> Asked:
    """What the body of /v1/completions asks of one of these models, or of any; raises `Refused`."""
    _refuse_others(body, models, "text")
    asked = _asked_in(body, least=0)
    top = _number(body, "logprobs", 0, _MOST_TOP)
    return replace(asked, prompts=_prompts(body.get("prompt")), top=top, echo=_flag(body, "echo"))


def _asked_in(body: Json, least: int) -> Asked:
    """What the fields of both paths ask for: answers of `least` tokens or more."""
    limit = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    return Asked(
        max_tokens=_number(body, limit, least, _MOST_TOKENS),
        options=_options(body),
        streams=_flag(body, "stream"),
        with_usage=_flag(_mapping(body, "stream_options"), "include_usage"),
    )


def object_in(data: bytes) -> Json:
    """What a request says; raises `Refused` if it is no JSON object."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the request is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused("the request is not a JSON object")
    return body


def _refuse_others(body: Json, models: Sequence[str] | None, path: str) -> None:
    """Refuse other models than these, and fields that are not followed."""
    name = body.get("model")
    if models is not None and name is not None and name not in models:
        known = f"this server has {models[0]!r}"
        raise Refused(f"there is no model {str(name)[:200]!r}: {known}", 404, code="model_not_found", param="model")
    inner = {f"stream_options.{name}": value for name, value in _mapping(body, "stream_options").items()}
    for name, value in {**body, **inner}.items():
        if value is not None and name not in FOLLOWED[path] | WITHOUT_MEANING and value not in REFUSED.get(name, ()):
            raise Refused(f"{name[:100]} is not supported", param=name[:100])


def _prompts(given: Json) -> list[str | list[int]]:
    many = given if isinstance(given, list) and given and not _are_tokens(given) else [given]
    for prompt in many:
        if not (isinstance(prompt, str) and prompt) and not _are_tokens(prompt):
            raise Refused("prompt is not text, nor a list of tokens, nor a list of these", param="prompt")
    return many


def _are_tokens(given: Json) -> bool:
    return isinstance(given, list) and bool(given) and all(type(token) is int for token in given)


def _flag(body: Json, name: str) -> bool:
    flag = body.get(name)
    if flag is not None and type(flag) is not bool:
        raise Refused(f"{name} is {flag!r}, not true or false"[:200], param=name)
    return bool(flag)


def _mapping(body: Json, name: str) -> Json:
    mapping = body.get(name)
    if mapping is not None and not isinstance(mapping, dict):
        raise Refused(f"{name} is not a JSON object", param=name)
    return mapping or {}


def _number(body: Json, name: str, least: int, most: int) -> int | None:
    number = body.get(name)
    if number is not None and (type(number) is not int or not least <= number <= most):
        raise Refused(f"{name} is {str(number)[:40]}, not a number from {least} to {most}", param=name)
    return number


def _messages(body: Json) -> list[Json]:
    """The messages of a request, whose content is text."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages are not a list with messages", param="messages")
    return [_message(one) for one in messages]


def _message(message: Json) -> Json:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused("a message has no role", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_of(part) for part in content)
    elif not isinstance(content, str | None):
        raise Refused("the content of a message is not text", param="messages")
    return {**message, "content": content or ""}


def _text_of(part: Json) -> str:
    """The text of a part of a message."""
    kind = str(part.get("type")) if isinstance(part, dict) else "unknown"
    text = part.get("text") if kind == "text" else None
    if not isinstance(text, str):
        message = f"a part of a message is of the type {kind[:40]!r}, without text: text alone is taken"
        raise Refused(message, param="messages")
    return text


def _options(body: Json) -> Json:
    options = {name: body[name] for name in OPTIONS if body.get(name) is not None}
    for name, (least, most) in _RANGES.items():
        value = options.get(name, least)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise Refused(f"{name} is {str(value)[:40]}, not a number from {least} to {most}", param=name)
        options |= {name: float(value)} if name in options else {}
    _number(options, "top_k", 0, _MOST_TOKENS)
    _number(options, "seed", -(2**63), 2**64 - 1)  # the range that torch accepts
    if 0 < options.get("temperature", 0) < _LEAST_TEMPERATURE:
        raise Refused("temperature is too small: 0 takes the most likely token", param="temperature")
    return {**options, "stop": _stops(options["stop"])} if "stop" in options else options


def _stops(given: Json) -> list[str]:
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise Refused(f"stop is {str(given)[:40]}, not a string or a list of strings", param="stop")
    if len(stops) > _MOST_STOPS or any(len(stop) > _LONGEST_STOP for stop in stops):
        raise Refused(f"stop has over {_MOST_STOPS} strings, or one over {_LONGEST_STOP} characters", param="stop")
    return [one for one in stops if one]
