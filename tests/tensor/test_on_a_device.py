"""Values on disk whose ops compute on an accelerator: what stays there, what is sent ahead, and what is waited for.

Each test runs in a child of its own: what it replaces needs not be put back.
"""

from __future__ import annotations

import copy
import itertools
import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import offload
from offload import OffloadedTensor, map_batches
from offload.checkpoints.checkpoint import open_checkpoint
from offload.checkpoints.forms.formats import unpacked
from offload.cli.main import parser
from offload.cli.models import loaded_model
from offload.errors import ChangedFileError
from offload.planning import estimate
from offload.planning.machine import Computing
from offload.prefetch import copies, plan, room, staging
from offload.prefetch.copies import retry_on_oom
from offload.prefetch.engine import POOL, replanning
from offload.prefetch.plan import Pool
from offload.prefetch.room import free_on, room_on, spare_of
from offload.prefetch.staging import Sent
from offload.prefetch.value import page_state_of
from offload.system import clock
from offload.tensor import experts as acts
from offload.tensor import hybrid, products
from offload.tensor.experts import Between
from offload.tensor.guests import CPU
from offload.tensor.products import _decoded_in
from offload.tensor.views import handle_of
from offload.tensor.wrapper import guest_of
from offload.transformers_api import kv_bytes_per_token
from tests.campaigns import amount
from tests.checkpoints.forms import FORMS
from tests.crashes import Act
from tests.interrupts import meets_interrupts
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


MOVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "its name": lambda w: w.to("delayed"),
    "its number": lambda w: w.to(device="delayed:0"),
    "with the dtype": lambda w: w.to("delayed", torch.float32),
    "the op": lambda w: torch.ops.aten._to_copy(w, device="delayed"),
}


@pytest.mark.parametrize("move", MOVES)
@on_the_device
def test_a_move_gives_the_same_file_with_another_target(device: torch.device, folder: Path, move: str) -> None:
    """Nothing is read: the file is moved away meanwhile. Writes through one are visible in the other."""
    w = OffloadedTensor.from_original_tensor(torch.ones(6, 8), "w", folder)
    w.offload_path.rename(folder / "kept")
    moved = MOVES[move](w)
    back = moved.cpu()
    (folder / "kept").rename(w.offload_path)

    assert all(map(offload.is_offloaded, (moved, back)))
    assert (device, CPU, CPU) == (moved.device, back.device, w.device)
    assert w.offload_path == moved.offload_path
    w.add_(1)
    moved[0].zero_()
    assert [0.0, 2.0, 2.0] == w[:3, 0].tolist() == moved[:3, 0].tolist() == back[:3, 0].tolist()


@on_the_device
def test_a_module_moves_with_its_weights_on_disk(device: torch.device, folder: Path) -> None:
    layer = torch.nn.Linear(8, 6, bias=False)
    expected = layer.weight.detach().clone()
    layer = offload.disk_offload(layer, folder)
    path, moved = layer.weight.offload_path, layer.weight.to(device)
    assert (True, False) == (moved.requires_grad, moved.is_leaf)
    del moved

    assert 0 == crossing(lambda: layer.to(device))

    assert isinstance(layer.weight, torch.nn.Parameter)
    assert offload.is_offloaded(layer.weight)
    assert (device, path) == (layer.weight.device, layer.weight.offload_path)
    assert torch.equal(expected, layer.to("cpu").weight.detach().materialize())


@on_the_device
def test_a_tensor_is_made_for_a_device_and_sent_there_by_an_op(device: torch.device) -> None:
    made: list[OffloadedTensor] = []
    make = lambda: made.append(OffloadedTensor.full((6, 8), 5.0, name="w", device="delayed"))  # noqa: E731

    assert 0 == crossing(make)
    assert device == made[0].device == OffloadedTensor.from_file(made[0].offload_path, device="delayed").device
    assert [[5.0] * 8] * 6 == made[0].cpu().tolist()
    row = made[0][2]
    assert (device, (8,)) == (row.device, tuple(row.shape))
    assert 8 * 4 == crossing(row.exp)


PICKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "embedding": lambda w: F.embedding(torch.tensor([0, 3, 3]), w),
    "index_select": lambda w: torch.index_select(w, 0, torch.tensor([5, 1])),
    "rows": lambda w: w[torch.tensor([4, 0])],
    "elements": lambda w: w[torch.tensor([4, 0]), torch.tensor([1, 1])],
    "gather": lambda w: w.gather(dim=0, index=torch.tensor([[2] * 8])),
}


@pytest.mark.parametrize("pick", PICKS)
@on_the_device
def test_picked_rows_are_sent_alone(folder: Path, pick: str) -> None:
    """They are picked where the file is; the table is not sent."""
    values, found = torch.randn(6, 8), []
    table, expected = on_disk(folder, "table", values), PICKS[pick](values)

    assert expected.nbytes == crossing(lambda: found.append(PICKS[pick](table)))
    assert torch.equal(expected, found[0].cpu())


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
    weights, values = squares(folder, 2)
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
    assert all(torch.equal(value, out.cpu()) for value, out in zip(values, outs, strict=True))


@on_the_device
def test_experts_that_are_on_the_device_cost_no_byte(folder: Path) -> None:
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
def test_a_value_that_is_larger_than_the_device_is_an_error(folder: Path) -> None:
    weight = on_disk(folder, "w", torch.ones(1 << 20))
    delayed.ops.limit(2 * MIB)

    with pytest.raises(torch.OutOfMemoryError):
        guest_of(weight)


@on_the_device
def test_an_op_that_never_fits_is_an_error_though_values_are_sent_ahead_of_it(
    device: torch.device, folder: Path
) -> None:
    weights, calls = squares(folder, 4)[0], []

    def act() -> torch.Tensor:
        calls.append(guest_of(weights[0]))
        assert len(calls) < 50
        raise torch.OutOfMemoryError("never")

    with offload.set_max_memory({"delayed:0": 0}):
        for _ in range(3):
            for weight in weights:
                guest_of(weight)
        with pytest.raises(torch.OutOfMemoryError, match="never"):
            retry_on_oom(device, act)


@on_the_device
def test_a_value_that_a_new_plan_drops_while_it_is_sent_does_not_stay(device: torch.device, folder: Path) -> None:
    weight, send = on_disk(folder, "w", torch.ones(1 << 18)), copies.send_bytes

    def send_slowly(values: torch.Tensor, target: torch.device) -> Sent:
        pool = POOL.on_devices[device]
        with replanning() as leaving:
            pool.max_memory = 0
            leaving.extend(pool.reconsider(anew=True))
        return send(values, target)

    copies.send_bytes = send_slowly
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
def test_a_changed_file_is_an_error_though_its_value_stays(folder: Path) -> None:
    weight = on_disk(folder, "w", torch.zeros(1 << 18))
    with offload.set_max_memory({"delayed:0": 4 * MIB}):
        assert MIB == crossing(lambda: guest_of(weight))
        assert 0 == crossing(lambda: guest_of(weight))

        save_file({"w": torch.ones(1 << 18)}, folder / "w.safetensors")

        with pytest.raises(ChangedFileError):
            guest_of(weight)


# Without a set budget


def squares(folder: Path, count: int, name: str = "w") -> tuple[list[OffloadedTensor], list[torch.Tensor]]:
    """Weights of 1 MiB each on disk, and the same in memory."""
    values = [torch.full((1 << 18,), float(number)) for number in range(count)]
    return [on_disk(folder, f"{name}{number}", value) for number, value in enumerate(values)], values


def used(weights: list[OffloadedTensor], values: list[torch.Tensor]) -> int:
    """How many MiB cross the bus as each is used; they are what they should be."""

    def use() -> None:
        assert all(torch.equal(value, guest_of(one).cpu()) for one, value in zip(weights, values, strict=True))

    return crossing(use) // MIB


def stop_the_clock() -> Callable[[float], None]:
    """From now on time passes when the returned function says so."""
    moved = [clock.now()]
    clock.now = lambda: moved[-1]
    return lambda seconds: moved.append(moved[-1] + seconds)


def on_the_delayed(what: str) -> int:
    """How many MiB may stay on the device (0), or do (1)."""
    return offload.memory_summary().on_devices["delayed:0"][("may", "do").index(what)] // MIB


