"""A truncated cache file, whether the cache is open or not: an error, never zeros; and it is not extended again."""

from __future__ import annotations

import os
import re
import shutil
import struct

import pytest
import torch

from offload import TensorCache
from offload.cache.states import FILE, PAGE
from offload.errors import ChangedFileError, CorruptFileError
from tests.equal import is_equal
from tests.page_cache import made_hot
from tests.processes import in_fork

ROWS = 1500
COLUMNS = {"x": (torch.float32, (5,)), "t": (torch.int32, (None,)), "note": "json", "raw": (torch.uint8, (None,))}
FILES = [
    "x.safetensors",
    "t.values",
    "t%2findex.safetensors",
    "note.jsonl",
    "note%2findex.safetensors",
    "raw.values",
    "raw%2findex.safetensors",
    FILE,
]
READS = {
    "a column": lambda cache: cache.column("x").sum(),
    "rows": lambda cache: cache[:],
    "a row": lambda cache: cache[-1],
    "batches": lambda cache: list(cache.batches(len(cache))),
    "missing_rows": lambda cache: cache.missing_rows(),
    "num_filled": lambda cache: cache.num_filled,
    "to_disk": lambda cache: cache.to_disk(cache.folder.parent / "rows.safetensors", ["x"]),
}
WRITES = {
    "in place": lambda cache: cache["x"].mul_(1),
    "write": lambda cache: cache.__setitem__([7], values([7])),
    "append": lambda cache: cache.append(values([len(cache)])),
    "append much": lambda cache: cache.append(values(range(len(cache), 4500))),
    "fill": lambda cache: cache.fill(lambda rows: {"x": rows}, list(range(len(cache)))),
    "flush": lambda cache: cache.flush(),
}
ACTS = {
    **READS,
    **WRITES,
    "a row of a column": lambda cache: cache["x"][-1].sum(),
    "a row in place": lambda cache: cache["x"][-1].mul_(1),
    "rows of the rest": lambda cache: [cache.get([-1, 0], [name]) for name in COLUMNS],
    "write the last": lambda cache: cache.__setitem__(ROWS - 1, {n: v[0] for n, v in values([ROWS - 1]).items()}),
    "write a column": lambda cache: cache.__setitem__([2], {"t": values([2])["t"]}),
    "len": len,
    "repr": repr,
    "close": lambda cache: cache.close(),
    "open to read": lambda cache: TensorCache.open(cache.folder)[:],
    "open to write": lambda cache: TensorCache.open(cache.folder, "r+")[:],
}
READING = ["len", "missing_rows", "num_filled", "rows", "a column"]


