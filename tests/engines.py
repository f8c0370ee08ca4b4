"""A prefetcher that has learned nothing from earlier tests, a writer at rest, and a clock that a test moves."""

from __future__ import annotations

import threading
import time
from weakref import WeakSet

import pytest

from offload.prefetch import engine as engines
from offload.prefetch import plan, tables
from offload.prefetch.engine import POOL, Engine
from offload.prefetch.plan import QUEUED, READING, Pool
from offload.training import activations


def forget() -> None:
    """Nothing is ahead, in the order or in the plan of the process."""
    try:
        rest()
    except AssertionError:  # a test has left it broken
        engines._ENGINE = Engine()
    engine = engines._ENGINE
    with engine.reader.lock:
        for stream in engine.streams.live:
            stream.give_up()
        engine.streams.live.clear()
        engine.streams._local = threading.local()
        vars(POOL).update(vars(Pool()))
    rest(engine)


def rest(engine: Engine | None = None) -> None:
    """Wait until the reader is idle, and everything to be dropped is gone."""
    engine = engine or engines._ENGINE
    given_up = time.monotonic() + 60
    while True:
        with engine.reader.lock:
            reader = engine.reader.thread
            ahead = [value for stream in engine.streams.live for value in stream.ahead]
            is_busy = bool(engine.reader._queue) or any(value.stage in (QUEUED, READING) for value in ahead)
            has_ended = reader is not None and not reader.is_running
            if not engine.reader.leaving_bytes and (has_ended or not is_busy):
                return
        assert time.monotonic() < given_up, "the reader does not come to rest"
        time.sleep(0.0005)


def settled() -> None:
    """Wait until every activation that waits to be written is written, or was dropped."""
    activations._DISK.wait(0)


def be_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of values that earlier tests have left does not count."""
    monkeypatch.setattr(plan, "_POOLS", WeakSet({POOL}))
    monkeypatch.setattr(tables, "_FILLINGS", WeakSet())


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time
