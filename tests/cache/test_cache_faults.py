"""Each system call of a cache fails once: the right error, nothing half done, and the cache still works."""

from __future__ import annotations

import errno
import itertools
import shutil
from pathlib import Path

import pytest
import torch

from offload import TensorCache
from offload.cache.states import FILE
from offload.errors import OffloadError
from tests import faults
from tests.campaigns import campaign

pytestmark = pytest.mark.campaign("faults")

COLUMNS = {"x": (torch.float32, (3,)), "t": (torch.int32, (None,)), "note": "json"}
ROWS = 12


def values(rows, *, new=False):
    rows = [row + 1000 * new for row in rows]
    return {
        "x": torch.tensor(rows)[:, None].float().expand(-1, 3) + 1,
        "t": [torch.full((row % 7 + 1,), row, dtype=torch.int32) for row in rows],
        "note": [f"number {row}" for row in rows],
    }


def row_of(found, at):
    return found["x"][at].tolist(), found["t"][at].tolist(), found["note"][at]


ALL = campaign("faults")
READING = faults.CODES if ALL else (errno.EIO, errno.EMFILE)
WRITING = faults.CODES if ALL else (errno.EIO, errno.ENOSPC)
MOST = 4 * ROWS
OLD = [row_of(values(range(MOST)), at) for at in range(MOST)]
NEW = [row_of(values(range(MOST), new=True), at) for at in range(MOST)]


@pytest.fixture
def fresh(quick_folder):
    """Creates a new cache folder each time, with all rows filled: a copy of one."""
    numbers, place = itertools.count(), Path(quick_folder)
    with TensorCache.create(place / "first", COLUMNS, ROWS) as cache:
        cache[:] = values(range(ROWS))

    def make():
        return shutil.copytree(place / "first", place / str(next(numbers)))

    return make


def assert_told(failure):
    """The error is ours, and also what a caller would expect from the system: an OSError with an errno."""
    error = failure.error
    assert error is None or isinstance(error, OffloadError), str(failure)
    assert error is None or (isinstance(error, OSError) and error.errno == failure.code), str(failure)
    leaked = [name for name in failure.leaked if not name.endswith(FILE)]  # an open one is remapped as it grows
    assert not leaked, (str(failure), leaked)


def assert_whole(folder, failure, *, missing=True):
    """Each row is old or new, or missing if it was being written; the folder is a cache that can be written."""
    with TensorCache.open(folder, "r+") as cache:
        gone = cache.missing_rows().tolist()
        assert missing or not gone, str(failure)
        rows = [row for row in range(len(cache)) if row not in gone]
        found = cache[rows]
        for at, row in enumerate(rows):
            assert row_of(found, at) in (OLD[row], NEW[row]), (str(failure), row)
        cache[:3] = values(range(3))
        assert range(len(cache), len(cache) + 1) == cache.append(values([0]))
    assert not list(folder.glob(".offload-tmp-*")), str(failure)


def read_all(cache):
    found = cache[:]
    return [row_of(found, at) for at in range(ROWS)]


