"""A memory that notes what is read into it, and an engine of its own."""

from __future__ import annotations

import pytest

from offload.prefetch.engine import Engine
from offload.storage import background
from tests.prefetch.fakes import Memory


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A separate one, whose reader ends soon after the test."""
    monkeypatch.setattr(background, "IDLE", 0.05)
    return Engine()
