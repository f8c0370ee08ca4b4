"""Parts of files that are read past the page cache."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from offload.errors import ChangedFileError, CorruptFileError, MissingFileError, ReadError
from offload.prefetch import direct, engine, loads, scratch
from offload.prefetch.direct import FilePart, Load, can_be_read
from offload.prefetch.engine import Engine
from offload.prefetch.loads import Arriving
from offload.prefetch.reader import DirectReader
from offload.storage.file import TensorFile
from offload.storage.layout import Entry, contiguous
from offload.system import background
from tests.page_cache import needs_direct_reads
from tests.processes import ended, forked

SIZE = 1_234_567


pytestmark = needs_direct_reads


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_ENGINE", Engine())
    monkeypatch.setattr(scratch, "_SCRATCH", scratch._Scratch())


def stored(path: Path, data: bytes) -> TensorFile:
    """A file without a header."""
    path.write_bytes(data)
    return TensorFile.raw(path, Entry("x", contiguous(torch.uint8, (len(data),)), 0))


@pytest.fixture
def data() -> bytes:
    return random.Random(0).randbytes(SIZE)


@pytest.fixture
def opened(tmp_path: Path, data: bytes) -> TensorFile:
    """A file of these bytes."""
    return stored(tmp_path / "data", data)


def text(load: Load, part: FilePart) -> bytes:
    return load.tensor(part, torch.empty(part.nbytes, dtype=torch.uint8, device="meta")).numpy().tobytes()


def arriving(loads_: list[Load], capacity: int = 1 << 20) -> Arriving:
    """With so many bytes at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loads, "reserve", lambda *_: capacity)
        return Arriving([(load, [(None, None)]) for load in loads_])


def in_order(loads_: list[Load], capacity: int = 1 << 20) -> Iterator[Load]:
    """Each once it is there, until the next one is asked for."""
    with closing(arriving(loads_, capacity)) as coming:
        for _ in loads_:
            yield coming.take()


def test_parts_of_any_place_and_size_are_what_the_file_holds(opened, data, tmp_path):
    others, chance = random.Random(1).randbytes(SIZE), random.Random(2)
    texts = {opened: data, stored(tmp_path / "others", others): others}
    places = [(0, 1), (SIZE - 1, 1), (0, SIZE), (4095, 2), (4096, 4096), (SIZE - 5000, 5000)]
    places += [(start, chance.randrange(1, SIZE - start + 1)) for start in (chance.randrange(SIZE) for _ in range(30))]
    parts = [FilePart(chance.choice([*texts]), *place) for place in places]
    groups = [parts[at : at + 3] for at in range(0, len(parts), 3)]

    for load, group in zip(in_order([Load(group) for group in groups]), groups, strict=True):
        for part in group:
            assert texts[part.file][part.start : part.start + part.nbytes] == text(load, part)


def test_values_lie_in_memory_as_in_the_file(opened, data):
    load = Load([FilePart(opened, 1000, 64)])
    like = torch.empty(4, 2, dtype=torch.float32, device="meta").t()

    [found] = [load.tensor(FilePart(opened, 1000, 32), like) for load in in_order([load])]

    assert torch.equal(
        torch.frombuffer(bytearray(data[1000:1032]), dtype=torch.float32).view(4, 2).t().isnan(), found.isnan()
    )
    assert found.stride() == like.stride()
    assert 1000 % 4096 == found.data_ptr() % 4096


def test_a_part_that_was_not_read_to_its_end_is_not_found(opened):
    load, like = Load([FilePart(opened, 5000, 100)]), torch.empty(200, dtype=torch.uint8, device="meta")

    for _ in in_order([load]):
        assert load.tensor(FilePart(opened, 5000, 200), like) is None
        assert load.tensor(FilePart(opened, 300_000, 200), like) is None


def test_gaps_are_left_out_unless_they_are_small(opened):
    assert 8192 == Load([FilePart(opened, 0, 10), FilePart(opened, 5000, 10)]).nbytes
    assert 8192 == Load([FilePart(opened, 0, 10), FilePart(opened, 500_000, 10)]).nbytes


def test_no_more_memory_is_taken_than_there_is_room_for(opened):
    parts = [FilePart(opened, 4096 * number, 600_000) for number in range(40)]
    size = 3 * direct._SIZES

    assert 40 == len(list(in_order([Load([part]) for part in parts], 5 * size)))

    blocks = [flat for flat, _ in scratch._SCRATCH._blocks]
    assert [size] * 5 == [flat.numel() for flat in blocks]


