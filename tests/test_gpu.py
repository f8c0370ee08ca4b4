"""`make gpu`: all of it goes through on the stand-in, and errors are in the result."""

import json
import os
import time

import pytest

from bench import gpu
from tests.processes import run_module


@pytest.mark.slow(45)
@pytest.mark.timeout(3600)  # however busy the machine is
def test_everything_for_an_accelerator_goes_through_on_the_stand_in(tmp_path, delayed_library, monkeypatch):
    """In another process: this one has imported the marked tests, which saw no device. As there, without hypothesis."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    (tmp_path / "missing").mkdir()
    (tmp_path / "missing/hypothesis.py").write_text("raise ImportError('not installed')", encoding="utf-8")
    missing = {"PYTHONPATH": str(tmp_path / "missing"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    env = {"OFFLOAD_STAND_IN": str(delayed_library), **missing}

    code = run_module("bench.gpu", "--dry", "--out", str(tmp_path), env=env, limit=3500).returncode

    [result], [log] = tmp_path.glob("*.json"), tmp_path.glob("*.log")
    found = json.loads(result.read_text(encoding="utf-8"))
    assert list(gpu.STEPS) == list(found)
    assert {} == {name: facts["error"] for name, facts in found.items() if "error" in facts}, log.read_text()
    assert " passed" in log.read_text(encoding="utf-8")
    assert " failed" not in log.read_text(encoding="utf-8")
    for form in ("bfloat16", "FP8", "W4A16", "Q4_K", "MXFP4 experts"):
        stored, per_token = found[form]["stored bytes"], found[form]["nothing stays"]["bytes sent per token"]
        assert found[form]["equal to the CPU"]
        assert 0 < per_token <= 1.5 * stored
        assert 0 == found[form]["everything stays"]["bytes sent per token"]
        assert 0 == found[form]["default"]["bytes sent per token"]
        assert {"nothing stays, hybrid", "dense, in the memory of the device, s"} <= found[form].keys()
    assert 0 == code


@pytest.mark.parametrize("act", [lambda: time.sleep(1000), lambda: os._exit(3)], ids=["hangs", "ends"])
def test_a_step_that_does_not_answer_is_an_error_in_the_result(tmp_path, act):
    found = gpu.in_child(act, tmp_path / "log", 0.3, is_dry=False)  # type: ignore[arg-type]

    assert found["error"].startswith(("it was stopped", "it ended without a word"))
