"""Copies to an accelerator that are late: with streams, events and pinned memory as in torch."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import offload
from offload import map_batches
from offload.prefetch import staging
from offload.prefetch.room import room_on
from offload.tensor.wrapper import guest_of
from tests.prefetch import delayed_device as delayed
from tests.prefetch.delayed_device import MIB, held, on_disk, on_the_device, side_of
from tests.processes import forked


@on_the_device
def test_a_slot_is_filled_again_only_after_its_copy(device: torch.device) -> None:
    values = [torch.randn(5 << 17) for _ in range(12)]  # two and a half slots each

    sent = [staging.send(value, device) for value in values]

    assert all(torch.equal(value, one.cpu()) for value, one in zip(values, sent, strict=True))


@pytest.mark.parametrize("count", [9, 1 << 21], ids=["small", "large"])
@pytest.mark.parametrize("kind", ["conjugated", "float64", "bfloat16", "bool", "float8_e4m3fn"])
@on_the_device
def test_values_of_every_dtype_are_sent_as_they_are(device: torch.device, kind: str, count: int) -> None:
    if kind == "conjugated":
        values = torch.randn(count, dtype=torch.complex64).conj()
    else:
        values = torch.randint(0, 2, (count,)).to(getattr(torch, kind))

    sent = staging.send(values, device).cpu()

    assert values.dtype == sent.dtype
    assert torch.equal(values.resolve_conj().view(torch.uint8), sent.resolve_conj().view(torch.uint8))


def test_a_device_without_streams_gets_plain_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_STAGINGS", {})
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    values = torch.randn(1 << 20)

    assert torch.equal(values, staging.send(values, torch.device("cpu")))
    assert staging.staging_for(torch.device("cpu")) is None
    assert 0 == room_on(torch.device("meta"))  # nor does it tell what is free


@on_the_device
def test_views_are_cut_from_the_value_that_stays_and_copies_of_it_are_independent(
    device: torch.device, folder: Path
) -> None:
    values = torch.randn(1 << 8, 1 << 10)
    w = on_disk(folder, "w", values)
    with offload.set_max_memory({"delayed:0": 2 * MIB}):
        guest_of(w)
        w.materialize().zero_()
        before = delayed.ops.sent()

        assert torch.equal(values[3:5].t(), guest_of(w[3:5].t()).cpu())
        assert torch.equal(values[7], guest_of(w[7]).cpu())
        assert before == delayed.ops.sent()


@on_the_device
def test_a_value_that_is_written_to_does_not_stay(device: torch.device, folder: Path) -> None:
    """Its file may be written to without this being noticed."""
    w = on_disk(folder, "w", torch.zeros(1 << 18))
    with offload.set_max_memory({"delayed:0": 2 * MIB}):
        guest_of(w)
        w.to("cpu").add_(1)
        before = delayed.ops.sent()

        assert guest_of(w).cpu().eq(1).all()
        assert guest_of(w).cpu().eq(1).all()
        assert 2 * MIB == delayed.ops.sent() - before


@on_the_device
def test_only_the_stream_that_uses_a_copy_waits_for_it(device: torch.device) -> None:
    values, out = torch.randn(1 << 18), torch.zeros(1 << 18, device=device)
    staging.send(values, device)
    side = side_of(device)
    go_on = held(side)

    out.copy_(staging.send(values, device))

    assert not side.query()
    assert not torch.accelerator.current_stream().query()
    go_on()
    assert torch.equal(values, out.cpu())


@on_the_device
def test_a_sent_value_stays_until_it_was_used(device: torch.device) -> None:
    """Its memory is from the side stream's pool, which would reuse it for the next value."""
    first, second, out = torch.randn(1 << 18), torch.randn(1 << 18), torch.zeros(1 << 18, device=device)
    out.cpu()
    go_on = held(torch.accelerator.current_stream())

    out.copy_(staging.send(first, device))
    staging.send(second, device)
    side_of(device).synchronize()

    go_on()
    assert torch.equal(first, out.cpu())


@on_the_device
def test_the_cpu_runs_ahead_by_a_few_values_at_most(device: torch.device) -> None:
    out = torch.zeros(1 << 18, device=device)
    out.cpu()
    before = delayed.ops.allocated()
    go_on = held(torch.accelerator.current_stream())

    def send() -> None:
        for _ in range(8):
            out.copy_(staging.send(torch.ones(1 << 18), device))

    thread = threading.Thread(target=send)
    thread.start()
    thread.join(0.5)

    assert thread.is_alive()
    assert delayed.ops.allocated() - before <= 3 * MIB
    go_on()
    thread.join()
    assert out.cpu().eq(1).all()


