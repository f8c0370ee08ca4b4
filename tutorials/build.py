"""What of the site is made: a reference from the code and the parser, charts from what was measured.

Always true:
- nothing is written beside the sources: these pages exist while the site is built
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from rich.filesize import decimal

import offload
from offload import testing
from offload.cli.main import parser
from offload.report.charts import Line, bar_chart, line_chart


class Docstrings(griffe.Extension):
    """Has a page understand docstrings as they are written here: several names in one entry, errors without a word."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = in_full(obj.docstring.value)


def in_full(text: str) -> str:
    """A docstring whose sections give each name an entry of its own."""
    text = re.sub(r"(?m)^(Always true:|[^\n]+:)$(?=\n- )", r"\1\n", text)
    text = re.sub(r"(?m)^Example:$", "Examples:", text)
    return _SECTION.sub(lambda found: found[1] + "".join(map(_entries, _ENTRY.findall(found[2]))), text)


def _entries(entry: str) -> str:
    """One for each name that stands before the colon; an error without a colon says what it says of itself."""
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
    """Put charts where `<!-- measured: FILE -->` and `<!-- memory: FILE -->` stand."""
    root = Path(config.config_file_path).parent
    for word, draw in (("measured", bars), ("memory", lines)):
        markdown = re.sub(rf"<!-- {word}: (\S+) -->", partial(_drawn, root, draw), markdown)
    return markdown


def _drawn(root: Path, draw: Callable[[Any], str], found: re.Match[str]) -> str:
    return draw(json.loads((root / found[1]).read_text()))


def bars(measured: dict[str, Any]) -> str:
    """A chart a figure: the median of each arm, and the limit."""
    parts = []
    for figure in measured["figures"]:
        medians = {arm: median(values) for arm, values in figure["values"].items() if values}
        if figure["limit"]:
            medians[f"limit: {figure['limit_name']}"] = median(figure["limit"])
        unit = partial(in_unit, figure["unit"])
        parts.append(
            f"**{figure['case']}**\n\n{chart(bar_chart(list(medians.items()), unit=unit, outstanding='offload'))}\n"
        )
    return "\n".join(parts)


def lines(traces: dict[str, list[tuple[float, float]]]) -> str:
    """Memory over time, a line an arm."""
    return chart(line_chart([Line(arm, trace) for arm, trace in traces.items()], unit=partial(in_unit, "B")))


def chart(svg: str) -> str:
    return f'<div class="chart">{svg}</div>'


def in_unit(unit: str, value: float) -> str:
    if unit == "B":
        return decimal(int(value))
    return f"{value * 1e3:.3g} ms" if unit == "s" and value < 1 else f"{value:.3g} {unit}"


def reference() -> Iterator[tuple[str, str, str]]:
    """Title, path and text of the page of each module that defines public names."""
    for module, names in sorted(modules().items()):
        listed = "".join(f"\n        - {name}" for name in names)
        yield module, f"reference/{module}.md", f"::: {module}\n    options:\n      members:{listed}\n"


def modules() -> dict[str, list[str]]:
    """By module, the public names that it has."""
    named = (
        offload.budget,
        offload.distributed,
        offload.errors,
        offload.integrations,
        offload.report,
        testing,
        offload.training,
    )
    found: dict[str, list[str]] = {module.__name__: list(module.__all__) for module in named}
    for name in offload.__all__:
        module = inspect.getmodule(getattr(offload, name))
        place = module.__name__ if module else "offload"
        if place == "builtins" or not place.startswith("offload"):
            place = "offload.models.device_map" if name == "ON_DISK" else "offload"
        if name not in found.setdefault(place, []):
            found[place].append(name)
    return found


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
