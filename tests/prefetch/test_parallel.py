"""Two threads read one range: each byte is read once, and what happens on errors and at the end."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import deque

import pytest
import torch
from safetensors.torch import save_file

import offload
from bench.page_cache import make_cold
from offload.prefetch import parallel
from offload.prefetch.parallel import read_in_parallel
from offload.system import background
from offload.system.background import Worker
from tests.page_cache import needs_page_cache

MIB = 1 << 20


@pytest.mark.parametrize("start", [0, 1, 4096 + 5, 3 * MIB])
@pytest.mark.parametrize("nbytes", [1, 8 * MIB - 1, 8 * MIB, 9 * MIB + 7, 100 * MIB])
def test_every_byte_is_read_once(start, nbytes):
    """A small range at once; parts begin at huge pages: two threads would read the same one otherwise."""
    parts: list[tuple[int, int]] = []
    read_in_parallel(start, nbytes, 16 * MIB, lambda *part: parts.append(part))

    assert (nbytes < 8 * MIB) == (1 == len(parts))
    place = start
    for first, length in sorted(parts):
        assert place == first
        assert length > 0
        assert first == start or 0 == first % (2 * MIB)
        place += length
    assert start + nbytes == place


def test_two_threads_read_at_the_same_time():
    both = threading.Barrier(2, timeout=10)
    read_in_parallel(0, 8 * MIB, 16 * MIB, lambda *_: both.wait() and None)

    assert not both.broken


@pytest.fixture
def parts(monkeypatch):
    """The parts that nobody has taken yet, of each read; an error removes them."""
    made: list[deque[tuple[int, int]]] = []
    make = parallel._parts
    monkeypatch.setattr(parallel, "_parts", lambda *args: made.append(make(*args)) or made[-1])
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
        read_in_parallel(0, 1024 * MIB, 16 * MIB, read)

    assert [0, 16 * MIB] == sorted(begun)  # of 64 parts
    assert sorted(begun) == sorted(ended)


@needs_page_cache
def test_a_large_cold_value_is_read_in_parts(tmp_path, parts):
    save_file({"w": torch.arange(5 * MIB, dtype=torch.float32)}, path := tmp_path / "w.safetensors")  # 20 MiB
    make_cold([path])

    assert torch.equal(torch.arange(5 * MIB, dtype=torch.float32), offload.load_file(path)["w"] + 0)
    assert 1 == len(parts)


def test_one_thread_reads_if_no_more_can_start(monkeypatch):
    """As while the interpreter ends (Python 3.12)."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(background, "start_new_thread", refuse)
    seen: list[tuple[int, int]] = []
    read_in_parallel(0, 100 * MIB, 2 * MIB, lambda _, nbytes: seen.append((threading.get_ident(), nbytes)))

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

    with pytest.raises(KeyboardInterrupt):
        read_in_parallel(0, 1024 * MIB, 16 * MIB, read)
    monkeypatch.undo()  # an interrupt of `join` has left the thread with its part
    for thread in [thread for thread in threading.enumerate() if thread.name == "offload-part"]:
        thread.join()

    assert len(begun) <= 2  # of 64


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
            read_in_parallel(0, 8 * MIB, 16 * MIB, read)
        del read, mapping
        assert seen() is None
    finally:
        gc.enable()
