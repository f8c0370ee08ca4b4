"""Many writers and readers of one cache: forked and spawned processes, and threads."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from offload import TensorCache
from offload.cache import states as states_module
from offload.cache.indexing import Rows as SomeRows
from offload.errors import MissingRowsError
from tests.campaigns import amount
from tests.equal import assert_equal
from tests.processes import ended, forked, in_fork

ROWS = amount("rows", 40_000, 1_000_000)
COLUMNS = {"a": (torch.int64, (4,)), "b": (torch.int32, (3,))}


def stamped(rows, stamp=0):
    rows = torch.as_tensor(rows)
    return {"a": (rows + stamp)[:, None].expand(-1, 4), "b": (rows + stamp).int()[:, None].expand(-1, 3)}


def is_of_one_stamp(batch):
    return bool((batch["a"] == batch["a"][:, :1]).all() and (batch["b"] == batch["a"][:, :1]).all())


def all_succeed(*acts):
    """Run each in a forked child."""
    pids = [forked(act) for act in acts]
    return [0] * len(acts) == [ended(pid) for pid in pids]


@pytest.mark.campaign("rows")
def test_random_writes_of_four_processes_are_complete_and_no_row_is_seen_half_written(tmp_path):
    TensorCache.create(tmp_path, COLUMNS, ROWS).close()
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))

    def write(rank):
        torch.set_num_threads(1)
        cache = TensorCache.open(tmp_path, "r+")
        for number, rows in enumerate(order[rank::4].split(97 if ROWS < 100_000 else 997)):
            cache[rows] = stamped(rows)
            if number % 20 == 0:
                cache.flush()
        cache.close()

    def read():
        torch.set_num_threads(1)
        cache, seen = TensorCache.open(tmp_path), 0
        while seen < ROWS:
            missing = cache.missing_rows()
            seen = ROWS - len(missing)
            filled = np.setdiff1d(np.arange(ROWS), missing.numpy())
            rows = torch.from_numpy(filled[:: max(len(filled) // 500, 1)])
            batch = cache[rows]
            assert is_of_one_stamp(batch)
            assert torch.equal(rows, batch["a"][:, 0])

    assert all_succeed(*[lambda rank=rank: write(rank) for rank in range(4)], read)

    cache = TensorCache.open(tmp_path)
    assert ROWS == cache.num_filled
    assert_equal(stamped(range(ROWS)), cache[:], strides=False)


def test_a_row_that_another_writes_again_is_filled_by_the_other_alone(tmp_path):
    first, second = TensorCache.create(tmp_path, COLUMNS, 3), TensorCache.open(tmp_path, "r+")
    reader = TensorCache.open(tmp_path)
    first[:2] = stamped([10, 20])
    second[1:] = stamped([21, 31])

    first.flush()
    assert [1, 2] == reader.missing_rows().tolist()
    second.flush()
    assert [10, 21, 31] == reader[:]["b"][:, 0].tolist()


def test_writers_of_one_row_exclude_each_other(tmp_path):
    first, second = TensorCache.create(tmp_path, COLUMNS, 3), TensorCache.open(tmp_path, "r+")
    other = threading.Thread(target=lambda: second.__setitem__(slice(None), stamped([1, 2, 3], 100)))
    last = first._store._files["b"]
    write = last.write

    def write_later(*args):
        other.start()
        other.join(0.2)
        assert other.is_alive()
        return write(*args)

    last.write = write_later
    first[:] = stamped([1, 2, 3], 200)
    other.join()
    second.flush()

    assert torch.equal(stamped([101, 102, 103])["b"], first[:]["b"])
    assert is_of_one_stamp(first[:])


def test_rows_that_several_processes_append_are_all_there(tmp_path):
    TensorCache.create(tmp_path, {"x": (torch.int64, ()), "t": (torch.int64, (None,))}).close()

    def append(rank):
        cache = TensorCache.open(tmp_path, "r+")
        for number in range(200):
            value = 1000 * rank + number
            rows = cache.append({"x": [value] * 10, "t": [torch.full((number % 9,), value)] * 10})
            assert [value] * 10 == cache[rows]["x"].tolist() if number % 50 == 0 else True

    assert all_succeed(*[lambda rank=rank: append(rank) for rank in range(3)]) is True

    cache = TensorCache.open(tmp_path, "r+")
    assert 6000 == len(cache)
    missing = set(cache.missing_rows().tolist())  # what a process did not flush before it ended abruptly
    batch = cache[[row for row in range(6000) if row not in missing]]
    for value, row in zip(batch["x"].tolist(), batch["t"], strict=True):
        assert torch.equal(torch.full((value % 1000 % 9,), value), row)


def test_a_reader_sees_rows_when_they_are_flushed_and_the_cache_when_it_grows(tmp_path):
    writer = TensorCache.create(tmp_path, COLUMNS, 2)
    reader = TensorCache.open(tmp_path)
    writer[0] = {name: value[0] for name, value in stamped([7]).items()}

    assert 0 == reader.num_filled
    writer.flush()
    assert (1, 7) == (reader.num_filled, reader[0]["b"][0])
    writer.append(stamped(range(5000)))
    writer.flush()
    assert (5002, 4999) == (len(reader), reader[-1]["a"][0])
    assert (5002, 4) == tuple(reader["a"].shape)


def appended_and_killed(folder):
    """Leaves capacity for rows that don't exist, as a killed writer does."""
    cache = TensorCache.open(folder, "r+")
    cache.append({"x": torch.ones(50_000, dtype=torch.int64)})
    os.kill(os.getpid(), 9)


