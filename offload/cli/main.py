"""The command line as a whole.

Always true:
- requested output goes to standard output, everything else to standard error
- with `--json`, standard output is one JSON value, even for an error: `{"error": {"kind": ..., "message": ...}}`
- a line is parsed, and `--help` answered, without torch, which takes seconds to import
- exit codes: 0 done; 1 an error that the user can fix, in one line, or findings of `verify`; 2 a wrong command
  line; 130 interrupted
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from offload.cli.commands import add_commands
from offload.cli.output import complain, escaping, logging_to_stderr
from offload.errors import OffloadError
from offload.importing import library, version

_EPILOG = """examples:
  offload chat MODEL --max-memory 8GiB
  offload batch MODEL requests.jsonl answers.jsonl
  offload quantize MODEL model-int8 --int8

MODEL is a folder with a checkpoint, a GGUF file, or a model on the hub.
offload COMMAND --help lists a command's options.

exit codes: 0 done; 1 an error, or what verify found; 2 a wrong command line;
130 interrupted"""


_CHOICE = re.compile(r"invalid choice: '([^']+)'")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    options = parser().parse_args(argv)
    if options.run is None:
        parser().print_help()
        return 0
    try:
        library()
        with escaping(), logging_to_stderr(options.verbose):
            code: int | None = options.run(options)
            if sys.stdout is not None:  # None if the shell closed it
                sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        with suppress(OSError):
            sys.stdout.close()
        return 0
    except (OffloadError, RuntimeError, ValueError, OSError, ModuleNotFoundError) as error:
        if options.traceback:
            raise
        complain(error, as_json=getattr(options, "json", False))
        return 1
    except KeyboardInterrupt:
        return 130
    return code or 0


def parser() -> argparse.ArgumentParser:
    """The parser for the whole command line."""
    import shtab

    as_it_is, about = argparse.RawDescriptionHelpFormatter, "PyTorch tensors that live on disk."
    made = _Parser(prog="offload", description=about, epilog=_EPILOG, formatter_class=as_it_is)
    made.set_defaults(run=None)
    made.add_argument("--version", action="version", version=f"offload {version()}")
    made.add_argument("--traceback", action="store_true", help="show where an error comes from")
    about = "log what is done to standard error; -vv logs more"
    made.add_argument("-v", "--verbose", action="count", default=0, help=about)
    about = 'print a completion script for a shell, as: eval "$(offload --print-completion bash)"'
    shtab.add_argument_to(made, ["--print-completion"], help=about)
    _allow_everywhere(add_commands(made))
    return made


class _Parser(argparse.ArgumentParser):
    """A parser that says what a mistyped command or option may be meant for (argparse does in Python 3.14)."""

    _line: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._line = sys.argv[1:] if args is None else [*args]
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        known = {*self._names()}
        words = _CHOICE.findall(message) + [word.partition("=")[0] for word in self._line if word.startswith("--")]
        close = (difflib.get_close_matches(word, known, 1) for word in words if word not in known)
        meant = next(filter(None, close), ())
        super().error(message + "".join(f"; did you mean {name}?" for name in meant))

    def _names(self) -> Iterator[str]:
        """Of its options and their choices, and those of the command on its line; else of all commands."""
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction) and (given := action.choices.keys() & {*self._line}):
                for command in given:
                    yield from action.choices[command]._names()
            else:
                yield from action.choices or ()


def _allow_everywhere(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Accept these options after a command, too: after an error it is easiest to add them at the end of the line."""
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for command in commands.choices.values():
        command.add_argument("--traceback", action="store_true", **hidden)
        command.add_argument("-v", "--verbose", action="count", **hidden)
        for action in command._actions:
            if isinstance(action, argparse._SubParsersAction):
                _allow_everywhere(action)
