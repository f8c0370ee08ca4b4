"""Memory and disk usage while a block runs, as a page.

Always true:
- watching costs a few system calls every few hundredths of a second, and nothing in the ops
- the page is written when the block ends, even with an exception; it replaces only an earlier page of its own kind
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from torch import nn

from offload.errors import ForeignFileError
from offload.memory import anonymous_bytes, mapped_bytes
from offload.prefetch.engine import counts
from offload.prefetch.value import page_state_of
from offload.report.charts import Line, Section, bar_chart, line_chart, page
from offload.storage.reasons import writing
from offload.storage.regular import absolute, is_there
from offload.storage.replacing import put_file
from offload.tensor.arguments import refuse_other
from offload.tensor.locals import local_of
from offload.tensor.recipes import stored_in
from offload.tensor.views import handle_of
from offload.tensor.wrapper import is_offloaded

_EVERY = 0.02  # seconds between samples
_MOST = 4000  # samples to keep; beyond that, every second one is dropped
_MOST_BARS = 40
_KIND = '<!doctype html><html lang="en"><head><meta charset="utf-8">'


@dataclass(frozen=True)
class Look:
    """One sample: seconds since the start, bytes of memory, bytes read since the start, seconds waited."""

    second: float
    anonymous: int
    mapped: int
    read: int
    waited: float


class Recording:
    """What was seen so far. `mark` says that something has happened, such as a token."""

    def __init__(self) -> None:
        self.looks: list[Look] = []
        self.marks: list[Look] = []
        self._started = time.perf_counter()
        self._before = counts()
        self._every = _EVERY
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="offload-report", daemon=True)

    @property
    def peak(self) -> int:
        """The largest anonymous memory seen, in bytes."""
        return max(look.anonymous for look in self.looks)

    def mark(self) -> None:
        """Record that a token, or a step, is done."""
        self.marks.append(self._look())

    def _look(self) -> Look:
        now = counts()
        return Look(
            second=time.perf_counter() - self._started,
            anonymous=anonymous_bytes(),
            mapped=mapped_bytes(),
            read=now.bytes_read - self._before.bytes_read,
            waited=now.waited - self._before.waited,
        )

    def _watch(self) -> None:
        while not self._ended.wait(self._every):
            self.looks.append(self._look())
            if len(self.looks) > _MOST:
                del self.looks[1::2]
                self._every *= 2

    @contextmanager
    def going_on(self) -> Iterator[Recording]:
        """Watch while the block runs."""
        self.looks.append(self._look())
        self._thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            self._thread.join()
            self.looks.append(self._look())


@contextmanager
def memory_report(
    path: str | os.PathLike[str], model: nn.Module | None = None, *, title: str = "offload"
) -> Iterator[Recording]:
    """Watch memory and reads while a block runs, then write a page with charts.

    Args:
        path: the `.html` file. An earlier one is replaced.
        model: its layers' waits are reported.
        title: its heading.

    Yields:
        The recording; call its `mark` after each token or step.

    Raises:
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
    if model is not None:
        refuse_other(model, nn.Module, "a torch.nn.Module")
    _refuse_other(target)
    layers = {} if model is None else _waits(model)
    seen = Recording()
    try:
        with seen.going_on():
            yield seen
    finally:
        now = {} if model is None else _waits(model)
        waits = [(name, seconds - layers.get(name, 0.0)) for name, seconds in now.items()]
        put_file(target, _page(seen, waits, str(title)).encode("utf-8", "replace"))


def _page(recording: Recording, waits: list[tuple[str, float]], title: str) -> str:
    looks = sorted([*recording.looks, *recording.marks], key=lambda look: look.second)
    marks = [look.second for look in recording.marks]
    sections = [
        Section(
            "Memory",
            "Anonymous memory is what the process has allocated. Mapped memory is files, which the kernel can drop.",
            line_chart(
                [
                    Line("anonymous", [(look.second, look.anonymous) for look in looks]),
                    Line("mapped from files", [(look.second, look.mapped) for look in looks]),
                ],
                unit=_in_bytes,
                marks=marks,
            ),
        ),
        Section(
            "Read from disk",
            "All bytes of values that were read since the start.",
            line_chart([Line("read", [(look.second, look.read) for look in looks])], unit=_in_bytes, marks=marks),
        ),
    ]
    if len(recording.marks) > 1:
        sections.append(_steps(recording.marks))
    if waits:
        sections.append(_waited(waits))
    return page(title, _facts(recording), sections)


def _steps(marks: list[Look]) -> Section:
    """Time per token; without the first, which includes everything before it."""
    pairs = list(pairwise(marks))
    taken = [(float(number), now.second - before.second) for number, (before, now) in enumerate(pairs, 2)]
    waited = [(float(number), now.waited - before.waited) for number, (before, now) in enumerate(pairs, 2)]
    lines = [Line("time", taken, steps=True), Line("of it, waiting for the disk", waited, steps=True)]
    chart = line_chart(lines, unit=_in_seconds, axis="")
    return Section("Time per token", "From the second token on; the first also holds the prompt.", chart)


def _waited(waits: list[tuple[str, float]]) -> Section:
    most = sorted(waits, key=lambda pair: -pair[1])[:_MOST_BARS]
    shown = [pair for pair in waits if pair in most and pair[1] > 0]
    text = "Seconds that ops waited for the values of each layer, the most of them, in the model's order."
    if not shown:
        return Section("Waits by layer", "Nothing was waited for.", "")
    return Section("Waits by layer", text, bar_chart(shown, unit=_in_seconds))


def _facts(recording: Recording) -> list[tuple[str, str]]:
    last = recording.looks[-1]
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
        if is_there(path) and not (path.is_file() and _begins_as_ours(path)):
            raise ForeignFileError(f"{path} exists and is not a report of offload: take another name")
        path.parent.mkdir(parents=True, exist_ok=True)


def _begins_as_ours(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_KIND)) == _KIND.encode()


def _in_bytes(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def _in_seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
