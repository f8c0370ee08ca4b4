"""Measure `offload` against its peers and against the limits of the machine.

Always true:
- everything that is compared is measured in the same run, in turn
- what can't be measured here is listed with the reason
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from bench import (
    batches,
    cache,
    capped,
    cold,
    decode,
    dispatch,
    drafts,
    experts,
    forms,
    generate,
    gguf_files,
    larger,
    larger_batches,
    larger_packed,
    load,
    machine,
    named,
    planned,
    ranks,
    report,
    routed,
    serve,
    small,
    tables,
    update,
)
from bench.models import cache_folder
from bench.peers import OURS
from bench.rounds import Figure
from bench.scale import FULL, TOY, Scale

CASES = {
    "dispatch": dispatch.figures,
    "load": load.figures,
    "decode": decode.figures,
    "generate": generate.figures,
    "forms": forms.figures,
    "gguf": gguf_files.figures,
    "named": named.figures,
    "experts": experts.figures,
    "routed": routed.figures,
    "cold": cold.figures,
    "capped": capped.figures,
    "larger": larger.figures,
    "larger-packed": larger_packed.figures,
    "drafts": drafts.figures,
    "plan": planned.figures,
    "batches": batches.figures,
    "larger-batches": larger_batches.figures,
    "serve": serve.figures,
    "ranks": ranks.figures,
    "update": update.figures,
    "small": small.figures,
    "tables": tables.figures,
    "cache": cache.figures,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if `offload` itself lacks a figure that others have, else 0."""
    chosen = _options().parse_args(arguments)
    scale = TOY if chosen.quick else FULL
    if chosen.rounds:
        scale = replace(scale, rounds=chosen.rounds)
    figures = measured(chosen.only, scale)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(report.table(figures))
    for line in report.reasons(figures):
        console.print(line, markup=False, soft_wrap=True)
    for path in written(figures, scale, chosen.out):
        console.print(str(path), markup=False, soft_wrap=True)
    return int(any(figure.values and OURS not in figure.values for figure in figures))


def measured(cases: Sequence[str], scale: Scale) -> list[Figure]:
    """The figures of some cases. Their files go to the cache folder, and are removed."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    figures = []
    with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
        for case in cases:
            with console.status(f"measuring: {case}"):
                figures += figures_or_reason(case, scale, Path(scratch))
    return figures


def figures_or_reason(case: str, scale: Scale, scratch: Path) -> list[Figure]:
    """The figures of a case, or one line that says why it can't be measured on this machine."""
    try:
        return CASES[case](scale, scratch)
    except (OSError, RuntimeError) as error:
        return [Figure(case, "", {}, [], "", {"no arm": str(error)})]


def written(figures: Sequence[Figure], scale: Scale, out: Path) -> list[Path]:
    """The files to which the figures were written."""
    stem = f"{machine.today()}-{machine.name()}-{scale.name}"
    facts = {"scale": scale.name, "rounds": scale.rounds, **machine.facts(cache_folder())}
    facts["bytes a second"] = machine.rates(scale.model())
    out.mkdir(parents=True, exist_ok=True)
    paths = [report.write_json(figures, facts, out / f"{stem}.json")]
    for number, figure in enumerate(figure for figure in figures if figure.traces):
        paths.append(report.draw_memory(figure.traces, figure.case, out / f"{stem}-memory-{number + 1}.png"))
    return paths


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m bench", description=__doc__.splitlines()[0])
    options.add_argument("--quick", action="store_true", help="toy sizes: seconds, and no claims")
    options.add_argument("--only", type=_cases, default=list(CASES), help=f"some of {','.join(CASES)}")
    options.add_argument("--rounds", type=int, help="how often each arm runs")
    options.add_argument("--out", type=Path, default=cache_folder(), help="where the JSON and the charts go")
    return options


def _cases(text: str) -> list[str]:
    unknown = sorted(set(text.split(",")) - set(CASES))
    if unknown:
        raise argparse.ArgumentTypeError(f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}")
    return text.split(",")


if __name__ == "__main__":
    sys.exit(main())
