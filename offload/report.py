"""Memory and disk usage while a block runs, as a page.

Always true:
- watching costs a few system calls every few hundredths of a second, and nothing in the ops
- the page is written when the block ends, even with an exception; it replaces only an earlier page of its own kind
- the page is self-contained: its charts, which matplotlib draws, are inside
"""

from __future__ import annotations

import base64
import io
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from rich.filesize import decimal
from torch import nn

from offload.memory import anonymous_bytes, mapped_bytes
from offload.prefetch.engine import counts
from offload.prefetch.value import page_state_of
from offload.storage.reasons import writing
from offload.storage.regular import absolute
from offload.storage.replacing import create_folder, put_file
from offload.storage.threads import Worker
from offload.storage.write import refuse_foreign
from offload.tensor.locals import local_of
from offload.tensor.recipes import stored_in
from offload.tensor.views import handle_of
from offload.tensor.wrapper import is_offloaded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["memory_report"]

_EVERY = 0.02  # seconds between samples
_MOST = 4000  # samples to keep; beyond that, every second one is dropped
_MOST_BARS = 40
_KIND = '<!doctype html><html lang="en"><head><meta charset="utf-8">'
_INK, _COLOURS = "#7d8590", ("#3b82f6", "#d97706", "#059669")  # visible on white and on black
_STYLE = (
    ":root{color-scheme:light dark;--ink:#1d2430;--paper:#fff}"
    "@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--paper:#14171d}}"
    "body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}"
    "main{max-width:800px;margin:0 auto;padding:24px 16px}h1{font-size:22px}h2{font-size:17px;margin:28px 0 0}"
    "p{margin:4px 0}th{text-align:left;font-weight:normal;padding:1px 16px 1px 0}img,.waits,i{width:100%}"
    ".bar{width:50%}i{display:block;height:12px;background:#3b82f6}"
)


@dataclass(frozen=True)
class Sample:
    """One sample: seconds since the start, bytes of memory, bytes read since the start, seconds waited."""

    second: float
    anonymous: int
    mapped: int
    read: int
    waited: float


class Recording:
    """The samples so far. `mark` adds one for an event, such as a token."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.marks: list[Sample] = []
        self._started = time.perf_counter()
        self._before = counts()
        self._every = _EVERY
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._thread = Worker(self._watch, "offload-report")

    @property
    def peak(self) -> int:
        """The largest anonymous memory seen, in bytes."""
        return max(one.anonymous for one in self.samples)

    def mark(self) -> None:
        """Record that a token, or a step, is done."""
        self.marks.append(self._sample())

    def _sample(self) -> Sample:
        now = counts()
        return Sample(
            second=time.perf_counter() - self._started,
            anonymous=anonymous_bytes(),
            mapped=mapped_bytes(),
            read=now.bytes_read - self._before.bytes_read,
            waited=now.waited - self._before.waited,
        )

    def _watch(self) -> None:
        while not self._has_ended():
            self.samples.append(self._sample())
            if len(self.samples) > _MOST:
                del self.samples[1::2]
                self._every *= 2

    def _has_ended(self) -> bool:
        with suppress(Empty):
            self._ended.get(timeout=self._every)
            return True
        return False

    @contextmanager
    def running(self) -> Iterator[Recording]:
        """Watch while the block runs."""
        self.samples.append(self._sample())
        try:
            self._thread.begin()
            yield self
        finally:
            self._ended.put(None)
            self._thread.join()
            self.samples.append(self._sample())


@contextmanager
def memory_report(
    path: str | os.PathLike[str], model: nn.Module | None = None, *, title: str = "offload"
) -> Iterator[Recording]:
    """Watch memory and reads while a block runs, then write a page with charts. This needs matplotlib.

    Args:
        path: the `.html` file. An earlier one is replaced.
        model: its layers' waits are reported.
        title: its heading.

    Yields:
        The recording; call its `mark` after each token or step.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; before the block runs.
        ForeignFileError: another file is at `path`; before the block runs.
        WriteError: the page could not be written.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with memory_report(folder / "report.html") as recording:
        ...     recording.mark()
        >>> (folder / "report.html").read_text(encoding="utf-8")[:15]
        '<!doctype html>'
    """
    target = absolute(path)
    _figure()
    _refuse_other(target)
    before = {} if model is None else _waits(model)
    recording = Recording()
    try:
        with recording.running():
            yield recording
    finally:
        after = {} if model is None else _waits(model)
        waits = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
        put_file(target, _page(recording, waits, str(title)).encode("utf-8", "replace"))


def _page(recording: Recording, waits: Mapping[str, float], title: str) -> str:
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in _facts(recording))
    body = "".join(
        f'<section><h2>{heading}</h2><p>{text}</p><img alt="{heading}" src="{chart}"></section>'
        for heading, text, chart in _charts(recording)
    )
    body += _waits_by_layer(waits) if waits else ""
    return (
        f'{_KIND}<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{_STYLE}</style></head>'
        f"<body><main><h1>{escape(title)}</h1><table>{rows}</table>{body}</main></body></html>\n"
    )


def _charts(recording: Recording) -> Iterator[tuple[str, str, str]]:
    """Heading, text and chart of each section."""
    samples = sorted([*recording.samples, *recording.marks], key=lambda one: one.second)
    marks = [one.second for one in recording.marks]
    memory = {
        "anonymous": [(one.second, one.anonymous) for one in samples],
        "mapped from files": [(one.second, one.mapped) for one in samples],
    }
    text = "Anonymous memory is what the process has allocated. Mapped memory is files, which the kernel can drop."
    yield "Memory", text, line_chart(memory, _in_bytes, marks=marks)
    read = {"read": [(one.second, one.read) for one in samples]}
    yield "Read from disk", "All bytes of values since the start.", line_chart(read, _in_bytes, marks=marks)
    if len(recording.marks) > 1:
        pairs = [(number, *pair) for number, pair in enumerate(pairwise(recording.marks), 2)]
        steps = {
            "time": [(number, after.second - before.second) for number, before, after in pairs],
            "of it, waiting for the disk": [(number, after.waited - before.waited) for number, before, after in pairs],
        }
        text = "From the second token on; the first one includes the prompt."
        yield "Time per token", text, line_chart(steps, _in_seconds, axis="token", steps=True)


def _waits_by_layer(waits: Mapping[str, float]) -> str:
    """The longest waits as bars, in the model's order. They are a table, so that the names can be read on a phone."""
    most = sorted(waits, key=lambda name: -waits[name])[:_MOST_BARS]
    shown = {name: seconds for name, seconds in waits.items() if name in most and seconds > 0}
    rows = "".join(
        f'<tr><th>{escape(name)}</th><td class="bar"><i style="width:{seconds / waits[most[0]] * 100:.1f}%"></i></td>'
        f"<td>{_in_seconds(seconds)}</td></tr>"
        for name, seconds in shown.items()
    )
    text = "How long ops waited for the values of each layer." if shown else "No op waited."
    return f"<section><h2>Waits by layer</h2><p>{text}</p><table class=waits>{rows}</table></section>"


