"""Output of the commands.

Always true:
- if the output is not a terminal, there are no colours or spinners, and no lines are cut
"""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from rich.console import Console
    from rich.table import Table


@contextmanager
def logging_to_stderr(verbose: int) -> Iterator[None]:
    """Show the package's log on standard error while the block runs: with 1 its decisions, with 2 everything.

    With 0, irrelevant warnings from importing torchao are hidden, too.
    """
    log, handler = logging.getLogger("offload"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    levels = {log: logging.INFO if verbose == 1 else logging.DEBUG} if verbose else {}
    for name in () if verbose else ("torchao", "torch.utils._pytree"):
        levels[logging.getLogger(name)] = logging.ERROR
    before = {one: one.level for one in levels}
    try:
        if verbose:
            log.addHandler(handler)
        for one, level in levels.items():
            one.setLevel(level)
        yield
    finally:
        for one, level in before.items():
            one.setLevel(level)
        log.removeHandler(handler)


def hide_bars_off_a_terminal() -> None:
    """Turn off the progress bars of transformers and the hub if standard error is a pipe or a file."""
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():
        disable_progress_bar()


@contextmanager
def doing(what: str) -> Iterator[Callable[[], None]]:
    """Say on a terminal what is being done while the block runs; yields a function that ends it early."""
    from rich.console import Console

    status = Console(stderr=True).status(what)
    if not status.console.is_terminal or not sys.stdout.isatty():
        yield lambda: None
        return
    try:
        status.start()
        yield status.stop
    finally:
        status.stop()


def console() -> Console:
    """A console that cuts lines on a terminal only."""
    from rich.console import Console

    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=10_000)


def table(*names: str, footer: bool = False, header: bool = True) -> Table:
    """An empty table with these columns."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, show_footer=footer, show_header=header)
    for name in names:
        made.add_column(name, overflow="fold")
    return made


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Print one line per pair."""
    from rich.text import Text

    made = table("", "", header=False)
    for label, value in pairs:
        made.add_row(Text(label), Text(value))
    console().print(made)


def print_json(said: Any) -> None:
    """Print one JSON value on one line; escaped if standard output can't encode it."""
    value = plain(said)
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeError:
        text = json.dumps(value)
    print(text)


def plain(said: Any) -> Any:
    """The value in JSON types: dataclasses as objects, paths as text."""
    if is_dataclass(said) and not isinstance(said, type):
        return plain(asdict(said))
    if isinstance(said, Mapping):
        return {str(key): plain(value) for key, value in said.items()}
    if isinstance(said, (list, tuple)):
        return [plain(value) for value in said]
    return str(said) if isinstance(said, Path) else said


def complain(error: BaseException, *, as_json: bool = False) -> None:
    """Print an error in one line, and as JSON if requested."""
    from rich.console import Console
    from rich.text import Text

    message = " ".join(_said(error).split()) or type(error).__name__
    line = Text("offload: ", style="bold red")
    line.append(message, style="not bold default")
    Console(stderr=True, soft_wrap=True).print(line)
    if as_json:
        with suppress(OSError):  # standard output itself may be broken
            print_json({"error": {"kind": type(error).__name__, "message": message}})


@contextmanager
def escaping() -> Iterator[None]:
    """Make standard output escape characters that its encoding lacks, instead of failing, while the block runs."""
    out = sys.stdout
    if not isinstance(out, io.TextIOWrapper) or out.errors != "strict":
        yield
        return
    out.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        with suppress(ValueError):  # it has been closed
            out.reconfigure(errors="strict")


def _said(error: BaseException) -> str:
    """The error's text, without the errno."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def counted(number: int, what: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def allow_json(*commands: ArgumentParser) -> None:
    """Add the option `--json` to commands."""
    for command in commands:
        command.add_argument("--json", action="store_true", help="print it as JSON, for machines")
