"""Requests and answers of a model as lines of JSON, in the batch file format of inference servers.

Always true:
- an answer is appended in one write, and is on the disk before the next one is written; a killed process leaves
  complete lines, and at most one incomplete line, which is cut off on resuming
- answered lines are not processed again; an invalid line does not stop the others
- a file that contains anything but answers is not written to

The format is that of https://platform.openai.com/docs/api-reference/batch: `custom_id`, `body.messages`...
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offload.annotations import Json
from offload.errors import ArgumentError, ForeignFileError, ReadError, WriteError
from offload.generation.bodies import OF_TEMPLATE, OPTIONS, Asked, Refused, asked_in, object_in
from offload.storage.replacing import sync_folder
from offload.system.locks import flock
from offload.system.reasons import reading, writing
from offload.system.regular import closed_on_error, owned

_KNOWN = {"model", "messages", "prompt", "max_tokens", "max_completion_tokens", *OPTIONS, *OF_TEMPLATE}
_ENVELOPE = {"custom_id", "method", "url", "body"}  # around the body, if there is one
_LONGEST = 64 << 20  # longest line in bytes


@dataclass(frozen=True)
class Request:
    """The request on one line; `ignored` are the options that it has beside what it asks for."""

    custom_id: str
    asked: Asked
    ignored: Sequence[str] = ()


@dataclass(frozen=True)
class Answer:
    request: Request
    text: str
    prompt_tokens: int
    tokens: int
    finish_reason: str

    def line(self, model: str) -> Json:
        """The line to write."""
        from offload.serving.responses import Choice, Response

        is_chat = self.request.asked.messages is not None
        whole = Response(model, None, [], self.prompt_tokens, is_chat=is_chat, scored=False)
        whole.choices.append(Choice("", self.text, tokens=self.tokens, reason=self.finish_reason))
        response = {"status_code": 200, "body": whole.whole()}
        return {"custom_id": self.request.custom_id, "response": response, "error": None}


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """The non-empty lines of a file, with their numbers from 1; `-` is standard input. Raises `ReadError`."""
    try:
        with open(0 if str(path) == "-" else path, "rb", closefd=str(path) != "-") as file:
            number = 0
            while line := file.readline(_LONGEST + 1):
                number += 1
                end = line
                while len(end) > _LONGEST and not end.endswith(b"\n"):  # the rest belongs to the same line
                    end = file.readline(_LONGEST + 1)
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ReadError(error.errno, f"the requests can't be read ({error.strerror})", str(path)) from error


def parsed(line: bytes, number: int) -> Request:
    """The request on a line; raises `Refused` if it is invalid, or asks for something unsupported."""
    if len(line) > _LONGEST:
        raise Refused(f"longer than {_LONGEST} bytes")
    request = object_in(line)
    body = request.get("body", request)
    if not isinstance(body, dict):
        raise Refused("body is not a JSON object")
    known = _KNOWN | _ENVELOPE if body is request else _KNOWN
    ignored = [name for name, value in body.items() if name not in known and value is not None]
    custom_id = request.get("custom_id", f"line-{number}")
    if not isinstance(custom_id, str) or not custom_id:
        raise Refused(f"custom_id is {custom_id!r}, not a non-empty string")
    return Request(custom_id, asked_in(body, _prompts(body)), ignored)


def custom_id_of(line: bytes) -> str | None:
    """The `custom_id` of an invalid line, if it can be found."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        return None
    found = request.get("custom_id") if isinstance(request, dict) else None
    return found if isinstance(found, str) else None


def _prompts(body: Json) -> list[str]:
    if body.get("messages") is not None:
        if "prompt" in body:
            raise Refused("both messages and a prompt are given")
        return []
    found = body.get("prompt")
    if not isinstance(found, str) or not found:
        raise Refused("neither messages nor a prompt is given, or the prompt is not text")
    return [found]


class Answers:
    """A file of answers, or of refusals, that is appended to. Only one process at a time can open it."""

    def __init__(self, path: Path, *, refused: bool = False) -> None:
        """Open or create it, without an incomplete last line; errors if it is something else, or another's."""
        self.path = path
        self.done: set[str] = set()
        self._refused = refused
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
            self._file = owned(os.open, path, flags, 0o666)
        except OSError as error:
            raise WriteError(error.errno, f"answers can't be written ({error.strerror})", str(path)) from error
        with closed_on_error(self._file), reading(path):
            self._fd = self._file.fileno()
            if not flock(self._fd, path, wait=False):
                raise ArgumentError(f"another process is writing answers to {path}")
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise ForeignFileError(errno.EINVAL, "answers go to a regular file, which is read again", str(path))
            self._read()
            sync_folder(path.parent)

    def _read(self) -> None:
        end = 0
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(0)
            for line in file:
                if line.endswith(b"\n"):
                    self.done.add(self._answered(line, whole=True))
                    end += len(line)
                elif line.startswith(b'{"custom_id"'[: len(line)]):  # the process was killed while writing it
                    os.ftruncate(self._fd, end)
                else:
                    self._answered(line, whole=False)

    def _answered(self, line: bytes, *, whole: bool) -> str:
        try:
            answer = json.loads(line) if whole else None
        except ValueError:
            answer = None
        names = {"custom_id", "response", "error"}
        if not isinstance(answer, dict) or names - answer.keys() or (answer["response"] is None) != self._refused:
            kind = "refused lines" if self._refused else "answers"
            message = f"the file exists and contains something else than {kind}: name another file"
            raise ForeignFileError(errno.EEXIST, message, str(self.path))
        return str(answer["custom_id"])

    def append(self, answer: Json) -> None:
        """Append a line; it is on the disk when this returns. Raises `WriteError`."""
        left = memoryview(_encoded(answer) + b"\n")
        start: int | None = None
        try:
            start = os.fstat(self._fd).st_size
            while left:
                left = left[os.write(self._fd, left) :]
            os.fdatasync(self._fd)
        except OSError as error:
            with suppress(OSError):  # then resuming cuts off what is incomplete
                if start is not None:
                    os.ftruncate(self._fd, start)
            raise WriteError(error.errno, f"an answer can't be written ({error.strerror})", str(self.path)) from error

    def clear(self) -> None:
        with writing(self.path):
            os.ftruncate(self._fd, 0)
        self.done = set()

    def close(self) -> None:
        """Let other processes open it."""
        self._file.close()


def _encoded(answer: Json) -> bytes:
    try:
        return json.dumps(answer, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(answer).encode()
