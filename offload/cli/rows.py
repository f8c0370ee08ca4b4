"""`offload cache`: what a cache of rows holds.

Always true:
- a cache is only read
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from offload.cli import arguments
from offload.cli.output import cell, console, print_json, say, table

if TYPE_CHECKING:
    from offload.cache.table import TensorCache


def cache(options: argparse.Namespace) -> None:
    """Print what a cache of rows holds."""
    from rich.filesize import decimal

    from offload.cache.table import TensorCache

    rows = TensorCache.from_disk(arguments.existing(options.path))
    if options.json:
        columns = {name: {**column.to_json(), "filled": _filled(rows, name)} for name, column in rows.schema.items()}
        counts = {"rows": len(rows), "filled": rows.num_filled, "nbytes": rows.nbytes}
        print_json({"path": str(options.path), **counts, "columns": columns, "metadata": dict(rows.metadata)})
        return
    lines = table("column", "kind", "dtype", "row", "filled")
    for name, column in rows.schema.items():
        dtype = str(column.dtype).removeprefix("torch.") if column.kind in ("tensor", "ragged") else ""
        lines.add_row(cell(name), column.kind, dtype, column.shape_text if dtype else "", str(_filled(rows, name)))
    console().print(lines)
    for key, value in rows.metadata.items():
        say(f"{key}: {json.dumps(value, ensure_ascii=False)}")
    say(f"{options.path}: {len(rows)} rows, {rows.num_filled} filled, {decimal(rows.nbytes)}")


def _filled(rows: TensorCache, name: str) -> int:
    return len(rows) - len(rows.missing_rows([name]))
