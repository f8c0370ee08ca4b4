"""The command `offload`.

Always true:
- what was asked for goes to standard output, everything else to standard error
- an error that a user can mend is one line and exit code 1, as is what `verify` finds; a wrong command line is exit
  code 2
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.errors import CheckpointError, OffloadError

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

    from offload.cache.table import TensorCache
    from offload.checkpoint import Checkpoint, StoredValue
    from offload.doctor import Diagnosis
    from offload.report import Recording
    from offload.verify import Verdict

_EXPORTS = ("safetensors", "parquet", "npy")
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; gives the exit code."""
    options = parser().parse_args(argv)
    try:
        code: int | None = options.run(options)
    except (OffloadError, RuntimeError, ValueError, OSError) as error:
        if options.traceback:
            raise
        print(f"offload: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return code or 0


def generate(options: argparse.Namespace) -> None:
    """Print what a language model on disk makes of a prompt, token by token."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from offload.device_map import ON_DISK
    from offload.integrations.hub import folder_of
    from offload.integrations.transformers import from_pretrained
    from offload.report import plot_memory

    if not sys.stderr.isatty():
        disable_progress_bar()
    folder = folder_of(options.model, revision=options.revision) if options.revision else folder_of(options.model)
    tokenizer = _tokenizer(folder)
    device_map = f"{ON_DISK}:{options.device}" if options.device else ON_DISK
    model = from_pretrained(folder, device_map=device_map, offload_dir=options.offload_dir, dtype=options.dtype)
    inputs = tokenizer(options.prompt, return_tensors="pt").to(model.device)
    watched = plot_memory(options.report, model, title=f"offload generate {options.model}") if options.report else None
    with watched or nullcontext() as recording, torch.inference_mode():
        model.generate(
            **inputs,
            max_new_tokens=options.max_new_tokens,
            do_sample=options.sample,
            streamer=_streamer(tokenizer, recording),
        )


def _streamer(tokenizer: Any, recording: Recording | None) -> Any:
    """Prints tokens as they come, and marks each in the recording."""
    from transformers import TextStreamer

    class Streamer(TextStreamer):  # type: ignore[misc]
        def put(self, value: torch.Tensor) -> None:
            is_prompt = self.next_tokens_are_prompt
            super().put(value)
            if recording is not None and not is_prompt:
                recording.mark()

    return Streamer(tokenizer, skip_prompt=True)


def convert(options: argparse.Namespace) -> None:
    """Write a checkpoint anew: in another dtype, in other shards, as safetensors, or as an offload folder."""
    from offload.conversion import convert_checkpoint

    convert_checkpoint(
        options.source,
        options.target,
        dtype=options.dtype,
        max_shard_size=options.max_shard_size,
        to_offload_folder=options.to == "offload",
    )


def inspect(options: argparse.Namespace) -> None:
    """Print the tensors of a checkpoint or an offload folder as a table."""
    from offload.checkpoint import open_checkpoint

    _console().print(_table(open_checkpoint(options.path)))


def verify(options: argparse.Namespace) -> int:
    """Look whether a checkpoint, or an offload folder, is whole; print what is wrong as a table."""
    from rich.filesize import decimal

    from offload.verify import verify as verified

    verdict = verified(options.path)
    if verdict.findings:
        _console().print(_findings(verdict))
    errors = sum(finding.is_error for finding in verdict.findings)
    state = "whole" if verdict.is_whole else f"{errors} error{'s' * (errors > 1)}"
    print(f"{options.path}: {state} ({len(verdict.files)} files, {verdict.tensors} tensors, {decimal(verdict.nbytes)})")
    return 0 if verdict.is_whole else 1


def doctor(options: argparse.Namespace) -> None:
    """Say what this machine can do: versions, devices, memory, and the speed of a folder's disk."""
    from offload.doctor import diagnose

    _console().print(_diagnosis(diagnose(options.folder)))


def _diagnosis(found: Diagnosis) -> Table:
    from rich import box
    from rich.filesize import decimal
    from rich.table import Table

    disk = found.disk
    rates = {"write, synced": disk.writes, "read, cold": disk.reads, "read with O_DIRECT": disk.reads_direct}
    rows = {
        **found.versions,
        **{device: decimal(size) for device, size in found.devices.items()},
        "memory": decimal(found.memory),
        "available now": decimal(found.available),
        **({} if found.limit is None else {"left in the control group": decimal(found.limit)}),
        "may stay in memory (max_memory)": decimal(found.budget),
        "read ahead": decimal(found.read_ahead),
        f"free in {disk.folder}": decimal(disk.free),
        **{label: "not possible here" if rate is None else f"{decimal(int(rate))}/s" for label, rate in rates.items()},
    }
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    for label, value in rows.items():
        table.add_row(label, value)
    return table


def cache_info(options: argparse.Namespace) -> None:
    """Print what a cache of rows holds."""
    from rich.filesize import decimal
    from rich.text import Text

    cache = _opened_cache(options.path)
    if options.json:
        print(json.dumps(_cache_as_json(cache, options.path)))
        return
    table = _bare_table("column", "kind", "dtype", "a row", "filled")
    for name, column in cache.columns.items():
        dtype = str(column.dtype).removeprefix("torch.") if column.kind in ("tensor", "ragged") else ""
        filled = len(cache) - len(cache.missing_rows([name]))
        table.add_row(Text(name), column.kind, dtype, column.shape_text if dtype else "", str(filled))
    _console().print(table)
    for key, value in cache.metadata.items():
        print(f"{key}: {json.dumps(value, ensure_ascii=False)}")
    print(f"{options.path}: {len(cache)} rows, {cache.num_filled} filled, {decimal(cache.nbytes)}")


def cache_verify(options: argparse.Namespace) -> int:
    """Look whether a cache of rows is whole; rows that are not filled are no error."""
    from rich.text import Text

    from offload.cache.verify import row_findings

    cache = _opened_cache(options.path)
    found = row_findings(cache)
    if options.json:
        said = [{"column": finding.column, "row": finding.row, "what": finding.what} for finding in found]
        print(json.dumps({**_cache_as_json(cache, options.path), "is_whole": not found, "findings": said}))
        return 1 if found else 0
    if found:
        table = _bare_table("column", "row", "what")
        for finding in found:
            table.add_row(Text(finding.column), str(finding.row), Text(finding.what))
        _console().print(table)
    state = f"{len(found)} error{'s' * (len(found) > 1)}" if found else "whole"
    print(f"{options.path}: {state} ({len(cache)} rows, {cache.num_filled} filled)")
    return 1 if found else 0


def cache_export(options: argparse.Namespace) -> None:
    """Write a cache of rows as safetensors, Parquet or .npy files."""
    from offload.integrations.export import export

    form = options.to or options.target.suffix.removeprefix(".") or "npy"
    if form not in _EXPORTS:
        raise ValueError(f"{options.target}: give --to, as its suffix names no format: {', '.join(_EXPORTS)}")
    export(_opened_cache(options.path), options.target, form, options.columns)


def _opened_cache(path: Path) -> TensorCache:
    from offload.cache.table import TensorCache

    return TensorCache.from_disk(path)


def _cache_as_json(cache: TensorCache, path: Path) -> dict[str, Any]:
    columns = {
        name: {**column.to_json(), "filled": len(cache) - len(cache.missing_rows([name]))}
        for name, column in cache.columns.items()
    }
    counts = {"rows": len(cache), "filled": cache.num_filled, "nbytes": cache.nbytes}
    return {"path": str(path), **counts, "columns": columns, "metadata": dict(cache.metadata)}


def _bare_table(*names: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def _findings(verdict: Verdict) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    table.add_column("file", overflow="fold")
    table.add_column("what", overflow="fold")
    for finding in verdict.findings:
        table.add_row("error" if finding.is_error else "warning", finding.path.name, Text(finding.what))
    return table


def _console() -> Console:
    """Of lines that are not cut, where nobody looks on."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=10_000)


def _table(source: Checkpoint) -> Table:
    from rich import box
    from rich.filesize import decimal
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_footer=True)
    table.add_column("name", f"{len(source)} tensors", overflow="fold")
    table.add_column("dtype")
    table.add_column("shape")
    table.add_column("size", decimal(source.nbytes), justify="right")
    table.add_column("file", overflow="fold")
    for name, value in source.items():
        table.add_row(name, *_kind_and_shape(value), decimal(value.nbytes), value.file.path.name)
    return table


def _kind_and_shape(value: StoredValue) -> tuple[str, str]:
    from offload.storage.subclasses import layout_from

    if value.layout is not None:
        return str(value.layout.dtype).removeprefix("torch."), str(list(value.layout.shape))
    if value.key in value.file.header.unreadable:
        return value.file.header.unreadable[value.key], ""
    recipe = value.file.notes["subclass"]
    return str(recipe.get("class")), str(list(layout_from(recipe).shape))


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{folder} has no tokenizer that transformers can load: {str(error).splitlines()[0]}"
        ) from error


def parser() -> argparse.ArgumentParser:
    """Of the whole command line."""
    made = argparse.ArgumentParser(prog="offload", description="PyTorch tensors that live on disk.")
    made.add_argument("--traceback", action="store_true", help="show where an error comes from")
    commands = made.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("generate", help="run a language model from disk", description=generate.__doc__)
    command.add_argument("model", help="a folder with a checkpoint, or a model on the hub")
    command.add_argument("--prompt", required=True)
    command.add_argument("--max-new-tokens", type=_positive, default=64, metavar="N", help="64 if not given")
    command.add_argument("--device", help="where to compute: cpu, cuda, cuda:1... (the accelerator, if there is one)")
    command.add_argument("--dtype", help="convert the weights to it, on disk (bfloat16, float32...)")
    command.add_argument("--offload-dir", type=Path, help="folder for converted weights (a temporary one)")
    command.add_argument("--revision", help="branch, tag or commit on the hub")
    command.add_argument("--sample", action="store_true", help="sample instead of taking the likeliest token")
    command.add_argument(
        "--report", type=Path, metavar="FILE", help="write a page of memory, reads and time: report.html"
    )
    command.set_defaults(run=generate)

    command = commands.add_parser("convert", help="write a checkpoint in another form", description=convert.__doc__)
    command.add_argument("source", type=Path, help="a checkpoint's file, index or folder, or an offload folder")
    command.add_argument("target", type=Path, help="the new folder")
    command.add_argument("--dtype", type=_dtype, help="of the floating-point values: bf16, fp16, fp32, float64...")
    command.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="bytes in a file, as 500MB (5GB)")
    command.add_argument("--to", choices=["safetensors", "offload"], default="safetensors", help="(safetensors)")
    command.set_defaults(run=convert)

    command = commands.add_parser("inspect", help="list the tensors of a checkpoint", description=inspect.__doc__)
    command.add_argument(
        "path", type=Path, help="a .safetensors or .bin file, an index, a checkpoint's folder, an offload folder"
    )
    command.set_defaults(run=inspect)

    command = commands.add_parser("verify", help="look whether a checkpoint is whole", description=verify.__doc__)
    command.add_argument("path", type=Path, help="as for inspect; of a folder, all that is in it")
    command.set_defaults(run=verify)

    command = commands.add_parser("doctor", help="say what this machine can do", description=doctor.__doc__)
    command.add_argument("folder", type=Path, nargs="?", default=Path(), help="where values would be kept (here)")
    command.set_defaults(run=doctor)

    _add_cache_commands(commands)
    return made


def _add_cache_commands(commands: Any) -> None:
    about = "what a cache of rows holds, whether it is whole, and as files of other kinds"
    group = commands.add_parser("cache", help="look at a cache of rows, or export it", description=about)
    kinds = group.add_subparsers(required=True, metavar="COMMAND")
    acts = {"info": cache_info, "verify": cache_verify, "export": cache_export}
    for name, act in acts.items():
        command = kinds.add_parser(name, help=act.__doc__, description=act.__doc__)
        command.add_argument("path", type=Path, help="a cache's folder, or a file of TensorCache.to_disk")
        command.set_defaults(run=act)
        if name != "export":
            command.add_argument("--json", action="store_true", help="print it as JSON")
    command.add_argument("target", type=Path, help="the new file; a folder for npy, which has a file a column")
    command.add_argument("--to", choices=_EXPORTS, help="(told by the target's suffix)")
    command.add_argument("--columns", nargs="+", metavar="NAME", help="some of the columns")


def _dtype(text: str) -> torch.dtype:
    from offload.storage.dtypes import dtype_named

    found = dtype_named(_SHORT_DTYPES.get(text, text.removeprefix("torch.")))
    if found is None or not found.is_floating_point:
        raise argparse.ArgumentTypeError(f"{text!r} is no floating-point dtype: bf16, fp16, fp32, float64...")
    return found


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


if __name__ == "__main__":
    sys.exit(main())
