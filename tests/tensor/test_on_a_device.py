"""Values on disk whose ops compute on an accelerator: what stays there, what is sent ahead, and what is waited for."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import offload
from offload import OffloadedTensor
from offload.checkpoints.checkpoint import open_checkpoint
from offload.checkpoints.forms.formats import unpacked
from offload.cli.main import parser
from offload.cli.models import loaded_model
from offload.errors import ChangedFileError
from offload.prefetch import copies
from offload.prefetch.engine import POOL, replanning
from offload.prefetch.staging import Sent
from offload.prefetch.value import page_state_of
from offload.tensor.views import handle_of
from offload.tensor.wrapper import guest_of
from tests.campaigns import amount
from tests.checkpoints.forms import FORMS
from tests.prefetch import delayed_device as delayed
from tests.prefetch.delayed_device import MIB, held, on_disk, on_the_device

LAYERS, SIDE = 8, 1024  # 1 MiB of 8-bit floats each, and 256 bytes of scales


def packed_layers(folder: Path, device: torch.device) -> list[OffloadedTensor]:
    """Weights of 8-bit floats in blocks, on disk, for a device."""
    pieces: dict[str, torch.Tensor] = {}
    for layer in range(LAYERS):
        pieces[f"{layer}.weight"] = (torch.randn(SIDE, SIDE) * 0.1).to(torch.float8_e4m3fn)
        pieces[f"{layer}.weight_scale_inv"] = torch.rand(SIDE // 128, SIDE // 128) + 0.5
    save_file(pieces, folder / "model.safetensors")
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    dense = unpacked(open_checkpoint(folder).tensors(None), quantization)
    assert dense is not None
    return [dense[f"{layer}.weight"].to(device) for layer in range(LAYERS)]  # type: ignore[misc]


def crossing(act: Callable[[], object]) -> int:
    """How many bytes an action sends to the device."""
    torch.accelerator.synchronize()
    before = delayed.ops.sent()
    act()
    torch.accelerator.synchronize()
    return int(delayed.ops.sent() - before)


@on_the_device
def test_packed_values_stay_within_the_budget_of_the_device(device: torch.device, folder: Path) -> None:
    """With half of the packed bytes as a budget, a pass sends half of them; and it has room in its budget."""
    delayed.ops.late(50)
    weights = packed_layers(folder, device)
    expected = [weight.to("cpu").materialize() for weight in weights]
    scales = LAYERS * 4 * (SIDE // 128) ** 2

    def run() -> None:
        for weight, value in zip(weights, expected, strict=True):
            assert torch.equal(value, guest_of(weight).cpu())

    with offload.set_max_memory({"delayed:0": LAYERS // 2 * MIB + scales}), offload.budget.set_read_ahead(False):
        before = delayed.ops.allocated()
        first, second, third = crossing(run), crossing(run), crossing(run)
        stays = delayed.ops.allocated() - before

    assert LAYERS * MIB + scales == first
    assert LAYERS // 2 * MIB == second == third
    assert LAYERS // 2 * MIB <= stays <= LAYERS // 2 * MIB + 2 * MIB


@on_the_device
def test_a_pass_sends_what_does_not_stay_and_memory_is_within_budget_and_what_is_in_use(
    device: torch.device, folder: Path
) -> None:
    """Half of the packed bytes stay, and the other half crosses once a pass."""
    delayed.ops.late(50)
    weights, x = packed_layers(folder, device), torch.ones(1, SIDE, device=device)
    budget, used, dense = LAYERS // 2 * MIB + (128 << 10), 4 * MIB, 3 * 4 * SIDE * SIDE

    def run() -> None:
        for weight in weights:
            F.linear(x, weight)

    with offload.set_max_memory({"delayed:0": budget}):
        crossing(run)
        crossing(run)
        torch.accelerator.reset_peak_memory_stats()
        sent = crossing(lambda: [run() for _ in range(4)])
        peak = torch.accelerator.max_memory_allocated()

    half = LAYERS // 2 * MIB
    assert 4 * half <= sent <= 1.02 * 4 * half
    assert peak <= budget + used + dense + MIB


@on_the_device
def test_the_next_pieces_are_on_their_way_while_an_op_computes(device: torch.device, folder: Path) -> None:
    """The copy stream goes on while the op's stream stands still, and the thread that issues them waits for neither."""
    weights = [on_disk(folder, f"w{number}", torch.full((1 << 18,), float(number))) for number in range(2)]
    outs = [torch.zeros(1 << 18, device=device) for _ in weights]
    torch.accelerator.synchronize()
    guest_of(weights[0])  # there is a copy stream
    torch.accelerator.synchronize()
    before = delayed.ops.sent()
    go_on, send_on = held(torch.accelerator.current_stream()), held(delayed.side_of(device))

    for weight, out in zip(weights, outs, strict=True):
        out.copy_(guest_of(weight))

    assert 2 * MIB == delayed.ops.sent() - before  # issued
    send_on()
    delayed.side_of(device).synchronize()  # it ends
    go_on()
    assert all(out.cpu().eq(number).all() for number, out in enumerate(outs))


@on_the_device
def test_experts_that_are_on_the_device_cost_no_byte(device: torch.device, folder: Path) -> None:
    """Of a stack, those that were picked stay one by one."""
    delayed.ops.late(50)
    stack = torch.randn(8, 256, 512)
    experts = on_disk(folder, "experts", stack)
    budget = {"delayed:0": 3 * MIB}  # of 4: half a MiB each

    def pick(*numbers: int) -> None:
        for number in numbers:
            assert torch.equal(stack[number], guest_of(experts[number]).cpu())

    with offload.set_max_memory(budget), offload.budget.set_read_ahead(False):
        first, again, other = (crossing(partial(pick, *numbers)) for numbers in ((1, 4, 6), (6, 1, 4), (1, 2)))

    assert 3 * MIB // 2 == first
    assert 0 == again
    assert MIB // 2 == other


