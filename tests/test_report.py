"""The page about memory and disk usage."""

from __future__ import annotations

import base64
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
from conftest import contents
from torch import nn

from bench.page_cache import cached_fraction, files_in
from offload import OffloadedTensor, cli, disk_offload, report, set_max_memory
from offload.budget import evict
from offload.errors import ForeignFileError, WriteError
from offload.report import memory_report
from tests.page_cache import needs_page_cache
from tests.processes import run_script

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Text(HTMLParser):
    """The words on a page, and the addresses in it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.addresses: list[str] = []
        self.feed(html)

    def pictures(self) -> list[bytes]:
        begin = "data:image/svg+xml;base64,"
        return [base64.b64decode(address.removeprefix(begin)) for address in self.addresses if begin in address]

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]


def made_cold(model: nn.Module, values: Path) -> None:
    """Nothing of a model is in memory: neither what stayed, nor what was still on its way when that was dropped.

    The first page of a file, which a value shares with the header, may stay.
    """
    while any(cached_fraction([path]) * path.stat().st_size > 2 * 4096 for path in files_in(values)):
        evict(model)
        time.sleep(0.01)


@needs_page_cache
def test_a_page_shows_memory_reads_steps_and_waits(tmp_path: Path) -> None:
    model = disk_offload(nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 300)), tmp_path / "values")
    model(torch.zeros(1, 300))
    made_cold(model, tmp_path / "values")

    with memory_report(tmp_path / "new" / "report.html", model, title="Two <layers>") as recording:
        for _ in range(3):
            model(torch.zeros(1, 300))
            recording.mark()

    text = Text((tmp_path / "new" / "report.html").read_text())
    assert {"Two <layers>", "Memory", "Read from disk", "Time per token", "Waits by layer"} <= set(text.words)
    assert "3" == text.words[text.words.index("tokens") + 1]
    read = text.words[text.words.index("read from disk") + 1]
    assert read in ("720.0 kB", "715.9 kB", "711.8 kB")  # two weights of 300 x 300 floats, minus pages already cached
    assert "data:," == text.addresses[0]
    assert all(b"</svg>" in picture for picture in text.pictures())
    assert 3 == len(text.pictures())


@needs_page_cache
def test_waits_are_shown_by_layer(tmp_path: Path) -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(300, 300) for _ in range(2)])
    model.head = nn.Linear(300, 300)
    disk_offload(model, tmp_path / "values")
    for layer in (*model.layers, model.head):
        layer(torch.zeros(1, 300))
    made_cold(model, tmp_path / "values")

    with memory_report(tmp_path / "report.html", model):
        model.layers[1](torch.zeros(1, 300))

    words = Text((tmp_path / "report.html").read_text()).words
    assert "layers.1" in words
    assert "layers.0" not in words
    assert "head" not in words


def test_a_page_is_written_when_the_block_raises_and_replaces_an_earlier_one(tmp_path: Path) -> None:
    for title in ("first", "second"):
        with pytest.raises(ZeroDivisionError), memory_report(tmp_path / "report.html", title=title):
            1 / 0

    assert ["report.html"] == sorted(contents(tmp_path))
    assert "second" in Text((tmp_path / "report.html").read_text()).words


def test_a_foreign_file_is_refused_before_the_block_runs(tmp_path: Path) -> None:
    (tmp_path / "notes.html").write_text("<p>mine</p>")

    with (
        pytest.raises(ForeignFileError, match=r"notes\.html exists and is not a report"),
        memory_report(tmp_path / "notes.html"),
    ):
        pytest.fail("the block ran")

    assert "<p>mine</p>" == (tmp_path / "notes.html").read_text()


def test_an_unwritable_page_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with (
        pytest.raises(WriteError, match="a file is where a folder should be"),
        memory_report(tmp_path / "file" / "x.html"),
    ):
        pass


@pytest.mark.parametrize("points", [[(0.0, 0.0)], [(0.0, 5.0), (0.0, 5.0)], [(1e-9, 1e12), (1e9, 1e-12)]])
def test_a_chart_of_extreme_values_is_drawn(points: list[tuple[float, float]]) -> None:
    assert report.line_chart({"a": points}, str).startswith("data:image/svg+xml;base64,")


@needs_page_cache
def test_the_names_of_layers_and_the_title_are_not_interpreted(tmp_path: Path) -> None:
    name = '$\\frac$<script>alert("x")</script>'
    model = nn.Module()
    model.register_module(name, nn.Linear(300, 300))
    disk_offload(model, tmp_path / "values")
    model.get_submodule(name)(torch.zeros(1, 300))
    made_cold(model, tmp_path / "values")

    with memory_report(tmp_path / "report.html", model, title=name):
        model.get_submodule(name)(torch.zeros(1, 300))

    text = (tmp_path / "report.html").read_text()
    assert "<script" not in text
    assert 3 == Text(text).words.count(name)  # twice the title, and the layer


def test_without_matplotlib_an_error_names_the_extra_before_the_block_runs(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with (
        pytest.raises(ModuleNotFoundError, match=r"pip install 'offload\[report\]'"),
        memory_report(tmp_path / "report.html"),
    ):
        pytest.fail("the block ran")

    assert not contents(tmp_path)


def test_a_report_leaves_matplotlib_as_it_was(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)

    with memory_report(tmp_path / "report.html") as recording:
        recording.mark()

    assert before == dict(matplotlib.rcParams)


def test_generate_writes_a_report(llama_folder: Path, tmp_path: Path) -> None:
    from tests.cli.test_cli import _tokenizer

    folder = tmp_path / "model"
    shutil.copytree(llama_folder, folder)
    _tokenizer(folder)

    command = [
        "generate",
        str(folder),
        "--prompt",
        "w3 w5",
        "--max-new-tokens",
        "5",
        "--report",
        str(tmp_path / "r.html"),
    ]
    assert 0 == cli.main(command)

    words = Text((tmp_path / "r.html").read_text()).words
    assert "5" == words[words.index("tokens") + 1]


@pytest.mark.skipif(CHROMIUM is None, reason="needs a headless Chromium")
def test_a_browser_shows_the_page_without_errors_or_requests(tmp_path: Path) -> None:
    """Rendered in light and dark: the picture is neither empty nor the same in both."""
    stored = OffloadedTensor.from_original_tensor(torch.randn(100, 100), "w")
    with set_max_memory("1GB"), memory_report(tmp_path / "report.html") as recording:
        for _ in range(3):
            stored.sum()
            recording.mark()

    pictures = [_seen(tmp_path, dark=dark) for dark in (False, True)]

    light, dark = pictures
    assert (255, 255, 255) in light
    assert (255, 255, 255) not in dark
    assert len(light) > 20
    assert len(dark) > 20


def _seen(folder: Path, *, dark: bool) -> list[tuple[int, ...]]:
    """The colours rendered by Chromium; anything it logs is an error."""
    from PIL import Image

    picture = folder / "picture.png"
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=450,800",
        "--enable-logging=stderr",
        "--v=0",
    ]
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [str(CHROMIUM), *options, scheme, f"--screenshot={picture}", (folder / "report.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    colours = Image.open(picture).convert("RGB").getcolors(1 << 20)
    assert colours is not None
    return sorted(colour for _, colour in colours)


def test_a_page_is_utf_8_in_every_locale(tmp_path: Path) -> None:
    script = """
        import sys, offload
        for _ in range(2):  # it recognises its own page
            with offload.report.memory_report(sys.argv[1], title="\\u010desk\\u00fd \\u00b5s"):
                pass
    """
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    run_script(script, tmp_path / "report.html", env=ascii_alone)

    assert "\u010desk\u00fd \u00b5s" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_an_unwritable_page_is_an_error_before_the_block_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")

    with pytest.raises(WriteError, match="a file is where a folder should be"), memory_report(tmp_path / "file" / "x"):
        pytest.fail("it ran")
