"""A cache whose folder, or a file in it, is removed, moved or replaced while it is open: an error, never other rows."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from offload import TensorCache
from offload.cache import rowfile
from offload.errors import ChangedFileError, MissingFileError
from tests.cache.test_cache_cut import COLUMNS, FILES, READS, WRITES, values
from tests.conftest import contents
from tests.page_cache import made_hot

ROWS = 40


def made(folder: Path, times: int = 1) -> None:
    """A cache in a new folder, each `x` multiplied by `times`."""
    with TensorCache.create(folder, COLUMNS, ROWS) as cache:
        rows = values(range(ROWS))
        cache[:] = {**rows, "x": rows["x"] * times}


def removed(folder: Path) -> None:
    shutil.rmtree(folder)


def made_anew(folder: Path) -> None:
    shutil.rmtree(folder)
    made(folder, 100)


def moved(folder: Path) -> None:
    folder.rename(folder.with_name("aside"))


def moved_and_made_anew(folder: Path) -> None:
    moved(folder)
    made(folder, 100)


WAYS = {
    removed: MissingFileError,
    made_anew: ChangedFileError,
    moved: MissingFileError,
    moved_and_made_anew: ChangedFileError,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of a cache; files are looked at in each read."""
    monkeypatch.setattr(rowfile, "_STILL", 0.0)
    made(tmp_path / "cache")
    return tmp_path / "cache"


def is_refused(error: type[Exception], act: Callable[[TensorCache], object], cache: TensorCache) -> bool:
    try:
        act(cache)
    except error:
        return True
    return False


def now_at(folder: Path) -> dict[str, tuple[int, bytes]]:
    return contents(folder.parent)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize(("mode", "acts"), [("r", READS), ("r+", {**READS, **WRITES})], ids=["r", "r+"])
def test_whatever_is_done_to_a_cache_that_is_elsewhere_by_now_is_an_error(folder, way, mode, acts):
    cache = TensorCache.open(folder, mode)
    cache[0], cache["x"][0].sum()  # maps the column
    way(folder)
    now = now_at(folder)

    assert acts == {name: act for name, act in acts.items() if is_refused(WAYS[way], act, cache)}
    cache.close()
    assert now == now_at(folder)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_rows_that_were_not_flushed_before_their_folder_went_are_an_error_at_the_end(folder, way):
    for end in (TensorCache.flush, TensorCache.close):
        cache = TensorCache.open(folder, "r+")
        cache[[7]] = values([7])
        way(folder)
        now = now_at(folder)

        with pytest.raises(WAYS[way]):
            end(cache)
        cache.close()
        assert now == now_at(folder)
        shutil.rmtree(folder.with_name("aside"), ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        made(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_one_file_that_is_replaced_by_an_equal_one_is_an_error(folder, name, mode):
    cache = TensorCache.open(folder, mode)
    shutil.copy(folder / name, folder / "copy")
    os.replace(folder / "copy", folder / name)

    with pytest.raises(ChangedFileError, match=name):
        cache[:]
    if mode == "r+":
        with pytest.raises(ChangedFileError, match=name):
            cache[[7]] = values([7])


def test_rows_in_memory_are_not_those_of_a_later_cache_in_the_same_folder(tmp_path, monkeypatch):
    with TensorCache.create(tmp_path / "cache", {"x": COLUMNS["x"]}, ROWS) as cache:
        cache[:] = {"x": values(range(ROWS))["x"]}
    cache = TensorCache.open(tmp_path / "cache")
    made_hot(cache)
    made_anew(tmp_path / "cache")
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 2 * rowfile._STILL)

    for rows in (0, [1, 2], slice(3, 9)):
        with pytest.raises(ChangedFileError):
            cache[rows]


def test_a_column_that_was_taken_before_does_not_become_that_of_another_cache(folder):
    cache = TensorCache.open(folder, "r+")
    column, before = cache["x"], cache["x"].materialize()
    made_anew(folder)
    now = now_at(folder)

    for act in (lambda: column.sum(), lambda: column[0].add_(1), column.flush):
        with pytest.raises(ChangedFileError):
            act()
    assert now == now_at(folder)
    assert not torch.equal(before, TensorCache.open(folder)["x"].materialize())
