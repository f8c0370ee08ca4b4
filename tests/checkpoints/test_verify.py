"""Checking that a checkpoint is complete: defects are found and named, and intact ones pass."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from conftest import contents
from safetensors.torch import save_file

from offload import OffloadedTensor, cli
from offload.checkpoints.verify import verify
from offload.errors import CheckpointError, ReadError
from tests import faults

INDEXES = {".safetensors": "model.safetensors.index.json", ".bin": "pytorch_model.bin.index.json"}


def write(path: Path, **values: torch.Tensor) -> None:
    if path.suffix == ".safetensors":
        save_file(values, path)
    else:
        torch.save(values, path)


@pytest.fixture(params=[".safetensors", ".bin"])
def suffix(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path, suffix: str) -> Path:
    """Two shards with three tensors and an index, in either format."""
    write(tmp_path / f"one{suffix}", a=torch.ones(300))
    write(tmp_path / f"two{suffix}", b=torch.ones(2), c=torch.ones(3))
    places = {"a": f"one{suffix}", "b": f"two{suffix}", "c": f"two{suffix}"}
    (tmp_path / INDEXES[suffix]).write_text(json.dumps({"weight_map": places}))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def found(path: Path) -> list[str]:
    return verify(path).findings


def test_a_complete_checkpoint_passes_in_one_line_and_is_not_changed(
    folder: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(folder)

    for path, tensors in ((folder, 3), (folder / INDEXES[suffix], 3), (folder / f"two{suffix}", 2)):
        verdict = verify(path)
        assert verdict.is_whole
        assert ([], tensors) == (verdict.findings, len(verdict.tensors))
    assert 0 == cli.main(["verify", str(folder)])
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{folder}: whole (2 files, 3 tensors, ")
    assert before == contents(folder)


def test_a_cut_file_is_found(folder: Path, suffix: str) -> None:
    path = folder / f"one{suffix}"
    os.truncate(path, path.stat().st_size - 20)

    for where in (folder, folder / INDEXES[suffix], path):
        [finding] = found(where)
        assert path.name in finding
        assert "cut off" in finding


def test_a_missing_shard_is_found_and_the_command_fails(
    folder: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / f"one{suffix}").unlink()

    [finding] = found(folder)
    assert f"one{suffix}, which holds 'a', is missing" in finding
    assert 1 == cli.main(["verify", str(folder)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"error: {finding}"
    assert lines[-1].startswith(f"{folder}: 1 error (")


def test_all_defects_are_found_at_once(folder: Path, suffix: str) -> None:
    (folder / f"two{suffix}").write_bytes(b"")
    write(folder / f"one{suffix}", z=torch.ones(1))
    (folder / "other.index.json").write_text("[]")

    findings = found(folder)

    for words in (f"that 'a' is in one{suffix}, and it is not", f"two{suffix} can't be used: it is empty"):
        assert any(words in finding for finding in findings)
    assert any("other.index.json is not an index of shards" in finding for finding in findings)


def test_an_index_that_leads_outside_is_found(folder: Path, suffix: str) -> None:
    (folder / INDEXES[suffix]).write_text(json.dumps({"weight_map": {"a": f"../one{suffix}"}}))

    assert any("outside its folder: refused" in what for what in found(folder))


def test_a_pickle_with_code_and_a_tensor_that_cannot_be_read_are_found(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "code": Path}, tmp_path / "code.bin")
    torch.save({"w": torch.ones(1), "s": torch.eye(2).to_sparse()}, tmp_path / "sparse.bin")

    (first, second) = found(tmp_path)

    assert "code.bin is a pickle with more than tensors" in first
    assert "sparse.bin: 's' can't be read where it lies (it is sparse, " in second


def test_files_of_a_training_beside_a_model_are_ignored(folder: Path) -> None:
    torch.save(Path, folder / "training_args.bin")

    assert [] == found(folder)


def test_an_offload_folder_is_looked_at(tmp_path: Path) -> None:
    kept = [OffloadedTensor.from_original_tensor(torch.ones(3), name, tmp_path) for name in ("a/b", "c")]
    assert ([], 2) == (verify(tmp_path).findings, len(verify(tmp_path).tensors))
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(kept[0].offload_path.read_bytes())
    assert ["holds 'a/b', as" in finding for finding in found(tmp_path)] == [True]
    os.truncate(kept[1].offload_path, 4100)

    assert any(kept[1].offload_path.name in finding and "cut off" in finding for finding in found(tmp_path))


def test_shards_without_an_index_are_found(tmp_path: Path, suffix: str) -> None:
    for number, name in enumerate("ab", 1):
        write(tmp_path / f"model-0000{number}-of-00002{suffix}", **{name: torch.ones(2)})

    for _ in ("alone", "beside a whole checkpoint"):
        [finding] = found(tmp_path)
        assert f"model-00001-of-00002{suffix}, a part of a checkpoint, but no index" in finding
        write(tmp_path / "model.safetensors", a=torch.ones(2))


@pytest.mark.parametrize(
    ("notes", "words"),
    [
        ({"name": "v"}, "says that it holds 'v', and it does not"),
        ({"name": 5}, "says that it holds '5', and it does not"),
        ({"name": "v", "subclass": {"x": 1}}, "description of a tensor subclass is malformed"),
    ],
)
def test_a_file_with_contradicting_notes_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], notes: dict[str, object], words: str
) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.ones(1)}, path, metadata={"offload": json.dumps({"version": 1, **notes})})

    assert [True] == [words in what for what in found(tmp_path)]
    assert 1 == cli.main(["inspect", str(tmp_path)])
    assert words in capsys.readouterr().err


def test_an_empty_folder_and_a_missing_file_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointError, match="holds no tensors"):
        verify(tmp_path)
    assert 1 == cli.main(["verify", str(tmp_path)])
    assert "holds no tensors" in capsys.readouterr().err
    [finding] = found(tmp_path / "nowhere.bin")
    assert "nowhere.bin does not exist" in finding


def test_a_temporary_read_error_is_not_a_finding(tmp_path: Path) -> None:
    """Otherwise, somebody who removes damaged files would remove good ones."""
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")

    for failure in faults.each_failure(lambda: tmp_path, verify):
        assert isinstance(failure.error, ReadError) or failure.result.is_whole, str(failure)
