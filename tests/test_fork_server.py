"""A fork of the server is like a Python process of its own, and does not harm the server."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fork_server import ForkServer
from tests.processes import _OWN, OF_THIS_PROCESS, run_module, run_script

# KMP_*: up to transformers 5.20, importing a model imports scikit-learn, which sets them.
FACTS = """
    import __main__, json, os, signal, sys, threading
    import torch, transformers.modeling_utils, offload
    ignored = "_", "PWD", "SHLVL", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"
    print(json.dumps({
        "arguments": sys.argv,
        "folder": os.getcwd(),
        "path": sys.path,
        "main": [__name__, sys.modules["__main__"] is __main__, hasattr(__main__, "__file__"), __main__.__spec__],
        "threads": [len(os.listdir("/proc/self/task")), threading.current_thread() is threading.main_thread()],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "input": [sys.stdin.isatty(), sys.stdin.read()],
        "output": [[file.isatty(), file.encoding, file.line_buffering] for file in (sys.stdout, sys.stderr)],
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name not in ignored},
        "signals": [str(signal.getsignal(number)).split(" at ")[0] for number in signal.valid_signals()],
        "offload": sorted(name for name in sys.modules if name.split(".")[0] == "offload"),
    }))
"""


def test_a_script_finds_what_it_finds_in_an_interpreter_of_its_own():
    forked, fresh = (json.loads(run_script(FACTS, 1, "two", fresh=fresh)) for fresh in (False, True))

    assert fresh == forked


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", 0),
        ("raise SystemExit", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit('why')", 1),
        ("raise ValueError", 1),
        ("import os; os._exit(4)", 4),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_a_script_ends_with_its_code(code, expected):
    run_script(code, expected=expected)

    assert "next\n" == run_script("print('next')")


def test_a_module_runs_as_with_python_m(tmp_path):
    (tmp_path / "shown.py").write_text(
        "import sys\nprint(__name__, __spec__.name, sys.argv, sys.stdin.read())\nsys.exit('no')\n"
    )
    done = run_module("shown", "word", cwd=tmp_path, given=b"given")

    assert f"__main__ shown ['{tmp_path / 'shown.py'}', 'word'] given\n" == done.stdout
    assert ("no\n", 1) == (done.stderr, done.returncode)


@pytest.fixture
def server() -> Iterator[ForkServer]:
    """One that the test may lose."""
    server = ForkServer({**os.environ, **_OWN})
    yield server
    server.close()


def is_link_to(path: Path, folder: Path) -> bool:
    try:
        return path.readlink() == folder
    except OSError:  # it has ended
        return False


def test_a_script_that_takes_too_long_is_killed_with_its_server(server, tmp_path):
    job = {"argv": ["-c"], "cwd": str(tmp_path), "env": {**os.environ, **_OWN}}
    server.run({"code": "pass", **job}, 100)

    with pytest.raises(TimeoutError):
        server.run({"code": "import time; time.sleep(1000)", **job}, 1)

    assert not server.runs
    assert [] == [path for path in Path("/proc").glob("[0-9]*/cwd") if is_link_to(path, tmp_path)]


def test_a_server_is_not_used_where_imports_may_see_another_environment(monkeypatch):
    script = "import sys; print(getattr(sys.modules.get('__main__'), '__spec__', 0), 'torch' in sys.modules)"

    assert "None True\n" == run_script(script)
    assert "None True\n" == run_script(script, env={"TMPDIR": "/"})
    assert "None False\n" == run_script(script, env={"HF_HUB_VERBOSITY": "error"})
    assert "None False\n" == run_script(script, shell="true")
    for name in OF_THIS_PROCESS:  # after any test
        monkeypatch.setenv(name, "1")
    assert "None True\n" == run_script(script)
    monkeypatch.setenv("OMP_DYNAMIC", "1")
    assert "None False\n" == run_script(script)
