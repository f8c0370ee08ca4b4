"""Run a Markdown page: `python -m tests.pages PAGE [SETUP]`, in the folder for its files.

Always true:
- every python fence runs, top to bottom in one namespace, unless the line before it says why not
- a fence of sh runs in a shell; where it asks http://127.0.0.1:8000, the page's `address` is asked, if it has one
- a text fence right after one that runs is its exact output
- errors are reported with the line in the page
- no connections to other machines are made
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

RUN = {"python", "sh"}
SHOWN = {"text", "console", "json", "yaml", "toml"}  # languages that are never run
_FENCE = re.compile(r"(?P<indent> *)(?P<marks>`{3,}|~{3,})(?P<language>\w*).*")
_EXCUSE = re.compile(r"\s*<!-- not run:(?P<reason>.*)-->\s*")
_ADDRESS = "http://127.0.0.1:8000"


class PageError(Exception):
    """A page that can't be run as written, or whose output is different."""


@dataclass(frozen=True)
class Fence:
    """A block of code on a page."""

    line: int  # of its opening marks; the first is 1
    language: str  # empty if none
    text: str  # without the indentation of the block
    excuse: str | None  # why it is not run
    follows: bool  # whether only blank lines are between it and the previous fence

    @property
    def runs(self) -> bool:
        return self.language in RUN and self.excuse is None


def fences(page: str) -> Iterator[Fence]:
    """The fences of a page; an error if one is not closed, has an unknown language, or an excuse without a reason."""
    lines = page.splitlines()
    place, between = 0, ["the page begins"]
    while place < len(lines):
        opening = _FENCE.fullmatch(lines[place])
        if not opening:
            between.append(lines[place])
            place += 1
            continue
        end = _end(lines, place, opening["marks"])
        text = "".join(line.removeprefix(opening["indent"]) + "\n" for line in lines[place + 1 : end])
        excuse = _excuse(lines[place - 1], place) if place else None
        yield _known(Fence(place + 1, opening["language"], text, excuse, not "".join(between).strip()))
        place, between = end + 1, []


def _end(lines: list[str], start: int, marks: str) -> int:
    for place in range(start + 1, len(lines)):
        if lines[place].strip().startswith(marks) and not lines[place].strip().strip(marks[0]):
            return place
    raise PageError(f"line {start + 1}: this fence is not closed")


def _excuse(before: str, line: int) -> str | None:
    found = _EXCUSE.fullmatch(before)
    if found and not found["reason"].strip():
        raise PageError(f"line {line}: say why the fence is not run: <!-- not run: reason -->")
    return found and found["reason"].strip()


def _known(fence: Fence) -> Fence:
    if fence.language not in RUN | SHOWN:
        known = ", ".join([*sorted(RUN), *sorted(SHOWN)])
        raise PageError(f"line {fence.line}: {fence.language!r} is no language of a fence; there are {known}")
    if fence.language in SHOWN and fence.excuse is not None:
        raise PageError(f"line {fence.line}: only a fence that would run is excused, this one is never run")
    return fence


def run(page: Path, setup: str = "") -> None:
    """Run a page in this process, which then prints to a file; `setup` is code to run first, in its namespace."""
    module = sys.modules["__main__"] = ModuleType("__main__")  # so that definitions on the page can be pickled
    exec(setup, module.__dict__)
    printed = Printed()
    last: Fence | None = None
    output = ""
    for fence in fences(page.read_text()):
        if last and last.runs and fence.follows and fence.language == "text" and fence.text != output:
            raise PageError(f"line {last.line}: the page says\n{fence.text}but this is printed\n{output}")
        if fence.runs:
            _run(fence, page, module)
            output = printed.since_last()
        last = fence


def _run(fence: Fence, page: Path, module: ModuleType) -> None:
    if fence.text.lstrip().startswith(">>>"):
        return _run_prompts(fence, page, module)
    if fence.language == "sh":
        return _run_in_shell(fence, module)
    lines_before = "\n" * fence.line  # so that tracebacks have the line numbers of the page
    try:
        exec(compile(lines_before + fence.text, str(page), "exec"), module.__dict__)
    except BaseException as error:
        told = error.stderr or "" if isinstance(error, subprocess.CalledProcessError) else ""
        raise PageError(f"line {fence.line}: this fence raises\n{traceback.format_exc()}{told}") from error


def _run_in_shell(fence: Fence, module: ModuleType) -> None:
    command = fence.text.replace(_ADDRESS, module.__dict__.get("address", _ADDRESS))
    sys.stdout.flush()
    if code := subprocess.run(["bash", "-eo", "pipefail", "-c", command]).returncode:
        raise PageError(f"line {fence.line}: this fence exits with {code}")


def _run_prompts(fence: Fence, page: Path, module: ModuleType) -> None:
    """Each prompt's output is what follows it."""
    test = doctest.DocTestParser().get_doctest(fence.text, module.__dict__, page.name, str(page), fence.line)
    told: list[str] = []
    if doctest.DocTestRunner(verbose=False).run(test, out=told.append, clear_globs=False).failed:
        raise PageError(f"line {fence.line}: an example gives something else\n{''.join(told)}")
    module.__dict__.update(test.globs)


class Printed:
    """Standard output from now on, of this process and its children, in a file."""

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as file:
            sys.stdout.flush()
            os.dup2(file.fileno(), 1)
        self._seen = 0

    def since_last(self) -> str:
        """The output since the last call."""
        sys.stdout.flush()
        start, self._seen = self._seen, os.lseek(1, 0, os.SEEK_CUR)
        return os.pread(1, self._seen - start, start).decode()


def _stay_here(event: str, arguments: tuple[object, ...]) -> None:
    """An audit hook that allows connections to this machine only."""
    address = arguments[1] if event == "socket.connect" else None
    if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1"):
        raise ConnectionRefusedError(f"a page runs without a network, and this one asks for {address[0]}")


if __name__ == "__main__":
    sys.addaudithook(_stay_here)
    try:
        run(Path(sys.argv[1]), *sys.argv[2:])
    except PageError as error:
        sys.exit(f"{sys.argv[1]}, {error}")