def values(rows):
    rows = list(rows)
    return {
        "x": torch.tensor(rows)[:, None].float().expand(-1, 5) + 1,
        "t": [torch.full((row % 7 + 1,), row, dtype=torch.int32) for row in rows],
        "note": [f"number {row}" for row in rows],
        "raw": [b"%d" % row for row in rows],
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "cache"
    with TensorCache.create(folder, COLUMNS, ROWS) as cache:
        cache[:] = values(range(ROWS))
    return folder


@pytest.fixture
def folder(made, tmp_path):
    shutil.copytree(made, tmp_path / "cache")
    return tmp_path / "cache"


def cut(path, part=0.4):
    """Truncate a file to that fraction of its rows; whole pages stay mapped, so that touching the rest is not fatal."""
    start = PAGE if path.suffix in (".safetensors", ".state") else 0
    size = start + int((path.stat().st_size - start) * part)
    os.truncate(path, size)
    return size


def refused(act, *args):
    """Whether truncation is reported as an error; any other error fails the test."""
    try:
        act(*args)
    except (CorruptFileError, ChangedFileError) as error:
        told = re.search("was truncated|is cut off|is incomplete|has changed since", str(error))
    else:
        return False
    assert told
    return True


def wrong_rows(folder):
    """Rows that can be read, but differ from what was written."""
    try:
        cache = TensorCache.open(folder)
        numbers = range(len(cache))
    except CorruptFileError:
        return []
    wrong = []
    for row in {*numbers[::19], *numbers[-5:]}:
        wanted = {name: value[0] for name, value in values([row]).items()}
        for name in COLUMNS:
            try:
                found = cache.get(row, [name])[name]
            except CorruptFileError:
                continue
            if not is_equal(wanted[name], bytes(found.tolist()) if name == "raw" else found):
                wrong.append((row, name, found))
    return wrong


@pytest.mark.parametrize("name", FILES)
def test_whatever_is_done_to_a_cut_cache_no_row_is_wrong_and_no_file_long_again(folder, name, tmp_path):
    told = 0
    for number, act in enumerate(ACTS.values()):
        work = tmp_path / str(number) / "cache"
        shutil.copytree(folder, work)
        cache = TensorCache.open(work, "r+")
        cache["x"][0].sum()  # maps a column beforehand
        size = cut(work / name)

        told += refused(act, cache)

        assert size == (work / name).stat().st_size, number
        refused(cache.close)
        assert size == (work / name).stat().st_size, number
        if name == FILE:
            assert refused(TensorCache.open, work)
        shutil.rmtree(tmp_path / str(number))
    assert told > 8


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("act", ["append much", "write the last", "close", "a column", "open to write"])
def test_after_a_cut_each_row_is_what_was_written_or_an_error(folder, name, act):
    cache = TensorCache.open(folder, "r+")
    cut(folder / name)

    refused(ACTS[act], cache)
    refused(cache.close)

    assert not wrong_rows(folder)


@pytest.mark.parametrize("size", [0, 40, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE])
def test_states_that_are_cut_while_open_are_an_error_and_not_a_signal(folder, size):
    def look(act, mode):
        cache = TensorCache.open(folder, mode)
        os.truncate(folder / FILE, size)
        assert refused(ACTS[act], cache)

    whole = (folder / FILE).read_bytes()
    for mode, acts in {"r": READING, "r+": [*READING, "append", "write", "close"]}.items():
        for act in acts:
            assert in_fork(lambda act=act, mode=mode: look(act, mode)), (act, mode)
            assert size == (folder / FILE).stat().st_size
            (folder / FILE).write_bytes(whole)


@pytest.mark.parametrize("name", [name for name in FILES if name != FILE])
def test_a_file_that_is_cut_while_the_cache_is_closed_is_not_written_to(folder, name):
    size = cut(folder / name)

    assert refused(TensorCache.open, folder, "r+")
    assert size == (folder / name).stat().st_size
    assert not wrong_rows(folder)


def lengths_of(folder, *new):
    with open(folder / FILE, "r+b") as file:
        file.seek(48)
        found = struct.unpack("<3Q", file.read(24))
        if new:
            file.seek(48)
            file.write(struct.pack("<3Q", *new))
    return list(found)


def test_how_long_the_values_are_stands_in_the_states(folder):
    sizes = [(folder / name).stat().st_size for name in ("t.values", "note.jsonl", "raw.values")]

    assert sizes == lengths_of(folder)


def test_the_rows_give_the_length_of_values_when_the_states_do_not(folder):
    whole = lengths_of(folder, 0, 0, 0)

    TensorCache.open(folder, "r+").close()
    assert whole == lengths_of(folder, 0, 0, 0)
    size = cut(folder / "note.jsonl", 0.999)
    assert refused(TensorCache.open, folder, "r+")
    assert size == (folder / "note.jsonl").stat().st_size


def test_values_that_a_power_cut_took_before_they_were_a_row_are_not_missed(folder):
    whole = lengths_of(folder)
    lengths_of(folder, *(length + 100 for length in whole))

    with TensorCache.open(folder, "r+") as cache:
        assert whole == lengths_of(folder)
        assert range(ROWS, ROWS + 1) == cache.append(values([ROWS]))
    assert not wrong_rows(folder)


def test_values_that_one_writes_and_another_finds_cut_are_not_written_over(folder):
    one, other = TensorCache.open(folder, "r+"), TensorCache.open(folder, "r+")
    before = (folder / "t.values").stat().st_size
    one[0] = {"t": torch.arange(100, dtype=torch.int32)}
    os.truncate(folder / "t.values", before)

    assert refused(other.__setitem__, [5], {"t": values([5])["t"]})
    assert refused(TensorCache.open, folder, "r+")
    assert before == (folder / "t.values").stat().st_size
    assert refused(one.flush)
    assert [0] == TensorCache.open(folder).missing_rows(["t"]).tolist()
    refused(one.close)
    refused(other.close)


def test_rows_in_memory_that_are_cut_off_are_an_error_and_not_a_signal(tmp_path):
    """They were mapped; touching the truncated part would be fatal."""
    with TensorCache.create(tmp_path / "cache", {"x": COLUMNS["x"]}, ROWS) as made:
        made[:] = {"x": values(range(ROWS))["x"]}
    cache = TensorCache.open(tmp_path / "cache")
    made_hot(cache)

    def look():
        cut(tmp_path / "cache" / "x.safetensors", 0.2)
        cache._store._files["x"].rowfile.in_memory_until = 0.0
        assert refused(cache.get, torch.arange(0, ROWS, 7))
        assert refused(cache.get, slice(ROWS - 10, None))
        assert torch.equal(values(range(10))["x"], cache[:10]["x"])

    assert in_fork(look)


def test_states_of_another_time_are_refused(folder):
    before = (folder / FILE).read_bytes()
    with TensorCache.open(folder, "r+") as cache:
        cache.append(values([ROWS]))
    size = (folder / "x.safetensors").stat().st_size
    (folder / FILE).write_bytes(before)

    for mode in ("r", "r+"):
        with pytest.raises(CorruptFileError, match=f"has {ROWS} rows, but the manifest has {ROWS + 1}"):
            TensorCache.open(folder, mode)
    assert size == (folder / "x.safetensors").stat().st_size