@on_the_device
def test_threads_with_streams_of_their_own_get_their_own_values(device: torch.device) -> None:
    wrong: list[int] = []

    def send(number: int) -> None:
        with torch.Stream(device):
            for step in range(6):
                values = torch.full((3 << 17,), float(10 * number + step))
                if not torch.equal(values, staging.send(values, device).cpu()):
                    wrong.append(number)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [] == wrong


@on_the_device
def test_other_streams_find_a_value_that_stays_on_the_device(device: torch.device, folder: Path) -> None:
    values, out = torch.randn(1 << 18), torch.zeros(1 << 18, device=device)
    out.cpu()
    w, other = on_disk(folder, "w", values), torch.Stream(device)
    with offload.set_max_memory({"delayed:0": 2 * MIB}):
        with torch.Stream(device):
            first = guest_of(w)
        with other:
            second = guest_of(w)
            out.copy_(second)
        other.synchronize()

    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(values, out.cpu())


@on_the_device
def test_a_value_that_leaves_the_device_is_used_to_the_end(device: torch.device, folder: Path) -> None:
    values, out = torch.randn(1 << 18), torch.zeros(1 << 18, device=device)
    out.cpu()
    w, v = on_disk(folder, "w", values), on_disk(folder, "v", torch.randn(1 << 18))
    with offload.set_max_memory({"delayed:0": 1 * MIB}):
        guest_of(w)
        other = torch.Stream(device)
        go_on = held(other)
        with other:
            out.copy_(guest_of(w))

        offload.budget.evict(w)
        torch.accelerator.current_stream().synchronize()  # its memory was kept for this one, too
        guest_of(v)
        side_of(device).synchronize()

        go_on()
        other.synchronize()
    assert torch.equal(values, out.cpu())


@on_the_device
def test_a_model_on_disk_runs_within_the_budget_of_the_device(device: torch.device, folder: Path) -> None:
    plain = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(8)])  # 1 MiB each
    save_file(plain.state_dict(), folder / "model.safetensors")
    with offload.init_empty_weights():
        model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(8)])
    offload.load_checkpoint_and_dispatch(
        model, folder / "model.safetensors", device_map="disk:delayed:0", max_memory={"delayed:0": 4 * MIB}
    )
    x = torch.randn(4, 512)
    with torch.no_grad():
        expected, given = plain(x), x.to(device)
        before = delayed.ops.allocated()
        found = [model(given).cpu() for _ in range(3)]
        torch.accelerator.synchronize()

        assert all(torch.equal(expected, one) for one in found)
        assert 3 * MIB <= delayed.ops.allocated() - before <= 8 * MIB  # the budget, and a window of four values
        offload.budget.evict(model)
        assert MIB > delayed.ops.allocated() - before


@on_the_device
def test_the_cpu_can_not_read_the_memory_of_the_device(device: torch.device) -> None:
    there = torch.ones(16, device=device)
    torch.accelerator.synchronize()

    faulthandler.disable()  # it is no accident
    pid = forked(lambda: ctypes.string_at(there.data_ptr(), 4))

    assert -signal.SIGSEGV == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@on_the_device
def test_without_events_a_copy_of_another_stream_is_garbage(device: torch.device) -> None:
    """What the other tests here would miss is told by the device."""
    values, out = torch.randn(1 << 18), torch.zeros(1 << 18, device=device)
    staging.send(torch.zeros(1 << 18), device)  # the slots are there, and the stream that fills them
    torch.accelerator.synchronize()
    go_on = held(side_of(device))
    delayed.ops.heed_events(False)

    out.copy_(staging.send(values, device))

    assert not torch.equal(values, out.cpu())
    go_on()


@on_the_device
def test_batches_use_the_stream_of_the_caller(device: torch.device) -> None:
    blocks = []

    class Looking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            blocks.append(threading.current_thread())
            return super().forward(x)

    model = nn.Sequential(Looking(2, 2), Looking(2, 2))
    own = torch.accelerator.current_stream()

    def fn(x: torch.Tensor) -> tuple[torch.Stream, torch.Tensor]:
        return torch.accelerator.current_stream(), model(x).detach()

    with torch.no_grad(), torch.Stream(device) as stream:
        found = list(map_batches(fn, [torch.ones(1, 2)] * 3, model, in_flight=2))

    assert own != stream
    assert threading.current_thread() not in blocks  # whose stream would be another batch's afterwards
    assert [stream] * 3 == [used for used, _ in found]
    assert all(torch.equal(model(torch.ones(1, 2)), out) for _, out in found)
    assert own == torch.accelerator.current_stream()
