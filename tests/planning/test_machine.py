"""Properties of a machine, for `offload doctor`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import psutil
import pytest
import torch
import transformers

from offload import cli
from offload.errors import MissingFileError
from offload.planning import machine
from offload.planning.machine import diagnose
from offload.torch_api import TESTED


@pytest.fixture(autouse=True)
def _reads_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_MOST", machine._LEAST)


def test_a_diagnosis_holds_the_figures_of_the_machine_and_leaves_nothing(tmp_path: Path) -> None:
    found = diagnose(tmp_path)

    assert torch.__version__ == found.versions["torch"]
    assert psutil.virtual_memory().total == found.memory
    assert 0 < found.available <= found.memory
    assert found.disk.writes is not None
    assert found.disk.writes > 0
    assert found.disk.free > 0
    assert tmp_path == found.disk.folder
    assert [] == os.listdir(tmp_path)


def test_a_full_disk_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    disk = diagnose(tmp_path).disk

    assert (1 << 20, None, None) == (disk.free, disk.writes, disk.reads)


def test_a_disk_without_direct_reads_is_measured_from_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.open

    def refusing(path: object, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return really(path, flags, *rest)

    monkeypatch.setattr(os, "open", refusing)

    disk = diagnose(tmp_path).disk

    assert disk.reads is not None


@pytest.mark.parametrize("name", ["typo", "file", "file/folder"])
def test_a_missing_folder_is_an_error_and_not_created(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")

    with pytest.raises(MissingFileError, match="no such folder"):
        diagnose(tmp_path / name)

    assert ["file"] == os.listdir(tmp_path)


def test_the_command_prints_versions_memory_and_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [0, 0] == [cli.main(["doctor", str(tmp_path)]), cli.main(["doctor", str(tmp_path), "--json"])]

    printed, last = capsys.readouterr().out.rstrip().rsplit("\n", 1)
    said = json.loads(last)
    assert (torch.__version__, str(tmp_path)) == (said["versions"]["torch"], said["disk"]["folder"])
    for word in ("torch", torch.__version__, "kernels", "read, cold", str(tmp_path), "/s"):
        assert word in printed


def test_a_release_newer_than_all_tested_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "__version__", f"{TESTED[-1]}.7")
    assert f"{TESTED[-1]}.7" == diagnose(tmp_path).versions["torch"]

    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    monkeypatch.setattr(machine, "TESTED_TRANSFORMERS", ("5.1", "5.2"))

    assert 0 == cli.main(["doctor", str(tmp_path)])

    printed = " ".join(capsys.readouterr().out.split())
    assert f"torch 2.99.0+cpu, newer than what was tested ({TESTED[-1]})" in printed
    assert f"transformers {transformers.__version__}, newer than what was tested (5.2)" in printed
