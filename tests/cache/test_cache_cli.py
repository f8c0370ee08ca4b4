"""`offload cache`: what a cache contains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from offload import TensorCache, cli

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    records = [
        {
            "id": number,
            "hidden": torch.full((2, 3), float(number)),
            "tokens": torch.arange(number % 3),
            "chat": [{"role": "user", "text": f"é{number}"}] if number % 4 else None,
            "score": number / 2,
            "raw": bytes([number]),
        }
        for number in range(10)
    ]
    schema = {"tokens": (torch.int64, (None,)), "chat": "json", "score": (torch.float32, ())}
    TensorCache.from_records(records, tmp_path / "cache", schema=schema, metadata={"model": "tiny"}).close()
    return tmp_path / "cache"


def test_info_lists_columns_rows_and_metadata(folder: Path, capsys: Capsys) -> None:
    assert 0 == cli.main(["cache", str(folder)])

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

    assert 0 == cli.main(["cache", str(tmp_path / "cache"), "--json"])

    said = json.loads(capsys.readouterr().out)
    assert (5, 1) == (said["rows"], said["filled"])
    assert {"kind": "tensor", "dtype": "bfloat16", "row_shape": [4], "filled": 3} == said["columns"]["x"]
    assert 1 == said["columns"]["y"]["filled"]


def test_a_file_of_to_disk_is_a_cache_too(tmp_path: Path, capsys: Capsys) -> None:
    TensorCache(tensors={"chosen_logps": torch.zeros(7)}).to_disk(tmp_path / "ref.safetensors")

    assert 0 == cli.main(["cache", str(tmp_path / "ref.safetensors")])
    assert "7 rows, 7 filled" in capsys.readouterr().out


def test_a_missing_cache_is_reported(tmp_path: Path, capsys: Capsys) -> None:
    assert 1 == cli.main(["cache", str(tmp_path / "nowhere")])

    assert "nowhere" in capsys.readouterr().err
