"""The folder of a cache: created once, opened again, and an error if it is not what it was."""

from __future__ import annotations

import gc
import json
import os
import shutil
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file

from offload import TensorCache
from offload.cache.states import PAGE
from offload.errors import (
    CacheError,
    CorruptFileError,
    DeviceError,
    ForeignFileError,
    MissingFileError,
    OffloadError,
    WriteError,
)
from tests.conftest import contents
from tests.processes import in_fork, run_on_a_small_disk

METADATA = {"model": "tiny", "layers": [1, 2]}
COLUMNS = {"x": (torch.int64, (300,)), "t": (torch.int32, (None,)), "note": "json"}


def values(first, count):
    numbers = range(first, first + count)
    return {
        "x": torch.tensor(numbers)[:, None].expand(-1, 300),
        "t": [torch.arange(number % 7, dtype=torch.int32) for number in numbers],
        "note": [f"number {number}" for number in numbers],
    }


@pytest.fixture
def folder(tmp_path):
    """A cache with 8 rows, 5 of them filled."""
    with TensorCache.create(tmp_path / "cache", COLUMNS, 8, metadata=METADATA) as cache:
        cache[[1, 2, 3, 5, 7]] = values(0, 5)
    return tmp_path / "cache"


def edited(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def counted_as(folder, version):
    with (folder / "rows.state").open("r+b") as file:
        file.seek(16)
        file.write(version.to_bytes(8, "little"))


def declared(folder, **changes):
    columns = json.loads((folder / "manifest.json").read_text())["columns"]
    edited(folder, columns={**columns, "x": {**columns["x"], **changes}})


def replaced(folder, name):
    shutil.copy(folder / name, folder / "x.safetensors")


def of_another_cache(folder):
    TensorCache.create(folder.parent / "other", {"x": (torch.int64, ())}, 8).close()
    shutil.copy(folder.parent / "other" / "rows.state", folder)


OTHER_ROWS = r"column 'x': .*x.safetensors does not hold rows of .* and is left as it is"


def test_a_cache_that_is_opened_again_is_the_same(folder):
    cache = TensorCache.open(folder, expect={"layers": [1, 2]})

    assert (8, 5, [0, 4, 6]) == (len(cache), cache.num_filled, cache.missing_rows().tolist())
    assert ["number 0", "number 4"] == cache[[1, 7]]["note"]
    assert {"model": "tiny", "layers": [1, 2]} == cache.metadata
    assert list(COLUMNS) == list(cache.schema)


def test_metadata_that_do_not_match_are_reported(folder):
    with pytest.raises(
        CacheError,
        match="has other metadata than expected: 'model' is 'tiny', expected 'large'; 'seed' is missing, expected 1",
    ):
        TensorCache.open(folder, expect={"model": "large", "layers": (1, 2), "seed": 1})
    with pytest.raises(CacheError, match="the metadata can't be written as JSON"):
        TensorCache.create(folder.parent / "other", COLUMNS, metadata={"model": torch.nn.Linear})


MANIFEST, STATES, COLUMN = "manifest.json", "rows.state", "x.safetensors"
NO_STATES = "is incomplete, or is not a file of row states"
BROKEN = {
    "no manifest": (lambda f: (f / MANIFEST).unlink(), MissingFileError, "there is no complete cache in this folder"),
    "half a manifest": (lambda f: os.truncate(f / MANIFEST, 40), CorruptFileError, "can't be read as the manifest"),
    "foreign": (lambda f: edited(f, format="chrome"), CorruptFileError, "is not the manifest of a cache of offload"),
    "later": (
        lambda f: edited(f, version=2),
        CacheError,
        "is of version 2, and this release of offload reads version 1",
    ),
    "old states": (lambda f: counted_as(f, 1), CacheError, "rows.state is of version 1, and this .* reads version 3"),
    "kind": (lambda f: edited(f, columns={"x": {"kind": "y"}}), CorruptFileError, "column 'x' is described as"),
    "another kind": (lambda f: declared(f, kind="y"), CorruptFileError, "column 'x' is described as"),
    "no name": (lambda f: edited(f, columns={"": {"kind": "json"}}), CorruptFileError, "can't be called ''"),
    "too large": (lambda f: declared(f, row_shape=[1 << 62, 9]), CorruptFileError, "larger than any file"),
    "another dtype": (lambda f: declared(f, dtype="int32"), CorruptFileError, OTHER_ROWS),
    "another shape": (lambda f: declared(f, row_shape=[30]), CorruptFileError, OTHER_ROWS),
    "another column's file": (lambda f: replaced(f, "t%2findex.safetensors"), CorruptFileError, OTHER_ROWS),
    "odd rows": (lambda f: edited(f, num_rows="8"), CorruptFileError, "malformed: '8' rows"),
    "cut column": (
        lambda f: os.truncate(f / COLUMN, 9000),
        CorruptFileError,
        r"x.safetensors has 9000 bytes, and 8 rows of \(300,\) torch.int64 take 23296: it was truncated",
    ),
    "no column": (lambda f: (f / COLUMN).unlink(), MissingFileError, "a file of the cache is missing"),
    "no values": (lambda f: (f / "t.values").unlink(), MissingFileError, "t.values"),
    "cut index": (lambda f: os.truncate(f / "t%2findex.safetensors", 4100), CorruptFileError, "it was truncated"),
    "no states": (lambda f: (f / STATES).unlink(), MissingFileError, "that says which rows are filled is missing"),
    "short states": (
        lambda f: os.truncate(f / STATES, PAGE + 5),
        CorruptFileError,
        "has 4101 bytes and 3 columns, where 8 rows of 3 columns take 4120",
    ),
    "states of another cache": (
        of_another_cache,
        CorruptFileError,
        "has 4104 bytes and 1 columns, where 8 rows of 3 columns",
    ),
    "empty states": (lambda f: os.truncate(f / STATES, 0), CorruptFileError, NO_STATES),
    "other states": (lambda f: (f / STATES).write_bytes(b"x" * 5000), CorruptFileError, NO_STATES),
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_folder_that_is_not_whole_is_an_error_with_words(folder, what, mode):
    act, kind, said = BROKEN[what]
    act(folder)

    with pytest.raises(kind, match=said) as caught:
        TensorCache.open(folder, mode)
    assert isinstance(caught.value, OffloadError)


@pytest.mark.parametrize("place", [(0, 1 << 62), (0, (1 << 62) + 1), ((1 << 63) - 1, 1), (-1, 2)])
def test_places_outside_of_the_values_are_an_error(folder, place):
    with open(folder / "t%2findex.safetensors", "r+b") as file:
        file.seek(PAGE + 16 * 2)
        file.write(struct.pack("<2q", *place))

    with pytest.raises(CorruptFileError, match=r"t.values has \d+ bytes, and its rows take more"):
        TensorCache.open(folder).get(2, columns=["t"])


def test_json_that_is_too_deep_is_an_error(tmp_path):
    with TensorCache.create(tmp_path, {"note": "json"}, 1) as cache:
        cache[0] = {"note": "x" * 100_000}
    (tmp_path / "note.jsonl").write_text("[" * 100_003)

    with pytest.raises(CorruptFileError, match=r"note.jsonl holds a row that is not JSON"):
        TensorCache.open(tmp_path)[0]


def test_a_folder_is_made_a_cache_once(folder):
    with pytest.raises(CacheError, match=f"{folder} already has a cache, .* exist_ok=True"):
        TensorCache.create(folder, COLUMNS, 8)
    assert 5 == TensorCache.open(folder).num_filled


@pytest.mark.parametrize("num_rows", [8, 0], ids=["as many rows", "any number of rows"])
def test_a_cache_that_is_there_and_agrees_is_opened_to_be_written(folder, num_rows):
    reordered = dict(reversed(COLUMNS.items()))

    with TensorCache.create(folder, reordered, num_rows, exist_ok=True, metadata=METADATA) as cache:
        assert ("r+", 8, [0, 4, 6]) == (cache.mode, len(cache), cache.missing_rows().tolist())
        assert METADATA == cache.metadata
        cache[0] = {name: values[0] for name, values in cache[[1]].items()}

    assert [4, 6] == TensorCache.open(folder).missing_rows().tolist()


@pytest.mark.parametrize(
    ("schema", "num_rows", "metadata", "said"),
    [
        (COLUMNS, 9, {}, "it has 8 rows, expected 9"),
        (
            COLUMNS | {"x": (torch.float64, (2,))},
            8,
            {},
            r"column 'x' is tensor .*, expected tensor \(2,\) torch.float64",
        ),
        (COLUMNS | {"t": "json"}, 8, {}, r"column 't' is ragged \(None,\) torch.int32, expected json"),
        (COLUMNS | {"y": "json"}, 8, {}, "it has no column 'y'"),
        ({"x": COLUMNS["x"]}, 8, {}, "it has a column '.*' as well"),
        (COLUMNS, 8, METADATA | {"model": "large"}, "'model' is 'tiny', expected 'large'"),
        (COLUMNS, 8, {"model": "tiny"}, "it has metadata 'layers' as well"),
    ],
)
def test_an_existing_cache_that_differs_is_refused_and_left_alone(folder, schema, num_rows, metadata, said):
    before = contents(folder)

    with pytest.raises(CacheError, match=f"the cache in {folder} is not as requested: .*{said}.*Open it as it is"):
        TensorCache.create(folder, schema, num_rows, exist_ok=True, metadata=metadata)
    assert {name: data for name, (_, data) in before.items()} == {
        name: data for name, (_, data) in contents(folder).items()
    }
    TensorCache.open(folder, "r+").close()  # nothing else has it open


def test_one_of_several_processes_creates_a_cache_and_the_others_open_it(tmp_path):
    def make(number):
        with TensorCache.create(tmp_path / "new", {"x": (torch.int64, ())}, 6, exist_ok=True) as cache:
            cache[number] = {"x": torch.tensor(number)}

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(make, range(6)))

    assert list(range(6)) == TensorCache.open(tmp_path / "new")[:]["x"].tolist()


def test_one_of_two_creators_of_a_folder_succeeds(tmp_path):
    def create(number):
        try:
            TensorCache.create(tmp_path / "cache", {"x": (torch.int64, (number,))}, 100).close()
        except CacheError:
            os._exit(3)
        os._exit(0)

    pids = []
    for number in range(1, 5):
        pid = os.fork()
        if not pid:
            create(number)
        pids.append(pid)
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]

    assert [0, 3, 3, 3] == sorted(ended)
    number = ended.index(0) + 1
    assert (100, number) == tuple(TensorCache.open(tmp_path / "cache")["x"].shape)


