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
import io
import sys
from collections.abc import Sequence
from contextlib import suppress

from offload.cli.commands import add_commands
from offload.cli.output import complain, logging_to_stderr
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    options = parser().parse_args(argv)
    if options.run is None:
        parser().print_help()
        return 0
    try:
        library()
        if isinstance(sys.stdout, io.TextIOWrapper):  # characters that its encoding lacks are escaped
            sys.stdout.reconfigure(errors="backslashreplace")
        with logging_to_stderr(options.verbose):
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
    as_it_is, about = argparse.RawDescriptionHelpFormatter, "PyTorch tensors that live on disk."
    command = argparse.ArgumentParser(prog="offload", description=about, epilog=_EPILOG, formatter_class=as_it_is)
    command.set_defaults(run=None)
    command.add_argument("--version", action="version", version=f"offload {version()}")
    add_commands(command)
    return command
