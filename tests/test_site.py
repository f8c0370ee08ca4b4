"""The documentation site: complete, consistent, and usable offline."""

import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import pytest

from offload.cli.main import parser
from tests.processes import ROOT
from tests.test_site_reference import public_names

pytest.importorskip("mkdocs", reason="the site's packages are not installed: make docs")
pytest.importorskip("material", reason="the site's packages are not installed: make docs")
pytest.importorskip("mkdocstrings", reason="the site's packages are not installed: make docs")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs a headless Chromium")
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """A page's links, resources, and anchors."""

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


def test_every_link_within_the_site_leads_somewhere(site, pages):
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


def test_comments_that_stand_for_content_are_replaced(site, pages):
    assert [] == [path for path, page in pages.items() if re.search("<!-- (?!not run|cuts?:)", page.text)]
    assert "<td>Qwen2.5 7B, Q4_K_M (4.7 GB)</td>" in pages[site / "index.html"].text


def test_nothing_is_loaded_from_elsewhere(site, pages):
    elsewhere = {load for page in pages.values() for load in page.loads if urlsplit(load).netloc}

    assert set() == elsewhere
    for style in site.rglob("*.css"):
        assert "url(http" not in style.read_text(), style


def test_the_reference_has_every_public_name_as_users_type_it_and_no_internal_module(pages):
    of_reference = [page for path, page in pages.items() if "reference" in path.parts]
    titles = {title for page in of_reference for title in re.findall(r'<h[12] id="([\w.]+)"[^>]*class="doc', page.text)}

    names = dict(public_names())
    assert {"offload.TensorCache", "offload.budget.evict"} <= titles <= names.keys()
    assert set() == names.keys() - {anchor for page in of_reference for anchor in page.anchors}


def test_every_option_of_the_command_line_is_in_the_reference(site):
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


class Served(http.server.ThreadingHTTPServer):
    """The site on a local server; and what its pages report back."""

    def __init__(self, site: Path) -> None:
        self.site = site
        self.found: list[Any] = []
        self.is_found = threading.Event()
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(site)))

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a picture at /wait once something was posted: a browser that prints a page waits for its pictures."""

    server: Served

    def do_GET(self) -> None:
        if self.path == "/wait":
            self.server.is_found.wait(timeout=240)
        super().do_GET()

    def do_POST(self) -> None:
        self.server.found = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.is_found.set()
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served(site: Path) -> Iterator[Served]:
    with Served(site) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.is_found.set()
        server.shutdown()
        thread.join()


def in_a_browser(served: Served, places: list[str], width: int, gives: str) -> list[Any]:
    """For each page, the value of a JavaScript expression of its `document` once it is true; null after a timeout."""
    # In frames on a page of the same site: a headless Chromium window can't be as narrow as a phone.
    (served.site / "frames.htm").write_text(
        f"""<body><script>
        const found = [], wait = ms => new Promise(done => setTimeout(done, ms));
        async function look(place) {{
            const frame = document.createElement("iframe");
            frame.width = {width}; frame.height = 900; frame.src = "/" + place;
            const loaded = new Promise(done => frame.onload = done);
            document.body.append(frame);
            await loaded;
            let given = null;
            for (let turn = 0; turn < 200 && given === null; turn++) {{
                await wait(turn ? 50 : 0);
                given = (document => {gives})(frame.contentDocument) || null;
            }}
            found.push(given);
            frame.remove();
        }}
        (async () => {{
            for (const place of {json.dumps(places)}) await look(place);
            await fetch("/found", {{method: "POST", body: JSON.stringify(found)}});
        }})();
        </script><img src="/wait">"""
    )
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    subprocess.run([str(CHROMIUM), *options, f"{served.address}/frames.htm"], capture_output=True, timeout=250)
    assert served.is_found.is_set(), "the browser has found nothing out"
    return served.found


TOO_WIDE = """JSON.stringify([...document.querySelectorAll("pre > code, .md-typeset__scrollwrap, figure, h1, h2, h3")]
    .filter(part => part.scrollWidth > part.clientWidth + 1 && part.clientWidth)
    .map(part => part.textContent.trim().slice(0, 60))
    .concat(document.documentElement.scrollWidth > document.documentElement.clientWidth ? ["the page"] : []))"""


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_of_a_page_is_cut(served, pages, width):
    """No code block, heading, chart or page is wider than its container: on a phone, and on a small screen."""
    places = sorted(f"{path.parent.relative_to(served.site)}/".removeprefix("./") for path in pages)
    found = in_a_browser(served, places, width, TOO_WIDE)

    cut = {place: json.loads(parts) for place, parts in zip(places, found, strict=True)}
    assert {} == {place: parts for place, parts in cut.items() if parts}


@needs_browser
@pytest.mark.parametrize("place", ["", "learn/01-first-tensor/", "reference/offload.budget/"])
def test_a_browser_opens_a_page_without_errors_or_foreign_requests(served, place, tmp_path):
    log = tmp_path / "net.json"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--disable-component-update"]
    done = subprocess.run(
        [str(CHROMIUM), *options, f"--log-net-log={log}", "--dump-dom", f"{served.address}/{place}"],
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
    assert {urlsplit(served.address).netloc} == from_the_page
