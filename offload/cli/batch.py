"""`offload batch`: answer a file of requests with a language model that is read once for many of them.

Always true:
- each request is answered as if it were alone; `--in-flight` changes time and memory, but no answer
- finished answers stay, however the process ends
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from offload.cli import arguments
from offload.cli.models import opened
from offload.cli.output import counted, print_json, print_pairs, say
from offload.cli.requests import Answer, Answers, Request, custom_id_of, lines_of, parsed
from offload.errors import ArgumentError, OffloadError
from offload.generation.bodies import Refused
from offload.generation.chat import Prompts
from offload.system.reasons import first_line
from offload.system.regular import is_there

if TYPE_CHECKING:
    from offload.generation.answering import Answering

Refusal: TypeAlias = tuple[str, int, str]
"""Of a line: its custom_id, its number, and why it can't be answered."""

_MOST_SEED = 2**63 - 1
_MOST = 2**31 - 1  # tokens of an answer of a model without an end to its context


def batch(options: argparse.Namespace) -> int:
    """Answer the requests of a file with a language model on disk, many at a time for one reading of the model.

    A line of the input is a JSON object with a custom_id, and messages or a prompt, in it or in its body. Answers are
    appended as they are ready. Called again after a kill, the command does what has no answer yet.
    """
    errors = options.errors or options.output.with_name(f"{options.output.name}.errors.jsonl")
    source = options.input if str(options.input) == "-" else arguments.existing(options.input).resolve()
    places = {source, options.output.resolve(), errors.resolve()}
    if len(places) < 3:
        raise ArgumentError("requests, answers and errors need three different files")
    with closing(Answers(options.output)) as answers, closing(_Refusals(errors)) as refusals:
        before = len(answers.done)
        progress = _Progress()
        for result in _results(options, _to_do(options.input, answers.done, refusals)):
            if isinstance(result, Answer):
                answers.append(result.line(options.model))
                progress.count(result.tokens)
            else:
                refusals.add(*result)
        done = {"answered": progress.lines, "answered_before": before, "refused": refusals.count}
        figures: dict[str, float] = {**done, **progress.figures()}
    if options.json:
        print_json(figures)
    else:
        print_pairs(
            (name.replace("_bytes", "").replace("_", " "), _written(name, value)) for name, value in figures.items()
        )
    if refusals.first:
        refused = f"{counted(refusals.count, 'line')} refused"
        say(f"offload: {refused}: see {errors}; the first is {refusals.first}", file=sys.stderr)
    return int(refusals.count > 0)


def _written(name: str, value: float) -> str:
    from rich.filesize import decimal

    if "bytes" in name:
        return decimal(int(value))
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _results(options: argparse.Namespace, requests: Iterator[tuple[int, Request]]) -> Iterator[Answer | Refusal]:
    """An answer or a refusal for each request. If there are none, no model is loaded."""
    import torch

    from offload.batches.mapping import map_batches

    first = next(requests, None)
    if first is None:
        return
    model, answering, prompts = opened(options, _MOST)
    answer = partial(_answer, answering, prompts, options.max_new_tokens)
    with torch.inference_mode():
        yield from map_batches(
            answer, chain([first], requests), model, in_flight=options.in_flight, ordered=False, progress=False
        )


def _to_do(path: Path, done: Collection[str], refusals: _Refusals) -> Iterator[tuple[int, Request]]:
    """The requests that have no answer yet; invalid ones are refused. One warning for each unknown option."""
    seen: set[str] = set()
    ignored: set[str] = set()
    for number, line in lines_of(path):
        try:
            request = parsed(line, number)
            if request.custom_id in seen:
                raise Refused(f"the custom_id {request.custom_id!r} is that of an earlier line")
        except Refused as error:
            refusals.add(custom_id_of(line), number, str(error))
            continue
        for name in request.ignored:
            if name not in ignored:
                say(f"offload: the option {name} is ignored, first on line {number}", file=sys.stderr)
                ignored.add(name)
        seen.add(request.custom_id)
        if request.custom_id not in done:
            yield number, request


def _answer(answering: Answering, prompts: Prompts, most: int, numbered: tuple[int, Request]) -> Answer | Refusal:
    """Answer one request, greedily unless it has a temperature; called in lockstep with others."""
    import torch

    from offload.generation.answering import Job

    number, request = numbered
    most = request.asked.max_tokens or most
    try:
        [prompt] = prompts.of(replace(request.asked, max_tokens=None))
    except Refused as error:
        return request.custom_id, number, str(error)
    pieces: list[Any] = []
    seed = int(torch.randint(_MOST_SEED, ()))  # of this request's own numbers, inside `map_batches`
    options = {"temperature": 0, "seed": seed, **request.asked.options}
    job = Job(replace(prompt, most=min(most, prompt.most)), pieces.append, options)
    try:
        reason = answering(job)
    except (OffloadError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a temperature close to 0, an unknown token, an odd generation_config.json
        return request.custom_id, number, f"the model rejects it: {first_line(error)}"
    text, count = "".join(piece.text for piece in pieces), sum(piece.tokens for piece in pieces)
    return Answer(request, text, len(prompt.tokens), count, reason)


class _Refusals:
    """The lines that can't be answered, in a file that exists only if there are any."""

    def __init__(self, path: Path) -> None:
        self.count = 0
        self.first = ""
        self._path = path
        self._file: Answers | None = None
        if is_there(path):  # from an earlier run; checked again
            self._file = Answers(path, refused=True)
            self._file.clear()

    def add(self, custom_id: str | None, line: int, why: str) -> None:
        self._file = self._file or Answers(self._path, refused=True)
        error = {"code": "invalid_request", "message": why, "line": line}
        self._file.append({"custom_id": custom_id, "response": None, "error": error})
        self.first = self.first or f"line {line}: {why}"
        self.count += 1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _Progress:
    def __init__(self) -> None:
        from offload.prefetch.engine import counts
        from offload.progress import Bar

        self.lines = self._tokens = 0
        self._start, self._counts = time.perf_counter(), counts
        self._read = counts().bytes_read
        self._bar = Bar(desc="batch", unit=" lines", delay=1, disable=None, leave=False)

    def count(self, tokens: int) -> None:
        self.lines += 1
        self._tokens += tokens
        figures = self.figures()
        rate, read = (_written(name, figures[name]) for name in ("tokens_per_second", "read_bytes_per_line"))
        self._bar.set_postfix_str(f"{rate} tokens/s, {read} read per line", refresh=False)
        self._bar.update()

    def figures(self) -> dict[str, float]:
        seconds, read = time.perf_counter() - self._start, self._counts().bytes_read - self._read
        rates = {"tokens_per_second": self._tokens / seconds, "read_bytes_per_line": read / max(self.lines, 1)}
        return {"tokens": self._tokens, **rates}
