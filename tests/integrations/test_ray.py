"""The page about Ray runs if Ray is installed; the tests don't require it, as it is large."""

import os
import subprocess
import sys

import pytest

from tests.processes import ROOT

PAGE = ROOT / "tutorials/how-to/ray.md"


def test_the_page_about_ray_runs_and_prints_what_it_says(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    text = PAGE.read_text(encoding="utf-8").replace("ray.init()", "ray.init(num_cpus=2, object_store_memory=100 << 20)")
    (tmp_path / "page.md").write_text(
        "\n".join(line for line in text.splitlines() if not line.startswith("<!-- not run"))
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-m", "tests.pages", str(tmp_path / "page.md"), ""]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)

    assert not done.returncode, done.stderr
