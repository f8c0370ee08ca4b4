"""Figures as a table, as JSON, and as charts.

Always true:
- every arm that should be measured is listed: with a figure, or with the reason why there is none
- higher ratios are better: 2 is twice as good as the peer, 1 is the limit
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.filesize import decimal
from rich.table import Table

from bench.peers import IN_MEMORY, OURS
from bench.rounds import Figure, Trace

RESULTS = Path(__file__).parent / "results"
NAMES = {IN_MEMORY: "plain transformers", "transformers": "transformers, disk map"}
COLUMNS = ("case", OURS, "best peer", "limit", "ratio to peer", "ratio to limit")
NONE = "-"


def table(figures: Iterable[Figure]) -> Table:
    """One line per figure."""
    made = Table(*COLUMNS, box=box.SIMPLE)
    made.columns[0].no_wrap = True  # a case can be looked for
    for figure in figures:
        made.add_row(*row(figure))
    return made


def row(figure: Figure) -> tuple[str, ...]:
    """The cells of a line."""
    peer = figure.best_peer
    return (
        figure.case,
        _value(figure.values.get(OURS, []), figure.unit),
        f"{_value(figure.values[peer], figure.unit)} ({peer})" if peer else NONE,
        f"{_value(figure.limit, figure.unit)} ({figure.limit_name})" if figure.limit else NONE,
        _ratio(figure.ratio_to_peer),
        _ratio(figure.ratio_to_limit),
    )


def reasons(figures: Iterable[Figure]) -> list[str]:
    """A line for each arm without figures, with the cases."""
    cases: dict[tuple[str, str], list[str]] = {}
    for figure in figures:
        for arm, reason in figure.missing.items():
            cases.setdefault((arm, reason), []).append(figure.case)
    return [f"{arm}: no figure in {'; '.join(where)}: {reason}" for (arm, reason), where in cases.items()]


def write_json(figures: Iterable[Figure], facts: Mapping[str, object], path: Path) -> Path:
    """All values of all rounds, the ratios, and facts about the machine."""
    path.write_text(
        json.dumps({**facts, "figures": [as_json(figure) for figure in figures]}, indent=1) + "\n", encoding="utf-8"
    )
    return path


def as_json(figure: Figure) -> dict[str, Any]:
    """A figure with its ratios, without its traces."""
    ratios = {"ratio to peer": figure.ratio_to_peer, "ratio to limit": figure.ratio_to_limit}
    return {key: value for key, value in asdict(figure).items() if key != "traces"} | ratios


def draw_memory(traces: Mapping[str, Trace], title: str, path: Path) -> Path:
    """Anonymous memory over time, one line per arm."""
    picture, axes = _pyplot().subplots(figsize=(8, 4), layout="constrained")
    for arm, trace in traces.items():
        axes.plot(*zip(*[(second, used / 1e6) for second, used in trace], strict=True), label=arm)
    axes.set(xlabel="seconds", ylabel="anonymous memory, MB", title=title)
    axes.legend()
    return _save(picture, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def _save(picture: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=120)
    _pyplot().close(picture)
    return path


def _value(values: Sequence[float], unit: str) -> str:
    if not values:
        return NONE
    middle = median(values)
    if unit == "B":
        return decimal(int(middle))
    return f"{middle * 1e3:.3g} ms" if unit == "s" and middle < 1 else f"{middle:.3g} {unit}"


def _ratio(ratio: float | None) -> str:
    return NONE if ratio is None else f"{ratio:.2f}"
