"""`offload cache`: what a cache contains, whether it is complete, and writing it to one file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from offload import TensorCache, cli
from tests.equal import assert_equal

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    records = [
        {
            "id": number,
            "hidden": torch.full((2, 3), float(number)),
            "tokens": torch.arange(number % 3),
            "chat": [{"role": "user", "text": f"é{number}"}] if number % 4 else None,
            "score": number / 2 if number % 5 else None,
            "raw": bytes([number]),
        }
        for number in range(10)
    ]
    schema = {"tokens": (torch.int64, (None,)), "chat": "json", "score": (torch.float32, ())}
    TensorCache.from_records(records, tmp_path / "cache", schema=schema, metadata={"model": "tiny"}).close()
    return tmp_path / "cache"


def test_info_lists_columns_rows_and_metadata(folder: Path, capsys: Capsys) -> None:
    assert 0 == cli.main(["cache", "info", str(folder)])

    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["hidden", "tensor", "float32", "(2,", "3)", "10"] in lines
    assert ["tokens", "ragged", "int64", "(None,)", "10"] in lines
    assert ["chat", "json", "10"] in lines
    assert ["model:", '"tiny"'] in lines
    assert any(line[1:5] == ["10", "rows,", "10", "filled,"] for line in lines if line)


def test_info_tells_what_is_missing_as_json(tmp_path: Path, capsys: Capsys) -> None:
    with TensorCache.create(tmp_path / "cache", {"x": (torch.bfloat16, (4,)), "y": (torch.int8, ())}, 5) as cache:
        cache[:3] = {"x": torch.zeros(3, 4, dtype=torch.bfloat16)}
        cache[1:2] = {"y": torch.zeros(1, dtype=torch.int8)}

    assert 0 == cli.main(["cache", "info", str(tmp_path / "cache"), "--json"])

    said = json.loads(capsys.readouterr().out)
    assert (5, 1) == (said["rows"], said["filled"])
    assert {"kind": "tensor", "dtype": "bfloat16", "row_shape": [4], "filled": 3} == said["columns"]["x"]
    assert 1 == said["columns"]["y"]["filled"]


def test_a_file_of_to_disk_is_a_cache_too(tmp_path: Path, capsys: Capsys) -> None:
    TensorCache(tensors={"chosen_logps": torch.zeros(7)}).to_disk(tmp_path / "ref.pt")

    assert 0 == cli.main(["cache", "info", str(tmp_path / "ref.pt")])
    assert "7 rows, 7 filled" in capsys.readouterr().out
    assert 0 == cli.main(["cache", "verify", str(tmp_path / "ref.pt")])
    assert "whole (7 rows, 7 filled)" in capsys.readouterr().out


def test_verify_says_that_a_cache_is_whole_if_rows_are_missing(tmp_path: Path, folder: Path, capsys: Capsys) -> None:
    TensorCache.create(tmp_path / "empty", {"x": (torch.float32, ()), "j": "json"}, 4).close()

    assert 0 == cli.main(["cache", "verify", str(folder)])
    assert 0 == cli.main(["cache", "verify", str(tmp_path / "empty")])

    out = capsys.readouterr().out
    assert "whole (10 rows, 10 filled)" in out
    assert "whole (4 rows, 0 filled)" in out


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("manifest.json", lambda path: path.write_text("{"), "can't be read as the manifest of a cache"),
        ("hidden.safetensors", lambda path: os.truncate(path, 4200), "it was truncated"),
    ],
)
def test_verify_finds_what_is_cut_or_gone(folder: Path, capsys: Capsys, file: str, damage: object, words: str) -> None:
    damage(folder / file)  # type: ignore[operator]

    assert 1 == cli.main(["cache", "verify", str(folder)])

    assert words in capsys.readouterr().err


def test_verify_finds_the_rows_that_say_nothing(folder: Path, capsys: Capsys) -> None:
    path = folder / "chat.jsonl"
    path.write_bytes(path.read_bytes().replace(b"user", b'u"er', 3))
    assert 1 == cli.main(["cache", "verify", str(folder)])
    assert ["chat", "1"] in [line.split()[:2] for line in capsys.readouterr().out.splitlines()]

    assert 1 == cli.main(["cache", "verify", str(folder), "--json"])
    said = json.loads(capsys.readouterr().out)
    assert not said["is_whole"]
    assert [("chat", 1)] == [(found["column"], found["row"]) for found in said["findings"]]
    assert "is not JSON" in said["findings"][0]["what"]

    os.truncate(path, 10)
    assert 1 == cli.main(["cache", "verify", str(folder)])
    assert "1 error (10 rows, 10 filled)" in capsys.readouterr().out


def test_a_missing_cache_is_reported(tmp_path: Path, capsys: Capsys) -> None:
    assert 1 == cli.main(["cache", "info", str(tmp_path / "nowhere")])

    assert "nowhere" in capsys.readouterr().err


# Export


@pytest.mark.parametrize("name", ["made/x.safetensors", "x.pt"])
def test_export_writes_the_columns_to_one_file(tmp_path: Path, folder: Path, capsys: Capsys, name: str) -> None:
    rows, target = TensorCache.open(folder)[:], tmp_path / name

    assert 0 == cli.main(["cache", "export", str(folder), str(target), "--columns", "hidden", "id"])

    assert f"{target}: written ({len(rows['id'])} rows, 2 columns)\n" in capsys.readouterr().out
    found = load_file(target) if target.suffix == ".safetensors" else torch.load(target, weights_only=True)
    assert_equal({name: rows[name] for name in ("hidden", "id")}, found)


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
def test_export_leaves_a_file_that_offload_did_not_write(
    tmp_path: Path, folder: Path, capsys: Capsys, name: str
) -> None:
    (tmp_path / name).write_text("mine")

    assert 1 == cli.main(["cache", "export", str(folder), str(tmp_path / name), "--columns", "id"])

    assert "mine" == (tmp_path / name).read_text()
    assert "exists and " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("columns", "target", "words"),
    [
        (["tokens"], "x.safetensors", "'tokens' have no rows of one size"),
        (["id"], "x", "one of the suffixes .safetensors, .bin, .pt, .pth, .ckpt. Parquet and .npy are on the page"),
    ],
)
def test_export_refuses_columns_and_suffixes_without_writing(
    tmp_path: Path, folder: Path, capsys: Capsys, columns: list[str], target: str, words: str
) -> None:
    assert 1 == cli.main(["cache", "export", str(folder), str(tmp_path / target), "--columns", *columns])

    assert words in capsys.readouterr().err
    assert not (tmp_path / target).exists()


def test_export_refuses_rows_that_are_missing(tmp_path: Path, capsys: Capsys) -> None:
    with TensorCache.create(tmp_path / "cache", {"x": (torch.bfloat16, ())}, 2) as cache:
        cache[0] = {"x": torch.tensor(1.0, dtype=torch.bfloat16)}

    assert 1 == cli.main(["cache", "export", str(tmp_path / "cache"), str(tmp_path / "x.pt")])

    assert "1 of 2 rows" in capsys.readouterr().err
    assert ["cache"] == os.listdir(tmp_path)
