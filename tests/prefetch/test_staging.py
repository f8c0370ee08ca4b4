"""Copies to an accelerator through pinned slots, in turn. Without an accelerator, the CPU stands in for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import offload
from offload import OffloadedTensor
from offload.prefetch import copies, staging
from offload.prefetch import engine as engines
from offload.prefetch.engine import POOL
from offload.prefetch.plan import OnDevice, Pool
from offload.prefetch.staging import Sent
from offload.prefetch.value import AWAY, READING, page_state_of
from offload.tensor import guests
from offload.tensor.wrapper import guest_of

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Events on a fake device with streams and events, which is the CPU."""
    log: list[str] = []

    class Event:
        count = 0

        def __init__(self) -> None:
            self.name = f"event {Event.count}"
            Event.count += 1

        def record(self, stream: object) -> None:
            log.append(f"{self.name} recorded on {'side' if isinstance(stream, Side) else 'current'}")

        def synchronize(self) -> None:
            log.append(f"{self.name} waited for")

        def query(self) -> bool:
            return False

    class Current:
        def wait_event(self, event: Event) -> None:
            log.append(f"current stream waits for {event.name}")

    class Side:
        def __init__(self, device: torch.device) -> None:
            pass

        def __enter__(self) -> None:
            log.append("on side")

        def __exit__(self, *_: object) -> None:
            pass

    module = SimpleNamespace(Stream=Side, Event=Event, current_stream=lambda device: Current())
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: log.append("kept for current stream"))
    monkeypatch.setattr(staging, "_pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(staging, "_STAGINGS", {})
    monkeypatch.setattr(staging, "_SLOTS", 2)
    return log


def test_a_large_value_goes_through_two_slots_in_turn(log, monkeypatch):
    monkeypatch.setattr(staging, "_SLOT", 1 << 20)
    values = torch.randn(5 << 17)  # two and a half slots

    sent = staging.send(values, CPU)

    assert torch.equal(values, sent)
    assert sent.data_ptr() != values.data_ptr()
    assert [
        "on side",
        "event 0 waited for", "event 0 recorded on side",
        "event 1 waited for", "event 1 recorded on side",
        "event 0 waited for", "event 0 recorded on side",
        "event 2 recorded on side",
        "event 3 recorded on current",
        "current stream waits for event 2",
        "kept for current stream",
    ] == log  # fmt: skip


def test_a_lazily_conjugated_value_is_sent_too(log):
    values = torch.randn(1 << 18, dtype=torch.complex64).conj()

    assert torch.equal(values, staging.send(values, CPU))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.float8_e4m3fn])
def test_every_dtype_is_sent_as_bytes(log, dtype):
    values = torch.randint(0, 2, (1 << 21,)).to(dtype)

    sent = staging.send(values, CPU)

    assert dtype == sent.dtype
    assert torch.equal(values.view(torch.uint8), sent.view(torch.uint8))
    assert log


@pytest.mark.parametrize("count", [9, 1 << 20], ids=["small", "for a device without streams"])
def test_a_value_that_is_not_staged_is_copied_at_once(log, monkeypatch, count):
    if count > 9:
        monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    values = torch.randn(count)

    assert torch.equal(values, staging.send(values, CPU))
    assert [] == log


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes sent to a fake GPU, which stores them on the CPU."""
    sent: list[int] = []

    def send(values: torch.Tensor, target: torch.device) -> torch.Tensor:
        assert target == GPU
        sent.append(values.nbytes)
        return values.clone()

    monkeypatch.setattr(guests, "send", send)
    monkeypatch.setattr(copies, "staging_for", lambda _: None)
    monkeypatch.setattr(copies, "send_bytes", lambda values, target: Sent(send(values, target)))
    return sent


def referenced(tmp_path: Any, name: str, values: torch.Tensor) -> OffloadedTensor:
    """A value in a read-only file, which computes on the GPU."""
    from safetensors.torch import save_file

    path = tmp_path / f"{name}.safetensors"
    save_file({name: values}, path)
    w = OffloadedTensor.from_file(path)
    w._target = GPU
    return w


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> Pool:
    """100 KiB on the GPU."""
    pool = OnDevice(100 << 10, GPU)
    monkeypatch.setattr(POOL, "fixed_window", 0)
    monkeypatch.setattr(POOL, "on_devices", {GPU: pool})
    return pool


def test_views_are_cut_from_the_value_that_stays(tmp_path, sent, budget):
    w = referenced(tmp_path, "w", torch.randn(100, 100))

    assert torch.equal(w._on_cpu()[3:5].t(), guest_of(w[3:5].t()))
    guest_of(w[7])

    assert [40_000] == sent


def test_nothing_stays_on_a_device_that_does_not_tell_what_is_free(tmp_path, sent):
    w = referenced(tmp_path, "w", torch.randn(100, 100))
    guest_of(w), guest_of(w)

    assert [40_000] * 2 == sent


def test_a_value_that_is_written_to_does_not_stay(tmp_path, sent, budget):
    """Its file may be written to without this being noticed."""
    w = referenced(tmp_path, "w", torch.zeros(100, 100))
    guest_of(w)
    w._target = CPU
    w.add_(1)
    w._target = GPU

    assert guest_of(w).eq(1).all()
    assert guest_of(w).eq(1).all()
    assert 3 == len(sent)
    assert not any(value.cached_bytes() for value in budget.values())


def test_evicted_values_leave_the_device(tmp_path, sent, budget):
    w = referenced(tmp_path, "w", torch.zeros(100, 100))
    guest_of(w)
    offload.budget.evict(w)
    guest_of(w)

    assert [40_000] * 2 == sent


def test_a_forked_child_goes_through_the_budgets_of_devices_too(tmp_path, sent, budget):
    """They contain values unknown to the reader; those being processed are free again."""
    w = referenced(tmp_path, "w", torch.zeros(100, 100))
    guest_of(w)
    v = OffloadedTensor.from_original_tensor(torch.zeros(300, 300), "v")
    v.sum()
    value = page_state_of(v._handle).ranges[v._handle.extent]
    value.stage = READING

    engine = engines._ENGINE
    try:
        engines._begin_anew()
    finally:
        engines._ENGINE = engine

    assert AWAY == value.stage


def test_a_materialized_value_is_an_independent_copy(tmp_path, sent, budget):
    """Modifying it does not change the resident copy."""
    w = referenced(tmp_path, "w", torch.ones(100, 100))
    guest_of(w)
    w.materialize().zero_()

    assert guest_of(w).eq(1).all()
