"""Charts as SVG, in a self-contained page.

Always true:
- a page loads no font, script or picture
- colours follow the reader's light or dark theme
- text from outside is escaped
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 760, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 12, 12, 34
_BAR = 20  # height of a horizontal bar, with its gap
_TICKS = 5

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """A named line; with steps, a value holds until the next one."""

    label: str
    points: Points
    steps: bool = False


@dataclass(frozen=True)
class Section:
    """A chart with a heading and a sentence about it."""

    heading: str
    text: str
    chart: str


def line_chart(
    lines: Sequence[Line], *, unit: Callable[[float], str], axis: str = "s", marks: Iterable[float] = ()
) -> str:
    """Lines on axes that start at zero.

    Args:
        lines: at least one, each with at least one point.
        unit: formats a value.
        axis: the unit of the horizontal axis.
        marks: positions on it where something happened.
    """
    last = max(x for line in lines for x, _ in line.points) or 1.0
    top = max(y for line in lines for _, y in line.points) or 1.0
    steps = _round_steps(top)
    top = steps[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + x / last * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - y / top * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_grid(y, unit(y), at(0, y)[1]) for y in steps]
    parts += [_along(x, axis, at(x, 0)[0]) for x in _round_steps(last) if x <= last]
    parts += [f'<path class="mark" d="M{at(x, 0)[0]:.1f} {_TOP}V{_HEIGHT - _BOTTOM}"/>' for x in marks]
    parts += [_path(line, number, at) for number, line in enumerate(lines)]
    legend = "".join(
        f'<span class="key c{number}">{escape(line.label)}</span>' for number, line in enumerate(lines) if line.label
    )
    return f'<p class="legend">{legend}</p>{_svg(_HEIGHT, parts)}'


def bar_chart(
    bars: Sequence[tuple[str, float]], *, unit: Callable[[float], str], outstanding: str | None = None
) -> str:
    """Horizontal bars, one below the other, each with its name and value.

    Args:
        bars: name and value.
        unit: formats a value.
        outstanding: the name of the highlighted bar; None for none.
    """
    most = max((value for _, value in bars), default=0) or 1.0
    left, right = 230, 90
    parts = []
    for number, (label, value) in enumerate(bars):
        y = number * _BAR
        width = value / most * (_WIDTH - left - right)
        colour = "c0" if outstanding in (None, label) else "behind"
        parts.append(
            f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(_short(label))}</text>'
            f'<rect class="{colour}" x="{left}" y="{y + 3}" width="{width:.1f}" height="{_BAR - 6}">'
            f"<title>{escape(label)}: {escape(unit(value))}</title></rect>"
            f'<text x="{left + width + 6:.1f}" y="{y + 14}">{escape(unit(value))}</text>'
        )
    return _svg(max(len(bars), 1) * _BAR, parts)


def page(title: str, facts: Sequence[tuple[str, str]], sections: Iterable[Section]) -> str:
    """A complete HTML page."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    body = "".join(
        f"<section><h2>{escape(one.heading)}</h2><p>{escape(one.text)}</p>{one.chart}</section>" for one in sections
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{_STYLE}</style></head>'
        f"<body><main><h1>{escape(title)}</h1><table>{rows}</table>{body}</main></body></html>\n"
    )


def _svg(height: int, parts: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(parts)}</svg>'


def _grid(value: float, label: str, y: float) -> str:
    return (
        f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
        f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(label) if value else "0"}</text>'
    )


def _along(value: float, unit: str, x: float) -> str:
    label = escape(f"{value:g} {unit}".strip())
    return f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{label}</text>'


def _path(line: Line, number: int, at: Callable[[float, float], tuple[float, float]]) -> str:
    drawn = ""
    for x, y in line.points:
        across, down = at(x, y)
        drawn += (
            f"H{across:.1f}V{down:.1f}" if line.steps and drawn else f"{'L' if drawn else 'M'}{across:.1f} {down:.1f}"
        )
    return f'<path class="line c{number}" d="{drawn}"><title>{escape(line.label)}</title></path>'


def _round_steps(most: float) -> list[float]:
    """About five round numbers from 0 to at least `most`."""
    magnitude = 10.0 ** int(f"{most / _TICKS:e}".partition("e")[2])
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude * _TICKS >= most)
    count = next(count for count in range(1, _TICKS + 1) if count * step >= most * (1 - 1e-9))
    return [round(number * step, 12) for number in range(count + 1)]


def _short(label: str, most: int = 34) -> str:
    return label if len(label) <= most else f"…{label[1 - most :]}"


_STYLE = """
:root{color-scheme:light dark}
:root{--ink:#1d2430;--paper:#fff;--faint:#8a93a3;--rule:#e3e6eb;--a:#2563eb;--b:#d97706;--c:#059669}
@media(prefers-color-scheme:dark){
:root{--ink:#e6e9ef;--paper:#14171d;--faint:#8a93a3;--rule:#2c313b;--a:#7aa2ff;--b:#f0a94a;--c:#4fc79a}}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:800px;margin:0 auto;padding:24px 16px}
h1{font-size:22px}h2{font-size:17px;margin:28px 0 0}p{margin:4px 0}
th{text-align:left;font-weight:normal;color:var(--faint);padding:1px 16px 1px 0}td{font-variant-numeric:tabular-nums}
svg{width:100%;height:auto;display:block}svg text{font-size:12px;fill:var(--faint)}
.grid{stroke:var(--rule)}.mark{stroke:var(--faint);stroke-dasharray:2 3;opacity:.5}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round}
.line.c0{stroke:var(--a)}.line.c1{stroke:var(--b)}.line.c2{stroke:var(--c)}rect.c0{fill:var(--a)}
.key{margin-right:18px}
.key::before{content:"";display:inline-block;width:14px;height:3px;margin:0 6px 4px 0;background:currentColor}
.key.c0{color:var(--a)}.key.c1{color:var(--b)}.key.c2{color:var(--c)}
""".replace("\n", "")