@pytest.mark.parametrize(("free", "sent"), [(20, 0), (9, 1), (5, 5), (1, 9)])
@on_the_device
def test_a_device_fills_itself_to_the_limit_and_not_beyond(folder: Path, free: int, sent: int) -> None:
    """Of ten weights those stay that there is room for; the others cross at each pass."""
    weights, values = squares(folder, 10)
    delayed.filled_up_to(free * MIB)

    assert [10, sent, sent] == [used(weights, values) for _ in range(3)]
    assert (free, 10 - sent) == (on_the_delayed("may"), on_the_delayed("do"))


@pytest.mark.parametrize("asked", [5, 9], ids=["others take what was spared", "an allocation fails"])
@on_the_device
def test_a_device_gives_half_back_to_others_for_a_while(device: torch.device, folder: Path, asked: int) -> None:
    weights, values = squares(folder, 10)
    delayed.filled_up_to(10 * MIB)
    pass_seconds, theirs = stop_the_clock(), []
    assert [10, 0] == [used(weights, values) for _ in range(2)]

    with suppress(torch.OutOfMemoryError):
        theirs.append(torch.empty(asked * MIB, dtype=torch.uint8, device=device))
    pass_seconds(0.2)
    used(weights, values)
    assert 5 == on_the_delayed("do")
    assert (asked > 8) == (theirs == [])
    theirs.clear()
    pass_seconds(60)
    used(weights, values)
    assert 0 == used(weights, values)


@on_the_device
def test_an_op_without_room_for_its_result_is_tried_again(device: torch.device, folder: Path) -> None:
    """Once as a function above autograd, once below it."""
    weights, values = squares(folder, 8)
    delayed.filled_up_to(8 * MIB)
    used(weights, values)
    _ = torch.empty(8 * MIB, dtype=torch.uint8, device=device)

    x = weights[0].materialize()
    sums = [torch.add(weights[1], x), weights[2].exp(), torch.stack(weights[:2])]

    assert torch.equal(values[0] + values[1], sums[0].cpu())
    assert torch.equal(values[2].exp(), sums[1].cpu())
    assert torch.equal(torch.stack(values[:2]), sums[2].cpu())


@on_the_device
def test_a_bundle_without_room_is_sent_one_by_one_and_nothing_else_is_dropped_for_it(
    device: torch.device, folder: Path
) -> None:
    staging._SLOT = 4 * MIB
    weights, values = squares(folder, 10)
    delayed.ops.limit(delayed.ops.allocated() + 5 * MIB + 3 * MIB)
    pass_seconds = stop_the_clock()
    with offload.set_max_memory({"delayed:0": 5 * MIB}):
        for _ in range(4):
            assert used(weights, values) >= 5
            pass_seconds(1)

        assert 0 < room.ooms_on(device)
        assert (5, 5) == (on_the_delayed("may"), on_the_delayed("do"))


@on_the_device
def test_two_models_share_what_a_device_has_room_for(folder: Path) -> None:
    """Whatever their budgets in main memory."""
    (weights, values), (others, theirs) = squares(folder, 6), squares(folder, 6, "v")
    page_state_of(handle_of(others[0])).pool = own = Pool(8 * MIB)
    delayed.filled_up_to(6 * MIB)
    for _ in range(2):
        used(weights, values), used(others, theirs)

    assert 6 == used(weights, values) + used(others, theirs)
    assert {} == own.on_devices


@on_the_device
def test_an_integrated_device_holds_nothing_twice(folder: Path) -> None:
    weights, values = squares(folder, 2)
    delayed.filled_up_to(4 * MIB)
    copies.is_integrated = lambda _: True
    os.sync()  # pages that are not written yet can't be dropped

    assert [2, 0] == [used(weights, values) for _ in range(2)]
    assert MIB // 16 > offload.memory_summary().resident


