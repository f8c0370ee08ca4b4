"""A cache folder with other things in place of its files: links, pipes, devices, folders, gigabytes of JSON."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from offload import TensorCache
from offload.cache.states import FILE, PAGE
from offload.errors import ChangedFileError, CorruptFileError, ForeignFileError, OffloadError
from offload.storage.state_file import MOST_JSON
from tests.cache import test_cache_cut
from tests.cache.test_cache_cut import COLUMNS, values
from tests.conftest import contents
from tests.processes import in_fork

FILES = ["manifest.json", "rows.lock", *(name for name in test_cache_cut.FILES if not name.startswith("raw"))]


@pytest.fixture
def folder(tmp_path):
    with TensorCache.create(tmp_path / "cache", COLUMNS, 8) as cache:
        cache[:] = values(range(8))
    return tmp_path / "cache"


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("manifest.json", "rows.lock")])
def test_nothing_is_written_through_a_link(folder, name):
    """Two versions of a folder share a file: the other one is not changed."""
    other = folder.parent / "other"
    shutil.move(folder, other)
    folder.mkdir()
    for path in other.iterdir():
        shutil.copy(path, folder)
    (folder / name).unlink()
    (folder / name).symlink_to(other / name)
    before = contents(other)

    with pytest.raises(ForeignFileError, match=rf"{name} is a symlink, and offload does not write through it"):
        TensorCache.open(folder, "r+")
    assert before == contents(other)
    assert "number 5" == TensorCache.open(folder)[5]["note"]


def test_the_manifest_behind_a_link_stays_as_it_is(folder):
    mine = folder.parent / "mine"
    (folder / "manifest.json").rename(mine)
    (folder / "manifest.json").symlink_to(mine)
    before = mine.read_bytes()

    with TensorCache.open(folder, "r+") as cache:
        cache.append(values(range(2)))

    assert before == mine.read_bytes()
    assert 10 == len(TensorCache.open(folder))


@pytest.mark.parametrize("name", ["rows.lock", "t.values", "note.jsonl", "x.safetensors", FILE])
@pytest.mark.parametrize("leads", ["to a file", "nowhere"])
def test_a_cache_is_not_made_through_links(tmp_path, name, leads):
    mine, folder = tmp_path / "mine", tmp_path / "cache"
    folder.mkdir()
    if leads == "to a file":
        mine.write_bytes(b"")
    (folder / name).symlink_to(mine)

    with pytest.raises(ForeignFileError, match=name):
        TensorCache.create(folder, COLUMNS, 3)

    assert (leads == "to a file") == mine.exists()
    assert not mine.exists() or not mine.stat().st_size


def pipe(path):
    os.mkfifo(path)


def zeros(path):
    path.symlink_to("/dev/zero")


def in_a_circle(path):
    path.symlink_to(path)


@pytest.mark.parametrize(
    "stands", [pipe, Path.mkdir, zeros, in_a_circle, lambda path: None], ids=lambda act: act.__name__
)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_path_that_is_not_a_file_is_refused_at_once_by_name(folder, name, stands, mode):
    (folder / name).unlink()
    stands(folder / name)

    with pytest.raises(OffloadError) as caught:
        TensorCache.open(folder, mode)
    assert str(folder / name) in str(caught.value)


@pytest.mark.parametrize("stands", [pipe, Path.mkdir, zeros], ids=lambda act: act.__name__)
@pytest.mark.parametrize("name", FILES[1:])
def test_a_cache_is_not_created_over_a_path_that_is_not_a_file(tmp_path, name, stands):
    stands(tmp_path / name)

    with pytest.raises(OffloadError) as caught:
        TensorCache.create(tmp_path, COLUMNS, 3)
    assert str(tmp_path) in str(caught.value)


def test_no_more_is_read_of_a_manifest_than_one_can_have(folder):
    os.truncate(folder / "manifest.json", MOST_JSON + 1)

    with pytest.raises(CorruptFileError, match=r"manifest\.json is larger than"):
        TensorCache.open(folder)


def bytes_in_place(name, data):
    return pytest.param(name, data, id=f"{name} {data[:12]!r}")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        bytes_in_place(name, data)
        for name in FILES
        if name != "rows.lock"
        for data in (b"", b"\0" * 5000, b"\xff" * 5000, b"{}", b"[" * 100_000, b"x" * PAGE)
        if (name, data) not in (("t.values", b"\0" * 5000), ("t.values", b"\xff" * 5000), ("t.values", b"x" * PAGE))
    ],
)
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_any_bytes_in_place_of_a_file_are_right_rows_or_an_error_that_names_it(folder, name, data, mode):
    (folder / name).write_bytes(data)

    told, found = "", values(range(8))
    try:
        found = TensorCache.open(folder, mode)[:]
    except OffloadError as error:
        told = str(error)

    assert not told or str(folder / name) in told
    assert torch.equal(values(range(8))["x"], found["x"])
    assert name == "note.jsonl" or values(range(8))["note"] == found["note"]


def test_a_forked_writer_does_not_use_states_that_were_replaced(folder):
    cache = TensorCache.open(folder, "r+")
    shutil.copy(folder / FILE, folder / "new")
    (folder / "new").replace(folder / FILE)

    def write():
        with pytest.raises(ChangedFileError, match=r"rows\.state was replaced since the cache was opened"):
            cache[0] = {"note": "mine"}

    assert in_fork(write)
    assert "number 0" == TensorCache.open(folder)[0]["note"]
