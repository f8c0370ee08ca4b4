"""The documentation site: complete, whole, and without the network."""

from __future__ import annotations

import http.server
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest

import offload
from offload import errors
from offload.cli.main import parser
from tests.processes import ROOT

pytest.importorskip("mkdocs", reason="the site's packages are not installed: make docs")
pytest.importorskip("material", reason="the site's packages are not installed: make docs")
pytest.importorskip("mkdocstrings", reason="the site's packages are not installed: make docs")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """What a page links to, loads, and can be linked at."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = {""}
        self.text = path.read_text()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.anchors |= {named[key] for key in ("id", "name") if key in named}
        if tag == "a" and "href" in named:
            self.links.append(named["href"])
        if tag in LOADED and LOADED[tag] in named and named.get("rel") != "canonical":
            self.loads.append(named[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built strictly: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert 0 == done.returncode, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_link_within_the_site_leads_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    lost = []
    for path, page in pages.items():
        for link in page.links:
            if urlsplit(link).scheme or link.startswith("//"):
                continue
            joined = urlsplit(urljoin(f"/{path.relative_to(site)}", link))
            target = site / unquote(joined.path).lstrip("/")
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (target in pages and unquote(joined.fragment) not in pages[target].anchors):
                lost.append(f"{path.relative_to(site)} -> {link}")

    assert [] == lost


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    elsewhere = {load for page in pages.values() for load in page.loads if urlsplit(load).netloc}

    assert set() == elsewhere
    for style in site.rglob("*.css"):
        assert "url(http" not in style.read_text(), style


def test_every_public_name_is_in_the_reference(site: Path, pages: dict[Path, Page]) -> None:
    anchors = {anchor for path, page in pages.items() if "reference" in path.parts for anchor in page.anchors}

    described = {anchor.rpartition(".")[2] for anchor in anchors}
    assert set() == {*offload.__all__, *errors.__all__} - described


def test_every_option_of_the_command_line_is_in_the_reference(site: Path) -> None:
    text = (site / "reference" / "cli" / "index.html").read_text()

    for action in _actions(parser()):
        for option in action.option_strings or [action.metavar or action.dest]:
            assert option in text


def _actions(command: object) -> Iterator[object]:
    for action in command._actions:  # type: ignore[attr-defined]
        if action.choices and isinstance(action.choices, dict):
            for inner in action.choices.values():
                yield from _actions(inner)
        else:
            yield action


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """Where the site is served."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.skipif(CHROMIUM is None, reason="needs a headless Chromium")
@pytest.mark.parametrize("place", ["", "learn/01-first-tensor/", "reference/offload.budget/"])
def test_a_browser_opens_a_page_without_errors_and_asks_nobody_else(address: str, place: str, tmp_path: Path) -> None:
    log = tmp_path / "net.json"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--disable-component-update"]
    done = subprocess.run(
        [str(CHROMIUM), *options, f"--log-net-log={log}", "--dump-dom", f"{address}/{place}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )

    assert "CONSOLE" not in done.stderr, done.stderr
    assert "</html>" in done.stdout
    events = json.loads(log.read_text())["events"]
    asked = {urlsplit(event.get("params", {}).get("url", "")).netloc for event in events} - {""}
    from_the_page = {host for host in asked if not host.endswith(("google.com", "googleapis.com", "gvt1.com"))}
    assert {urlsplit(address).netloc} == from_the_page
