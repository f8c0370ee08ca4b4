"""The parts of the site that are generated: a reference from the code and the parser, charts from result files.

Always true:
- nothing is written beside the sources: these pages exist while the site is built
- the reference lists names as users type them, not by the module that defines them
- a figure in a chart or in the summary comes from a file in bench/results
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from html import escape
from inspect import getdoc, ismodule
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

import griffe
from matplotlib.figure import Figure
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from rich.filesize import decimal

import offload
from bench.report import NAMES
from offload.cli.main import parser
from tutorials.public import MODULES

OURS = "offload"

GROUPS = {
    "Tensors": (
        "OffloadedTensor is_offloaded materialize offloaded_like offloading by_reference register_subclass OffloadError"
    ),
    "Models": (
        "from_pretrained init_empty_weights load_checkpoint_and_dispatch load_checkpoint_in_model LoadReport ON_DISK "
        "disk_offload load_file save_checkpoint"
    ),
    "Running models": "plan map_batches exact set_max_memory memory_summary",
    "Changing values": "map_values MapReport quantize_ merge_lora",
    "Rows and nested data": "TensorCache topk save_tree load_tree",
}
"""The public names of the package itself, by the page that describes them."""

RESULTS = "bench/results/2026-11-"
SUMMARY = (
    ("27-larger.json", "larger, dense: a token"),
    ("27-larger.json", "larger, dense: bytes read, a token"),
    ("27-capped.json", "capped, 1.5x: a token"),
    ("27-capped.json", "capped, 1.5x: bytes read, a token"),
    ("27-cold.json", "cold, first pass: prompt of 1"),
    ("27-cold.json", "cold, later: prompt of 1"),
    ("27-batches.json", "batches, dense, 32 tokens, 16 in flight: a batch"),
    ("27-routed.json", "routed: bytes read by one token of a mixture of experts, cold"),
    ("27-loading.json", "generate: load"),
    ("27-loading.json", "generate: bytes written by loading"),
    ("27-loading.json", "generate: a token"),
    ("27-loading.json", "generate: peak anonymous memory"),
    ("29-cache.json", "cache, cold: 256 random rows of 8192 B"),
    ("29-cache.json", "cache, warm: 256 random rows of 8192 B"),
)
"""The figures that a reader wants first: a result file, and a case in it."""

SETTINGS = {
    r"gguf": "From a GGUF file in the page cache",
    r"cold, first pass": "Cold, the first pass after loading",
    r"cold, later": "Cold, a later pass",
    r"cold, (\d+) MB (\w+), first pass": r"Cold, values of \1 MB in \2, the first pass after loading",
    r"cold, (\d+) MB (\w+), later": r"Cold, values of \1 MB in \2, a later pass",
    r"capped, ([\d.]+)x": r"Capped, the model \1 times the budget",
    r"capped, (\d+) MB (\w+), ([\d.]+)x": r"Capped, values of \1 MB in \2, the model \3 times the budget",
    r"larger, dense": "A model of 1.2 times the machine's memory",
    r"larger, experts": "A mixture of experts of 1.2 times the machine's memory",
    r"dispatch": "What dispatch adds, of weights of 8x8",
    r"load": "Warm, loading",
    r"generate": "Warm",
    r"forms, (.+)": r"Packed, \1",
    r"routed": "Cold, a mixture of experts",
    r"batches, dense, (\d+) tokens, (\d+) in flight": r"Capped, batches of \1 tokens, \2 in flight",
    r"batches, dense, (\d+) tokens and (\d+) generated, (\d+) in flight": (
        r"Capped, batches of \1 tokens with \2 generated, \3 in flight"
    ),
    r"batches, experts, (\d+) tokens, (\d+) in flight": r"Capped, a mixture of experts, \1 tokens, \2 in flight",
    r"larger-batches, (\d+) tokens, (\d+) in flight": (
        r"A model of 1.2 times the machine's memory, batches of \1 tokens, \2 in flight"
    ),
    r"larger-batches, (\d+) tokens and (\d+) generated, (\d+) in flight": (
        r"A model of 1.2 times the machine's memory, batches of \1 tokens with \2 generated, \3 in flight"
    ),
    r"ranks, (\d+)": r"Tensor parallel ranks, \1 on one machine",
    r"ranks, (\d+), ([\d.]+)x capped": r"Capped, \1 tensor parallel ranks, each with a share of \2 times its budget",
    r"small, cold": "Cold, many small values",
    r"update": "Written and synced",
    r"cache, written": "Rows",
    r"cache, appended": "Rows",
    r"cache, first epoch": "Rows, the first epoch from cold",
    r"cache, (warm|cold|capped)": r"Rows, \1",
}
MEASURES = {
    r"prompt of 1": "time for a prompt of 1 token",
    r"prompt of (\d+)": r"time for a prompt of \1 tokens",
    r"a token": "time per token",
    r"a token, (.+)": r"time per token, \1",
    r"bytes read, a token": "bytes read per token",
    r"read by a rank to the first token": "bytes read by a rank up to the first token",
    r"read by a rank, a token": "bytes read by a rank per token",
    r"a batch": "time per batch",
    r"bytes read, a batch": "bytes read per batch",
    r"load": "time to load",
    r"first pass": "time of the first pass, a prompt of 16 tokens",
    r"first token": "time to the first token",
    r"CPU time a tensor, (\d+) tensors": r"CPU time per tensor, of \1",
    r"bytes read by one token.*": "bytes read by one token",
    r"(\d+) random rows of (\d+) B": r"time to read \1 random rows of \2 B",
    r"scan of (.*)": r"time to scan \1",
    r"(\d+ MB in batches of \d+ random rows.*)": r"time to read \1",
    r"(\d+ MB in .*)": r"time to write \1",
}
"""What `bench` calls a case, before and after its colon, and what a reader is told."""


class Docstrings(griffe.Extension):
    """Makes pages understand our docstrings: several names in one entry, errors without a description."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = in_full(obj.docstring.value)


