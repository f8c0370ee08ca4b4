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
from offload.cli.arguments import count, device, draft, dtype, number, path, port, prompt, seed, share, size


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
    completes: str = ""  # what a shell offers for it: "FILE", "DIRECTORY", or nothing
    is_one_of: bool = False  # of several, of which exactly one is given

    def add_to(self, command: Any, name: str) -> None:
        import shtab

        settings = {**self.settings}
        if name.startswith("--") and settings.get("type") in _METAVARS:
            settings["metavar"] = _METAVARS[settings["type"]]
        action = command.add_argument(name, help=self.help, **settings)
        if self.completes:
            action.complete = getattr(shtab, self.completes)


_METAVARS: Mapping[object, str] = {
    **dict.fromkeys((count, draft, seed), "N"),
    **dict.fromkeys((number, share), "X"),
    size: "SIZE",
    path: "PATH",
    prompt: "TEXT",
}


def _takes(kind: Callable[[str], object] | None, about: str, completes: str = "", **settings: object) -> Option:
    is_told = settings.get("default") is None or "default:" in about
    return Option(about if is_told else f"{about} (default: %(default)s)", {"type": kind, **settings}, completes)


def _is(about: str) -> Option:
    return Option(about, {"action": "store_true"})


def _form(name: str, about: str) -> Option:
    return Option(about, {"dest": "form", "action": "store_const", "const": name}, is_one_of=True)


OPTIONS = {
    # A model, and where it goes
    "model": _takes(None, "a folder with a checkpoint, a GGUF file, or a model on the hub", "DIRECTORY"),
    "--device": _takes(device, "cpu, cuda, cuda:1... (default: an accelerator, if any)"),
    "--dtype": _takes(dtype, "of the weights: bfloat16, float16, float32... (default: as configured)"),
    "--max-memory": _takes(size, "how much of the weights may stay in memory: 8GiB (default: as much as is available)"),
    "--device-memory": _takes(size, "the same, on an accelerator: 20GiB (default: what is free, less a tenth)"),
    "--offload-dir": _takes(path, "for weights that change (default: a temporary one)"),
    "--store": _is("write decoded weights to --offload-dir (default: no)"),
    "--revision": _takes(None, "branch, tag or commit on the hub (default: main)"),
    "--trust-remote-code": _is("run code that comes with the model, which can do whatever you can (default: refuse)"),
    # Text
    "--prompt": _takes(prompt, "a message to the model, or text that it continues", required=True),
    "--system": _takes(prompt, "instructions before the message (default: none)"),
    "--raw": _is("continue the prompt as it is, without a template"),
    "--max-new-tokens": _takes(count, "of an answer, where a request does not say", default=1024),
    "--max-new-tokens@generate": _takes(count, "at most", default=64),
    "--max-new-tokens@batch": _takes(count, "of an answer, where a line does not say", default=256),
    "--prompt-cache": _takes(path, "keep keys and values of prompts there (default: none)"),
    "--prompt-cache-size": _takes(size, "how much that may take", default="10GiB"),
    "--kv-cache": _is("keep keys and values on disk (default: in memory)"),
    "--temperature": _takes(number, "of sampling (default: 0, the most likely token)"),
    "--temperature@chat": _takes(number, "of sampling; 0: none (default: as the model's settings say)"),
    "--top-p": _takes(share, "of the most likely tokens to sample among (default: 1)"),
    "--seed": _takes(seed, "of sampling (default: a random one)"),
    "--assistant": _takes(None, "a smaller model that drafts tokens (default: none)", "DIRECTORY", metavar="SMALL"),
    "--draft": _takes(
        draft,
        "tokens to draft, also from the text (default: auto)",
        default="auto",
    ),
    "input": _takes(path, "JSON lines: custom_id, and messages or a prompt; - for standard input", "FILE"),
    "output": _takes(path, "where answers are appended, as JSON lines", "FILE"),
    "--errors": _takes(path, "for bad lines (default: OUTPUT.errors.jsonl)"),
    "--in-flight": _takes(count, "answers that share one reading of the model (default: as many as fit in memory)"),
    # A server
    "--in-flight@serve": _takes(
        count, "answers that share one reading of the model (default: as fit in memory, up to 64)"
    ),
    "--name": _takes(None, "what clients call the model (default: the name of its folder or file)"),
    "--host": _takes(None, "address to listen at", default=serve.LOOPBACK),
    "--port": _takes(port, "to listen at; 0 for a free one", default=8000),
    "--api-key": _takes(
        None, f"that clients must have; others here see a command line, not ${serve.KEY} (default: that)"
    ),
    "--allow-origin": _takes(
        None, "of pages in browsers, https://chat.example.org (default: none)", action="append", default=[]
    ),
    "--queue": _takes(count, "answers that may wait", default=256),
    "--grace": _takes(count, "seconds that answers in progress have after SIGTERM", default=30),
    # A plan
    "--batch": _takes(count, "sequences at a time", default=1),
    "--context": _takes(count, "tokens of each", default=1024),
    "--disk-rate": _takes(size, "bytes per second: 2GB (default: measured)"),
    # What is written
    "target": _takes(path, "the new folder", "DIRECTORY"),
    "target@export": _takes(path, "the new file, with the suffix .safetensors or .pt"),
    "adapter": _takes(None, "a folder that peft saved, or an adapter on the hub", "DIRECTORY"),
    "source": _takes(path, "a checkpoint's file, index or folder, a GGUF file, or an offload folder", "FILE"),
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
    "--to": _takes(None, "the kind of folder to write", choices=["safetensors", "offload"], default="safetensors"),
    "--dequantize": _is("of a quantized checkpoint, write the dense one (of a GGUF file always)"),
    "--resume": _is("resume a run that was killed"),
    "--resume@convert": _is("resume a run that dequantizes, and was killed"),
    # What is looked at
    "path": _takes(path, "a file of tensors, an index, a checkpoint's folder, or an offload folder", "FILE"),
    "path@cache": _takes(path, "a cache's folder, or a file of TensorCache.to_disk", "FILE"),
    "--columns": _takes(None, "which columns (default: all)", nargs="+", metavar="NAME"),
    "folder": _takes(
        path, "where values would be kept (default: the current folder)", "DIRECTORY", nargs="?", default=Path()
    ),
    "--check": _is("compare tiny models on disk with the same ones in memory, in some 20 s"),
    "--json": _is("print JSON, for programs"),
}

