"""What every source of rows does: inherit `RowSourceTests`, and say how such a source is made."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offload import TensorCache
from offload.errors import CacheError, OffloadError
from offload.integrations import cache_from
from offload.integrations.rows import rows_of

N = 17


def columns(rows: int = N) -> dict[str, np.ndarray[Any, Any]]:
    """Columns that every source can hold, by name."""
    numbers = np.arange(rows)
    return {"id": numbers, "score": (numbers / 4).astype(np.float32), "pair": np.stack([numbers, -numbers], axis=1)}


class RowSourceTests:
    """Inherit this, and define `source`. Batches are small."""

    def source(self, folder: Path, values: dict[str, np.ndarray[Any, Any]]) -> Any:
        """A source with these columns; a path below `folder`, if it is a file."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _small_batches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("offload.cache.incoming._BATCH", 200)  # bytes

    def test_all_rows_come_in_order_and_bit_for_bit(self, tmp_path: Path) -> None:
        cache = cache_from(self.source(tmp_path, columns()), tmp_path / "cache", metadata={"of": "rows"})

        assert (N, {"of": "rows"}, set(columns())) == (cache.num_filled, cache.metadata, set(cache.schema))
        for name, values in columns().items():
            assert torch.equal(torch.from_numpy(values), cache[:][name])

    def test_the_cache_can_be_opened_again(self, tmp_path: Path) -> None:
        cache_from(self.source(tmp_path, columns()), tmp_path / "cache").close()

        assert list(range(N)) == TensorCache.open(tmp_path / "cache")[:]["id"].tolist()

    def test_columns_are_chosen_in_order(self, tmp_path: Path) -> None:
        cache = cache_from(self.source(tmp_path, columns()), columns=["score", "id"])

        assert ["score", "id"] == list(cache.schema)
        assert torch.equal(torch.from_numpy(columns()["score"]), cache[:]["score"])

    def test_a_missing_column_is_an_error_that_names_it(self, tmp_path: Path) -> None:
        with pytest.raises(CacheError, match=r"has no column 'nothing'; it has .*'id'"):
            cache_from(self.source(tmp_path, columns()), tmp_path / "cache", columns=["nothing"])

        assert not (tmp_path / "cache").exists()

    def test_a_source_may_have_no_rows(self, tmp_path: Path) -> None:
        cache = cache_from(self.source(tmp_path, columns(rows=0)))

        assert 0 == len(cache)
        assert set(columns()) <= set(cache.schema)  # Parquet without rows does not say whether it has nulls

    def test_rows_come_in_several_batches(self, tmp_path: Path) -> None:
        batches = [len(batch["id"]) for batch in rows_of(self.source(tmp_path, columns())).batches]

        assert N == sum(batches)
        assert 1 < len(batches)
        assert N // 2 > max(batches)


class RowFileTests(RowSourceTests):
    """Sources that are a file, or a folder of files."""

    def test_the_files_are_left_as_they_are(self, tmp_path: Path) -> None:
        path = self.source(tmp_path, columns())
        before = contents(path)

        cache_from(path, tmp_path / "cache").close()

        assert before == contents(path)

    def test_a_truncated_file_is_an_error_and_leaves_no_cache(self, tmp_path: Path) -> None:
        path = self.source(tmp_path, columns())
        largest = max(files_of(path), key=lambda file: file.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)

        with pytest.raises(OffloadError, match=path.name):
            cache_from(path, tmp_path / "cache")

        assert not (tmp_path / "cache").exists()

    def test_a_missing_file_is_an_error_that_names_it(self, tmp_path: Path) -> None:
        path = self.source(tmp_path, columns())

        with pytest.raises(FileNotFoundError, match="elsewhere"):
            cache_from(path.with_name("elsewhere"))


def files_of(path: Path) -> list[Path]:
    return [file for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else [path]


def contents(path: Path) -> dict[Path, str]:
    return {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in files_of(path)}
