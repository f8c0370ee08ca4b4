"""What a request asks for: the fields of OpenAI's API that have a meaning here.

Always true:
- every field is in one of three tables: it is followed, or changes no answer, or is refused; others are refused
- a refusal has the words that clients know: a status, a type, a code, and the field

The format is that of https://platform.openai.com/docs/api-reference/chat and .../completions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from offload.annotations import Json
from offload.errors import OffloadError

_MOST_CHOICES = 16  # answers for one prompt
_MOST_TOP = 20  # alternatives per token
_MOST_STOPS, _LONGEST_STOP = 16, 256  # strings, and characters of one
_MOST_TOKENS = 2**31 - 1  # of an answer
_LEAST_TEMPERATURE = 0.001  # smaller ones divide by nothing
_TEXTS = {"text", "input_text", "output_text", "refusal"}  # types of parts of a message
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
}
OPTIONS = {*_RANGES, "top_k", "seed", "stop", "ignore_eos", "skip_special_tokens"}
"""Fields that say how an answer is generated."""
OF_TEMPLATE = {"chat_template_kwargs", "continue_final_message", "add_generation_prompt"}
"""Fields that say how messages become a prompt."""
_BOTH = {*OPTIONS, "model", "max_tokens", "max_completion_tokens", "n", "logprobs"}
_BOTH |= {"stream", "stream_options", "stream_options.include_usage"}
FOLLOWED = {
    "chat": {*_BOTH, *OF_TEMPLATE, "messages", "top_logprobs"},
    "text": {*_BOTH, "prompt", "echo", "best_of"},
}
"""The fields that are followed, of /v1/chat/completions and of /v1/completions."""
WITHOUT_MEANING = {
    *("user", "safety_identifier", "metadata", "store", "service_tier", "prediction", "parallel_tool_calls"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "stream_options.include_obfuscation"),
    *("cache_prompt", "cache_salt", "priority", "request_id"),  # of other servers
}
"""Fields that change no answer: they are accepted, and nothing more."""
REFUSED: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "moderation": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "suffix": ("",),
    "best_of": (1,),  # this one and the next two: of the other path
    "echo": (False,),
    "top_logprobs": (0,),
    "min_tokens": (0,),  # this one and the next ones: of other servers
    "stop_token_ids": ([],),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "num_beams": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "add_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "stream_options.continuous_usage_stats": (False,),
}
"""Fields that are refused, and the values with which they ask for nothing. What is in no table is refused, too."""


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
        options: those of `OPTIONS` that are given.
        template: options of the chat template.
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
    template: Json = field(default_factory=dict)
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
    body = _object(data, models, "chat")
    messages = messages_in(body)
    if messages is None:
        raise Refused("messages are missing", param="messages")
    wanted = _flag(body, "logprobs")
    top = _number(body, "top_logprobs", 0, _MOST_TOP)
    return Asked(messages, template=template_in(body), top=(top or 0) if wanted else None, **_common(body, 1))


def text_body(data: bytes, models: Sequence[str]) -> Asked:
    """What the body of /v1/completions asks for.

    Raises:
        Refused: it is invalid, or asks for something unsupported.
    """
    body = _object(data, models, "text")
    best, choices = body.get("best_of"), body.get("n")
    if best is not None and best != (choices or 1):
        raise Refused("best_of is not supported: ask for n answers", param="best_of")
    prompts, top = _prompts(body.get("prompt")), _number(body, "logprobs", 0, _MOST_TOP)
    return Asked(None, prompts, top=top, echo=_flag(body, "echo"), **_common(body, 0))


def _object(data: bytes, models: Sequence[str], path: str) -> Json:
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
    _refuse_fields(body, path)
    return body


def _refuse_fields(body: Json, path: str) -> None:
    """Refuse what changes an answer and is not followed."""
    streams = body.get("stream_options")
    if streams is not None and not isinstance(streams, dict):
        raise Refused("stream_options is not a JSON object", param="stream_options")
    for name, value in {**body, **{f"stream_options.{name}": value for name, value in (streams or {}).items()}}.items():
        if value is None or name in FOLLOWED[path] | WITHOUT_MEANING or value in REFUSED.get(name, ()):
            continue
        is_known = name in REFUSED or any(name in fields for fields in FOLLOWED.values())
        why = "is not supported here" if is_known else "is a field that this server does not know"
        raise Refused(f"{name[:100]} {why}", param=name[:100])


def _common(body: Json, least: int) -> dict[str, Json]:
    """Fields of both paths; `least` tokens of an answer."""
    options = options_in(body)
    stops = options.get("stop", [])
    if len(stops) > _MOST_STOPS or any(len(stop) > _LONGEST_STOP for stop in stops):
        raise Refused(f"stop has more than {_MOST_STOPS} strings, or one of over {_LONGEST_STOP} characters")
    if 0 < options.get("temperature", 0) < _LEAST_TEMPERATURE:
        raise Refused("temperature is too small: 0 takes the most likely token", param="temperature")
    return {
        "max_tokens": max_tokens_in(body, least),
        "choices": _number(body, "n", 1, _MOST_CHOICES) or 1,
        "options": options,
        "streams": _flag(body, "stream"),
        "with_usage": _flag(body.get("stream_options") or {}, "include_usage"),
    }


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
    """The messages of a request, with a content that is text, or a list of parts that are; None if it has none.

    Raises:
        Refused: they are no messages, or are no text.
    """
    if "messages" not in body:
        return None
    found = body["messages"]
    if not isinstance(found, list) or not found:
        raise Refused("messages is not a list of messages", param="messages")
    return [_message(one) for one in found]


def _message(message: Json) -> Json:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused("a message has no role", param="messages")
    content = message.get("content")
    if content is None:
        content = message.get("refusal") or ""
    if isinstance(content, list):
        content = [_part(part) for part in content]
    elif not isinstance(content, str):
        raise Refused("the content of a message is not text", param="messages")
    if message.get("audio") is not None:
        raise Refused("a message has audio, and this server takes text alone", param="messages")
    return {**message, "content": content}


def _part(part: Json) -> Json:
    """A part of a message, in the form that chat templates read."""
    kind = str(part.get("type")) if isinstance(part, dict) else "unknown"
    text = part.get("refusal" if kind == "refusal" else "text") if kind in _TEXTS else None
    if not isinstance(text, str):
        message = f"a part of a message is of the type {kind[:40]!r}, without text: this server takes text alone"
        raise Refused(message, param="messages")
    return {"type": "text", "text": text}


def template_in(body: Json) -> Json:
    """Options of the chat template: how messages become a prompt.

    Raises:
        Refused: one is invalid.
    """
    given = body.get("chat_template_kwargs")
    if given is not None and not isinstance(given, dict):
        raise Refused("chat_template_kwargs is not a JSON object", param="chat_template_kwargs")
    continues, begins = _flag(body, "continue_final_message"), _flag(body, "add_generation_prompt")
    if continues and begins:
        raise Refused("add_generation_prompt begins an answer, and continue_final_message goes on with the last one")
    if body.get("add_generation_prompt") is None:
        begins = not continues
    return {"continue_final_message": continues, "add_generation_prompt": begins, **(given or {})}


def max_tokens_in(body: Json, least: int = 1) -> int | None:
    """The most tokens of an answer; None if a request does not say.

    Raises:
        Refused: it is not an integer from `least`.
    """
    name = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    return _number(body, name, least, _MOST_TOKENS)


def options_in(body: Json) -> Json:
    """Those of `OPTIONS` that a request has.

    Raises:
        Refused: one is invalid.
    """
    options = {name: body[name] for name in OPTIONS if body.get(name) is not None}
    for name, (least, most) in _RANGES.items():
        value = options.get(name, least)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise Refused(f"{name} is {str(value)[:40]}, not a number from {least} to {most}", param=name)
    _number(options, "top_k", -1, _MOST_TOKENS)
    _number(options, "seed", -(2**63), 2**64 - 1)  # the range that torch accepts
    for name in ("ignore_eos", "skip_special_tokens"):
        _flag(options, name)
    stop = options.get("stop", [])
    options |= {"stop": [stop] if isinstance(stop, str) else stop} if stop else {}
    if not isinstance(stop, str) and not (isinstance(stop, list) and all(isinstance(one, str) for one in stop)):
        raise Refused(f"stop is {str(stop)[:40]}, not a string or a list of strings", param="stop")
    if "stop" in options:
        options["stop"] = [one for one in options["stop"] if one]
    return options
