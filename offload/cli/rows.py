"""`offload cache`: caches of rows.

Always true:
- a cache is only read
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.cli import arguments
from offload.cli.output import cell, console, counted, print_json, say, table
from offload.errors import ArgumentError, OffloadError

if TYPE_CHECKING:
    from offload.cache.table import TensorCache

_STEP = 1024  # rows checked at a time


def info(options: argparse.Namespace) -> None:
    """Print what a cache of rows holds."""
    from rich.filesize import decimal

    cache = _opened(options.path)
    if options.json:
        print_json(_as_json(cache, options.path))
        return
    made = table("column", "kind", "dtype", "row", "filled")
    for name, column in cache.schema.items():
        dtype = str(column.dtype).removeprefix("torch.") if column.kind in ("tensor", "ragged") else ""
        filled = len(cache) - len(cache.missing_rows([name]))
        made.add_row(cell(name), column.kind, dtype, column.shape_text if dtype else "", str(filled))
    console().print(made)
    for key, value in cache.metadata.items():
        say(f"{key}: {json.dumps(value, ensure_ascii=False)}")
    say(f"{options.path}: {len(cache)} rows, {cache.num_filled} filled, {decimal(cache.nbytes)}")


def verify(options: argparse.Namespace) -> int:
    """Check that a cache of rows is undamaged; rows that are not filled are not an error."""
    cache = _opened(options.path)
    found = _findings(cache)
    if options.json:
        print_json({**_as_json(cache, options.path), "is_whole": not found, "findings": found})
        return 1 if found else 0
    if found:
        made = table("column", "row", "what")
        for finding in found:
            made.add_row(cell(finding["column"]), str(finding["row"]), cell(finding["what"]))
        console().print(made)
    state = counted(len(found), "error") if found else "whole"
    say(f"{options.path}: {state} ({len(cache)} rows, {cache.num_filled} filled)")
    return 1 if found else 0


def _findings(cache: TensorCache) -> list[dict[str, Any]]:
    """In each chunk of rows that are read together, the first that can't be read; opening has checked all else."""
    from offload.progress import progress

    names = [name for name, column in cache.schema.items() if column.kind != "tensor"]
    steps = [(name, start) for name in names for start in range(0, len(cache), _STEP)]
    found = (_first(cache, name, start, min(start + _STEP, len(cache))) for name, start in progress(steps, "rows"))
    return [finding for finding in found if finding]


def _first(cache: TensorCache, name: str, start: int, end: int) -> dict[str, Any] | None:
    try:
        cache.get(slice(start, end), columns=[name], device="cpu", missing="zeros")
    except OffloadError as error:
        if end - start == 1:
            return {"column": name, "row": start, "what": str(error)}
        middle = (start + end) // 2
        return _first(cache, name, start, middle) or _first(cache, name, middle, end)
    return None


def export(options: argparse.Namespace) -> None:
    """Write a cache of rows to one file of safetensors or of torch.save."""
    from offload.checkpoints.checkpoint import PICKLES

    if options.target.suffix not in (suffixes := (".safetensors", *PICKLES)):
        raise ArgumentError(
            f"{options.target}: give the new file one of the suffixes {', '.join(suffixes)}. Parquet and .npy are "
            "on the page 'Rows for other tools'"
        )
    cache = _opened(options.path)
    cache.to_disk(options.target, options.columns)
    held = f"{counted(len(cache), 'row')}, {counted(len(options.columns or cache.schema), 'column')}"
    say(f"{options.target}: written ({held})")


def _opened(path: Path) -> TensorCache:
    from offload.cache.table import TensorCache

    return TensorCache.from_disk(arguments.existing(path))


def _as_json(cache: TensorCache, path: Path) -> dict[str, Any]:
    columns = {
        name: {**column.to_json(), "filled": len(cache) - len(cache.missing_rows([name]))}
        for name, column in cache.schema.items()
    }
    counts = {"rows": len(cache), "filled": cache.num_filled, "nbytes": cache.nbytes}
    return {"path": str(path), **counts, "columns": columns, "metadata": dict(cache.metadata)}
