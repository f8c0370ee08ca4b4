"""The picture of the README, drawn from result files: `python -m bench.picture`.

Always true:
- each bar is the median of an arm's rounds in the file named beside it; no arm of a case is left out
- the same files give the same picture, byte for byte
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from statistics import median

from bench.peers import IN_MEMORY, OURS

RESULTS = Path(__file__).parent / "results"
PICTURE = RESULTS / "in-short.svg"
CASES = (
    ("One token of a model 1.5 times the memory it may take", "2026-11-24-capped.json", "capped, 1.5x: a token"),
    (
        "One token of a model of 30 GB, with 24 GiB of memory (one round)",
        "2026-11-24-larger.json",
        "larger, dense: a token",
    ),
    (
        "A batch of a model 3 times the memory, 16 batches in flight (one round)",
        "2026-11-23-batches.json",
        "batches, dense, 32 tokens, 16 in flight: a batch",
    ),
    ("256 random rows of 8 KiB, cold", "2026-11-23-cache.json", "cache, cold: 256 random rows of 8192 B"),
)
NAMES = {IN_MEMORY: "plain transformers", "transformers": "transformers, disk map"}
_WIDTH, _LEFT, _RIGHT, _ROW, _GAP = 480, 160, 62, 19, 22
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#59636e}.title,.ours{fill:#1f2328;font-weight:600}"
    "rect{fill:#9aa4b0}rect.ours{fill:#2563eb}"
    "@media(prefers-color-scheme:dark){text{fill:#9aa4b0}.title,.ours{fill:#f0f3f6}rect{fill:#59636e}"
    "rect.ours{fill:#7aa2ff}}"
)


def main() -> None:
    PICTURE.write_text(picture(), encoding="utf-8")
    print(PICTURE)


def picture() -> str:
    """Three charts, one below the other, half a screen wide."""
    parts: list[str] = []
    height = 0
    for title, file, case in CASES:
        parts.append(f'<text class="title" x="0" y="{height + 14}">{escape(title)}</text>')
        height += _GAP
        for part in _bars(medians(file, case), height):
            parts.append(part)
            height += _ROW
        height += _GAP
    height -= _GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        f'role="img"><style>{_STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def medians(file: str, case: str) -> dict[str, float]:
    """Seconds by arm, shortest first."""
    figures = json.loads((RESULTS / file).read_text(encoding="utf-8"))["figures"]
    values = next(figure["values"] for figure in figures if figure["case"] == case)
    found = {arm: median(rounds) for arm, rounds in values.items() if rounds}
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


def _bars(seconds: dict[str, float], top: int) -> Iterator[str]:
    """A name, a bar and a value for each arm."""
    most = max(seconds.values())
    for number, (arm, value) in enumerate(seconds.items()):
        y, width = top + number * _ROW, value / most * (_WIDTH - _LEFT - _RIGHT)
        kind = ' class="ours"' if arm == OURS else ""
        said = f"{value:.2f} s" if value >= 0.1 else f"{value * 1e3:.3g} ms"
        yield (
            f'<text{kind} x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(NAMES.get(arm, arm))}</text>'
            f'<rect{kind} x="{_LEFT}" y="{y + 3}" width="{max(width, 1):.1f}" height="12"/>'
            f'<text{kind} x="{_LEFT + max(width, 1) + 6:.1f}" y="{y + 13}">{said}</text>'
        )


if __name__ == "__main__":
    main()