def test_a_foreign_file_is_left_as_it_is(tmp_path):
    save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    before = (tmp_path / "x.safetensors").read_bytes()

    with pytest.raises(ForeignFileError, match="was not written by offload"):
        TensorCache.create(tmp_path, COLUMNS, 3)
    (tmp_path / "t.values").write_text("mine")
    with pytest.raises(ForeignFileError, match=r"t.values exists, and is left as it is"):
        TensorCache.create(tmp_path, {"t": (torch.int32, (None,))}, 3)
    (tmp_path / "rows.state").write_text("mine")
    with pytest.raises(ForeignFileError, match=r"rows\.state exists, and is left as it is"):
        TensorCache.create(tmp_path, {"y": (torch.int32, ())}, 3)
    assert before == (tmp_path / "x.safetensors").read_bytes()
    assert ["mine"] * 2 == [(tmp_path / name).read_text() for name in ("t.values", "rows.state")]


def test_rows_that_a_power_cut_took_from_a_column_is_restored(tmp_path):
    with TensorCache.create(tmp_path, COLUMNS, 100) as cache:
        cache[:9] = values(0, 9)
    os.truncate(tmp_path / "x.safetensors", 4096 + 9 * 2400)

    assert 9 == TensorCache.open(tmp_path).num_filled
    with TensorCache.open(tmp_path, "r+") as cache:
        cache[99] = {name: value[0] for name, value in values(99, 1).items()}
        assert (100, 300) == tuple(cache["x"].shape)
        assert torch.equal(values(0, 9)["x"], cache[:9]["x"])