@on_the_device
def test_the_keys_and_values_of_a_context_have_room_on_a_device(device: torch.device, folder: Path) -> None:
    """Of 4,096 tokens; `plan` says the same."""
    delayed.ops.late(20)
    estimate.computing_rates = lambda *_: Computing(1e9, 1e9, 1e9, 0.0, 1e9)
    FORMS["llama"].write(folder)
    delayed.filled_up_to(256 * MIB)
    model = offload.from_pretrained(folder, device_map="disk:delayed:0")
    per_token, free = kv_bytes_per_token(model), free_on(device)
    tokens = torch.arange(8, device=device)[None]
    model(tokens)
    first, planned = copies.pool_on(device).capacity, offload.plan(folder, device="delayed:0", context=4096)

    assert abs(first - (free - spare_of(free) - 4096 * per_token)) < MIB // 16
    assert planned.context_bytes == 4096 * per_token
    assert room_on(device) == planned.device_memory - 8 * MIB


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
@on_the_device
def test_the_contexts_of_several_answers_at_a_time_add_up_on_a_device(
    device: torch.device, folder: Path, error: type[BaseException] | None
) -> None:
    """Each takes its own away as it ends, however it does; without any there is room for 4,096 tokens."""
    FORMS["llama"].write(folder)
    delayed.filled_up_to(256 * MIB)
    model = offload.from_pretrained(folder, device_map="disk:delayed:0")
    tokens, pool, seen = torch.arange(8, device=device)[None], copies.pool_on(device), [0]

    def beside() -> int:
        free = free_on(device) + pool._held()
        return (free - spare_of(free) - pool.room()) // kv_bytes_per_token(model)

    def generate(new: int, *others: int) -> None:
        def stop(*_: object) -> bool:
            seen.append(beside())
            if others:
                with suppress(error or ()):
                    generate(*others)
                seen.append(beside())
            if error is not None and new > 8:
                raise error
            return True

        model.generate(tokens, max_new_tokens=new, stopping_criteria=[stop], do_sample=False, pad_token_id=0)

    seen[0] = beside()
    generate(8, 24, 56)

    assert [4096, 16, 16 + 32, 16 + 32 + 64, 16 + 32, 16, 4096] == [*seen, beside()]


# In bundles


