"""A cache's system calls: few, early, and none that waits in vain."""

from __future__ import annotations

import errno
import os
from itertools import pairwise

import pytest
import torch

from offload import TensorCache
from offload.cache import rowfile
from offload.cache.indexing import Rows
from offload.cache.states import FILE, PAGE
from offload.errors import ReadError
from offload.tensor.views import handle_of
from tests.page_cache import needs_page_cache

COLUMNS = {"x": (torch.int64, (1024,))}  # rows of 8 KiB


def values(rows):
    return {"x": torch.arange(rows.start, rows.stop)[:, None].expand(-1, 1024)}


@pytest.fixture
def calls(monkeypatch):
    """The descriptors passed to each call, by the call's name."""
    made = {"fsync": [], "preadv": []}

    def watch(name):
        real = getattr(os, name)

        def watched(fd, *args):
            made[name].append(fd)
            return real(fd, *args)

        monkeypatch.setattr(os, name, watched)

    for name in made:
        watch(name)
    return made


def filled_cache(folder, rows=64):
    with TensorCache.create(folder, COLUMNS, rows) as cache:
        cache[:] = values(range(rows))
    return TensorCache.open(folder)


def test_a_cache_that_grows_seldom_waits_for_the_length_of_its_states(tmp_path, calls):
    cache = TensorCache.create(tmp_path, {"x": (torch.int8, ())})
    cache.append({"x": torch.zeros(1024, dtype=torch.int8)})
    calls["fsync"].clear()

    for _ in range(15):
        cache.append({"x": torch.zeros(1024, dtype=torch.int8)})

    assert [] == calls["fsync"]
    cache.append({"x": torch.zeros(1, dtype=torch.int8)})
    assert [cache._store._states.fd] == calls["fsync"]


def test_the_length_that_a_killed_writer_left_is_waited_for_before_it_is_counted_on(tmp_path, calls):
    TensorCache.create(tmp_path, COLUMNS).close()
    os.truncate(tmp_path / FILE, 1 << 20)
    cache = TensorCache.open(tmp_path, "r+")
    calls["fsync"].clear()

    cache.append(values(range(10)))

    assert [cache._store._states.fd] == calls["fsync"]


def test_the_states_of_a_closed_cache_are_of_its_rows_though_their_file_stays_long(tmp_path):
    """Processes that map it would be killed when they read past its end."""
    with TensorCache.create(tmp_path, COLUMNS) as cache:
        cache.append(values(range(10)))
        length = (tmp_path / FILE).stat().st_size
        assert PAGE + 10 < length

    assert length == (tmp_path / FILE).stat().st_size
    assert PAGE + 4096 >= (tmp_path / FILE).stat().st_blocks * 512  # the rest is a hole
    assert not any((tmp_path / FILE).read_bytes()[PAGE + 10 :])
    assert torch.equal(values(range(10))["x"], TensorCache.open(tmp_path)[:]["x"])


