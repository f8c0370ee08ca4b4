"""`offload plan`: whether a model runs here, and how fast.

Always true:
- no weight is read, and none is downloaded
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from offload.cli.output import cell, console, doing, print_json

if TYPE_CHECKING:
    from offload.planning.estimate import Plan


def plan(options: argparse.Namespace) -> None:
    """Say whether a model runs on this machine, how fast, and in which ways it would run faster."""
    with doing("importing transformers"):
        from offload.planning.estimate import plan as planned

    with doing("measuring the disk and the processor"):
        found = planned(
            options.model,
            max_memory=options.max_memory,
            device=options.device,
            batch=options.batch,
            context=options.context,
            disk_rate=options.disk_rate,
            trust_remote_code=options.trust_remote_code,
            **({"revision": options.revision} if options.revision else {}),
        )
    if options.json:
        print_json(found)
    else:
        _show(found)


def _show(found: Plan) -> None:
    """In colours on a terminal."""
    from rich.text import Text

    out, colour = console(), "green" if found.as_it_is.token_seconds < 1 and found.runs else "yellow"
    out.print(cell(found.answer), style=f"bold {colour}", soft_wrap=True)
    for label, text in found.rows():
        value = cell(text)
        if label == "type" or text.startswith("offload "):
            value.stylize("cyan")
        out.print(Text.assemble((f"  {label:8}", "dim"), value), soft_wrap=True)