def test_a_column_that_a_power_cut_left_too_short_is_read_by_rows(folder):
    """The number of rows was on the disk before the new file length: no row there was filled."""
    with TensorCache.open(folder, "r+") as cache:
        with cache._store._lock.held():
            cache._store._states.grow(12)
        cache._store._close_files()
        cache._store.is_closed = True

    reader = TensorCache.open(folder)

    assert [0, 4, 6, 8, 9, 10, 11] == reader.missing_rows().tolist()
    assert torch.equal(values(4, 1)["x"], reader[[7]]["x"])
    with pytest.raises(
        CorruptFileError, match=r"x\.safetensors ends before the last rows.* with mode='r\+' repairs the column"
    ):
        reader["x"]
    TensorCache.open(folder, "r+").close()
    assert (8, 300) == tuple(TensorCache.open(folder)["x"].shape)


def test_rows_that_were_appended_and_not_flushed_go_with_a_killed_writer(folder):
    def append_and_die():
        cache = TensorCache.open(folder, "r+")
        if len(cache) == 8:
            cache.append(values(10, 20))
            cache.flush()
        cache.append(values(30, 40))
        os.kill(os.getpid(), 9)

    for _ in range(2):  # the second time, rows are appended where others were cut off
        assert not in_fork(append_and_die)

        assert 68 == len(TensorCache.open(folder))  # they may be another writer's
        with TensorCache.open(folder, "r+") as cache:
            assert (28, [0, 4, 6]) == (len(cache), cache.missing_rows().tolist())
            assert values(10, 20)["note"] == cache[8:]["note"]


