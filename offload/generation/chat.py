"""What requests say, in tokens: messages in the form that a model was trained on.

Always true:
- a chat template is a program from the checkpoint: it runs in a forked child, which the system ends at a limit, as
  nothing in Python stops `9**9**9`; text, or an error's, is all that comes back
- a template gets the content of messages in the form that it reads: as text, or as a list of one part
- a text that can't fit into the model's context is refused before it is made tokens, which takes long
"""

from __future__ import annotations

import inspect
import os
import re
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from offload.annotations import Json
from offload.errors import ArgumentError
from offload.generation.bodies import Asked, Refused
from offload.system.reasons import first_line, reading

ONLY_TOKENS = {"return_token_type_ids": False}
"""For a tokenizer: language models take no segment ids, which some tokenizers return by default."""
ONE_ANSWER = {"return_dict_in_generate": False, "num_beams": 1, "num_return_sequences": 1, "stop_strings": None}
"""For `generate`, whatever the model's generation settings ask for: tokens are told one by one as they come.

transformers' own criterion for stop strings (5.23) does not work with every tokenizer: see `stops_of`.
"""

_NO_TEMPLATE = "the model has no chat template: give a prompt (of /v1/completions) instead of messages"
_TEXT, _NOISE = "offload-text", "offload-noise"  # in a message that shows what a template reads
_A_TOKEN = 64  # characters of a token of a text that fits, where the vocabulary has no longer ones
_HALF = re.compile("[\ud800-\udfff]")  # of a character


@dataclass(frozen=True)
class Prompt:
    """What an answer begins with: its tokens, and how many more may follow."""

    tokens: list[int]
    most: int
    text: str = ""  # if that is part of the answer


def in_chat(tokenizer: Any, messages: list[Json], variables: Json) -> str:
    """Messages in the form of the model's chat template; `ArgumentError` if it refuses them, or is too slow."""
    render = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True, **variables)

    def rendered() -> str:
        parts = [{"type": "text", "text": _TEXT, "noise": _NOISE}]
        as_parts = not _reads(render, _TEXT) and _reads(render, parts)
        return str(render([_in_parts(message) for message in messages] if as_parts else messages))

    return within_limits(rendered, "the chat template")


def _reads(render: Callable[..., str], content: object) -> bool:
    """Whether a template takes the text out of such a content: some print a list of parts as Python does."""
    try:
        text = render([{"role": "user", "content": content}])
    except Exception:  # a chat template can raise anything
        return False
    return _TEXT in text and _NOISE not in text


def _in_parts(message: Json) -> Json:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def ends_of(model: Any) -> list[int]:
    """The tokens after which nothing follows."""
    eos = model.generation_config.eos_token_id
    return [] if eos is None else eos if isinstance(eos, list) else [eos]


def stops_of(model: Any) -> list[str]:
    """The stop strings of the model's generation settings."""
    stops = getattr(model.generation_config, "stop_strings", None) or []
    return [stops] if isinstance(stops, str) else [str(stop) for stop in stops if stop]


