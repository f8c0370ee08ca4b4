"""`offload cache`: what a cache contains, whether it is complete, and exporting it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from offload import TensorCache, cli
from offload.integrations import cache_from

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
    TensorCache.from_records(records, tmp_path / "cache", metadata={"model": "tiny"}).close()
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
        ("manifest.json", lambda path: path.unlink(), "no cache is here"),
        ("rows.state", lambda path: os.truncate(path, 4097), "says which rows are filled"),
        ("rows.state", lambda path: path.unlink(), "says which rows are filled"),
        ("hidden.safetensors", lambda path: os.truncate(path, 4200), "it was cut"),
        ("hidden.safetensors", lambda path: path.unlink(), "is missing"),
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


def test_nothing_there_is_told(tmp_path: Path, capsys: Capsys) -> None:
    assert 1 == cli.main(["cache", "info", str(tmp_path / "nowhere")])

    assert "nowhere" in capsys.readouterr().err


# Export


def test_export_to_parquet_and_back(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.setattr("offload.cache.incoming._BATCH", 5000)  # bytes
    before = TensorCache.open(folder)[:]

    assert 0 == cli.main(["cache", "export", str(folder), str(tmp_path / "made" / "rows.parquet")])

    after = cache_from(tmp_path / "made" / "rows.parquet")[:]
    assert set(before) <= set(after)
    assert after["raw"] == before["raw"]
    assert after["chat"] == before["chat"]
    assert [row.tolist() for row in before["tokens"]] == [row.tolist() for row in after["tokens"]]
    for name in ("id", "hidden", "score", "score.present"):
        assert torch.equal(before[name], after[name])
    assert ["rows.parquet"] == os.listdir(tmp_path / "made")


def test_parquet_that_others_read_has_nulls_where_values_are_missing(tmp_path: Path, folder: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")

    cli.main(
        ["cache", "export", str(folder), str(tmp_path / "rows.parquet"), "--columns", "id", "score", "score.present"]
    )

    table = pq.read_table(tmp_path / "rows.parquet")
    assert ["id", "score"] == table.column_names
    assert [number / 2 if number % 5 else None for number in range(10)] == table["score"].to_pylist()


def test_export_to_safetensors_and_npy(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = TensorCache.open(folder)[:]

    assert 0 == cli.main(["cache", "export", str(folder), str(tmp_path / "x.safetensors"), "--columns", "hidden", "id"])
    assert 0 == cli.main(["cache", "export", str(folder), str(tmp_path / "arrays"), "--columns", "hidden", "id"])

    assert f"{tmp_path / 'x.safetensors'}: written ({len(rows['id'])} rows, 2 columns)\n" in capsys.readouterr().out
    found = load_file(tmp_path / "x.safetensors")
    assert {"hidden", "id"} == set(found)
    for name, values in found.items():
        assert torch.equal(rows[name], values)
        assert np.array_equal(rows[name].numpy(), np.load(tmp_path / "arrays" / f"{name}.npy"))
    assert ["hidden.npy", "id.npy"] == sorted(os.listdir(tmp_path / "arrays"))


def test_what_stands_there_is_left_alone(tmp_path: Path, folder: Path, capsys: Capsys) -> None:
    (tmp_path / "arrays").mkdir()
    for name in ("x.parquet", "x.safetensors", "arrays/id.npy"):
        (tmp_path / name).write_text("mine")
        target = tmp_path / ("arrays" if "arrays" in name else name)

        assert 1 == cli.main(["cache", "export", str(folder), str(target), "--columns", "id"])

        assert "mine" == (tmp_path / name).read_text()
        assert "exists and is not a file of offload" in (err := capsys.readouterr().err) or "left as it is" in err


@pytest.mark.parametrize(
    ("columns", "target", "words"),
    [
        (["tokens"], "x.safetensors", "'tokens' have no rows of one size"),
        (["tokens"], "x", "'tokens' has no rows of one size, and .npy no others: export to parquet"),
        (["nothing"], "x.parquet", "has no column 'nothing'"),
        (["id"], "x.csv", "give --to, as its suffix names no format: safetensors, parquet, npy"),
    ],
)
def test_what_can_t_be_exported_is_told(
    tmp_path: Path, folder: Path, capsys: Capsys, columns: list[str], target: str, words: str
) -> None:
    assert 1 == cli.main(["cache", "export", str(folder), str(tmp_path / target), "--columns", *columns])

    assert words in capsys.readouterr().err
    assert not (tmp_path / target).exists()


def test_dtypes_that_a_format_has_not_and_rows_that_are_missing_are_told(tmp_path: Path, capsys: Capsys) -> None:
    with TensorCache.create(tmp_path / "cache", {"x": (torch.bfloat16, ())}, 2) as cache:
        cache[0] = {"x": torch.tensor(1.0, dtype=torch.bfloat16)}
    command = ["cache", "export", str(tmp_path / "cache")]

    assert 1 == cli.main([*command, str(tmp_path / "x.parquet")])
    assert "1 of 2 rows" in capsys.readouterr().err
    with TensorCache.open(tmp_path / "cache", "r+") as cache:
        cache[1] = {"x": torch.tensor(1.0, dtype=torch.bfloat16)}
    assert 1 == cli.main([*command, str(tmp_path / "x.parquet")])
    assert "'x' is of torch.bfloat16, which Arrow does not have: export to safetensors" in capsys.readouterr().err
    assert 1 == cli.main([*command, str(tmp_path / "x"), "--to", "npy"])
    assert "'x' is of torch.bfloat16, which NumPy does not have: export to safetensors" in capsys.readouterr().err
    assert ["cache"] == os.listdir(tmp_path)
