"""`offload inspect`, `convert`, `quantize`, `merge-lora` and `verify`: checkpoints, from file to file.

Always true:
- what is read is never written to; a new folder appears complete
- a killed run of `quantize` goes on when it is called again
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from offload.annotations import Kwargs
from offload.cli import arguments
from offload.cli.models import folder_of_model
from offload.cli.output import cell, console, counted, doing, print_json, say, table

if TYPE_CHECKING:
    from offload.checkpoints.checkpoint import Value


def _how(options: argparse.Namespace, source: Path) -> Kwargs:
    """How a checkpoint is written anew; of a GGUF file in the dtype to compute in, if none is asked for."""
    from offload.checkpoints.checkpoint import open_checkpoint
    from offload.checkpoints.forms.gguf import computing_dtype

    dtype = options.dtype
    if dtype is None and (opened := open_checkpoint(source)).is_gguf:
        dtype = computing_dtype(opened)
    return {"dtype": dtype, "max_shard_size": options.max_shard_size}


def convert(options: argparse.Namespace) -> None:
    """Write a checkpoint anew, as safetensors: in another dtype or other shards, or dense."""
    with doing("importing torch"):
        from offload.checkpoints.conversion import convert_checkpoint

    how = _how(options, options.source)
    convert_checkpoint(options.source, options.target, dequantize=options.dequantize, **how)
    print_written(options.target)


def print_written(target: Path) -> None:
    from rich.filesize import decimal

    from offload.checkpoints.checkpoint import open_checkpoint

    written = open_checkpoint(target)
    files = {file.path for value in written.values() for file in value.files}
    held = f"{counted(len(files), 'file')}, {counted(len(written), 'tensor')}, {decimal(written.nbytes)}"
    say(f"{target}: written ({held})")


def inspect(options: argparse.Namespace) -> None:
    """Print the tensors of a checkpoint or an offload folder as a table."""
    from rich.filesize import decimal

    from offload.checkpoints.checkpoint import open_checkpoint

    source = open_checkpoint(options.path)
    rows = [(name, *_kind_and_shape(value), value.nbytes, _place(value)) for name, value in source.items()]
    if options.json:
        names = ("name", "dtype", "shape", "nbytes", "file")
        print_json({"tensors": [dict(zip(names, row, strict=True)) for row in rows], "nbytes": source.nbytes})
        return
    lines = table("name", "dtype", "shape", "size", "file", footer=True)
    lines.columns[0].footer, lines.columns[3].footer = counted(len(source), "tensor"), decimal(source.nbytes)
    lines.columns[3].justify = "right"
    for name, dtype, shape, nbytes, file in rows:
        lines.add_row(cell(name), cell(dtype), "" if shape is None else str(shape), decimal(nbytes), cell(file))
    console().print(lines)


def verify(options: argparse.Namespace) -> int:
    """Check that a checkpoint, or an offload folder, is complete; print what is wrong."""
    from rich.filesize import decimal

    from offload.checkpoints.verify import verify as verified

    verdict = verified(arguments.existing(options.path))
    code = 0 if verdict.is_whole else 1
    counts = {"files": len(verdict.files), "tensors": len(verdict.tensors), "nbytes": verdict.nbytes}
    if options.json:
        print_json({"path": options.path, "is_whole": verdict.is_whole, **counts, "findings": verdict.findings})
        return code
    for finding in verdict.findings:
        say(f"error: {finding}")
    state = "whole" if verdict.is_whole else counted(len(verdict.findings), "error")
    held = ", ".join([counted(len(verdict.files), "file"), counted(len(verdict.tensors), "tensor")])
    say(f"{options.path}: {state} ({held}, {decimal(verdict.nbytes)})")
    return code


def _place(value: Value) -> str:
    return ", ".join(file.path.name for file in value.files)


def _kind_and_shape(value: Value) -> tuple[str, list[int] | None]:
    from offload.storage.subclasses import layout_from

    if value.layout is not None and value.key in value.file.header.kinds:
        return value.file.header.kinds[value.key], list(value.layout.shape)
    if value.layout is not None:
        return str(value.layout.dtype).removeprefix("torch."), list(value.layout.shape)
    if value.key in value.file.header.unreadable:
        return value.file.header.unreadable[value.key], None
    recipe = value.file.notes["subclass"]
    return str(recipe.get("class")), list(layout_from(recipe).shape)


def quantize(options: argparse.Namespace) -> None:
    """Write a model with its linear layers in 8 or 4 bits, in the format of compressed-tensors, without calibration.

    offload, transformers, vLLM and others load it. One weight at a time is in memory.
    """
    source = folder_of_model(options)
    with doing("importing transformers and compressed-tensors"):
        import compressed_tensors.quantization.quant_scheme  # noqa: F401 - here, as it takes seconds
        import transformers.models.auto  # noqa: F401

        from offload.integrations.compressed_tensors import quantize_checkpoint

    how = {"group_size": options.group_size, **_how(options, source)}
    left = quantize_checkpoint(source, options.target, options.form, **how)
    if left:
        say(
            f"left as they are: {counted(len(left), 'layer')} whose columns do not divide into groups of 32 or more, "
            "or whose experts are stored as one tensor "
            f"({', '.join(left[:3])}{'...' if len(left) > 3 else ''})",
            file=sys.stderr,
        )
    print_written(options.target)


def merge_lora(options: argparse.Namespace) -> None:
    """Write a model with an adapter of peft merged into it: the values of peft's merge_and_unload, bit for bit."""
    source = folder_of_model(options)
    with doing("importing transformers and peft"):
        import peft  # noqa: F401 - here, as it takes seconds
        import transformers.models.auto  # noqa: F401

        from offload.integrations.peft import merge_checkpoint

    merge_checkpoint(source, options.adapter, options.target, **_how(options, source))
    print_written(options.target)