def _facts(recording: Recording) -> list[tuple[str, str]]:
    last = recording.samples[-1]
    facts = [
        ("time", _in_seconds(last.second)),
        ("peak anonymous memory", _in_bytes(recording.peak)),
        ("read from disk", _in_bytes(last.read)),
        ("waited for the disk", _in_seconds(last.waited)),
    ]
    if recording.marks:
        facts.append(("tokens", str(len(recording.marks))))
    return facts


def _waits(model: nn.Module) -> dict[str, float]:
    """Seconds waited so far for the values of each layer: an element of a module list, or a module with own values."""
    waits: dict[str, float] = {}
    seen: set[int] = set()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        local = local_of(tensor)
        if not is_offloaded(local):
            continue
        for handle in stored_in([handle_of(local)]):
            if id(handle) not in seen:
                seen.add(id(handle))
                layer, ranges = _layer_of(name), list(page_state_of(handle).ranges.values())
                waits[layer] = waits.get(layer, 0.0) + sum(value.waited for value in ranges)
    return waits


def _layer_of(name: str) -> str:
    """`model.layers.3` for everything in it; else the module that holds the value."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[:-1] if number is None else parts[: number + 1]) or name


def _refuse_other(path: Path) -> None:
    with writing(path, 0, "name"):
        refuse_foreign(path, _KIND.encode(), "exists and is not a report of offload: take another name")
        create_folder(path.parent)


def _in_bytes(value: float) -> str:
    return decimal(int(value))


def _in_seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


# Charts


def line_chart(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    unit: Callable[[float], str],
    *,
    marks: Sequence[float] = (),
    axis: str = "seconds",
    steps: bool = False,
) -> str:
    """Lines on axes that start at zero, as the address of an image.

    Args:
        lines: the points of each line, by its name; at most three.
        unit: formats a value.
        marks: positions on the horizontal axis where something happened.
        axis: the name of the horizontal axis.
        steps: whether a value holds until the next one.
    """
    figure, axes = _figure()
    for colour, (label, points) in zip(_COLOURS, lines.items(), strict=False):
        style = "steps-post" if steps else "default"
        axes.plot(*zip(*points, strict=True), label=label, color=colour, drawstyle=style)
    axes.vlines(marks, 0, 1, transform=axes.get_xaxis_transform(), colors=_INK, linestyles="dotted", linewidths=0.5)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(axis, color=_INK)
    axes.yaxis.set_major_formatter(lambda value, _: unit(value))
    if len(lines) > 1:
        figure.legend(loc="outside upper left", ncols=len(lines), frameon=False, labelcolor="linecolor")
    file = io.BytesIO()
    figure.savefig(file, format="svg", transparent=True)
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()


def _figure() -> tuple[Figure, Axes]:
    """An empty chart. pyplot, which has state, is not used.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("matplotlib draws the charts of a report: pip install 'offload[report]'") from error
    figure = Figure(figsize=(6.4, 2.6), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(color=_INK, alpha=0.25)
    axes.tick_params(colors=_INK, length=0)
    axes.spines[:].set_visible(False)
    return figure, axes
