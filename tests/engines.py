"""A prefetcher that has learned nothing from earlier tests, and a clock that a test moves."""

from __future__ import annotations

import threading
from weakref import WeakSet

import pytest

from offload.prefetch import engine as engines
from offload.prefetch import filling, plan
from offload.prefetch.engine import POOL
from offload.prefetch.plan import Pool
from offload.storage import disks


def forget() -> None:
    """Nothing is ahead, in the order or in the plan of the process, and how fast its disks are is unknown."""
    engine = engines._ENGINE
    with engine.reader.lock:
        for stream in engine.streams.live:
            stream.give_up()
        engine.streams.live.clear()
        engine.streams._local = threading.local()
        vars(POOL).update(vars(Pool()))
    disks._DISKS.clear()


def be_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of values that earlier tests have left does not count."""
    monkeypatch.setattr(plan, "_POOLS", WeakSet({POOL}))
    monkeypatch.setattr(filling, "_FILLINGS", WeakSet())


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time
