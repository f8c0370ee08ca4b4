"""`offload batch`: answer a file of requests with a language model that is read once for many of them.

Always true:
- each request is answered as if it were alone; `--in-flight` changes time and memory, but no answer
- an answer is appended in one write, and is on the disk before the next one is written; a killed process leaves
  complete lines, and at most one incomplete line, which is cut off on resuming
- answered lines are not processed again; an invalid line does not stop the others
- a file that contains anything but answers is not written to

The format is that of https://platform.openai.com/docs/api-reference/batch: `custom_id`, `body.messages`...
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.annotations import Json
from offload.cli import arguments
from offload.cli.models import opened
from offload.cli.output import counted, print_json, say
from offload.errors import ArgumentError, ForeignFileError, OffloadError
from offload.generation.bodies import Asked, Refused, chat_body, object_in, text_body
from offload.generation.chat import Prompts
from offload.storage.replacing import sync_folder
from offload.system.locks import flock
from offload.system.reasons import first_line, reading, writing
from offload.system.regular import closed_on_error, open_regular

if TYPE_CHECKING:
    from offload.generation.answering import Answering

_LONGEST = 64 << 20  # longest line in bytes
_MOST_SEED = 2**63 - 1


@dataclass(frozen=True)
class Request:
    """A line of the input that can be understood."""

    line: int
    custom_id: str
    asked: Asked


class Refusals:
    """The lines that can't be answered, which are told on standard error."""

    count = 0

    def add(self, line: int, why: str) -> None:
        self.count += 1
        say(f"offload: line {line}: {why}", file=sys.stderr)


def batch(options: argparse.Namespace) -> int:
    """Answer the requests of a file with a language model on disk, many at a time for one reading of the model.

    A line of the input is a JSON object with a custom_id, and a body with messages or a prompt. Answers are appended
    as they are ready. Called again after a kill, the command does what has no answer yet.
    """
    from rich.filesize import decimal

    from offload.prefetch.engine import counts
    from offload.progress import progress

    if arguments.existing(options.input).resolve() == options.output.resolve():
        raise ArgumentError("requests and answers need two different files")
    refusals, answered, tokens = Refusals(), 0, 0
    begun, read = time.perf_counter(), counts().bytes_read
    with closing(Answers(options.output)) as answers:
        before = len(answers.done)
        for answer in progress(_answers(options, answers.done, refusals), "batch"):
            answers.append(answer)
            answered, tokens = answered + 1, tokens + answer["response"]["body"]["usage"]["completion_tokens"]
    rate, read = tokens / (time.perf_counter() - begun), counts().bytes_read - read
    if options.json:
        done = {"answered": answered, "answered_before": before, "refused": refusals.count, "tokens": tokens}
        print_json({**done, "tokens_per_second": rate, "read_bytes": read})
    else:
        lines = f"{counted(answered, 'line')} answered, {before} before, {refusals.count} refused"
        say(f"{lines}: {tokens} tokens, {rate:.3g} tokens/s, {decimal(read)} read")
    return int(refusals.count > 0)


def _answers(options: argparse.Namespace, done: Collection[str], refusals: Refusals) -> Iterator[Json]:
    """A line for each request that can have one. If there are none, no model is loaded."""
    import torch

    from offload.batches.mapping import map_batches

    requests = _requests(options.input, done, refusals)
    first = next(requests, None)
    if first is None:
        return
    model, answering, prompts = opened(options, options.max_new_tokens)
    answer = partial(_answer, options.model, answering, prompts, refusals)
    todo, most = chain([first], requests), options.in_flight
    with torch.inference_mode():
        yield from filter(None, map_batches(answer, todo, model, in_flight=most, ordered=False, progress=False))


def _requests(path: Path, done: Collection[str], refusals: Refusals) -> Iterator[Request]:
    """The requests that have no answer yet."""
    seen: set[str] = set()
    for number, line in enumerate(_lines(path), 1):
        try:
            request = _request(line, number) if line.strip() else None
            if request is not None and request.custom_id in seen:
                raise Refused(f"the custom_id {request.custom_id!r} is that of an earlier line")
        except Refused as error:
            refusals.add(number, str(error))
            continue
        if request is not None:
            seen.add(request.custom_id)
            if request.custom_id not in done:
                yield request


