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


def found(path: Path) -> list[tuple[str, str]]:
    return [(finding.path.name, finding.what) for finding in verify(path).findings]


def test_a_complete_checkpoint_passes_in_one_line_and_is_not_changed(
    folder: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(folder)

    for path, tensors in ((folder, 3), (folder / INDEXES[suffix], 3), (folder / f"two{suffix}", 2)):
        verdict = verify(path)
        assert verdict.is_whole
        assert ([], tensors) == (verdict.findings, verdict.tensors)
    assert 0 == cli.main(["verify", str(folder)])
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{folder}: whole (2 files, 3 tensors, ")
    assert before == contents(folder)


def test_a_cut_file_is_found(folder: Path, suffix: str) -> None:
    path = folder / f"one{suffix}"
    os.truncate(path, path.stat().st_size - 20)

    for where in (folder, folder / INDEXES[suffix], path):
        [(name, what)] = found(where)
        assert path.name == name
        assert "cut off" in what


def test_a_missing_shard_is_found_and_the_command_fails(
    folder: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / f"one{suffix}").unlink()

    [(name, what)] = found(folder)
    assert f"one{suffix}" == name
    assert "missing" in what
    assert 1 == cli.main(["verify", str(folder)])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["error", f"one{suffix}"] and "missing" in line for line in lines if line.strip())
    assert lines[-1].startswith(f"{folder}: 1 error (")


def test_all_defects_are_found_at_once(folder: Path, suffix: str) -> None:
    (folder / f"two{suffix}").write_bytes(b"")
    write(folder / f"one{suffix}", z=torch.ones(1))
    (folder / "other.index.json").write_text("[]")

    findings = found(folder)

    assert (INDEXES[suffix], f"places 'a' in one{suffix}, which does not have it") in findings
    assert any(name == f"two{suffix}" and "it is empty" in what for name, what in findings)
    assert any(name == "other.index.json" and "is not an index of shards" in what for name, what in findings)


def test_an_index_that_leads_outside_is_found(folder: Path, suffix: str) -> None:
    (folder / INDEXES[suffix]).write_text(json.dumps({"weight_map": {"a": f"../one{suffix}"}}))

    assert any("outside its folder: refused" in what for _, what in found(folder))


def test_a_pickle_with_code_and_a_tensor_that_cannot_be_read_are_found(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "code": Path}, tmp_path / "code.bin")
    torch.save({"w": torch.ones(1), "s": torch.eye(2).to_sparse()}, tmp_path / "sparse.bin")

    (first, second) = found(tmp_path)

    assert first[0] == "code.bin"
    assert "is a pickle with more than tensors" in first[1]
    assert ("sparse.bin", "'s' is a sparse_coo tensor: save its to_dense(), or its parts") == second


def test_files_of_a_training_beside_a_model_are_ignored(folder: Path) -> None:
    torch.save(Path, folder / "training_args.bin")

    assert [] == found(folder)


def test_an_offload_folder_is_looked_at(tmp_path: Path) -> None:
    kept = [OffloadedTensor.from_original_tensor(torch.ones(3), name, tmp_path) for name in ("a/b", "c")]
    assert ([], 2) == (verify(tmp_path).findings, verify(tmp_path).tensors)
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(kept[0].offload_path.read_bytes())
    os.truncate(kept[1].offload_path, 4100)

    findings = found(tmp_path)

    assert any(name == kept[1].offload_path.name and "cut off" in what for name, what in findings)
    assert any("holds 'a/b', as" in what for _, what in findings)


def test_shards_without_an_index_are_found(tmp_path: Path, suffix: str) -> None:
    for number, name in enumerate("ab", 1):
        write(tmp_path / f"model-0000{number}-of-00002{suffix}", **{name: torch.ones(2)})
    expected = [
        (f"model-0000{n}-of-00002{suffix}", "is one shard of a checkpoint, and there is no index") for n in (1, 2)
    ]

    assert expected == found(tmp_path)


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

    assert [True] == [words in what for _, what in found(tmp_path)]
    assert 1 == cli.main(["inspect", str(tmp_path)])
    assert words in capsys.readouterr().err


def test_an_empty_folder_and_a_missing_file_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointError, match="holds no tensors"):
        verify(tmp_path)
    assert 1 == cli.main(["verify", str(tmp_path)])
    assert "holds no tensors" in capsys.readouterr().err
    [(name, what)] = found(tmp_path / "nowhere.bin")
    assert "nowhere.bin" == name
    assert "missing" in what


def test_a_temporary_read_error_is_not_a_finding(tmp_path: Path) -> None:
    """Otherwise, somebody who removes damaged files would remove good ones."""
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")

    for failure in faults.each_failure(lambda: tmp_path, verify):
        assert isinstance(failure.error, ReadError) or failure.result.is_whole, str(failure)