@on_the_device
def test_a_device_without_room_keeps_less(device: torch.device, folder: Path) -> None:
    """The budget is larger than the device: what it has no room for streams, and no op fails."""
    delayed.ops.late(50)
    values = [torch.full((1 << 18,), float(number)) for number in range(10)]
    weights = [on_disk(folder, f"w{number}", value) for number, value in enumerate(values)]
    out = torch.zeros(1 << 18, device=device)
    torch.accelerator.synchronize()
    delayed.ops.limit(delayed.ops.allocated() + 6 * MIB)

    with offload.set_max_memory({"delayed:0": 10 * MIB}):
        for _ in range(3):
            for value, weight in zip(values, weights, strict=True):
                out.copy_(guest_of(weight))
                assert torch.equal(value, out.cpu())
        kept = sum(value.nbytes for value in POOL.on_devices[device].values() if value.kept)

    assert 0 < kept <= 6 * MIB


@on_the_device
def test_a_value_that_is_larger_than_the_device_is_an_error(device: torch.device, folder: Path) -> None:
    weight = on_disk(folder, "w", torch.ones(1 << 20))
    delayed.ops.limit(2 * MIB)

    with pytest.raises(torch.OutOfMemoryError):
        guest_of(weight)


@on_the_device
def test_a_value_that_a_new_plan_drops_while_it_is_sent_does_not_stay(
    device: torch.device, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, send = on_disk(folder, "w", torch.ones(1 << 18)), copies.send_bytes

    def send_slowly(values: torch.Tensor, target: torch.device) -> Sent:
        pool = POOL.on_devices[device]
        with replanning() as leaving:
            pool.max_memory = 0
            leaving.extend(pool.reconsider(anew=True))
        return send(values, target)

    monkeypatch.setattr(copies, "send_bytes", send_slowly)
    with offload.set_max_memory({"delayed:0": 4 * MIB}):
        assert guest_of(weight).cpu().eq(1).all()
        stays = sum(copy.cached_bytes() for copy in page_state_of(handle_of(weight)).copies.values())

    assert 0 == stays


@on_the_device
def test_a_command_takes_a_budget_for_the_device(device: torch.device, folder: Path) -> None:
    FORMS["llama"].write(folder)
    words = ["generate", "--prompt", "w1", str(folder), "--device", "delayed:0", "--device-memory", "64MiB"]
    options = parser().parse_args(words)

    model = loaded_model(folder, options)

    with torch.no_grad():
        tokens = torch.arange(8, device=device)[None]
        model(tokens)
        stays = page_state_of(handle_of(model.lm_head.weight)).pool.on_devices[device]
        assert 64 * MIB == stays.max_memory
        assert MIB // 16 > crossing(lambda: model(tokens))


@on_the_device
def test_a_changed_file_is_an_error_though_its_value_stays(device: torch.device, folder: Path) -> None:
    weight = on_disk(folder, "w", torch.zeros(1 << 18))
    with offload.set_max_memory({"delayed:0": 4 * MIB}):
        assert MIB == crossing(lambda: guest_of(weight))
        assert 0 == crossing(lambda: guest_of(weight))

        save_file({"w": torch.ones(1 << 18)}, folder / "w.safetensors")

        with pytest.raises(ChangedFileError):
            guest_of(weight)


def many_steps(device: torch.device, folder: Path, steps: int) -> int:
    """How many values were wrong on streams that are late: threads use values while budgets change."""
    count, size = 12, 40 << 10  # elements, of 4 bytes: more than is sent as one
    weights = [on_disk(folder, f"w{number}", torch.full((size,), float(number))) for number in range(count)]
    delayed.ops.limit(64 * MIB)
    wrong: list[int] = []

    def use(thread: int) -> None:
        chance = random.Random(thread)
        with torch.Stream(device):
            outs = [torch.zeros(size, device=device) for _ in range(4)]
            asked: list[int] = []
            for step in range(steps // 2):
                number = step % count if chance.random() < 0.9 else chance.randrange(count)
                outs[len(asked)].copy_(guest_of(weights[number]))
                asked.append(number)
                if len(asked) == len(outs):
                    found = [out.cpu() for out in outs]
                    wrong.extend(n for n, out in zip(asked, found, strict=True) if not out.eq(n).all())
                    asked.clear()
                if chance.random() < 0.01:
                    offload.budget.evict(weights[chance.randrange(count)])

    threads = [threading.Thread(target=use, args=(number,)) for number in range(2)]
    with offload.set_max_memory({"delayed:0": MIB}):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return len(wrong)


@pytest.mark.campaign("devices")
@on_the_device
def test_no_value_is_stale_or_torn_on_streams_that_are_late(device: torch.device, folder: Path) -> None:
    delayed.ops.late(300)

    assert 0 == many_steps(device, folder, amount("devices", usual=400, whole=10_000))


@on_the_device
def test_without_the_waits_values_are_wrong_on_streams_that_are_late(device: torch.device, folder: Path) -> None:
    """That the test before this one can fail."""
    delayed.ops.late(300)
    delayed.ops.heed_events(False)

    assert 0 < many_steps(device, folder, 400)