def _lines(path: Path) -> Iterator[bytes]:
    """The lines; of one that is too long, the beginning."""
    with reading(path), open(path, "rb") as file:
        while line := file.readline(_LONGEST):
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(_LONGEST)
            yield line


def _request(line: bytes, number: int) -> Request:
    """The request on a line; raises `Refused`."""
    if len(line) == _LONGEST:
        raise Refused(f"it has {_LONGEST} bytes or more")
    request = object_in(line)
    custom_id, body = request.get("custom_id"), request.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise Refused(f"custom_id is {custom_id!r}, not a non-empty string")
    if not isinstance(body, dict):
        raise Refused("body is not a JSON object")
    asked = text_body(body) if "prompt" in body else chat_body(body)
    if len(asked.prompts) > 1:
        raise Refused("prompt is a list: give each prompt a line of its own")
    return Request(number, custom_id, asked)


def _answer(name: str, answering: Answering, prompts: Prompts, refusals: Refusals, request: Request) -> Json:
    """Answer one request, greedily unless it has a temperature; called in lockstep with others."""
    import torch

    from offload.generation.answering import Job
    from offload.serving.responses import Response

    asked = request.asked
    try:
        [prompt] = prompts.of(asked)
        kind = {"is_chat": asked.messages is not None, "scored": asked.top is not None}
        response = Response(name, prompts.tokenizer, [prompt.text], len(prompt.tokens), **kind)
        [choice], pieces = response.choices, list[Any]()
        seed = int(torch.randint(_MOST_SEED, ()))  # of this request's own numbers, inside `map_batches`
        how = {"temperature": 0, "seed": seed, **asked.options}
        choice.reason = answering(Job(prompt, pieces.append, how, asked.top, asked.echo))
    except Refused as error:
        refusals.add(request.line, str(error))
        return None
    except (OffloadError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # an unknown token, an odd generation_config.json
        refusals.add(request.line, f"the model rejects it: {first_line(error)}")
        return None
    for piece in pieces:
        choice.add(piece)
    reply = {"status_code": 200, "body": response.whole()}
    return {"custom_id": request.custom_id, "response": reply, "error": None}


class Answers:
    """A file of answers that is appended to. Only one process at a time can open it."""

    def __init__(self, path: Path) -> None:
        """Open or create it, without an incomplete last line; errors if it is something else, or another's."""
        self.path = path
        self.done: set[str] = set()
        self._file = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        with closed_on_error(self._file), reading(path):
            self._fd = self._file.fileno()
            if not flock(self._fd, path, wait=False):
                raise ArgumentError(f"another process is writing answers to {path}")
            self._read()
            sync_folder(path.parent)

    def _read(self) -> None:
        end = 0
        with open(self._fd, "rb", closefd=False) as file:
            for line in file:
                if not line.endswith(b"\n") and line.startswith(b'{"custom_id"'[: len(line)]):
                    with suppress(ValueError):  # it is not whole: the process was killed while writing it
                        json.loads(line)
                        self._answered(line)
                    os.ftruncate(self._fd, end)
                    break
                self.done.add(self._answered(line))
                end += len(line)

    def _answered(self, line: bytes) -> str:
        try:
            answer = json.loads(line)
            if isinstance(answer["response"]["body"], dict):
                return str(answer["custom_id"])
        except (ValueError, LookupError, TypeError):
            pass
        message = "the file exists and contains something else than answers: name another file"
        raise ForeignFileError(errno.EEXIST, message, str(self.path))

    def append(self, answer: Json) -> None:
        """Append a line; it is on the disk when this returns. Raises `WriteError`."""
        left = memoryview(json.dumps(answer).encode() + b"\n")
        with writing(self.path):
            while left:
                left = left[os.write(self._fd, left) :]
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Let other processes open it."""
        self._file.close()