@pytest.mark.parametrize(("stays", "sent"), [(0, 4), (LAYERS // 2, 2), (LAYERS, 0)])
@on_the_device
def test_values_that_stream_cross_in_one_copy_per_block(
    device: torch.device, folder: Path, stays: int, sent: int
) -> None:
    """Of two layers each, weights and scales, once the order is known; and no byte more."""
    delayed.ops.late(20)
    staging._SLOT = 2 * MIB + 4096
    weights = packed_layers(folder, device)
    expected = [weight.to("cpu").materialize() for weight in weights]

    def run() -> None:
        assert all(torch.equal(value, guest_of(one).cpu()) for one, value in zip(weights, expected, strict=True))

    with offload.set_max_memory({"delayed:0": stays * (MIB + 1024)}):
        for _ in range(3):
            run()
        before = delayed.ops.copies()
        nbytes = crossing(run)

    assert sent == delayed.ops.copies() - before
    assert 2 * sent * MIB <= nbytes <= 1.02 * 2 * sent * MIB


@pytest.mark.parametrize("is_short", [False, True])
@on_the_device
def test_a_bundle_stays_in_pinned_memory_while_there_is_enough(
    device: torch.device, folder: Path, is_short: bool
) -> None:
    staging.available_bytes = lambda: (4 if is_short else 64) * MIB
    weights, values = squares(folder, 4)
    with offload.set_max_memory({"delayed:0": 0}):
        for _ in range(3):
            used(weights, values)
        arrived: list[object] = []
        copies.arrive = arrived.append

        assert 4 == used(weights, values)
        assert (4 if is_short else 0) == len(arrived)
        assert (0 if is_short else 4 * MIB) == sum(one.nbytes for one in staging._STAGINGS[device]._pinned)


@on_the_device
def test_pinned_memory_is_sent_only_once_it_is_filled(folder: Path) -> None:
    """Another thread that sends the same bundle, at the worst moment."""
    weights, values = squares(folder, 2)
    send_many, again = staging.Staging.send_many, []

    def send_late(self: Any, pinned: Any, stored: Any, spans: Any) -> Any:
        if pinned is not None and stored and not again:
            again.append(True)
            thread = threading.Thread(target=lambda: again.append(torch.equal(values[0], guest_of(weights[0]).cpu())))
            thread.start()
            thread.join()
        return send_many(self, pinned, stored, spans)

    staging.Staging.send_many = send_late
    with offload.set_max_memory({"delayed:0": 0}):
        for _ in range(4):
            used(weights, values)

    assert [True, True] == again[:2]


@on_the_device
def test_values_that_were_sent_in_vain_are_dropped(folder: Path) -> None:
    """The values of a first order, which then changes again and again."""
    delayed.ops.late(20)
    staging._SLOT = 4 * MIB
    weights, values = squares(folder, 12)
    before = delayed.ops.allocated()
    with offload.set_max_memory({"delayed:0": 0}):
        for step in (1, 1, 5, 7, 11, 5):
            order = [step * number % 12 for number in range(12)]
            used([weights[number] for number in order], [values[number] for number in order])
            assert delayed.ops.allocated() - before <= 2 * 4 * MIB


# Computed where they lie


def products_of(weights: list[OffloadedTensor], x: torch.Tensor) -> list[torch.Tensor]:
    return [F.linear(x, weight).cpu() for weight in weights]


@pytest.mark.fused
@on_the_device
def test_a_product_is_computed_where_its_weight_lies_if_that_wins(device: torch.device, folder: Path) -> None:
    hybrid._wins = lambda here, *_: here() is not None
    delayed.ops.late(20)
    weights = packed_layers(folder, device)
    x = torch.randn(8, SIDE)
    true = [F.linear(x.double(), weight.cpu().materialize().double()) for weight in weights]
    bound = [F.linear(x.double().abs(), weight.cpu().materialize().double().abs()) for weight in weights]
    there, more = x.to(device), torch.randn(9, SIDE).to(device)
    with offload.set_max_memory({"delayed:0": 0}):
        products_of(weights, there), products_of(weights, there)  # the weights are known, and one was tried
        sent = crossing(lambda: products_of(weights, there))

        found = products_of(weights, there)

        assert all(
            ((one - value).abs() <= 1e-5 * most).all() for one, value, most in zip(found, true, bound, strict=True)
        )
        assert sent == LAYERS * x.nbytes
        assert LAYERS * MIB <= crossing(lambda: products_of(weights, more))
        with offload.exact():
            assert LAYERS * MIB <= crossing(lambda: products_of(weights, there))
        os.environ["OFFLOAD_HYBRID"] = "off"
        assert LAYERS * MIB <= crossing(lambda: products_of(weights, there))


@pytest.mark.fused
@pytest.mark.parametrize("name", ["fp8-mixtral", "mxfp4-gpt_oss", "ct-nvfp4a16", "gptq", "gguf-q4_k"])
@on_the_device
def test_products_of_packed_forms_are_as_exact_where_they_lie(device: torch.device, folder: Path, name: str) -> None:
    """Of dense layers and of experts, alone and in batches: weights, product and sum are rounded."""
    hybrid._wins = lambda here, *_: here() is not None
    products.streams_to = lambda *_: True  # though they are small
    delayed.ops.late(20)
    FORMS[name].write(folder)
    model = offload.from_pretrained(folder, device_map="disk:delayed:0", **FORMS[name].options)
    kinds = {
        (one.dim(), tuple(one.shape)): one for one in model.parameters() if any(_decoded_in(handle_of(one).composed))
    }
    assert kinds
    for (dims, _), stack in kinds.items():
        weight = stack[0].t() if dims == 3 and name.startswith("mxfp4") else stack[0] if dims == 3 else stack
        x = torch.randn(3, weight.shape[1]).to(weight.dtype)
        dense = weight.cpu().materialize().double()
        limit = 2.0**-7 * (x.double().abs() @ dense.abs().T)

        found = [one.cpu() for one in map_batches(partial(F.linear, weight=weight), [x.to(device)] * 2, model)]

        assert all(((one.double() - x.double() @ dense.T).abs() <= limit).all() for one in found)
    assert any(staging._STAGINGS[device].wins.values())


# Experts, here and there


ROUTED = torch.tensor([[0, 5], [1, 6], [7, 2], [3, 4]])


class Experts:
    """Of a layer: eight of 384 KiB, dense, on disk."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.given = torch.randn(4, 256).to(device), ROUTED.to(device), torch.rand(4, 2).to(device)
        self.up, self.down = torch.randn(8, 256, 256), torch.randn(8, 256, 128)
        self.stored = [on_disk(folder, "up", self.up), on_disk(folder, "down", self.down)]
        self.between = Between(self, self.gate, is_silu=True)
        self.order: list[torch.device] = []  # where they are computed

    def gate(self, products: torch.Tensor, _: object) -> torch.Tensor:
        self.order.append(products.device)
        return F.silu(products[:, :128]) * products[:, 128:]

    def use(self, *numbers: int) -> None:
        for number in numbers:
            for one in self.stored:
                guest_of(one[number])

    def sums(self, x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | None:
        return acts.multiplied_by_experts(x, picks, weights, *self.stored, self.between)

    def are_right(self, found: torch.Tensor, x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor) -> bool:
        up, down, given = self.up.double(), self.down.double(), x.cpu().double()
        true = torch.zeros(len(x), 256, dtype=torch.float64)
        for token, some in enumerate(picks.tolist()):
            for place, number in enumerate(some):
                gated = self.gate((up[number] @ given[token])[None], None)[0]
                true[token] += weights[token, place].item() * (down[number] @ gated)
        return bool(((found.cpu() - true).abs() <= 1e-5 * true.abs().max()).all())


@pytest.mark.fused
@on_the_device
def test_experts_that_do_not_stay_are_computed_here_after_the_device_was_given_the_others(
    device: torch.device, folder: Path
) -> None:
    tried: list[int] = []
    hybrid._wins = lambda *_: tried.append(1) is None
    experts, results = Experts(folder, device), []
    x, picks, weights = experts.given
    result = acts.Act.result
    acts.Act.result = lambda act: [experts.order.append(CPU), result(act)][1]
    with offload.set_max_memory({"delayed:0": 4 * 384 << 10}):
        assert experts.sums(*experts.given) is None  # their budget knows them once they were sent
        for _ in range(4):
            experts.use(0, 1, 2, 3)
        experts.use(4, 5, 6, 7)
        experts.sums(*experts.given)
        experts.order.clear()

        sent = crossing(lambda: results.append(experts.sums(*experts.given)))
        alone = experts.sums(x[1:2], picks[1:2], weights[1:2])
        many = experts.sums(*(one.repeat(3, 1) for one in experts.given))
        with offload.exact():
            exact = experts.sums(*experts.given)
        os.environ["OFFLOAD_HYBRID"] = "off"
        switched_off = experts.sums(*experts.given)

    assert [*[device] * 4, CPU] == experts.order[:5]
    assert sent < 64 << 10
    assert experts.are_right(results[0], *experts.given)
    assert experts.are_right(alone, x[1:2], picks[1:2], weights[1:2])
    assert [None] * 3 == [many, exact, switched_off]
    assert [1, 1] == tried


@pytest.mark.fused
@pytest.mark.parametrize("seconds", [1.0, 0.1])
@on_the_device
def test_experts_are_sent_if_that_is_faster(device: torch.device, folder: Path, seconds: float) -> None:
    """Both ways are timed once: to compute them here, in so many seconds, or to send them in half a second."""
    timed: list[Any] = []

    def measured(act: Any, _: object) -> float:
        timed.append(act())
        return seconds if len(timed) == 1 else 0.5

    hybrid._seconds = measured
    experts = Experts(folder, device)
    with offload.set_max_memory({"delayed:0": 0}):
        experts.use(*range(8))
        found = [experts.sums(*experts.given) for _ in range(3)]

    assert [seconds == 1.0] * 3 == [one is None for one in found]
    assert 2 == len(timed)
    assert all(experts.are_right(one, *experts.given) for one in (*timed, *found) if one is not None)


@pytest.mark.fused
@pytest.mark.parametrize(
    "name", ["qwen3_moe", "fp8-qwen3_moe", "mxfp4-gpt_oss", "inkling2_text", "ct-nvfp4a16-qwen3_moe"]
)
@on_the_device
def test_experts_of_each_form_are_as_exact_here_and_there_as_plain_ones(
    device: torch.device, folder: Path, name: str
) -> None:
    """Every second one is computed here, alone and in batches."""
    turns = itertools.count()
    hybrid._wins = lambda *_: True
    acts.streams_to = lambda *_: next(turns) % 2 == 0  # though they are small
    delayed.ops.late(20)
    form = FORMS[name]
    form.write(folder)
    model = offload.from_pretrained(folder, device_map="disk:delayed:0", **form.options)
    [*_, experts] = [one for one in model.modules() if hasattr(one, "is_transposed")]
    assert "offload" == experts.config._experts_implementation
    [*_, dense] = [one for one in form.plain(folder).modules() if hasattr(one, "is_transposed")]
    plain = copy.deepcopy(dense).double()
    plain.config = copy.copy(plain.config)
    plain.config._experts_implementation = "eager"
    generator, numbers = torch.Generator().manual_seed(1), torch.tensor([[0, 1], [2, 1], [1, 0], [3, 2]])
    x = torch.randn(4, getattr(experts, "hidden_dim", 128), generator=generator).to(model.dtype)
    weights = torch.rand(4, 2, generator=generator).to(model.dtype)
    with torch.no_grad():
        true = plain(x.double(), numbers, weights.double())
        there = x.to(device), numbers.to(device), weights.to(device)
        exact, before = dense(x, numbers, weights), next(turns)

        found = [one.cpu() for one in map_batches(lambda some: experts(*some), [there] * 2, model)]
        found.append(experts(*there).cpu())

    assert next(turns) - before > 6
    allowed, unit = (exact.double() - true).abs(), torch.finfo(model.dtype).eps * true.abs().max()
    for one in found:
        error = (one.double() - true).abs()
        assert error.max() <= allowed.max() + unit / 2
        assert error.mean() <= allowed.mean() + unit / 100


@pytest.mark.fused
@on_the_device
def test_experts_that_all_stay_are_left_to_the_device_before_it_is_waited_for(
    device: torch.device, folder: Path
) -> None:
    acts._here_and_there = lambda *_: pytest.fail("the device is waited for")
    experts = Experts(folder, device)
    with offload.set_max_memory({"delayed:0": 16 << 20}):
        experts.use(*range(8))

        assert experts.sums(*experts.given) is None


@pytest.mark.fused
@on_the_device
def test_interrupts_leave_experts_here_and_there_as_they_were(device: torch.device, folder: Path) -> None:
    """Ctrl-C at places all over; half of them stay."""
    hybrid._wins = lambda *_: True
    delayed.ops.late(20)

    def are_after_the_fourth(device: torch.device, reads: Any) -> bool:
        copies.streams_to(device, reads)
        return bool(reads[0][1].storage_offset() >= 4 * 256 * 128)

    acts.streams_to = are_after_the_fourth
    experts = Experts(folder, device)
    tried = Act(lambda _: experts, lambda one: one.are_right(one.sums(*one.given), *one.given))
    with offload.set_max_memory({"delayed:0": 4 * 384 << 10}):
        experts.use(*range(8))

        assert 50 < meets_interrupts(tried, folder, set(), step=16)
        assert tried.act(experts)


def many_steps(device: torch.device, folder: Path, steps: int) -> int:
    """How many values were wrong on streams that are late: threads use values while budgets change."""
    count, size = 12, 40 << 10  # elements, of 4 bytes: more than is sent as one
    weights = [on_disk(folder, f"w{number}", torch.full((size,), float(number))) for number in range(count)]
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

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(use, range(2)))
    return len(wrong)


@pytest.mark.campaign("devices")
@on_the_device
def test_no_value_is_stale_or_torn_on_streams_that_are_late(device: torch.device, folder: Path) -> None:
    delayed.ops.late(300)

    with offload.set_max_memory({"delayed:0": MIB}):
        assert 0 == many_steps(device, folder, amount("devices", usual=400, whole=10_000))


@pytest.mark.campaign("devices")
@on_the_device
def test_no_value_is_wrong_as_a_full_device_runs_out_of_memory(device: torch.device, folder: Path) -> None:
    """At random, though what does not stay would have room; and no error is seen."""
    delayed.ops.late(300)
    room._CALM, plan._LOOK_AGAIN = 0.05, 0.02  # it soon fills itself again
    delayed.filled_up_to(5 * MIB // 2)
    delayed.ops.pinch(2 * MIB, 20)

    wrong = many_steps(device, folder, amount("devices", usual=400, whole=10_000))

    assert 0 == wrong
    assert 0 < room.ooms_on(device)