class Prompts:
    def __init__(self, tokenizer: Any, longest: int | None, most_new: int) -> None:
        """`longest` is the model's context, in tokens; `most_new` of an answer whose request does not say."""
        self.tokenizer = tokenizer
        self._longest, self._most_new = longest or 2**62, most_new
        self._vocabulary = len(tokenizer)
        self._most_characters = max(_A_TOKEN, *map(len, tokenizer.get_vocab())) * self._longest
        tokenizer("", **ONLY_TOKENS)  # the first call sets truncation and padding: later ones, in threads, only read

    def of(self, asked: Asked) -> list[Prompt]:
        """The prompts of a request; raises `Refused` if one is too long, or the template or tokenizer refuses it."""
        if asked.messages is not None:
            return [self._in_chat(asked.messages, asked)]
        return [self._of(prompt, asked) for prompt in asked.prompts]

    def _in_chat(self, messages: list[Json], asked: Asked) -> Prompt:
        if not getattr(self.tokenizer, "chat_template", None):
            raise Refused(_NO_TEMPLATE, param="messages")
        taken = inspect.signature(self.tokenizer.apply_chat_template).parameters.keys()
        if wrong := taken & asked.template.keys():
            raise Refused(f"chat_template_kwargs can't set {min(wrong)}", param="chat_template_kwargs")
        try:
            text = in_chat(self.tokenizer, messages, asked.template)
        except OSError:  # the system's; a template has nothing to do with it
            raise
        except Exception as error:  # chat templates can raise anything
            raise Refused(f"the model's chat template refuses it: {first_line(error)}", param="messages") from error
        tokens = self._encoded(text, "messages", add_special_tokens=False)
        return Prompt(tokens, self._most(tokens, asked))

    def _of(self, prompt: str | list[int], asked: Asked) -> Prompt:
        if isinstance(prompt, str):
            tokens = self._encoded(prompt, "prompt")
        elif all(0 <= token < self._vocabulary for token in prompt):
            tokens = prompt
        else:
            raise Refused(f"a token is not one of the model's {self._vocabulary}", param="prompt")
        most = self._most(tokens, asked)
        if asked.echo and not isinstance(prompt, str):
            how = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
            prompt = str(self.tokenizer.decode(tokens, **how))
        return Prompt(tokens, most, str(prompt) if asked.echo else "")

    def _encoded(self, text: str, param: str, **options: bool) -> list[int]:
        if len(text) > self._most_characters:
            raise self._too_long(f"the prompt's {len(text):,} characters")
        if _HALF.search(text):
            raise Refused("the text has half of a character (a surrogate without the other one)", param=param)
        try:
            tokens: list[int] = self.tokenizer(text, **ONLY_TOKENS, **options)["input_ids"]
        except OSError:
            raise
        except Exception as error:  # a tokenizer can raise anything
            raise Refused(f"the model's tokenizer refuses it: {first_line(error)}", param=param) from error
        return tokens

    def _most(self, tokens: list[int], asked: Asked) -> int:
        count = len(tokens)
        if not count:
            raise Refused("the prompt has no tokens for this model")
        most = asked.max_tokens
        if most is None:
            most = min(self._most_new, max(self._longest - count, 1))
        if count + most > self._longest:
            raise self._too_long(f"{count} of the prompt and {most} more")
        return most

    def _too_long(self, what: str) -> Refused:
        message = f"the model's context has {self._longest} tokens: {what} are too many"
        return Refused(message, code="context_length_exceeded")


_MOST_SECONDS = 10  # of a processor
_MOST_WAIT = 60  # seconds, whatever the processor does
_MOST_BYTES = 1 << 30  # beyond what the process has


def within_limits(act: Callable[[], str], what: str) -> str:
    """The text that `act` returns in a forked child; `ArgumentError` if it fails, or needs too much time or memory."""
    reply, sizes = b"", Path("/proc/self/statm")
    with reading(sizes):
        most = int(sizes.read_text(encoding="ascii").split()[0]) * resource.getpagesize() + _MOST_BYTES
    mine, theirs = socket.socketpair()
    with mine, theirs:
        pid = os.fork()
        if not pid:
            _tell(act, theirs, most)
        try:
            theirs.close()
            mine.settimeout(_MOST_WAIT)
            with mine.makefile("rb") as file, suppress(TimeoutError):
                reply = file.read()
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if not reply:
        raise ArgumentError(f"{what} takes more than {_MOST_SECONDS} s, or too much memory")
    text = reply[1:].decode("utf-8", "surrogatepass")
    if reply[:1] == b"-":
        raise ArgumentError(text)
    return text


def _tell(act: Callable[[], str], to: socket.socket, most: int) -> None:
    """Never returns."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (_MOST_SECONDS, _MOST_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        try:
            reply = "+" + act()
        except Exception as error:  # a chat template can raise anything
            reply = "-" + first_line(error)
        to.sendall(reply.encode("utf-8", "surrogatepass"))
    finally:
        with suppress(BaseException):
            to.close()
        os._exit(0)
