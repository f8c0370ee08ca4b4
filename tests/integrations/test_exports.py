"""Exporting a cache: durable before the files get their names, and with file names valid everywhere."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from offload import TensorCache
from offload.errors import ForeignFileError, OffloadError
from offload.integrations.export import export
from tests import faults

NAMES = ["a/b", "a.b", "A.b", "..", "nul", "é" * 150, "a%2fb", "x\ny"]


@pytest.fixture
def cache(tmp_path: Path) -> TensorCache:
    cache = TensorCache.create(tmp_path / "cache", {"x": (torch.float32, (3,)), "y": (torch.int64, ())}, 5)
    cache[:] = {"x": torch.arange(15.0).view(5, 3), "y": torch.arange(5)}
    cache.flush()
    return cache


@pytest.mark.parametrize("form", ["parquet", "npy", "safetensors"])
def test_a_file_is_on_the_disk_before_it_has_its_name_and_the_name_after(
    tmp_path: Path, cache: TensorCache, form: str
) -> None:
    if form == "parquet":
        pytest.importorskip("pyarrow")
    with faults.watched() as calls:
        export(cache, tmp_path / "out", form, ["x"])

    names = [call.name for call in calls]
    at = max(place for place, name in enumerate(names) if name in ("os.rename", "os.replace"))
    assert "os.fsync" in names[:at]
    assert "os.fsync" in names[at:]


def test_columns_of_any_name_have_a_npy_file_of_their_own(tmp_path: Path) -> None:
    values = {name: torch.full((2,), number) for number, name in enumerate(NAMES)}
    with TensorCache(tensors=values) as cache:
        export(cache, tmp_path / "out", "npy")
        export(cache, tmp_path / "out.safetensors", "safetensors")

    files = sorted((tmp_path / "out").iterdir())
    assert len(NAMES) == len(files)
    assert all(path.name.isascii() and path.name == path.name.lower() and len(path.name) < 200 for path in files)
    assert set(range(len(NAMES))) == {int(np.load(path)[0]) for path in files}
    found = load_file(tmp_path / "out.safetensors")
    assert {name: value.tolist() for name, value in values.items()} == {n: v.tolist() for n, v in found.items()}


def test_columns_of_any_name_are_in_parquet(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    values = {name: torch.full((2,), number) for number, name in enumerate(NAMES)}
    with TensorCache(tensors=values) as cache:
        export(cache, tmp_path / "out.parquet", "parquet")

    table = pq.read_table(tmp_path / "out.parquet")
    assert {name: value.tolist() for name, value in values.items()} == table.to_pydict()


@pytest.mark.parametrize("form", ["parquet", "npy"])
def test_nothing_is_replaced_and_nothing_written_through_a_link(tmp_path: Path, cache: TensorCache, form: str) -> None:
    if form == "parquet":
        pytest.importorskip("pyarrow")
    out, mine = tmp_path / "out", tmp_path / "mine"
    place = out / "y.npy" if form == "npy" else out
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(mine)

    with pytest.raises(ForeignFileError, match="is there already, and is left as it is"):
        export(cache, out, form)
    assert not mine.exists()
    assert form == "parquet" or ["y.npy"] == os.listdir(out)  # existing files are found before the first is written


@pytest.mark.parametrize("form", ["parquet", "npy", "safetensors"])
def test_an_export_that_fails_leaves_whole_files_or_none(tmp_path: Path, cache: TensorCache, form: str) -> None:
    if form == "parquet":
        pytest.importorskip("pyarrow")
    numbers = iter(range(1000))

    def act(out: Path) -> None:
        export(cache, out, form)

    seen = 0
    for failure in faults.each_failure(lambda: tmp_path / str(next(numbers)) / "out", act, (errno.EIO, errno.ENOSPC)):
        seen += 1
        error, out = failure.error, failure.given
        assert error is None or isinstance(error, OffloadError), str(failure)
        assert error is None or (isinstance(error, OSError) and error.errno == failure.code), str(failure)
        assert not failure.leaked, (str(failure), failure.leaked)
        left = [path for path in out.parent.rglob("*") if path.is_file()] if out.parent.exists() else []
        assert not [path for path in left if path.name.startswith(".offload-tmp")], str(failure)
        for path in left:
            if form == "npy":
                assert np.array_equal(cache[:][path.stem].numpy(), np.load(path)), str(failure)
            elif form == "safetensors":
                assert torch.equal(cache[:]["x"], load_file(path)["x"]), str(failure)
            else:
                assert 5 == pytest.importorskip("pyarrow.parquet").read_table(path).num_rows, str(failure)
    assert seen > 5