def test_unfilled_rows_that_were_cut_off_are_missing_to_an_open_reader(tmp_path):
    TensorCache.create(tmp_path, {"x": (torch.int64, ())}).close()
    assert not in_fork(lambda: appended_and_killed(tmp_path))
    cache = TensorCache.open(tmp_path)
    reader, rows = cache._store, SomeRows.run(40_000, len(cache))

    TensorCache.open(tmp_path, "r+").close()

    assert 0 == len(TensorCache.open(tmp_path))

    def look():
        with pytest.raises(MissingRowsError):
            reader.read(rows, None)

    assert in_fork(look)


def test_a_reader_that_looks_again_while_the_cache_grows_takes_it_for_whole(tmp_path, monkeypatch):
    writer = TensorCache.create(tmp_path, {"x": (torch.int64, ())})
    reader, make = TensorCache.open(tmp_path), states_module.mmap.mmap
    writer.append({"x": torch.ones(10, dtype=torch.int64)})

    def while_it_grows(*args, **options):
        monkeypatch.setattr(states_module.mmap, "mmap", make)
        writer.append({"x": torch.ones(2_100_000, dtype=torch.int64)})
        return make(*args, **options)

    monkeypatch.setattr(states_module.mmap, "mmap", while_it_grows)

    reader.missing_rows()
    writer.flush()

    assert (2_100_010, 2_100_010) == (len(reader), reader.num_filled)


def test_a_forked_child_writes_its_own_rows_and_leaves_the_others_to_its_parent(tmp_path):
    cache = TensorCache.create(tmp_path, COLUMNS, 50)
    cache[:10] = stamped(range(10))

    def write():
        cache[10:20] = stamped(range(10, 20))
        cache.flush()
        assert 10 == cache.num_filled

    assert in_fork(write)
    cache.flush()
    assert torch.equal(stamped(range(20))["a"], cache[:20]["a"])


def test_a_forked_child_stays_a_writer_after_its_parent_has_closed(tmp_path):
    cache = TensorCache.create(tmp_path, COLUMNS)

    def append():
        cache.append(stamped([1, 2]))
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        cache.flush()

    ready, go = os.pipe(), os.pipe()
    child = threading.Thread(target=lambda: ended.append(in_fork(append)))
    ended = []
    child.start()
    os.read(ready[0], 1)
    cache.close()
    TensorCache.open(tmp_path, "r+").close()  # the only writer would drop rows that nobody has flushed
    os.write(go[1], b"x")
    child.join()

    assert [True] == ended
    assert [1, 2] == TensorCache.open(tmp_path)[:]["a"][:, 0].tolist()


def test_threads_write_and_read_one_cache(tmp_path):
    cache = TensorCache.create(tmp_path, COLUMNS, 4000)

    def work(rank):
        for rows in torch.arange(4000)[rank::4].split(50):
            cache[rows] = stamped(rows)
            assert torch.equal(stamped(rows)["a"], cache[rows]["a"])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))

    assert torch.equal(stamped(range(4000))["b"], cache[:]["b"])


class Rows(Dataset):
    """Rows of a cache, and one row that each worker writes itself."""

    def __init__(self, cache):
        self.cache = cache

    def __len__(self):
        return 12

    def __getitem__(self, row):
        self.cache[20 + row] = {name: value[0] for name, value in stamped([20 + row]).items()}
        return self.cache[row]


def test_workers_of_a_data_loader_read_and_write_a_cache(tmp_path):
    cache = TensorCache.create(tmp_path, COLUMNS, 32)
    cache[:12] = stamped(range(12))
    cache.flush()

    loader = DataLoader(Rows(cache), batch_size=3, num_workers=2)
    batches = list(loader)
    del loader

    assert torch.equal(stamped(range(12))["a"], torch.cat([batch["a"] for batch in batches]))
    assert torch.equal(stamped(range(20, 32))["a"], cache[20:]["a"])  # even of processes that have just ended