def test_a_column_of_an_open_cache_is_a_safetensors_file_after_each_append(folder):
    cache = TensorCache.open(folder, "r+")

    for number in (9, 10):
        cache.append(values(number, 1))
        assert torch.equal(values(number, 1)["x"][0], load_file(folder / "x.safetensors")["x"][number - 1])


def test_rows_that_were_never_filled_are_cut_off_at_closing(folder):
    cache = TensorCache.open(folder, "r+")
    cache.append(values(10, 20))
    cache._store._written = []  # as if they could not be flushed

    cache.close()

    assert 8 == len(TensorCache.open(folder))


@pytest.mark.parametrize("times", [1, 128])
def test_an_appended_row_that_is_written_again_when_its_writer_is_killed_stays_a_row(tmp_path, times):
    TensorCache.create(tmp_path, {"x": (torch.int64, ())}).close()

    def write_and_die():
        cache = TensorCache.open(tmp_path, "r+")
        cache.append({"x": [1, 2, 3]})
        for _ in range(times):
            cache.flush()
            cache[1:] = {"x": [4, 5]}
        os.kill(os.getpid(), 9)

    assert not in_fork(write_and_die)

    with TensorCache.open(tmp_path, "r+") as cache:
        assert (3, [1, 2]) == (len(cache), cache.missing_rows().tolist())


def test_a_cache_is_written_to_only_when_it_is_opened_for_that(folder):
    cache = TensorCache.open(folder)

    for act in (lambda: cache.append(values(0, 1)), lambda: cache.__setitem__(0, values(0, 1)), cache.flush):
        with pytest.raises(
            CacheError, match=r"is open for reading only: TensorCache.open\(folder, mode='r\+'\) can write"
        ):
            act()
    with pytest.raises(CacheError, match="unknown mode 'w': 'r' reads, 'r\\+' also writes"):
        TensorCache.open(folder, "w")


