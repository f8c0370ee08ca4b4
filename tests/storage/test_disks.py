"""Several threads read one range: how many, that each byte is read once, and what happens on errors and at the end."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import offload
from bench.page_cache import make_cold
from offload.storage import disks, threads
from offload.storage.disks import Disk, read_shared
from offload.storage.threads import Worker
from tests.page_cache import needs_page_cache
from tests.processes import in_fork

MIB = 1 << 20
NUMBERS = itertools.count(-1, -1)  # no file system has these


def test_two_threads_read_at_first():
    assert 2 == Disk().readers
    assert 1 == Disk(most=1).readers


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({1: 1.0, 2: 1.0, 4: 1.0}, 2),
        ({1: 1.0, 2: 1.1, 4: 1.2}, 2),
        ({1: 1.0, 2: 1.8, 4: 3.0, 8: 3.1}, 4),
        ({1: 1.0, 2: 1.8, 4: 3.0, 8: 5.0}, 8),
        ({1: 1.0, 2: 0.6, 4: 0.3}, 1),
    ],
)
def test_the_number_with_the_clearly_better_rate_stays(rates, expected):
    disk = Disk()
    done = measured(disk, lambda count, _: rates[count])

    assert expected == disk.readers
    assert disk.due == disk.readers
    assert len(done) <= 30


def test_a_varying_rate_does_not_decide():
    """Each third read is three times as fast, whoever reads: medians of pairs do not follow that."""
    disk = Disk()
    measured(disk, lambda _, place: 3.0 if place % 3 == 0 else 1.0)

    assert 2 == disk.readers


def test_threads_never_exceed_the_limit():
    disk = Disk(most=3)
    done = measured(disk, lambda count, _: float(count))

    assert 3 == disk.readers
    assert 3 == max(done)


def test_an_unrequested_measurement_is_ignored():
    disk = Disk()
    for _ in range(20):
        disk.learn(4, 9.0)  # never beside one by two threads
        disk.learn(3, 9.0)

    assert 2 == disk.readers
    assert disk.other == 4


@pytest.mark.parametrize("start", [0, 1, 4096 + 5, 3 * MIB])
@pytest.mark.parametrize("nbytes", [1, 8 * MIB - 1, 8 * MIB, 9 * MIB + 7, 100 * MIB])
def test_every_byte_is_read_once(start, nbytes):
    parts: list[tuple[int, int]] = []
    read_shared(next(NUMBERS), start, nbytes, 16 * MIB, lambda *part: parts.append(part), lambda: nbytes)

    place = start
    for first, length in sorted(parts):
        assert place == first
        assert length > 0
        place += length
    assert start + nbytes == place


def test_parts_begin_at_huge_pages():
    """Two threads would read the same one otherwise."""
    parts: list[tuple[int, int]] = []
    read_shared(next(NUMBERS), MIB, 100 * MIB, 16 * MIB, lambda *part: parts.append(part), lambda: 0)

    assert len(parts) > 2
    assert all(first % (2 * MIB) == 0 for first, _ in sorted(parts)[1:])


def test_a_small_range_is_read_at_once():
    parts: list[tuple[int, int]] = []
    read_shared(next(NUMBERS), 3, 8 * MIB - 1, 2 * MIB, lambda *part: parts.append(part), lambda: 0)

    assert [(3, 8 * MIB - 1)] == parts


def test_two_threads_read_at_the_same_time():
    both = threading.Barrier(2, timeout=10)
    read_shared(next(NUMBERS), 0, 8 * MIB, 16 * MIB, lambda *_: both.wait() and None, lambda: 0)

    assert not both.broken


def test_threads_never_outnumber_parts(monkeypatch):
    number, begun = next(NUMBERS), []
    disks._DISKS[number] = disk = Disk()
    disk.readers = 8
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: begun.append(self) or start(self))
    read_shared(number, 0, 8 * MIB, 16 * MIB, lambda *_: None, lambda: 0)  # in four parts

    assert 3 == len(begun)


def test_reads_from_memory_do_not_count_as_the_disks_rate():
    number = next(NUMBERS)
    for _ in range(30):
        read_shared(number, 0, 8 * MIB, 16 * MIB, lambda *_: None, lambda: 7 * MIB)

    assert 4 == disks._DISKS[number].other


def test_reads_from_the_disk_count_as_its_rate():
    number = next(NUMBERS)
    asked: list[int] = []
    for _ in range(40):
        read_shared(number, 0, 8 * MIB, 16 * MIB, lambda *_: None, lambda: asked.append(1) or 8 * MIB)

    assert disks._DISKS[number].other is None
    assert 10 <= len(asked) < 40


@pytest.fixture
def parts(monkeypatch):
    """The parts that nobody has taken yet, of each read; an error removes them."""
    made: list[deque[tuple[int, int]]] = []
    make = disks._parts
    monkeypatch.setattr(disks, "_parts", lambda *args: made.append(make(*args)) or made[-1])
    return made


def until_empty(parts: list[deque[tuple[int, int]]]) -> None:
    while any(parts):
        time.sleep(0.001)


@pytest.mark.parametrize("error", [OSError(5, "the disk failed"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("fails_here", [True, False], ids=["the caller's thread", "another"])
def test_an_error_of_any_thread_is_raised_and_ends_the_others(parts, fails_here, error):
    both = threading.Barrier(2, timeout=10)
    fails = threading.Event()
    begun: list[int] = []
    ended: list[int] = []

    def read(start: int, _nbytes: int) -> None:
        begun.append(start)
        if start <= 16 * MIB:  # the first two parts
            both.wait()
        try:
            if (threading.current_thread() is threading.main_thread()) == fails_here:
                fails.set()
                raise error
            fails.wait(10)
            until_empty(parts)  # the other one has raised
        finally:
            ended.append(start)

    with pytest.raises(type(error)):
        read_shared(next(NUMBERS), 0, 1024 * MIB, 16 * MIB, read, lambda: 0)

    assert [0, 16 * MIB] == sorted(begun)  # of 64 parts
    assert sorted(begun) == sorted(ended)


def test_a_forked_child_reads_by_several_threads():
    def act() -> None:
        both = threading.Barrier(2, timeout=10)
        read_shared(next(NUMBERS), 0, 8 * MIB, 16 * MIB, lambda *_: both.wait() and None, lambda: 0)
        assert not both.broken

    act()

    assert in_fork(act)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    save_file({"w": torch.arange(5 * MIB, dtype=torch.float32)}, tmp_path / "w.safetensors")  # 20 MiB
    return tmp_path / "w.safetensors"


@needs_page_cache
@pytest.mark.parametrize("readers", [1, 2, 8])
def test_a_value_is_the_same_with_any_number_of_threads(large, monkeypatch, readers):
    disk = Disk()
    disk.readers = readers
    read_by, seen = disks._read_by, []

    def seen_by(count: int, *rest: Any) -> None:
        seen.append(count)
        read_by(count, *rest)

    monkeypatch.setattr(disks, "_read_by", seen_by)
    monkeypatch.setattr(disks, "_DISKS", {large.stat().st_dev: disk})
    monkeypatch.setattr(Disk, "other", None)
    make_cold([large])
    found = offload.load_file(large)["w"] + 0

    assert torch.equal(torch.arange(5 * MIB, dtype=torch.float32), found)
    assert [readers] == seen


def test_one_thread_reads_if_no_more_can_start(monkeypatch):
    """As while the interpreter ends (Python 3.12)."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "start_new_thread", refuse)
    seen: list[tuple[int, int]] = []
    read_shared(
        next(NUMBERS), 0, 100 * MIB, 2 * MIB, lambda _, nbytes: seen.append((threading.get_ident(), nbytes)), int
    )

    assert 100 * MIB == sum(nbytes for _, nbytes in seen)
    assert {threading.get_ident()} == {thread for thread, _ in seen}


