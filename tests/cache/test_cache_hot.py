"""A cache with all rows filled and in memory: the short path gives the same results."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from offload import TensorCache
from offload.cache import rowfile
from offload.errors import CacheError, ColumnError, CorruptFileError, MissingRowsError, RowIndexError, WriteError
from tests.page_cache import made_hot

ROWS = 40
COLUMNS = {"x": (torch.float32, (3, 2)), "y": (torch.int16, ()), "odd": (torch.uint16, (5,))}


def values(numbers):
    numbers = torch.as_tensor(numbers)
    return {
        "x": numbers[:, None, None].float().expand(-1, 3, 2),
        "y": numbers.to(torch.int16),
        "odd": numbers[:, None].expand(-1, 5).to(torch.uint16),
    }


@pytest.fixture(autouse=True)
def moments(monkeypatch):
    monkeypatch.setattr(rowfile, "_STILL", 3600.0)


@pytest.fixture
def folder(tmp_path):
    with TensorCache.create(tmp_path / "cache", COLUMNS, ROWS) as cache:
        cache[:] = values(range(ROWS))
    return tmp_path / "cache"


def hot(folder, mode="r"):
    """An open cache whose next batch takes the short path."""
    cache = TensorCache.open(folder, mode)
    made_hot(cache)
    return cache


@pytest.fixture
def no_other(monkeypatch):
    """Allows only the short path: any other read is an error."""

    def watch(cache):
        monkeypatch.setattr(cache._store, "read", None)
        return cache

    return watch


@pytest.mark.parametrize(
    "index",
    [
        torch.tensor([7, 0, 39, 7]),
        torch.tensor([], dtype=torch.int64),
        torch.arange(40)[::3],
        np.array([7, 0, 39, 7]),
        [7, 0, 39, 7],
        slice(None),
        slice(3, 9),
        slice(-5, None),
        slice(38, 100),
        slice(9, 3),
        slice(2, 5, 1),
    ],
    ids=str,
)
def test_hot_rows_are_those_of_the_plain_tensors(folder, no_other, index):
    cache = no_other(hot(folder))

    found = cache[index]

    expected = values(torch.arange(ROWS)[index])
    assert list(COLUMNS) == list(found)
    for name, value in expected.items():
        assert (value.shape, value.dtype) == (found[name].shape, found[name].dtype)
        assert torch.equal(value, found[name])


@pytest.mark.parametrize("row", [0, 7, -1, -ROWS])
def test_a_hot_row_has_no_leading_dimension_and_memory_of_its_own(folder, no_other, row):
    cache = no_other(hot(folder))

    found = cache[row]
    found["x"].fill_(-1.0)

    assert torch.equal(values(range(ROWS))["x"][row], cache[row]["x"])
    assert [((), torch.int16), ((5,), torch.uint16)] == [(found[n].shape, found[n].dtype) for n in ("y", "odd")]
    assert torch.equal(values(range(ROWS))["odd"][row], found["odd"])


@pytest.mark.parametrize(
    "index", [ROWS, -ROWS - 1, [0, ROWS], True, [True] * 3, [[True]], [0.5], ["x"], [1 << 70], None]
)
def test_an_invalid_index_is_the_same_error_on_the_hot_path(folder, index):
    with pytest.raises(RowIndexError):
        hot(folder)[index]


@pytest.mark.parametrize("columns", [["y"], ("odd", "x"), [], ["x", "x"]])
def test_some_columns_come_in_the_order_that_was_asked_for(folder, no_other, columns):
    found = no_other(hot(folder)).get(torch.tensor([3, 1]), columns)

    assert list(dict.fromkeys(columns)) == list(found)
    for name in columns:
        assert torch.equal(values([3, 1])[name], found[name])


@pytest.mark.parametrize(
    "index",
    [
        *([-4, 2], [True, False] * 20, range(4), slice(None, None, -1), slice(1, 30, 4), np.array([9, 8])),
        *(torch.tensor([-1, 2]), torch.tensor(5), torch.arange(40) > 37, torch.tensor([3], dtype=torch.int8)),
    ],
    ids=str,
)
def test_other_forms_give_their_rows(folder, index):
    numbers = np.arange(ROWS)[np.asarray(index) if not isinstance(index, slice) else index]

    found = hot(folder)[index]

    assert torch.equal(values(np.atleast_1d(numbers).copy())["x"].reshape(*np.shape(numbers), 3, 2), found["x"])


@pytest.mark.parametrize("numbers", [np.arange(ROWS)[::-3], np.arange(9)])
def test_arrays_that_torch_does_not_take_name_rows_too(folder, numbers):
    """Reversed or read-only ones: torch refuses the first, and warns about the second."""
    numbers.flags.writeable = False
    cache = hot(folder)

    for _ in range(2):
        assert numbers.tolist() == cache[numbers]["y"].tolist()


def test_errors_are_the_same_on_the_hot_path(folder):
    cache = hot(folder)

    for index, words in [
        (torch.tensor([1, 40]), "row 40 is out of range for a cache of 40 rows"),
        (torch.tensor([-41]), "row -41 is out of range for a cache of 40 rows"),
        (torch.tensor([1.5]), "is not an index of rows"),
    ]:
        with pytest.raises(RowIndexError, match=words):
            cache[index]
    with pytest.raises(ColumnError, match="no column 'z'"):
        cache.get(torch.tensor([1]), ["x", "z"])
    with pytest.raises(CacheError, match="unknown missing='zero'"):
        cache.get(torch.tensor([1]), missing="zero")
    with pytest.raises(TypeError, match="slice indices must be integers"):
        cache["a":"b"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_hot_rows_land_where_they_are_wanted(folder, no_other, device):
    found = no_other(hot(folder)).get([7, 0], device=device)

    assert {device} == {value.device.type for value in found.values()}
    assert [(2, 3, 2), (2,), (2, 5)] == [tuple(value.shape) for value in found.values()]


def test_names_that_can_be_gone_through_once_are_not_used_up(folder):
    cache = hot(folder)

    for number in (2, -1):  # a negative index does not take the short path
        assert ["y", "x"] == list(cache.get(torch.tensor([number]), (name for name in ["y", "x"])))


def test_a_batch_is_the_callers(folder):
    cache = hot(folder)

    for index in (torch.tensor([4, 5]), slice(4, 6)):
        batch = cache[index]
        for value in batch.values():
            value.zero_()

    assert torch.equal(values([4, 5])["x"], cache[4:6]["x"])


@pytest.mark.parametrize("mode", ["inference", "fake", "default device", "no_grad"])
def test_in_every_mode_rows_are_plain(folder, mode):
    cache = hot(folder)
    modes = {
        "inference": torch.inference_mode,
        "fake": FakeTensorMode,
        "default device": lambda: torch.device("meta"),
        "no_grad": torch.no_grad,
    }
    rows = torch.tensor([4, 5])

    with modes[mode]():
        found = cache[rows]["x"], cache[4:6]["x"]

    for value in found:
        assert type(value) is torch.Tensor
        assert not value.is_inference()
        assert torch.equal(values([4, 5])["x"], value)


def test_a_row_that_another_writes_again_is_missing_until_it_is_flushed(folder):
    reader, writer = hot(folder), TensorCache.open(folder, "r+")

    writer[[7]] = values([70])

    for index in (torch.tensor([6, 7]), slice(6, 8)):
        with pytest.raises(MissingRowsError, match=r"1 of the requested rows are not filled in .*: 7"):
            reader[index]
        assert [6, 8] == reader[torch.tensor([6, 8])]["y"].tolist()
    writer.flush()
    for index in (torch.tensor([6, 7]), slice(6, 8)):
        assert [6, 70] == reader[index]["y"].tolist()


def test_rows_that_another_adds_are_missing_until_they_are_flushed(folder):
    reader, writer = hot(folder), TensorCache.open(folder, "r+")

    writer.append(values([40, 41]))

    with pytest.raises(MissingRowsError, match=r"1 of the requested rows .*: 41"):
        reader[torch.tensor([39, 41])]
    with pytest.raises(MissingRowsError, match=r"2 of the requested rows .*: 40, 41"):
        reader[:]
    writer.flush()
    for _ in range(2):
        assert list(range(42)) == reader[:]["y"].tolist()
        assert [41, 3] == reader[torch.tensor([41, 3])]["y"].tolist()


def test_a_writer_sees_what_it_has_written(folder):
    cache = hot(folder, "r+")

    for number in (50, 60):
        cache[[3]] = values([number])
        for _ in range(2):
            assert [2, number] == cache[torch.tensor([2, 3])]["y"].tolist()


def test_rows_not_in_memory_are_read_from_the_disk(folder, monkeypatch):
    cache, real, rows = hot(folder), os.preadv, torch.tensor([3, 30])
    cache._store._files["x"].rowfile.in_memory_until = 0.0
    announced = []

    def preadv(fd, into, at, flags=0):
        if flags:
            raise BlockingIOError
        return real(fd, into, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        patch.setattr(os, "posix_fadvise", lambda *args: announced.append(args))
        assert torch.equal(values([3, 30])["x"], cache[rows]["x"])

        assert announced
        assert cache._store.warm.take(rows, None) is None
        patch.setattr(rowfile, "cached_bytes", lambda *_: 0)
        cache[rows]
    assert cache._store.warm is None  # the file is no longer mapped
    assert torch.equal(values([3, 30])["x"], cache[rows]["x"])


def test_a_truncated_file_is_an_error(folder):
    cache = hot(folder)
    for file in cache._store._files.values():
        file.rowfile.in_memory_until = 0.0
    os.truncate(folder / "x.safetensors", 0)

    with pytest.raises(CorruptFileError, match="was truncated"):
        cache[torch.tensor([3, 30])]


@pytest.mark.parametrize("is_whole", [True, False])
def test_whether_all_rows_are_filled_is_known_after_some_batches(tmp_path, is_whole):
    with TensorCache.create(tmp_path / "cache", {"x": (torch.uint8, ())}, 300_000) as cache:
        cache[: 300_000 - (not is_whole)] = {"x": torch.arange(300_000 - (not is_whole)).to(torch.uint8)}
    cache, rows = TensorCache.open(tmp_path / "cache"), torch.arange(0, 300_000, 3001)
    states, known = cache._store._states, []

    for _ in range(12):
        assert torch.equal(rows.to(torch.uint8), cache[rows]["x"])
        known.append(states.known_filled(states.changes))

    assert known[0] == 0
    assert known[-1] == (300_000 if is_whole else 0)


def test_rows_whose_writing_failed_before_it_began_are_missing_and_not_left_out(folder, monkeypatch):
    """There are more rows, but the change counter is unchanged."""
    reader, writer = hot(folder), TensorCache.open(folder, "r+")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(WriteError):
            writer.append(values(range(40, 60)))

    assert len(reader) == 60
    for index in (slice(None), slice(-2, None), slice(50, 55)):
        with pytest.raises(MissingRowsError):
            reader[index]
    with pytest.raises(MissingRowsError):
        list(reader.batches(16))
    assert [39, 3] == reader[torch.tensor([39, 3])]["y"].tolist()


def test_long_runs_are_copied_by_a_system_call_and_are_the_same(folder, no_other, monkeypatch):
    cache, runs = no_other(hot(folder)), []
    monkeypatch.setattr(rowfile, "_LONG", 60)  # bytes
    read_run = rowfile.read_run
    monkeypatch.setattr(rowfile, "read_run", lambda *given: (runs.append(given[2]), read_run(*given)))

    for index in (slice(None), slice(3, 9), slice(39, 50), slice(9, 3)):
        found, expected = cache[index], values(range(*index.indices(ROWS)))
        assert all(torch.equal(expected[name], found[name]) for name in COLUMNS)
    assert 5 == len(runs)  # three columns, two, none, none


def test_a_file_that_was_cut_is_an_error_of_a_long_run(folder, monkeypatch):
    cache = hot(folder)
    monkeypatch.setattr(rowfile, "_LONG", 1)
    os.truncate(folder / "x.safetensors", 4096 + 10)
    with pytest.raises(CorruptFileError, match="was truncated"):
        cache[10:20]
