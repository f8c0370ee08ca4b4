"""The table of commands, and the table of their arguments and options.

Always true:
- what several commands take is one row; a row with another meaning for a command has its name after an @
- the help of an option with a value names its default
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from offload.cli import batch, files, machine, models, plan, rows, serve
from offload.cli.arguments import count, device, dtype, number, path, port, seed, share, size, words


@dataclass(frozen=True)
class Command:
    """A command: the function of this name in a module, whose docstring describes it."""

    module: ModuleType
    help: str
    takes: str  # arguments and options, in order, as in `OPTIONS`

    def add_to(self, commands: Any, name: str) -> None:
        run = getattr(self.module, name.replace("-", "_"))
        usage = "%(prog)s [options] --prompt PROMPT model" if name == "generate" else None
        command = commands.add_parser(name, help=self.help, description=run.__doc__, usage=usage)
        command.set_defaults(run=run)
        command.add_argument("--traceback", action="store_true", help="show where an error comes from")
        command.add_argument("-v", "--verbose", action="count", default=0, help="log what is done; -vv logs more")
        rare = command.add_argument_group("options that few need")
        one_of = None
        for word in self.takes.split():
            option = OPTIONS[word]
            if option.is_one_of and one_of is None:
                one_of = command.add_mutually_exclusive_group(required=True)
            place = one_of if option.is_one_of else rare if word in _RARE else command
            option.add_to(place, word.partition("@")[0])


@dataclass(frozen=True)
class Option:
    """An argument or option."""

    help: str
    settings: Mapping[str, Any]  # others of `add_argument`
    is_one_of: bool = False  # of several, of which exactly one is given

    def add_to(self, command: Any, name: str) -> None:
        settings = {**self.settings}
        if name.startswith("--") and settings.get("type") in _METAVARS:
            settings["metavar"] = _METAVARS[settings["type"]]
        command.add_argument(name, help=self.help, **settings)


_METAVARS: Mapping[object, str] = {
    **dict.fromkeys((count, seed), "N"),
    **dict.fromkeys((number, share), "X"),
    size: "SIZE",
    path: "PATH",
}


def _takes(kind: Callable[[str], object] | None, about: str, **settings: object) -> Option:
    is_told = settings.get("default") is None or "default:" in about
    return Option(about if is_told else f"{about} (default: %(default)s)", {"type": kind, **settings})


def _is(about: str) -> Option:
    return Option(about, {"action": "store_true"})


def _form(name: str, about: str) -> Option:
    return Option(about, {"dest": "form", "action": "store_const", "const": name}, is_one_of=True)


OPTIONS = {
    # A model, and where it goes
    "model": _takes(None, "a checkpoint's folder, a GGUF file, or a hub's model"),
    "--device": _takes(device, "cpu, cuda, cuda:1... (default: an accelerator, if any)"),
    "--dtype": _takes(dtype, "of the weights: bfloat16, float16, float32... (default: as configured)"),
    "--max-memory": _takes(size, "how much of the weights may stay in memory: 8GiB (default: what is free)"),
    "--device-memory": _takes(size, "the same, on an accelerator: 20GiB (default: what is free, less a tenth)"),
    "--revision": _takes(None, "branch, tag or commit on the hub (default: main)"),
    "--trust-remote-code": _is("run code that comes with the model, which can do whatever you can (default: refuse)"),
    # Text
    "--prompt": _takes(words, "a message to the model, or text that it continues", metavar="TEXT", required=True),
    "--system": _takes(words, "instructions before the message (default: none)", metavar="TEXT"),
    "--raw": _is("continue the prompt as it is, without a template"),
    "--max-new-tokens": _takes(count, "of an answer, where a request does not say", default=1024),
    "--max-new-tokens@chat": _takes(count, "of an answer, at most", default=1024),
    "--max-new-tokens@generate": _takes(count, "at most", default=64),
    "--max-new-tokens@batch": _takes(count, "of an answer, where a line does not say", default=256),
    "--prompt-cache": _takes(path, "keep keys and values of prompts there (default: none)"),
    "--prompt-cache-size": _takes(size, "how much that may take", default="10GiB"),
    "--temperature": _takes(number, "of sampling (default: 0, the most likely token)"),
    "--temperature@chat": _takes(number, "of sampling; 0: none (default: as the model's settings say)"),
    "--top-p": _takes(share, "of the most likely tokens to sample among (default: 1)"),
    "--seed": _takes(seed, "of sampling (default: a random one)"),
    "--assistant": _takes(None, "a smaller model that drafts tokens (default: none)", metavar="SMALL"),
    "input": _takes(path, "JSON lines: a custom_id, and a body with messages or a prompt"),
    "output": _takes(path, "where answers are appended, as JSON lines"),
    "--in-flight": _takes(count, "answers that share one reading of the model (default: as many as fit in memory)"),
    # A server
    "--in-flight@serve": _takes(
        count, "answers that share one reading of the model (default: as fit in memory, up to 64)"
    ),
    "--name": _takes(None, "what clients call the model (default: the name of its folder or file)"),
    "--host": _takes(None, "address to listen at", default=serve.LOOPBACK),
    "--port": _takes(port, "to listen at; 0 for a free one", default=8000),
    "--api-key": _takes(None, f"that clients must send (default: ${serve.KEY}, which other users can't see)"),
    "--queue": _takes(count, "answers that may wait", default=256),
    "--grace": _takes(count, "seconds that answers in progress have after SIGTERM", default=30),
    # A plan
    "--batch": _takes(count, "sequences at a time", default=1),
    "--context": _takes(count, "tokens of each", default=1024),
    "--disk-rate": _takes(size, "bytes that the disk reads in a second: 2GB (default: measured)"),
    # What is written
    "target": _takes(path, "the new folder"),
    "adapter": _takes(None, "a folder that peft saved, or an adapter on the hub"),
    "source": _takes(path, "a checkpoint's file, index or folder, a GGUF file, or an offload folder"),
    "--int8": _form("int8", "8-bit integers"),
    "--int4": _form("int4", "4-bit integers"),
    "--fp8": _form("fp8", "8-bit floating-point numbers (E4M3)"),
    "--group-size": _takes(
        count, "columns with a scale, in --int8 and --int4; fewer if it does not divide them", default=128
    ),
    "--dtype@written": _takes(
        dtype, "to write, and to compute in: bfloat16, float32... (default: as it is; of a packed GGUF file bfloat16)"
    ),
    "--max-shard-size": _takes(size, "of the values in a file: 500MB, 2GiB", default="5GB"),
    "--dequantize": _is("of a quantized checkpoint, write the dense one (of a GGUF file always)"),
    # What is looked at
    "path": _takes(path, "a file of tensors, an index, a checkpoint's folder, or an offload folder"),
    "path@cache": _takes(path, "a cache's folder, or a file of TensorCache.to_disk"),
    "folder": _takes(path, "where values would be kept (default: the current folder)", nargs="?", default=Path()),
    "--json": _is("print JSON, for programs"),
}

_RARE = (  # in a group of their own in the help
    *("--dtype", "--device-memory", "--revision", "--trust-remote-code", "--raw"),
    *("--prompt-cache", "--prompt-cache-size", "--assistant"),
    *("--queue", "--grace", "--group-size"),
)
_RUNS = "model --device --dtype --max-memory --device-memory --revision --trust-remote-code"
_KEEPS = "--prompt-cache --prompt-cache-size"
_SAMPLES = "--temperature --top-p --seed"
_WRITES = "--dtype@written --max-shard-size"

COMMANDS = {
    "plan": Command(
        plan,
        "say whether a model runs here, and how fast",
        "model --max-memory --device --batch --context --disk-rate --revision --trust-remote-code --json",
    ),
    "generate": Command(
        models,
        "run a language model from disk",
        f"{_RUNS} --prompt --system --raw --max-new-tokens@generate {_KEEPS} {_SAMPLES} --assistant --json",
    ),
    "chat": Command(
        models,
        "talk with a language model",
        f"{_RUNS} --system --max-new-tokens@chat --temperature@chat --top-p --seed {_KEEPS} --assistant",
    ),
    "batch": Command(
        batch,
        "answer a file of requests",
        f"{_RUNS} input output --max-new-tokens@batch --in-flight {_KEEPS} --json",
    ),
    "serve": Command(
        serve,
        "serve a language model to OpenAI's clients",
        f"{_RUNS} --assistant {_KEEPS} --name --host --port --api-key --max-new-tokens --in-flight@serve --queue "
        "--grace",
    ),
    "quantize": Command(
        files,
        "write a model in 8 or 4 bits",
        f"model target --int8 --int4 --fp8 --group-size {_WRITES} --revision",
    ),
    "merge-lora": Command(files, "merge an adapter into its base", f"model adapter target {_WRITES} --revision"),
    "convert": Command(files, "write a checkpoint in another form", f"source target {_WRITES} --dequantize"),
    "inspect": Command(files, "list the tensors of a checkpoint", "path --json"),
    "verify": Command(files, "check that a checkpoint is complete", "path --json"),
    "cache": Command(rows, "print what a cache of rows holds", "path@cache --json"),
    "doctor": Command(machine, "show what this machine can do", "folder --json"),
}


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add all commands to a parser."""
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.add_to(commands, name)