_RARE = (  # in a group of their own in the help
    *("--dtype", "--device-memory", "--offload-dir", "--store", "--revision", "--trust-remote-code", "--raw"),
    *("--prompt-cache", "--prompt-cache-size", "--kv-cache", "--assistant", "--draft"),
    *("--allow-origin", "--queue", "--grace", "--errors", "--group-size"),
)
_RUNS = "model --device --dtype --max-memory --device-memory --offload-dir --store --revision --trust-remote-code"
_KEEPS = "--prompt-cache --prompt-cache-size"
_DRAFTS = "--assistant --draft"
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
        f"{_RUNS} --prompt --system --raw --max-new-tokens@generate {_KEEPS} --kv-cache {_SAMPLES} {_DRAFTS} --json",
    ),
    "chat": Command(
        models,
        "talk with a language model",
        f"{_RUNS} --system --max-new-tokens --temperature@chat --top-p --seed {_KEEPS} {_DRAFTS}",
    ),
    "batch": Command(
        batch,
        "answer a file of requests",
        f"{_RUNS} input output --errors --max-new-tokens@batch --in-flight {_KEEPS} --json",
    ),
    "serve": Command(
        serve,
        "serve a language model to OpenAI's clients",
        f"{_RUNS} {_DRAFTS} {_KEEPS} --name --host --port --api-key --allow-origin --max-new-tokens --in-flight@serve "
        "--queue --grace",
    ),
    "quantize": Command(
        files,
        "write a model in 8 or 4 bits",
        f"model target --int8 --int4 --fp8 --group-size {_WRITES} --revision --resume",
    ),
    "merge-lora": Command(
        files, "merge an adapter into its base", f"model adapter target {_WRITES} --revision --resume"
    ),
    "convert": Command(
        files, "write a checkpoint in another form", f"source target {_WRITES} --to --dequantize --resume@convert"
    ),
    "inspect": Command(files, "list the tensors of a checkpoint", "path --json"),
    "verify": Command(files, "check that a checkpoint is complete", "path --json"),
    "cache info": Command(rows, "print what a cache of rows holds", "path@cache --json"),
    "cache verify": Command(rows, "check that a cache of rows is undamaged", "path@cache --json"),
    "cache export": Command(rows, "write a cache of rows to one file", "path@cache target@export --columns"),
    "doctor": Command(machine, "show what this machine can do", "folder --check --json"),
}


def add_commands(parser: argparse.ArgumentParser) -> Any:
    """Add all commands to a parser; returns argparse's record of them."""
    commands = parser.add_subparsers(metavar="COMMAND")
    of_caches: Any = None
    for name, command in COMMANDS.items():
        if not name.startswith("cache "):
            command.add_to(commands, name)
            continue
        if of_caches is None:
            about = "What a cache of rows holds, whether it is whole, and as one file."
            words = "look at a cache of rows, or write it to one file"
            of_caches = commands.add_parser("cache", help=words, description=about)
            of_caches = of_caches.add_subparsers(required=True, metavar="COMMAND")
        command.add_to(of_caches, name.removeprefix("cache "))
    return commands