def test_rows_behind_each_other_are_given_to_the_disk_once_in_whole_pages(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(rowfile, "begin_to_write_out", lambda fd, start, nbytes: given.append((start, start + nbytes)))
    cache = TensorCache.create(tmp_path, {"x": (torch.uint8, (3000,))}, 8000)

    for start in range(0, 8000, 500):
        cache[start : start + 500] = {"x": torch.zeros(500, 3000, dtype=torch.uint8)}
    cache[torch.arange(0, 8000, 2)] = {"x": torch.zeros(4000, 3000, dtype=torch.uint8)}

    assert 2 == len(given)
    assert given[0][1] == given[1][0]
    assert all(end - start > (8 << 20) - PAGE and end % PAGE == 0 for start, end in given)


@needs_page_cache
def test_rows_in_memory_are_read_through_a_mapping_from_the_first_batch_on(tmp_path, calls, monkeypatch):
    monkeypatch.setattr(rowfile, "_STILL", 3600.0)
    cache, rows = filled_cache(tmp_path), torch.tensor([40, 3, 63, 3, 0, 17, 20, 33], dtype=torch.int32)

    batch = cache[rows]

    assert torch.equal(rows, batch["x"][:, 7])
    assert len(rows) == len(calls["preadv"])  # checks
    assert torch.equal(rows, cache[rows]["x"][:, 1023])
    assert len(rows) == len(calls["preadv"])
    cache._store._files["x"].rowfile.in_memory_until = 0.0  # the moment has passed
    assert torch.equal(rows, cache[rows]["x"][:, 0])
    assert len(rows) + 4 == len(calls["preadv"])


def test_a_run_is_read_in_one_call_and_is_copied_once_the_file_is_in_memory(tmp_path, calls, monkeypatch):
    cache = filled_cache(tmp_path)
    monkeypatch.setattr(rowfile, "cached_bytes", lambda *_: 0)
    for start in (0, 1, 20):
        assert torch.equal(torch.arange(start, start + 30), cache[start : start + 30]["x"][:, 7])
    assert 3 == len(calls["preadv"])

    monkeypatch.setattr(rowfile, "cached_bytes", lambda _, nbytes: nbytes)

    assert torch.equal(torch.arange(64), cache[:]["x"][:, 7])
    assert 3 == len(calls["preadv"])


@needs_page_cache
@pytest.mark.parametrize("absent", [5, 6])
def test_a_file_of_which_a_part_is_not_in_memory_is_not_mapped(tmp_path, monkeypatch, absent):
    cache, places = filled_cache(tmp_path, 512), []

    def cached_bytes(address, nbytes):
        places.append(address)
        return nbytes * (len(places) <= 200 - absent or len(places) > 200)

    monkeypatch.setattr(rowfile, "cached_bytes", cached_bytes)
    rows = torch.arange(0, 512, 2)

    assert torch.equal(rows, cache[rows]["x"][:, 7])
    assert (256 if absent == 5 else 200) == len(places) == len(set(places))
    assert {512 * 8192 // 256} == {place - later for place, later in pairwise(places)}  # from the end
    assert (absent == 6) == (cache._store._files["x"].rowfile.mapped is None)


def test_rows_that_lie_close_to_each_other_are_read_in_one_call(tmp_path, calls, monkeypatch):
    monkeypatch.setattr(rowfile, "available_bytes", lambda: 0)  # nothing is mapped
    with TensorCache.create(tmp_path, {"x": (torch.int16, (40,))}, 2000) as cache:
        cache[:] = {"x": torch.arange(2000, dtype=torch.int16)[:, None].expand(-1, 40)}
    cache = TensorCache.open(tmp_path)
    rows = torch.cat([torch.arange(0, 1000, 3), torch.arange(1900, 1700, -2), torch.tensor([1300, 1300, 1301, 1999])])

    batch = cache[rows]

    assert torch.equal(rows.short()[:, None].expand(-1, 40), batch["x"])
    looks = -(-len(rows) // -(-len(rows) // 16))
    assert looks + 6 >= len(calls["preadv"])


@needs_page_cache
@pytest.mark.parametrize("start", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("dtype", [torch.complex128, torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("row_shape", [(), (2, 1)])
def test_rows_that_do_not_begin_at_a_multiple_of_their_elements_are_mapped_too(tmp_path, start, dtype, row_shape):
    values = (torch.randn(100, *row_shape) * 9).to(dtype)
    (tmp_path / "rows").write_bytes(bytes(start) + values.contiguous().view(torch.uint8).numpy().tobytes())
    file = rowfile.RowFile(tmp_path / "rows", start, dtype, row_shape, writes=False)
    numbers = torch.tensor([99, 0, 42])

    for _ in range(2):
        assert torch.equal(values[5:80], file.read(Rows.run(5, 80)))
        assert torch.equal(values[numbers], file.read(Rows(numbers.numpy())))
    assert file.mapped is not None
    file.close()


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "too many mappings"])
def test_a_file_that_is_cut_while_it_is_mapped_or_can_not_be_is_read_by_calls(tmp_path, monkeypatch, is_cut):
    cache, map_bytes = filled_cache(tmp_path), rowfile.map_bytes

    def refused(fd, path, *args, **kwargs):
        asked.append(path)
        if not is_cut:
            raise ReadError(errno.ENOMEM, "no more mappings", str(path))
        os.truncate(path, path.stat().st_size - 1)
        return map_bytes(fd, path, *args, **kwargs)

    asked = []
    monkeypatch.setattr(rowfile, "map_bytes", refused)

    assert torch.equal(torch.arange(10, 20), cache[10:20]["x"][:, 7])
    assert asked
    assert all(column.rowfile.mapped is None for column in cache._store._files.values())


def test_tensors_of_a_column_share_their_file_until_it_changes(tmp_path):
    filled_cache(tmp_path).close()
    reader, writer = TensorCache.open(tmp_path), TensorCache.open(tmp_path, "r+")
    first = reader["x"]

    assert handle_of(first).file is handle_of(reader["x"]).file
    writer.append(values(range(64, 70)))
    writer.flush()
    assert (70, 1024) == tuple(reader["x"].shape)
    assert torch.equal(torch.arange(70), reader["x"][:, 5])


def test_values_of_any_length_that_are_not_in_memory_are_announced_before_the_first_is_read(tmp_path, monkeypatch):
    with TensorCache.create(tmp_path, {"t": (torch.int32, (None,))}, 40) as cache:
        cache[:] = {"t": [torch.full((4096,), row, dtype=torch.int32) for row in range(40)]}
    cache, real, seen = TensorCache.open(tmp_path), os.preadv, []
    fd = cache._store._files["t"]._values._random

    def preadv(at_fd, into, at, flags=0):
        if flags:
            raise BlockingIOError
        seen.extend(["read"] * (at_fd == fd))
        return real(at_fd, into, at)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "posix_fadvise", lambda at_fd, *_: seen.extend(["announced"] * (at_fd == fd)))
    found = cache[[30, 1, 20]]["t"]

    assert [30, 1, 20] == [int(row[-1]) for row in found]
    assert ["announced"] * 3 + ["read"] * 3 == seen
