"""The terminal recording in the README: `python -m bench.recording`.

Always true:
- it shows what was sent to a terminal, with its timing; the lines with $ are added, with the commands as called
- the commands run in a memory cgroup smaller than the model, and nothing of the model is cached at the start
- the same record gives the same drawing, byte for byte
"""

from __future__ import annotations

import codecs
import json
import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html import escape
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

from bench.memory_cap import memory_cap
from bench.models import smollm2_dense
from bench.page_cache import files_in, make_cold

RESULTS = Path(__file__).parent / "results"
RECORD, DRAWING = RESULTS / "recording.json", RESULTS / "recording.svg"
LIMIT = 500_000_000
COMMANDS = ("offload plan {model}", 'offload generate {model} --prompt "What is the capital of France?"')
_COLUMNS, _ROWS, _FONT, _LINE, _EDGE = 92, 40, 13, 19, 14
_SPINNER = re.compile("[⠁-⣿]")
_DIM, _GREY = "\x1b[2m", "\x1b[90m"  # pyte does not know the first
_STYLE = (
    "text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#d5dbe1;white-space:pre}"
    ".called{fill:#7aa2ff}.bold,.called{font-weight:600}.passing{visibility:hidden}.brightblack{fill:#8b949e}"
    ".green{fill:#7ee787}.brown{fill:#e3b341}.red{fill:#ff7b72}.cyan{fill:#56d4dd}"
    "@keyframes hidden{from,to{visibility:hidden}}@keyframes shown{from,to{visibility:visible}}"
    "@media(prefers-reduced-motion){text{animation:none!important}}"
)

Line = list[tuple[str, str]]
"""Pieces of a line, and the colours and weight of each: names of CSS classes."""

Screens = list[tuple[float, list[Line]]]
"""What the terminal shows from a second on."""


@dataclass(frozen=True)
class Record:
    """A recording. Sizes in bytes."""

    model: str
    stored: int
    limit: int
    columns: int
    screens: Screens


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "SmolLM2-135M")  # a name with which the commands fit into the columns
        model.symlink_to(smollm2_dense())
        record = recorded(model, LIMIT)
    RECORD.write_text(json.dumps(asdict(record), ensure_ascii=False) + "\n", encoding="utf-8")
    DRAWING.write_text(drawn(record), encoding="utf-8")
    print(DRAWING)


def read(path: Path = RECORD) -> Record:
    """The stored recording."""
    return Record(**json.loads(path.read_text(encoding="utf-8")))


def recorded(model: Path, limit: int) -> Record:
    """The commands, one after the other, in this many bytes of memory.

    Raises:
        OSError: this process can't create a memory cgroup.
        CalledProcessError: a command fails.
    """
    import pyte

    screen, screens = pyte.Screen(_COLUMNS, _ROWS), []
    terminal, start = pyte.Stream(screen), time.perf_counter()
    for command in COMMANDS:
        make_cold(files_in(model))
        terminal.feed(("\r\n" if screens else "") + f"$ {command.format(model=model.name)}\r\n")
        screens.append((time.perf_counter() - start, _lines(screen)))
        for text in _sent(shlex.split(command.format(model=model.name))[1:], model.parent, limit):
            terminal.feed(text.replace(_DIM, _GREY))
            screens.append((time.perf_counter() - start, _lines(screen)))
    stored = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return Record(model.name, stored, limit, _COLUMNS, list(_changes(screens)))


def _lines(screen: Any) -> list[Line]:
    rows = ([screen.buffer[row][column] for column in range(screen.columns)] for row in range(screen.lines))
    return [[("".join(one.data for one in group), style) for style, group in groupby(row, _style)] for row in rows]


def _style(letter: Any) -> str:
    return " ".join([*([] if letter.fg == "default" else [letter.fg]), *(["bold"] if letter.bold else [])])


def _sent(words: list[str], folder: Path, limit: int) -> Iterator[str]:
    """The command's output on a terminal, as it arrives."""
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (_ROWS, _COLUMNS))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    environment |= {"TERM": "xterm", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "offload", *words]
    decoder = codecs.getincrementaldecoder("utf-8")()
    with memory_cap(limit) as group:
        ends = {"stdin": follower, "stdout": follower, "stderr": follower}
        process = subprocess.Popen(command, cwd=folder, env=environment, preexec_fn=group.join, **ends)
        os.close(follower)
        while sent := _read(leader):
            yield decoder.decode(sent)
        code = process.wait()
    os.close(leader)
    if code:
        raise subprocess.CalledProcessError(code, command)


def _read(leader: int) -> bytes:
    """Empty once the terminal's other end is closed, which Linux reports as EIO."""
    try:
        return os.read(leader, 65536)
    except OSError:
        return b""


def _changes(screens: Screens) -> Iterator[tuple[float, list[Line]]]:
    """At least a tenth of a second apart, with a spinner standing still."""
    by_time = {round(second, 1): [_still(line) for line in lines] for second, lines in screens}
    last: list[Line] = []
    for second, lines in by_time.items():
        if lines != last:
            yield second, lines
        last = lines


def _still(line: Line) -> Line:
    pieces = [(_SPINNER.sub("⠿", text), style) for text, style in line]
    while pieces and not pieces[-1][0].strip():
        pieces.pop()
    return [*pieces[:-1], *((text.rstrip(), style) for text, style in pieces[-1:])]


def drawn(record: Record) -> str:
    """An animation of the terminal that stops at its end; just the end where animations are off."""
    rows = max(number for _, lines in record.screens for number, line in enumerate(lines, start=1) if line)
    width, height = round(record.columns * _FONT * 0.61) + 2 * _EDGE, rows * _LINE + 2 * _EDGE
    back = '<rect x="0.5" y="0.5" width="99.8%" height="99.8%" rx="8" fill="#1f2328" stroke="#3d444d"/>'
    texts = "\n".join(_texts(record.screens, rows))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img"><style>{_STYLE}</style>\n{back}\n{texts}\n</svg>\n'
    )


def _texts(screens: Screens, rows: int) -> Iterator[str]:
    """Each line, with the time for which it was visible."""
    for row in range(rows):
        shown = [(lines[row] if row < len(lines) else [], second) for second, lines in screens]
        runs = [next(group) for _, group in groupby(shown, key=lambda one: one[0])]
        for (line, start), (_, end) in zip_longest(runs, runs[1:], fillvalue=([], None)):
            if line and start is not None:
                yield _text(line, row * _LINE + _EDGE + _FONT, start, end)


def _text(line: Line, y: int, start: float, end: float | None) -> str:
    kinds = ["called"] if line[0][0].startswith("$ ") else []
    if end is None:
        moves = f"hidden {start:.1f}s"
    else:
        kinds.append("passing")
        moves = f"shown {end - start:.1f}s {start:.1f}s"
    kind = f' class="{" ".join(kinds)}"' if kinds else ""
    parts = [(escape(text), style) for text, style in line]
    inside = "".join(f'<tspan class="{style}">{text}</tspan>' if style else text for text, style in parts)
    return f'<text{kind} x="{_EDGE}" y="{y}" style="animation:{moves}">{inside}</text>'


if __name__ == "__main__":
    main()
