"""A cache with all rows filled and in memory: they are copied out of mappings."""

from __future__ import annotations

import os

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from offload import TensorCache
from offload.cache import rowfile
from offload.errors import ColumnError, CorruptFileError, MissingRowsError, RowIndexError, WriteError
from tests.equal import assert_equal
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
    """An open cache whose files are mapped."""
    cache = TensorCache.open(folder, mode)
    made_hot(cache)
    return cache


@pytest.mark.parametrize("index", [torch.tensor([7, 0, 39, 7]), slice(3, 9), slice(38, 100), 7, -1], ids=str)
def test_hot_rows_come_out_of_mappings_and_are_the_callers(folder, monkeypatch, index):
    cache = hot(folder)
    for read in ("read_run", "read_parts"):
        monkeypatch.setattr(rowfile, read, None)

    for _ in range(2):
        found = cache[index]
        assert_equal({name: value[index] for name, value in values(range(ROWS)).items()}, found, strides=False)
        for value in found.values():
            value.zero_()
    assert {"meta"} == {value.device.type for value in cache.get(index, device="meta").values()}


@pytest.mark.parametrize("columns", [["y"], ("odd", "x"), [], ["x", "x"]])
def test_some_columns_come_in_the_order_that_was_asked_for(folder, columns):
    found = hot(folder).get(torch.tensor([3, 1]), columns)

    assert list(dict.fromkeys(columns)) == list(found)
    assert_equal({name: values([3, 1])[name] for name in columns}, found, strides=False)


@pytest.mark.parametrize(
    ("index", "how", "error", "words"),
    [
        ([-ROWS - 1], {}, RowIndexError, "row -41 is out of range for a cache of 40 rows"),
        (torch.tensor([1]), {"columns": ["x", "z"]}, ColumnError, "no column 'z'"),
        (slice("a", "b"), {}, TypeError, "slice indices must be integers"),
    ],
)
def test_errors_are_the_same_for_hot_rows(folder, index, how, error, words):
    with pytest.raises(error, match=words):
        hot(folder).get(index, **how)


def test_names_that_can_be_gone_through_once_are_not_used_up(folder):
    cache = hot(folder)

    for number in (2, -1):
        assert ["y", "x"] == list(cache.get(torch.tensor([number]), (name for name in ["y", "x"])))


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
        assert cache._store._files["x"].rowfile.mapped is not None
        patch.setattr(rowfile, "cached_bytes", lambda *_: 0)
        cache[rows]
    assert cache._store._files["x"].rowfile.mapped is None
    assert torch.equal(values([3, 30])["x"], cache[rows]["x"])


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


def test_long_runs_are_copied_by_a_system_call_and_are_the_same(folder, monkeypatch):
    cache, runs = hot(folder), []
    monkeypatch.setattr(rowfile, "_LONG", 60)  # bytes
    read_run = rowfile.read_run
    monkeypatch.setattr(rowfile, "read_run", lambda *given: (runs.append(given[2]), read_run(*given)))

    for index in (slice(None), slice(3, 9), slice(39, 50), slice(9, 3)):
        assert_equal(values(range(*index.indices(ROWS))), cache[index], strides=False)
    assert 5 == len(runs)  # three columns, two, none, none


def test_a_file_that_was_cut_is_an_error_of_a_long_run(folder, monkeypatch):
    cache = hot(folder)
    monkeypatch.setattr(rowfile, "_LONG", 1)
    os.truncate(folder / "x.safetensors", 4096 + 10)
    with pytest.raises(CorruptFileError, match="was truncated"):
        cache[10:20]
