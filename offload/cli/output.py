"""Output of the commands.

Always true:
- if the output is not a terminal, there are no colours or spinners, and no lines are cut
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any, TextIO

from offload.annotations import Json
from offload.errors import visible, visible_lines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


# Irrelevant log lines of third-party imports, about unused kernels: the logger, and words in the line.
_AT_IMPORT = {
    "torchao": "Failed to load ",
    "torch.utils._pytree": " is an Enum subclass and is now natively supported",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
}
_FOR_PROGRAMMERS = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)


@contextmanager
def logging_to_stderr(verbose: int) -> Iterator[None]:
    """Show the package's log on standard error while the block runs: with 1 its decisions, with 2 everything.

    With 0, warnings that concern only the authors of other packages are hidden.
    """
    if not verbose:
        with _without_noise():
            yield
        return
    level = logging.INFO if verbose == 1 else logging.DEBUG
    with shown("offload", level, _Visible("%(name)s: %(message)s")):
        yield


@contextmanager
def shown(name: str, level: int, form: logging.Formatter) -> Iterator[None]:
    """Show what a logger has to say from this level on, on standard error alone, while the block runs."""
    log, handler = logging.getLogger(name), logging.StreamHandler()
    handler.setFormatter(form)
    before, passes_on = log.level, log.propagate
    try:
        log.addHandler(handler)
        log.setLevel(level)
        log.propagate = False
        yield
    finally:
        log.setLevel(before)
        log.propagate = passes_on
        log.removeHandler(handler)


class _Visible(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible_lines(super().format(record))


@contextmanager
def _without_noise() -> Iterator[None]:
    """No lines about imports, and no deprecations unless Python was told to show them (`-W`, `PYTHONWARNINGS`)."""

    def is_wanted(record: logging.LogRecord) -> bool:
        return _AT_IMPORT[record.name] not in record.getMessage()

    with ExitStack() as stack, warnings.catch_warnings():
        for name in _AT_IMPORT:  # a filter of the logger alone: those below it keep their warnings
            logging.getLogger(name).addFilter(is_wanted)
            stack.callback(logging.getLogger(name).removeFilter, is_wanted)
        for category in () if sys.warnoptions else _FOR_PROGRAMMERS:
            warnings.simplefilter("ignore", category)
        yield


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


def console(*, stderr: bool = False) -> Console:
    """A console that cuts lines on a terminal only."""
    from rich.console import Console

    screen = Console(highlight=False, stderr=stderr)
    return screen if screen.is_terminal else Console(highlight=False, stderr=stderr, width=10_000)


def table(*names: str, footer: bool = False, header: bool = True) -> Table:
    """An empty table with these columns."""
    from rich import box
    from rich.table import Table

    empty = Table(box=box.SIMPLE_HEAD, show_footer=footer, show_header=header)
    for name in names:
        empty.add_column(name, overflow="fold")
    return empty


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Print one line per pair."""
    pairs_table = table("", "", header=False)
    for label, value in pairs:
        pairs_table.add_row(cell(label), cell(value))
    console().print(pairs_table)


def cell(text: str) -> Text:
    """Text from a file in a table: without markup, its control characters visible."""
    from rich.text import Text

    return Text(visible(text))


def say(text: str, *, file: TextIO | None = None) -> None:
    """Print text that may have names from files in it, to standard output or `file`."""
    print(visible_lines(text), file=file)


def print_json(value: object) -> None:
    """Print one JSON value on one line, in ASCII: dataclasses as objects, paths as text."""
    print(json.dumps(value, default=_plain))


def _plain(value: Any) -> Json:
    return asdict(value) if is_dataclass(type(value)) else str(value)


def complain(error: BaseException, *, as_json: bool = False) -> None:
    """Print an error in one line, and as JSON if requested."""
    from rich.console import Console
    from rich.text import Text

    message = visible(" ".join(_message(error).split())) or type(error).__name__
    line = Text("offload: ", style="bold red")
    line.append(message, style="not bold default")
    Console(stderr=True, soft_wrap=True).print(line)
    if as_json:
        with suppress(OSError):  # standard output itself may be broken
            print_json({"error": {"kind": type(error).__name__, "message": message}})


def _message(error: BaseException) -> str:
    """The error's text, without the errno; for a missing package, how to install it."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name:
        package = error.name.replace("_", "-")
        return f"this needs the package {package}, which is not installed: pip install {package}"
    return str(error)


def counted(number: int, what: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number} {what}{'' if number == 1 else 's'}"
