"""A cold cache that is read at random: it is read in whole if there is room, and enough rows have been read."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time

import numpy as np
import pytest
import torch

import offload
from bench.page_cache import cached_fraction
from offload import TensorCache
from offload.cache import rowfile
from offload.errors import CorruptFileError
from offload.prefetch import engine, pages, plan, tables
from tests.page_cache import dropped, needs_page_cache
from tests.processes import in_fork

MIB = 1 << 20
ROWS = 2048  # of 8 KiB

pytestmark = [needs_page_cache, pytest.mark.usefixtures("only_own_values", "still_clock")]


def values(numbers):
    return torch.as_tensor(numbers)[:, None].int().expand(-1, 2048)


@pytest.fixture
def folder(tmp_path):
    with TensorCache.create(tmp_path / "cache", {"x": (torch.int32, (2048,))}, ROWS) as cache:
        cache[:] = {"x": values(range(ROWS))}
    return tmp_path / "cache"


@pytest.fixture
def path(folder):
    """The column's file, not in memory."""
    return dropped(folder / "x.safetensors")


@pytest.fixture
def cache(folder, path):
    """An open one, whose rows are not in memory."""
    return TensorCache.open(folder)


@pytest.fixture(autouse=True)
def _looks_read_nothing(monkeypatch):
    """Otherwise, a quick disk has the page that is looked at before the look ends, and it is taken to be in memory."""

    def look_at(fd, places):
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapping:
            address = np.frombuffer(mapping, np.uint8).ctypes.data
            if not all(pages.cached_bytes(address + place, 1) for place in places):
                raise OSError(errno.EAGAIN, "not in memory")

    monkeypatch.setattr(rowfile, "look_at", look_at)


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """The parts that are read in; before each one, `gate` is waited for, and `before` called."""

    class Parts(list):
        before = staticmethod(lambda: None)
        gate = threading.Event()

    seen = Parts()
    seen.gate.set()

    def bring_in(address, nbytes):
        seen.gate.wait()
        seen.before()
        is_read = pages.bring_in(address, nbytes)
        seen.append(nbytes)
        return is_read

    monkeypatch.setattr(tables, "bring_in", bring_in)
    monkeypatch.setattr(tables, "_PART", MIB)
    yield seen
    seen.gate.set()
    rest()


def rest():
    """Wait until nothing is being read in."""
    while engine._ENGINE.reader._parts:
        time.sleep(0.001)


def read_in(cache, parts, before):
    """Some rows, and what is then read in: `before` is called before each part, and nothing is read until they are."""
    parts.before = before
    parts.gate.clear()
    cache[some(256)]
    parts.gate.set()
    rest()


def some(count, seed=0):
    return torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))[:count]


def assert_whole(cache):
    for rows in torch.randperm(ROWS).split(256):
        assert torch.equal(values(rows), cache[rows]["x"])


@pytest.mark.parametrize("is_file", [False, True], ids=["folder", "file"])
def test_a_column_that_fits_is_in_memory_after_some_random_rows(folder, tmp_path, parts, is_file):
    path = folder / "x.safetensors"
    if is_file:
        path = tmp_path / "rows.safetensors"
        TensorCache.open(folder).to_disk(path)
    dropped(path)
    cache = TensorCache.from_disk(path if is_file else folder)

    for rows in some(256).split(64):
        assert torch.equal(values(rows), cache[rows]["x"])
    rest()

    assert cached_fraction([path]) > 0.99
    assert sum(parts) == ROWS * 8192
    assert_whole(cache)


@pytest.mark.parametrize("count", [255, 256])
def test_rows_of_any_length_are_in_memory_after_some_too(tmp_path, parts, count):
    rows = [torch.full((1024 + number % 64,), number) for number in range(ROWS)]
    with TensorCache.create(tmp_path / "cache", {"x": (torch.int64, (None,))}) as cache:
        cache.append({"x": rows})
    path = dropped(tmp_path / "cache" / "x.values")
    cache = TensorCache.open(tmp_path / "cache")

    cache[some(count)]
    rest()

    assert (cached_fraction([path]) > 0.99) == (count == 256)
    assert bool(parts) == (count == 256)
    for number, value in enumerate(cache[torch.arange(ROWS).flip(0)]["x"]):
        assert torch.equal(rows[ROWS - 1 - number], value)