def in_full(text: str) -> str:
    """The docstring with a separate entry for each name in its sections."""
    text = re.sub(r"(?m)^(Always true:|[^\n]+:)$(?=\n- )", r"\1\n", text)
    text = re.sub(r"(?m)^Example:$", "Examples:", text)
    return _SECTION.sub(lambda found: found[1] + "".join(map(_entries, _ENTRY.findall(found[2]))), text)


def _entries(entry: str) -> str:
    """One for each name before the colon; an error without a colon gets its own docstring."""
    named = re.match(r" {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*):", entry)
    if named:
        return "".join(f"    {name}:{entry[named.end() :]}" for name in named[1].split(", "))
    found = re.findall(r"(\w+Error|OSError)(?: \(([^)]*)\))?", entry)
    return "".join(f"    {name}: {note or _said_of(name)}\n" for name, note in found) or entry


def _said_of(error: str) -> str:
    return str(getattr(offload.errors, error, OSError).__doc__).splitlines()[0]


_SECTION = re.compile(r"(?m)^((?:Args|Raises|Attributes):\n)((?: {4}.*(?:\n|$))+)")
_ENTRY = re.compile(r" {4}\S.*(?:\n {5,}.*)*(?:\n|$)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages under Reference."""
    pages = [{title: path} for title, path, _ in reference()]
    config.nav = [*(config.nav or []), {"Reference": [*pages, {"Command line": "reference/cli.md"}]}]
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for _, path, text in reference():
        files.append(File.generated(config, path, content=text))
    files.append(File.generated(config, "reference/cli.md", content="\n".join(command_line())))
    return files


def on_page_markdown(markdown: str, *, config: MkDocsConfig, **_: Any) -> str:
    """Replace comments by generated content.

    These are `chart: FILE | CASE | TITLE`, `charts: FILE`, `forms: FILE`, `memory: FILE`, `picture: FILE | TEXT`,
    `summary`, and `table of the README`.
    """
    root = Path(config.config_file_path).parent
    markdown = re.sub(r"<!-- picture: (\S+) \| (.+?) -->", partial(_picture, root), markdown)
    for word, draw in (("chart", _one), ("charts", _all), ("forms", _forms), ("memory", _memory)):
        markdown = re.sub(rf"<!-- {word}: (\S+)(?: \| (.+?))? -->", partial(_drawn, root, draw), markdown)
    for comment, made in (("summary", summary), ("table of the README", _of_the_readme)):
        if f"<!-- {comment} -->" in markdown:
            markdown = markdown.replace(f"<!-- {comment} -->", "\n".join(made(root)))
    return markdown


def _of_the_readme(root: Path) -> Iterator[str]:
    text = (root / "README.md").read_text(encoding="utf-8").partition("## What was measured")[2]
    yield from (line for line in text.splitlines() if line.startswith("|"))


def _picture(root: Path, found: re.Match[str]) -> str:
    """An SVG file, within the page."""
    content = quote((root / found[1]).read_text(encoding="utf-8"))
    return f'<img alt="{escape(found[2])}" src="data:image/svg+xml,{content}">'


def _drawn(root: Path, draw: Callable[[Any, str | None], str], found: re.Match[str]) -> str:
    return draw(json.loads((root / found[1]).read_text()), found[2])


def _one(measured: dict[str, Any], asked: str | None) -> str:
    case, _, title = (asked or "").partition(" | ")
    return bars(_figure(measured, case), title)


def _all(measured: dict[str, Any], _: str | None) -> str:
    """Every figure of a run, folded away."""
    inside = "".join(bars(figure) for figure in measured["figures"])
    rounds = "one round" if measured["rounds"] == 1 else f"{measured['rounds']} rounds"
    count = f"All {len(measured['figures'])} charts of this run, {measured['date']}, {rounds}"
    return f'<details class="charts" data-search-exclude><summary>{count}</summary>{inside}</details>'


def _forms(measured: dict[str, Any], _: str | None) -> str:
    """A table of packed forms: how many times as fast a token is as with the values stored dense, and what it reads."""
    forms = [figure["case"].split(", ")[1].split(":")[0] for figure in measured["figures"] if "warm" in figure["case"]]
    lines = ["| form | warm | cold | capped | bytes | GB/s |", "| --- | --- | --- | --- | --- | --- |"]
    for form in forms:
        figures = (_figure(measured, f"forms, {form}: {case}") for case in _OF_A_FORM)
        warm, cold, capped, read, decoding = figures
        bytes_read = median(read["values"][OURS]) / median(read["limit"])
        speeds = " | ".join(f"{figure['ratio to limit']:.2f}x" for figure in (warm, cold, capped))
        lines.append(f"| {form} | {speeds} | {bytes_read:.2f} | {1 / median(decoding['values'][OURS]):.1f} |")
    return "\n".join(lines)


_INK, _COLOURS = "#7d8590", ("#3b82f6", "#d97706", "#059669")  # visible on white and on black
_OF_A_FORM = ("a token, warm", "a token, cold", "a token, capped", "bytes, cold", "decoding a gigabyte")


def _memory(traces: dict[str, list[tuple[float, float]]], _: str | None) -> str:
    """Memory over time, one line per arm."""
    figure = Figure(figsize=(6.4, 2.6), layout="constrained")
    axes = figure.add_subplot()
    for colour, (label, points) in zip(_COLOURS, traces.items(), strict=False):
        axes.plot(*zip(*points, strict=True), label=label, color=colour)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds", color=_INK)
    axes.yaxis.set_major_formatter(lambda value, _: in_unit("B", value))
    axes.grid(color=_INK, alpha=0.25)
    axes.tick_params(colors=_INK, length=0)
    axes.spines[:].set_visible(False)
    figure.legend(loc="outside upper left", ncols=len(traces), frameon=False, labelcolor="linecolor")
    file = io.BytesIO()
    figure.savefig(file, format="svg", transparent=True)
    address = "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()
    return f'<img alt="Memory over time, by arm" src="{address}">'


def _medians(figure: dict[str, Any]) -> dict[str, float]:
    return {arm: median(values) for arm, values in figure["values"].items() if values}


def _figure(measured: dict[str, Any], case: str) -> dict[str, Any]:
    return next(figure for figure in measured["figures"] if figure["case"] == case)


def bars(figure: dict[str, Any], title: str = "") -> str:
    """A chart of one figure: the median of each arm, smallest first, and the limit.

    It is a table, not a drawing, so that its text has the page's size on a phone.
    """
    medians = dict(sorted(_medians(figure).items(), key=lambda pair: pair[1]))
    if figure["limit"]:
        medians[f"limit: {NAMES.get(figure['limit_name'], figure['limit_name'])}"] = median(figure["limit"])
    most = max(medians.values(), default=0) or 1
    rows = "".join(
        f'<tr{" class=ours" if arm == OURS else ""}><th scope="row">{escape(NAMES.get(arm, arm))}</th>'
        f'<td><i style="width:{value / most * 100:.1f}%"></i></td><td>{in_unit(figure["unit"], value)}</td></tr>'
        for arm, value in medians.items()
    )
    caption = f"<figcaption>{escape(title or said(figure['case']))}</figcaption>"
    return f'<figure class="bars" data-search-exclude>{caption}<table class="bars">{rows}</table></figure>'


def summary(root: Path) -> Iterator[str]:
    """A table of the most important figures, from the newest of the quoted runs."""
    yield "| measured | offload | best peer | limit |"
    yield "| --- | --- | --- | --- |"
    for file, case in SUMMARY:
        figure = _figure(json.loads((root / f"{RESULTS}{file}").read_text()), case)
        medians = _medians(figure)
        ours, unit = medians[OURS], partial(in_unit, figure["unit"])
        peer = min((arm for arm in medians if not arm.startswith(OURS)), key=lambda arm: medians[arm])
        limit = unit(median(figure["limit"])) if figure["limit"] else ""
        yield f"| {said(case)} | **{unit(ours)}** | {unit(medians[peer])} ({NAMES.get(peer, peer)}) | {limit} |"


def said(case: str) -> str:
    """What a case measures, in plain words."""
    setting, _, measure = case.partition(": ")
    return f"{_worded(SETTINGS, setting)}: {_worded(MEASURES, measure)}"


def _worded(table: dict[str, str], words: str) -> str:
    found = next((pattern for pattern in table if re.fullmatch(pattern, words)), None)
    return re.sub(found, table[found], words) if found else words


def in_unit(unit: str, value: float) -> str:
    if unit == "B":
        return decimal(int(value))
    return f"{value * 1e3:.3g} ms" if unit == "s" and value < 1 else f"{value:.3g} {unit}"


def reference() -> Iterator[tuple[str, str, str]]:
    """Title, path and text of each page of the reference."""
    for title, names in GROUPS.items():
        described = "\n".join(f"::: offload.{name}" for name in names.split())
        yield title, f"reference/{title.lower().replace(' ', '-')}.md", f"# {title}\n\n{described}\n"
    for module in MODULES:
        first = (getdoc(module) or "").partition("\n")[0]
        described = "\n".join(_described(module, module.__all__))
        yield module.__name__, f"reference/{module.__name__}.md", f"# {module.__name__}\n\n{first}\n\n{described}\n"


def _described(module: Any, names: Iterable[str]) -> Iterator[str]:
    """A line for each name, and for each of a module's."""
    for name in names:
        value = getattr(module, name)
        if ismodule(value):
            yield from _described(value, value.__all__)
        else:
            yield f"::: {module.__name__}.{name}"


def command_line() -> Iterator[str]:
    """The help of each command."""
    top = parser()
    yield "# The command `offload`\n"
    yield f"```text\n{top.format_help()}```\n"
    for name, command in _commands(top):
        yield f"## {name}\n\n```text\n{command.format_help()}```\n"


def _commands(parser: argparse.ArgumentParser, before: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    actions: list[Any] = parser._actions
    for action in actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield f"{before}{name}", command
                yield from _commands(command, f"{before}{name} ")