@pytest.mark.parametrize("where", ["begin", "join"])
def test_an_interrupt_stops_all_reads(monkeypatch, parts, where):
    """An interrupt may come while threads are started, or waited for."""
    act = getattr(Worker, where)

    def interrupted(thread: Worker) -> None:
        if where == "begin":
            act(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(Worker, where, interrupted)
    begun: list[int] = []

    def read(start: int, _nbytes: int) -> None:
        begun.append(start)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        until_empty(parts)

    number = next(NUMBERS)
    with pytest.raises(KeyboardInterrupt):
        read_shared(number, 0, 1024 * MIB, 16 * MIB, read, lambda: 0)
    monkeypatch.undo()  # an interrupt of `join` has left the thread with its part
    for thread in [thread for thread in threading.enumerate() if thread.name == "offload-part"]:
        thread.join()

    assert len(begun) <= 2  # of 64
    assert 0 == disks._DISKS[number].under_way


def test_an_error_of_another_thread_keeps_nothing_alive():
    """Its traceback would keep the mapping until the next garbage collection."""

    class Mapping:
        pass

    mapping = Mapping()
    seen = weakref.ref(mapping)
    both = threading.Barrier(2, timeout=10)

    def read(*_: int, held: Mapping = mapping) -> None:
        both.wait()
        if threading.current_thread() is not threading.main_thread():
            raise OSError(5, "the disk failed")

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(OSError, match="the disk failed"):
            read_shared(next(NUMBERS), 0, 8 * MIB, 16 * MIB, read, lambda: 0)
        del read, mapping
        assert seen() is None
    finally:
        gc.enable()


def test_rates_beside_another_read_do_not_count():
    number = next(NUMBERS)
    disks._DISKS[number] = disk = Disk()

    def read(start: int, _nbytes: int) -> None:
        if start == 0:
            read_shared(number, 1 << 40, 8 * MIB, 16 * MIB, lambda *_: None, lambda: 0)

    for _ in range(3):
        read_shared(number, 0, 8 * MIB, 16 * MIB, read, lambda: 8 * MIB)

    assert 3 * 2 == disk.begun
    assert disk._before is None
    assert not disk._ratios


def measured(disk: Disk, rate: Callable[[int, int], float]) -> list[int]:
    """Reads until nothing is left to compare; returns the numbers of threads."""
    done: list[int] = []
    while disk.other is not None:
        done.append(disk.due)
        disk.learn(done[-1], rate(done[-1], len(done)))
    return done
