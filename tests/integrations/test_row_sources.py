"""What every source of rows does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from offload.errors import CacheError, OffloadError
from offload.integrations import cache_from
from offload.integrations.rows import rows_of
from tests.conftest import contents

h5py = pytest.importorskip("h5py")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

Values: TypeAlias = dict[str, np.ndarray[Any, Any]]
Make: TypeAlias = Callable[[Path, Values], Any]
N = 17


def columns(rows: int = N) -> Values:
    numbers = np.arange(rows)
    return {"id": numbers, "score": (numbers / 4).astype(np.float32), "pair": np.stack([numbers, -numbers], axis=1)}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several batches even for little data."""
    monkeypatch.setattr("offload.cache.incoming._BATCH", 200)  # bytes


def tensors(values: Values) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(part) for name, part in values.items()}


def arrow_table(values: Values) -> Any:
    pair = pa.FixedSizeListArray.from_arrays(pa.array(values["pair"].reshape(-1)), 2)
    return pa.table({"id": values["id"], "score": values["score"], "pair": pair})


def a_dataset(values: Values) -> Any:
    return pytest.importorskip("datasets").Dataset(arrow_table(values))


def a_tensordict(values: Values) -> Any:
    return pytest.importorskip("tensordict").TensorDict(tensors(values), batch_size=[len(values["id"])])


def hdf5_group(folder: Path, values: Values) -> Any:
    file = h5py.File(folder / "rows.h5", "w")
    file.update({f"group/{name}": part for name, part in values.items()})
    return file["group"]


def parquet_folder(path: Path, table: Any) -> None:
    path.mkdir()
    pq.write_table(table.slice(0, 9), path / "0.parquet")
    pq.write_table(table.slice(9), path / "1.parquet")


IN_MEMORY: dict[str, Make] = {
    "dict of arrays": lambda _, values: values,
    "dict of tensors": lambda _, values: tensors(values),
    "HDF5 group": hdf5_group,
    "Arrow table": lambda _, values: arrow_table(values),
    "dataset": lambda _, values: a_dataset(values),
    "TensorDict": lambda _, values: a_tensordict(values),
}
FILES: dict[str, Make] = {
    "rows.safetensors": lambda path, values: save_file(tensors(values), path),
    "rows.pt": lambda path, values: torch.save(tensors(values), path),
    "rows.parquet": lambda path, values: pq.write_table(arrow_table(values), path, row_group_size=5),
    "shards": lambda path, values: parquet_folder(path, arrow_table(values)),
}


def made(folder: Path, name: str, values: Values | None = None) -> Path:
    """A file, or a folder of files, with the columns."""
    FILES[name](folder / name, columns() if values is None else values)
    return folder / name


SOURCES: dict[str, Make] = {
    **IN_MEMORY,
    **{name: lambda folder, values, name=name: made(folder, name, values) for name in FILES},  # type: ignore[misc]
}


@pytest.fixture(params=SOURCES)
def make(request: pytest.FixtureRequest) -> Make:
    """Makes a source of columns; one that is a file is below the folder."""
    return SOURCES[request.param]


def test_all_rows_come_in_order_and_bit_for_bit(tmp_path: Path, make: Make) -> None:
    cache = cache_from(make(tmp_path, columns()), tmp_path / "cache", metadata={"of": "rows"})

    assert (N, {"of": "rows"}, set(columns())) == (cache.num_filled, cache.metadata, set(cache.schema))
    for name, values in columns().items():
        assert torch.equal(torch.from_numpy(values), cache[:][name])


def test_columns_are_chosen_in_order(tmp_path: Path, make: Make) -> None:
    cache = cache_from(make(tmp_path, columns()), columns=["score", "id"])

    assert ["score", "id"] == list(cache.schema)
    assert torch.equal(torch.from_numpy(columns()["score"]), cache[:]["score"])


def test_a_missing_column_is_an_error_that_names_it(tmp_path: Path, make: Make) -> None:
    with pytest.raises(CacheError, match=r"has no column 'nothing'; it has .*'id'"):
        cache_from(make(tmp_path, columns()), tmp_path / "cache", columns=["nothing"])

    assert not (tmp_path / "cache").exists()


def test_a_source_may_have_no_rows(tmp_path: Path, make: Make) -> None:
    cache = cache_from(make(tmp_path, columns(rows=0)))

    assert 0 == len(cache)
    assert set(columns()) == set(cache.schema)


def test_rows_come_in_several_batches(tmp_path: Path, make: Make) -> None:
    batches = [len(batch["id"]) for batch in rows_of(make(tmp_path, columns())).batches]

    assert N == sum(batches)
    assert 1 < len(batches)
    assert N // 2 > max(batches)


def test_wide_text_comes_in_batches_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.cache.incoming._BATCH", 20_000)  # bytes; a row has 8,000
    assert [2] * 8 + [1] == [len(batch["values"]) for batch in rows_of(np.array(["x" * 2000] * N)).batches]


@pytest.mark.parametrize("name", FILES)
def test_the_files_are_left_as_they_are(tmp_path: Path, name: str) -> None:
    path = made(tmp_path, name)
    before = contents(tmp_path)

    cache_from(path).close()

    assert before == contents(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_an_error_and_leaves_no_cache(tmp_path: Path, name: str) -> None:
    path = made(tmp_path, name)
    largest = max((file for file in (path, *path.rglob("*")) if file.is_file()), key=lambda file: file.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)

    with pytest.raises(OffloadError, match=path.name):
        cache_from(path, tmp_path / "cache")

    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    path = made(tmp_path, name)

    with pytest.raises(FileNotFoundError, match="elsewhere"):
        cache_from(path.with_name("elsewhere"))
