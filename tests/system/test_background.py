"""A thread that works while there is something to do."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque

import pytest

from offload.system import background
from offload.system.background import Background
from tests.processes import ROOT, in_fork


class Counter(Background[int]):
    """Records what it was given; fails at negative numbers."""

    def __init__(self) -> None:
        super().__init__("test-counter")
        self.queue: deque[int] = deque()
        self.done: list[tuple[int, str]] = []
        self.something = threading.Semaphore(0)

    def give(self, *numbers: int) -> None:
        with self.lock:
            self.queue.extend(numbers)
            self.wake()

    def take(self) -> int | None:
        return self.queue.popleft() if self.queue else None

    def carry_out(self, work: int) -> None:
        self.done.append((work, threading.current_thread().name))
        self.something.release()
        if work < 0:
            raise ValueError(work)

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self.something.acquire(timeout=10)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    monkeypatch.setattr(background, "IDLE", 0.02)
    return Counter()


def ended(thread: threading.Thread | None) -> bool:
    if thread is not None:
        thread.join(10)
    return thread is None or not thread.is_alive()


def test_work_is_done_in_order_by_a_thread_of_that_name(counter):
    counter.give(1, 2, 3)
    counter.wait(3)

    assert [(number, "test-counter") for number in (1, 2, 3)] == counter.done


def test_the_thread_ends_when_idle_and_another_begins_when_there_is_work(counter):
    assert counter.thread is None
    counter.give(1)
    counter.wait(1)
    assert ended(counter.thread)

    counter.give(2)
    counter.wait(1)

    assert [1, 2] == [number for number, _ in counter.done]


def test_an_error_ends_the_thread_and_the_next_work_finds_another(counter, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda *_: None)
    counter.give(-1)
    counter.wait(1)
    assert ended(counter.thread)

    counter.give(2)
    counter.wait(1)

    assert [-1, 2] == [number for number, _ in counter.done]


def test_work_that_was_given_beside_what_fails_is_done_by_another_thread(counter, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda *_: None)

    counter.give(-1, 2, -3, 4)
    counter.wait(4)

    assert [-1, 2, -3, 4] == [number for number, _ in counter.done]


def test_a_forked_child_has_no_thread_and_can_make_one(counter):
    counter.give(1)
    counter.wait(1)

    def child() -> bool:
        other = Counter()
        other.give(2)
        other.wait(1)
        return [2] == [number for number, _ in other.done]

    assert in_fork(child)


def test_a_process_that_ends_while_the_thread_is_inside_torch_ends_well():
    """Each sort lets go of the interpreter's lock, and takes it again in a destructor that must not raise."""
    program = """if True:
        import threading, torch
        from offload.system.background import Background

        class Sorting(Background[int]):
            def take(self):
                return 1

            def carry_out(self, work):
                for _ in range(200):
                    torch.rand(300).sort()
                begun.set()

        begun, sorting = threading.Event(), Sorting("test-sorting")
        with sorting.lock:
            sorting.wake()
        begun.wait()
    """

    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)

    assert (0, "") == (done.returncode, done.stderr)


def test_nothing_is_begun_once_the_process_ends(counter):
    counter.give(1)
    counter.wait(1)
    thread = counter.thread

    counter.end()

    assert ended(thread)
    with pytest.raises(RuntimeError, match="shutting down"):
        counter.give(2)


def test_a_thread_that_is_at_work_as_the_process_ends_does_not_rest(counter, monkeypatch):
    monkeypatch.setattr(background, "IDLE", 3600)
    may_end = threading.Event()
    monkeypatch.setattr(counter, "carry_out", lambda _: (counter.something.release(), may_end.wait(10)))
    counter.give(1)
    counter.wait(1)
    thread = counter.thread
    ending = threading.Thread(target=counter.end)
    ending.start()
    while not counter._is_at_exit:
        pass
    may_end.set()
    ending.join()

    assert ended(thread)