@pytest.mark.parametrize("count", [10, 255])
def test_a_few_rows_bring_in_no_others(cache, path, parts, count):
    cache[some(count)]
    rest()

    assert not parts
    assert cached_fraction([path]) < 2 * count / ROWS + 0.01


def test_few_rows_of_many_bring_in_no_others(cache, path, parts, monkeypatch):
    """Fewer than one in 64 of the bytes."""
    monkeypatch.setattr(tables, "_LEAST_ROWS", 1)

    cache[some(31)]
    rest()
    assert not parts

    cache[some(40)[31:]]
    rest()
    assert cached_fraction([path]) > 0.99


def test_rows_behind_each_other_bring_in_no_others(cache, parts):
    for start in range(0, ROWS, 256):
        assert torch.equal(values(range(start, start + 256)), cache[start : start + 256]["x"])
    rest()

    assert not parts


def test_a_column_that_does_not_fit_is_not_read_whole(folder, path, parts):
    with offload.set_max_memory("15MiB"):
        cache = TensorCache.open(folder)
        cache[some(256)]
        rest()

    assert not parts
    assert cached_fraction([path]) < 0.3


def test_the_one_of_two_columns_that_fits_is_read_whole(tmp_path):
    schema = dict.fromkeys("xy", (torch.int32, (2048,)))
    with TensorCache.create(tmp_path / "two", schema, ROWS) as cache:
        cache[:] = {name: values(range(ROWS)) for name in "xy"}
    paths = [dropped(tmp_path / "two" / f"{name}.safetensors") for name in "xy"]
    with offload.set_max_memory("24MiB"):
        cache = TensorCache.open(tmp_path / "two")
        for rows in some(1024).split(256):
            cache[rows]
        rest()

    whole = sorted(cached_fraction([path]) > 0.99 for path in paths)
    assert [False, True] == whole


def test_it_stops_where_the_memory_goes(cache, path, parts, monkeypatch):
    left = iter([1 << 40, 1 << 40, 1 << 40])
    monkeypatch.setattr(plan, "available_bytes", lambda: next(left, MIB))

    cache[some(256)]
    rest()

    assert 1 <= len(parts) <= 3
    assert cached_fraction([path]) < 0.5
    assert_whole(cache)


def test_a_column_that_was_evicted_is_read_whole_less_readily(cache, path, parts, monkeypatch):
    monkeypatch.setattr(tables, "_LEAST_ROWS", 1)
    needed = []
    for _ in range(3):
        parts.clear()
        cache._store._files["x"].rowfile.mapped = None
        for done, rows in enumerate(some(ROWS).split(16)):
            dropped(path)
            cache[rows]
            rest()
            if parts:
                needed.append((done + 1) * 16)
                break
        cache._store._files["x"].rowfile._filling.take()
        dropped(path)

    assert [48, 144, 528] == needed  # the header counts too


def test_rows_that_are_written_meanwhile_are_right(cache, parts):
    writer = TensorCache.open(cache.folder, "r+")
    expected = values(range(ROWS)).clone()
    numbers = iter(range(3, ROWS, 127))

    def write():
        row = next(numbers)
        writer[[row]] = {"x": values([-row])}
        writer.flush()
        expected[row] = -row

    read_in(cache, parts, write)

    assert len(parts) == 16
    assert (expected[:, 0] < 0).sum() == 16
    for reader in (cache, writer):
        assert torch.equal(expected, reader[torch.arange(ROWS).flip(0)]["x"].flip(0))


def test_a_closed_cache_is_not_brought_in_further(cache, parts):
    read_in(cache, parts, cache.close)

    assert 1 == len(parts)


def test_a_file_that_is_cut_meanwhile_is_an_error_of_its_rows_alone(cache, path, parts):
    read_in(cache, parts, lambda: os.truncate(path, 4096))

    assert not parts
    assert not cache._store._files["x"].rowfile._filling.is_under_way
    with pytest.raises(CorruptFileError, match="cut"):
        cache[some(256, seed=1)]


def test_a_forked_child_goes_on_by_itself(cache, path, parts):
    parts.gate.clear()
    cache[some(256)]

    def child():
        parts.gate.set()
        cache[some(600)[256:]]
        rest()
        assert cached_fraction([path]) > 0.99
        assert_whole(cache)

    try:
        assert in_fork(child)
    finally:
        parts.gate.set()
    rest()
    assert_whole(cache)