def test_memory_that_is_in_use_is_not_handed_out(opened, data):
    parts = [FilePart(opened, 4096 * number, 200_000) for number in range(20)]
    loads_ = [Load([part]) for part in parts]
    with closing(arriving(loads_, 0)) as coming:  # one in use, one that is read
        for part, following in zip(parts, [*loads_[1:], loads_[-1]], strict=True):
            load = coming.take()
            engine.reader().bring_load(following)
            assert data[part.start : part.start + part.nbytes] == text(load, part)


def readers_end() -> None:
    for thread in [reader.thread for reader in engine.reader().direct]:
        if thread is not None:
            thread.join(60)


def test_unused_memory_is_freed_after_a_while(opened, monkeypatch):
    """Also if the readers have ended before it is released."""
    monkeypatch.setattr(background, "IDLE", 0.01)
    monkeypatch.setattr(scratch, "_MOST_UNUSED", 1 << 20)
    loads_ = [Load([FilePart(opened, 0, 600_000)]) for _ in range(8)]
    coming = arriving(loads_, 8 << 20)
    for load in loads_:
        engine.reader().bring_load(load)
    readers_end()
    assert 8 == len(scratch._SCRATCH._blocks)

    coming.close()
    readers_end()

    assert 1 == len(scratch._SCRATCH._blocks)


def change(path: Path) -> None:
    path.write_bytes(b"another")


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (change, ChangedFileError),
        (lambda path: os.truncate(path, 4096), ChangedFileError),
        (Path.unlink, MissingFileError),
    ],
    ids=["changed", "cut", "gone"],
)
def test_a_file_that_is_another_one_now_is_an_error(opened, act: Callable[[Path], object], error):
    act(opened.path)

    with pytest.raises(error, match=str(opened.path)):
        list(in_order([Load([FilePart(opened, 0, 100)])]))


def test_a_file_that_is_cut_while_it_is_read_is_an_error(opened, monkeypatch):
    monkeypatch.setattr(direct, "_read_into", lambda *_: 4096)

    with pytest.raises(CorruptFileError, match="was truncated"):
        list(in_order([Load([FilePart(opened, 0, 5000)])]))


def test_an_error_of_the_disk_is_that_of_its_load_alone(opened, monkeypatch):
    read = direct._read_into

    def failing(memory: memoryview, fd: int, first: int) -> int:
        if first == 8192:
            raise OSError(errno.EIO, "Input/output error")
        return read(memory, fd, first)

    monkeypatch.setattr(direct, "_read_into", failing)
    with closing(arriving([Load([FilePart(opened, 8192 * number, 100)]) for number in range(3)])) as coming:
        coming.take()
        with pytest.raises(ReadError, match=str(opened.path)):
            coming.take()
        coming.take()


def test_without_threads_it_is_read_by_the_caller(opened, data, monkeypatch):
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(DirectReader, "wake", refuse)
    parts = [FilePart(opened, 5000 * number, 5000) for number in range(4)]

    found = [text(load, part) for load, part in zip(in_order([Load([part]) for part in parts]), parts, strict=True)]

    assert data[:20_000] == b"".join(found)


def test_memory_that_is_still_written_to_is_not_used_again(opened, monkeypatch):
    reads, goes_on = threading.Event(), threading.Event()
    read = direct._read_into

    def slow(*given: object) -> int:
        reads.set()
        assert goes_on.wait(60)
        return read(*given)

    monkeypatch.setattr(direct, "_read_into", slow)
    coming = arriving([Load([FilePart(opened, 0, 100)])])
    assert reads.wait(60)
    coming.close()
    [(flat, _)] = scratch._SCRATCH._blocks

    assert flat.data_ptr() != scratch.take_scratch(flat.numel()).data_ptr()
    goes_on.set()


def test_a_forked_child_reads(opened, data):
    list(in_order([Load([FilePart(opened, 0, 100)])]))

    def child() -> None:
        part = FilePart(opened, 100, 100)
        assert [data[100:200]] == [text(load, part) for load in in_order([Load([part])])]

    assert 0 == ended(forked(child))


def test_file_systems_without_direct_reads_are_noticed(opened, monkeypatch):
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "preadv", refuse)

    assert not can_be_read(opened)