def test_a_folder_that_is_read_only_can_be_read(folder, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the user running the tests may write everywhere

    with pytest.raises(WriteError, match="the folder is read-only: open the cache with mode='r'"):
        TensorCache.open(folder, "r+")
    assert ["number 4"] == TensorCache.open(folder)[[7]]["note"]


# Runs in its own mount namespace, with a small tmpfs at sys.argv[1].
FULL = """
    import errno, json, os, sys, torch
    from offload import TensorCache
    from offload.errors import WriteError

    said = {}
    cache = TensorCache.create(sys.argv[1] + "/cache", {"x": (torch.uint8, (4096,)), "note": "json"}, 4000)
    cache[:50] = {"x": torch.ones(50, 4096, dtype=torch.uint8), "note": ["a"] * 50}
    cache.flush()
    try:
        cache[40:1000] = {"x": torch.full((960, 4096), 2, dtype=torch.uint8), "note": ["b"] * 960}
    except WriteError as error:
        said["errno"], said["message"] = errno.errorcode[error.errno], str(error)
    said["filled"] = cache.num_filled
    try:
        cache.append({"x": torch.full((960, 4096), 2, dtype=torch.uint8), "note": ["c"] * 960})
    except WriteError as error:
        said["appended"], said["rows"] = str(error), len(cache)
    try:
        cache["x"].fill_(3)
    except WriteError as error:
        said["in place"] = str(error)
    cache.close()
    again = TensorCache.open(sys.argv[1] + "/cache")
    said["again"] = again.num_filled
    said["right"] = bool((again[:40]["x"] == 1).all()) and set(again[:40]["note"]) == {"a"}
    print(json.dumps(said))
"""


def test_on_a_full_disk_the_batch_is_not_filled_and_what_was_is_right(tmp_path):
    said = run_on_a_small_disk(FULL, tmp_path, "1m")

    assert "ENOSPC" == said["errno"]
    assert (
        "960 rows from row 40 on could not be written (No space left on device): they count as missing"
        in said["message"]
    )
    assert (
        "960 rows from row 4000 on could not be written (No space left on device): they were not added"
        in (said["appended"])
    )
    assert 4000 == said["rows"]
    assert "tensor 'x'" in said["in place"]
    assert (40, 40, True) == (said["filled"], said["again"], said["right"])


def test_a_cache_for_a_device_that_is_not_there_leaves_no_file_open(tmp_path):
    TensorCache.create(tmp_path / "c", {"x": (torch.float32, ())}, 2).close()
    TensorCache(tensors={"x": torch.ones(2)}).to_disk(tmp_path / "x.safetensors")
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))

    for make in (TensorCache.open, TensorCache.from_disk):
        with pytest.raises(DeviceError, match="cuda:77"):
            make(tmp_path / "c", device="cuda:77")
    with pytest.raises(DeviceError, match="cuda:77"):
        TensorCache.from_disk(tmp_path / "x.safetensors", "cuda:77")

    assert before == len(os.listdir("/proc/self/fd"))


def test_the_log_tells_what_was_made_grown_and_cut_off(tmp_path, caplog):
    caplog.set_level("DEBUG", "offload.cache")
    folder = tmp_path / "cache"

    def write_and_die():
        cache = TensorCache.open(folder, "r+")
        cache.append({"x": torch.arange(2)})
        cache.flush()
        cache.append({"x": torch.arange(3)})
        os.kill(os.getpid(), 9)

    TensorCache.create(folder, {"x": (torch.int64, ())}, 0).close()
    in_fork(write_and_die)
    with TensorCache.open(folder, "r+") as cache:
        cache.append({"x": torch.arange(2097152)})

    lines = [record.getMessage().removeprefix(f"{folder}: ") for record in caplog.records]
    assert [
        "created with 0 rows of x",
        "opened for writing, as the only writer",
        "3 rows from row 2 on were never filled: cut off",
        "opened for writing, as the only writer",
        "2097152 rows are on the disk",
    ] == lines


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_system_that_reads_less_than_it_was_asked_for_is_asked_again(folder, mode, monkeypatch):
    """As network file systems may; a file that ends is another thing."""
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda fd, count, at: pread(fd, min(count, 7), at))
    monkeypatch.setattr(os, "preadv", lambda fd, into, at, *rest: preadv(fd, [into[0][:7]], at, *rest))

    with TensorCache.open(folder, mode=mode) as cache:
        assert (5, [0, 4, 6]) == (cache.num_filled, cache.missing_rows().tolist())
        assert ["number 0", "number 4"] == cache[[1, 7]]["note"]