READS = {
    "rows": lambda cache: read_all(cache) == OLD[:ROWS],
    "some rows": lambda cache: [row_of(cache[[5, 11, 2]], at) for at in range(3)] == [OLD[5], OLD[11], OLD[2]],
    "a row": lambda cache: cache[7]["note"] == OLD[7][2],
    "batches": lambda cache: [b["note"] for b in cache.batches(8, prefetch=0)][1] == [row[2] for row in OLD[8:ROWS]],
    "a column": lambda cache: cache.column("x")[5].tolist() == OLD[5][0],
    "lengths": lambda cache: cache.lengths("t")[:7].tolist() == [1, 2, 3, 4, 5, 6, 7],
    "missing rows": lambda cache: (cache.missing_rows().tolist(), cache.num_filled, len(cache)) == ([], ROWS, ROWS),
    "repr": lambda cache: "12 rows, 12 filled" in repr(cache),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_read_that_fails_says_so_and_the_next_is_right(fresh, name, mode):
    act, folder = READS[name], fresh()
    opened = TensorCache.open(folder, mode)

    seen = 0
    for failure in faults.each_failure(lambda: opened, act, READING):
        seen += 1
        assert_told(failure)
        assert failure.result is not False, str(failure)
        assert act(opened), str(failure)
    assert seen > 0
    opened.close()


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_opening_that_fails_leaves_the_folder_as_it_is(fresh, mode):
    folder = fresh()

    def act(folder):
        cache = TensorCache.open(folder, mode)
        found = read_all(cache)
        cache.close()
        return found

    seen = 0
    for failure in faults.each_failure(lambda: folder, act, READING):
        seen += 1
        assert_told(failure)
        assert failure.result in (None, OLD[:ROWS]), str(failure)
        assert OLD[:ROWS] == read_all(TensorCache.open(folder)), str(failure)
    assert seen > 20
    assert_whole(folder, None, missing=False)


def test_making_a_cache_that_fails_can_be_done_again(quick_folder):
    numbers, place = itertools.count(), Path(quick_folder)

    def act(folder):
        TensorCache.create(folder, COLUMNS, ROWS).close()

    seen = 0
    for failure in faults.each_failure(lambda: place / str(next(numbers)), act, WRITING):
        seen += 1
        assert_told(failure)
        if (failure.given / "manifest.json").exists():
            assert_whole(failure.given, failure)
        else:
            act(failure.given)
        assert not list(failure.given.glob(".offload-tmp-*")), str(failure)
    assert seen > 20


def overwrite(cache):
    cache[3:9] = values(range(3, 9), new=True)
    cache.flush()


def append(cache):
    cache.append(values(range(ROWS, ROWS + 9)))
    cache.flush()


def append_beyond_the_room(cache):
    cache.append(values(range(ROWS, 2 * ROWS), new=True))
    cache.append(values(range(2 * ROWS, 3 * ROWS), new=True))
    cache.flush()


def in_place(cache):
    cache.column("x")[4].mul_(1)
    cache.flush()


WRITES = [overwrite, append, append_beyond_the_room, in_place]


@pytest.mark.parametrize(
    ("act", "lasting"),
    [*((act, False) for act in WRITES), *((act, True) for act in (WRITES if ALL else [append_beyond_the_room]))],
)
def test_a_write_that_fails_leaves_each_row_old_or_new_or_missing_and_the_cache_goes_on(fresh, act, lasting):
    """Once, as for a bad block; or from then on, as on a full disk."""
    codes = (errno.ENOSPC,) if lasting else WRITING
    seen = 0
    for failure in faults.each_failure(lambda: TensorCache.open(fresh(), "r+"), act, codes, lasting=lasting):
        seen += 1
        cache = failure.given
        assert_told(failure)
        before = len(cache)
        gone = cache.missing_rows().tolist()
        written = range(3, 9) if act is overwrite else range(ROWS, before)
        assert set(gone) <= set(written), str(failure)
        assert failure.error is not None or not gone, str(failure)
        rows = [row for row in range(len(cache)) if row not in gone]
        found = cache[rows]
        for at, row in enumerate(rows):
            assert row_of(found, at) in (OLD[row], NEW[row]), (str(failure), row)
        cache[written] = values(written, new=True)
        assert range(before, before + 2) == cache.append(values(range(before, before + 2)))
        cache.flush()
        found = cache[written]
        assert [NEW[row] for row in written] == [row_of(found, at) for at in range(len(written))], str(failure)
        cache.close()
        assert_whole(cache.folder, failure, missing=False)
    assert seen > 5


def test_a_close_that_fails_has_let_go_of_the_files_and_lost_nothing_that_was_flushed(fresh):
    def begin():
        cache = TensorCache.open(fresh(), "r+")
        cache.append(values(range(ROWS, ROWS + 5), new=True))
        cache.flush()
        cache[0] = {name: value[0] for name, value in values([0], new=True).items()}
        return cache

    seen = 0
    for failure in faults.each_failure(begin, TensorCache.close, WRITING):
        seen += 1
        error = failure.error
        assert error is None or (isinstance(error, OffloadError) and error.errno == failure.code), str(failure)
        failure.given.close()
        with TensorCache.open(failure.given.folder) as cache:
            assert set(cache.missing_rows().tolist()) <= {0}, str(failure)
            found = cache[1:]
            assert OLD[1:ROWS] + NEW[ROWS : ROWS + 5] == [row_of(found, at) for at in range(ROWS + 4)], str(failure)
        assert_whole(failure.given.folder, failure)
    assert seen > 10
