"""On a full disk nothing that is half loaded claims to be whole."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.processes import ROOT

# Runs in a mount namespace of its own, with a small tmpfs at sys.argv[1].
SCRIPT = """
    import errno, json, os, subprocess, sys, torch, offload
    from offload.errors import MetaTensorError, WriteError
    from offload.verify import verify
    from torch import nn

    small, source = sys.argv[1:]

    def empty():
        with offload.init_empty_weights():
            return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))

    model, said = empty(), {}
    try:
        offload.load_checkpoint_and_dispatch(model, source, offload_dir=small, dtype=torch.bfloat16)
    except WriteError as error:
        said["errno"], said["message"] = errno.errorcode[error.errno], str(error)
    said["without_data"] = sum(weight.is_meta for weight in model.parameters())
    said["files"] = sorted(os.listdir(small))
    said["files_are_whole"] = verify(small).is_whole
    del model
    try:
        offload.load_checkpoint_and_dispatch(empty(), small)
    except MetaTensorError as error:
        said["again"] = str(error)
    subprocess.run(["mount", "-o", "remount,size=64m", small], check=True)
    model = offload.load_checkpoint_and_dispatch(empty(), source, offload_dir=small, dtype=torch.bfloat16)
    said["right"] = all((weight == number).all().item() for number, weight in enumerate(model.parameters()))
    print(json.dumps(said))
"""
MOUNTED = 'mount -t tmpfs -o size=1200k none "$0" && exec "$@"'


def in_namespace(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    whole = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", MOUNTED, str(folder), *command]
    return subprocess.run(whole, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.parametrize("form", ["model.safetensors", "pytorch_model.bin"])
def test_a_conversion_that_does_not_fit_says_so_and_what_is_there_is_whole(tmp_path: Path, form: str) -> None:
    """Two of eight weights fit; with more room it is done again."""
    small = tmp_path / "small"
    small.mkdir()
    if shutil.which("unshare") is None or in_namespace(small, "true").returncode:
        pytest.skip("this system lets no test mount a small disk")
    weights = {f"{number}.weight": torch.full((512, 512), float(number)) for number in range(8)}
    (save_file if form.endswith("safetensors") else torch.save)(weights, tmp_path / form)  # type: ignore[operator]

    done = in_namespace(small, sys.executable, "-c", textwrap.dedent(SCRIPT), str(small), str(tmp_path / form))

    assert 0 == done.returncode, done.stderr
    said = json.loads(done.stdout)
    assert "ENOSPC" == said["errno"]
    assert "'2.weight'" in said["message"]
    assert "take another offload_dir" in said["message"]
    assert 6 == said["without_data"]
    assert ["0.weight.safetensors", "1.weight.safetensors"] == said["files"]
    assert said["files_are_whole"]
    assert "6 tensors of the model have no data after loading: 2.weight" in said["again"]
    assert said["right"]
