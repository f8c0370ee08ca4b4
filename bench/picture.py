"""The picture of the README, drawn from result files: `python -m bench.picture`.

Always true:
- each bar is the median of an arm's rounds in the file named beside it; no arm of a case is left out
- the same files give the same picture, byte for byte
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.peers import IN_MEMORY, OURS

RESULTS = Path(__file__).parent / "results"
PICTURE = RESULTS / "in-short.svg"
CASES = (
    ("One token of a model 1.5 times the memory it may take", "2026-11-27-capped.json", "capped, 1.5x: a token"),
    (
        "One token of a model of 30 GB, with 24 GiB of memory",
        "2026-11-27-larger.json",
        "larger, dense: a token",
    ),
    (
        "A batch of a model 3 times the memory, 16 batches in flight",
        "2026-11-27-batches.json",
        "batches, dense, 32 tokens, 16 in flight: a batch",
    ),
    ("256 random rows of 8 KiB, cold", "2026-11-27-cache.json", "cache, cold: 256 random rows of 8192 B"),
)
NAMES = {IN_MEMORY: "plain transformers", "transformers": "transformers, disk map"}
_WIDTH, _NAMES, _ROW, _TITLE = 6.6, 2.0, 0.24, 0.4  # inches: the picture, its column of names, a bar, a title
_INK, _OURS, _PEERS = "#7d8590", "#3b82f6", "#9aa4b0"  # visible on white and on black


def main() -> None:
    PICTURE.write_text(picture(), encoding="utf-8")
    print(PICTURE)


def picture() -> str:
    """The charts as SVG, with letters as outlines, so that no font is needed."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "offload"}):
        drawn().savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return file.getvalue()


def drawn() -> Figure:
    """A chart per case, one below the other."""
    charts = {title: medians(file, case) for title, file, case in CASES}
    height = sum(_TITLE + _ROW * len(seconds) for seconds in charts.values())
    figure = Figure(figsize=(_WIDTH, height))
    top = height
    for title, seconds in charts.items():
        figure.text(0.005, (top - 0.25) / height, title, color=_INK, weight="bold")
        rows = _ROW * len(seconds)
        top -= _TITLE + rows
        _bars(figure.add_axes((_NAMES / _WIDTH, top / height, 1 - _NAMES / _WIDTH, rows / height)), seconds)
    return figure


def medians(file: str, case: str) -> dict[str, float]:
    """Seconds by arm, shortest first."""
    figures = json.loads((RESULTS / file).read_text(encoding="utf-8"))["figures"]
    values = next(figure["values"] for figure in figures if figure["case"] == case)
    found = {arm: median(rounds) for arm, rounds in values.items() if rounds}
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


def _bars(axes: Axes, seconds: Mapping[str, float]) -> None:
    """A name, a bar and a value for each arm."""
    colours = [_OURS if arm == OURS else _PEERS for arm in seconds]
    bars = axes.barh(range(len(seconds)), list(seconds.values()), color=colours, height=0.6)
    labels = [f"{value:.2f} s" if value >= 0.1 else f"{value * 1e3:.3g} ms" for value in seconds.values()]
    values = axes.bar_label(bars, labels, padding=4)
    axes.set_yticks(range(len(seconds)), [NAMES.get(arm, arm) for arm in seconds])
    for arm, *texts in zip(seconds, values, axes.get_yticklabels(), strict=True):
        for text in texts:
            text.set(color=_OURS if arm == OURS else _INK, weight="bold" if arm == OURS else "normal")
    axes.set_xlim(0, 1.18 * max(seconds.values()))  # a value stands beside the longest bar
    axes.set_ylim(len(seconds) - 0.5, -0.5)
    axes.spines[:].set_visible(False)
    axes.xaxis.set_visible(False)
    axes.tick_params(length=0)


if __name__ == "__main__":
    main()
