"""Downloads from the hub: safetensors if there are any, else .bin, and never code."""

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import nn

import offload
from offload.errors import CheckpointError
from offload.integrations.hub import folder_of

BESIDE = ["config.json", "tokenizer.json", "vocab.txt"]
NEVER = ["modeling_x.py", "run.sh", "training_args.bin", "optimizer.bin", "onnx/weights.bin", "model.onnx", "x.h5"]


@pytest.fixture
def fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A hub with these files, which records requests."""

    def of(*files: str) -> list[str]:
        fetched: list[str] = []

        def snapshot_download(name: str, **options: Any) -> str:
            assert ("org/model", "main") == (name, options["revision"])
            for file in files:
                wanted = any(fnmatch(file, pattern) for pattern in options["allow_patterns"])
                if wanted and not any(fnmatch(file, pattern) for pattern in options.get("ignore_patterns") or ()):
                    fetched.append(file)
                    (tmp_path / file).parent.mkdir(exist_ok=True)
                    (tmp_path / file).write_text("")
            return str(tmp_path)

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
        assert tmp_path == folder_of("org/model", revision="main")
        return sorted(fetched)

    return of


def test_bin_files_are_downloaded_only_if_there_are_no_safetensors(fetch: Any) -> None:
    weights = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "pytorch_model.bin.index.json"]

    assert sorted([*BESIDE, *weights]) == fetch(*BESIDE, *weights, *NEVER)
    assert sorted([*BESIDE, "model.safetensors"]) == fetch(*BESIDE, "model.safetensors", "pytorch_model.bin", *NEVER)


def test_a_file_is_refused_with_the_folder_that_it_is_in(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()

    with pytest.raises(CheckpointError, match=rf"is a file: give the folder of the model, {tmp_path}$"):
        folder_of(tmp_path / "model.safetensors")


def test_an_error_of_the_hub_ends_with_one_full_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, **options: Any) -> str:
        raise OSError("It is not there.\nLook at it.")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)

    with pytest.raises(CheckpointError, match=r"fetching it from the hub failed: It is not there\. Check the name"):
        folder_of("org/model")


class Own(nn.Module, PyTorchModelHubMixin):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        return found

    def generate(self, x: torch.Tensor, steps: int = 2) -> torch.Tensor:
        for _ in range(steps):
            x = self(x)
        return x


def test_a_model_of_the_hub_that_generates_is_offloaded_runs_and_saves_itself(tmp_path: Path) -> None:
    plain, x = Own(), torch.randn(3, 4)
    plain.save_pretrained(tmp_path / "saved")
    expected = plain.generate(x, steps=3)
    model = offload.disk_offload(Own.from_pretrained(tmp_path / "saved"))
    found = model.generate(x, steps=3)
    model.save_pretrained(tmp_path / "again")

    assert offload.is_offloaded(model.layer.weight)
    assert torch.equal(expected, found)
    assert torch.equal(expected, Own.from_pretrained(tmp_path / "again").generate(x, steps=3))
