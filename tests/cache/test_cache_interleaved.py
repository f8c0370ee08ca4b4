"""A reader between any two lines of a writer, and a writer between any two lines of a reader: rows are seen whole."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from offload import TensorCache
from offload.cache import rowfile
from offload.errors import MissingRowsError
from tests.page_cache import made_hot

ROWS = 8
FIXED = {"x": (torch.int64, (5,)), "y": (torch.int32, ()), "z": (torch.int64, (2, 2))}
OURS = os.sep.join(["", "offload", "cache", ""])


def values(stamps, columns):
    numbers = torch.tensor(stamps)
    found = {
        "x": numbers[:, None].expand(-1, 5),
        "y": numbers.int(),
        "z": numbers[:, None, None].expand(-1, 2, 2),
        "t": [torch.full((stamp % 5 + 1,), stamp) for stamp in stamps],
    }
    return {name: found[name] for name in columns}


def stamps_of(batch):
    """The stamp of each row, which is all it contains."""
    found = []
    for row in zip(*batch.values(), strict=True):
        [stamp] = {number for value in row for number in value.reshape(-1).tolist()}
        found.append(stamp)
    return found


def at_lines(act, look, only=None):
    """Run `act`, with `look` before each line of it in the cache package, or before one; returns their number."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if OURS not in frame.f_code.co_filename:
            return None
        if event == "line":
            if only in (None, lines):
                look()
            lines += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return lines


@pytest.fixture(params=[FIXED, FIXED | {"t": (torch.int64, (None,))}], ids=["hot", "with ragged rows"])
def caches(request, tmp_path, monkeypatch):
    """A reader and a writer for filled rows, with their numbers as stamps."""
    monkeypatch.setattr(rowfile, "_STILL", 3600.0)
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)  # invisible to readers
    writer = TensorCache.create(tmp_path / "cache", request.param, ROWS)
    writer[:] = values(range(ROWS), request.param)
    writer.flush()
    reader = TensorCache.open(tmp_path / "cache")
    if "t" not in request.param:
        made_hot(reader)
    return reader, writer


def in_files(folder):
    """What a reader can see of a folder: the size of each file, and its first bytes."""
    found = []
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            found.append((path.name, path.stat().st_size, file.read(1 << 16)))
    return found


def test_between_any_two_lines_of_a_writer_rows_are_whole_or_missing(caches):
    """Checked when the line before has changed a file: otherwise a reader sees the same as before."""
    reader, writer = caches
    seen = {row: {row} for row in range(ROWS)}
    before, looks = None, 0

    def look():
        nonlocal before, looks
        if (found := in_files(reader.folder)) == before:
            return
        before, looks = found, looks + 1
        assert [0, 5, 7] == stamps_of(reader[torch.tensor([0, 5, 7])])  # not being written
        last = len(reader)
        for index in (slice(1, 5), torch.tensor([6]), torch.tensor([3, 1]), torch.arange(last - 3, last), slice(None)):
            try:
                found = stamps_of(reader[index])
            except MissingRowsError:
                continue
            for row, stamp in zip(torch.arange(last)[index].tolist(), found, strict=True):
                assert stamp % 1000 == row
                seen.setdefault(row, set()).add(stamp)

    def write():
        writer[[1, 3]] = values([1001, 1003], writer.schema)
        writer.flush()
        writer[slice(2, 5)] = values([2002, 2003, 2004], writer.schema)
        writer[[3]] = values([3003], writer.schema)
        writer.append(values([1008, 1009], writer.schema))
        writer.flush()
        writer.append(values([1010], writer.schema))
        writer.close()

    assert at_lines(write, look) > 300
    assert looks > 30
    look()
    assert {1: {1, 1001}, 2: {2, 2002}, 3: {3, 1003, 3003}, 4: {4, 2004}, 6: {6}} == {
        row: seen[row] for row in (1, 2, 3, 4, 6)
    }
    assert [{1008}, {1009}, {1010}] == [seen[row] for row in (8, 9, 10)]


@pytest.mark.parametrize("flushes", [False, True], ids=["rows are missing then", "and flushes"])
@pytest.mark.parametrize("index", [torch.tensor([2, 6, 1]), slice(1, 7)], ids=["picked", "run"])
def test_a_writer_between_any_two_lines_of_a_reader_does_not_tear_rows(caches, index, flushes):
    reader, writer = caches
    rows, stamp, results = torch.arange(ROWS)[index].tolist(), 0, set()

    def write():
        writer[[1, 6]] = values([stamp + 1, stamp + 6], writer.schema)
        if flushes:
            writer.flush()

    def read():
        try:
            found = stamps_of(reader[index])
        except MissingRowsError:
            results.add("missing")
            return
        results.add("new" if found[-1] == stamp + rows[-1] else "old")
        for row, number in zip(rows, found, strict=True):
            assert number % 1000 == row
            assert row in (1, 6) or number == row
            assert number in (row, before + row, stamp + row)

    lines, only = 1, 0
    while only < lines:
        before, stamp = stamp, stamp + 1000
        reader[torch.arange(ROWS)]
        lines = at_lines(read, write, only)
        writer.flush()
        only += 1

    assert only > 20
    assert results == ({"old", "new"} if flushes else {"old", "missing"})
