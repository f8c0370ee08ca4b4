"""What is computed from stored values is computed once for all batches at a block."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from offload.batches.mapping import map_batches
from offload.prefetch import scratch
from offload.prefetch.engine import counts
from offload.prefetch.order import Lease
from offload.prefetch.plan import Pool
from offload.storage.handle import Handle
from offload.storage.layout import contiguous
from offload.tensor.recipes import Joined, Piece, Plain
from offload.tensor.views import handle_of, meta_of
from offload.tensor.wrapper import OffloadedTensor, wrap_handle
from tests.batches.lockstep import assert_as_one_by_one, on_disk
from tests.page_cache import needs_page_cache
from tests.peak import Peak

MIB = 1 << 20
LAYERS = 12

pytestmark = pytest.mark.usefixtures("computed")


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[torch.Tensor]]:
    """Every value that was computed."""
    found: list[weakref.ref[torch.Tensor]] = []
    plain = Joined._computed

    def noting(self: Joined, box: object, device: torch.device) -> torch.Tensor:
        made = plain(self, box, device)
        found.append(weakref.ref(made))
        return made

    monkeypatch.setattr(Joined, "_computed", noting)
    monkeypatch.setattr(scratch, "_SCRATCH", scratch._Scratch())  # none that is too large is left of other tests
    return found


def cast_on_disk(folder: Path, size: int, **options: object) -> nn.Sequential:
    """Layers stored in float32, and read in float64."""
    return on_disk(folder, size, LAYERS, dtype=torch.float64, **options)


def batches_of(size: int, count: int = 8) -> list[torch.Tensor]:
    return [torch.randn(2, size, dtype=torch.float64) for _ in range(count)]


def after_each(model: nn.Sequential, look: Callable[[], int]) -> list[int]:
    """What `look` gives after each call of a layer."""
    seen: list[int] = []

    class Looking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = super().forward(x)
            seen.append(look())
            return found

    for layer in model:
        layer.__class__ = Looking
    return seen


@torch.no_grad()
@pytest.mark.parametrize(("in_flight", "sweeps"), [(1, 8), (3, 3), (4, 2), (8, 1)])
def test_a_value_is_computed_once_per_sweep(tmp_path, computed, in_flight, sweeps):
    model, batches = cast_on_disk(tmp_path, 256), batches_of(256)
    for batch in batches:
        model(batch)
    assert LAYERS * len(batches) == len(computed)

    assert_as_one_by_one(model, batches, model, computed, in_flight=in_flight)
    assert LAYERS * sweeps == len(computed)


def test_a_value_is_computed_once_per_sweep_with_gradients(tmp_path, computed):
    model, batches = cast_on_disk(tmp_path, 256).requires_grad_(False), batches_of(256)

    def fn(batch: torch.Tensor) -> torch.Tensor:
        inputs = batch.clone().requires_grad_()
        model(inputs).pow(2).sum().backward()
        return inputs.grad

    for batch in batches:
        fn(batch)
    one_by_one = len(computed)

    assert_as_one_by_one(fn, batches, model, computed, in_flight=8)
    assert len(computed) <= one_by_one / 4


@torch.no_grad()
def test_a_result_is_freed_when_all_batches_have_passed(tmp_path, computed):
    model, batches = cast_on_disk(tmp_path, 256), batches_of(256)
    alive = after_each(model, lambda: sum(one() is not None for one in computed))
    list(map_batches(model, batches, model, in_flight=4))

    assert {1} == {*alive}
    gc.collect()
    assert not any(one() is not None for one in computed)


@torch.no_grad()
def test_memory_of_a_block_is_reused_for_the_next_one(tmp_path):
    """Results of 32 MiB."""
    model, batches = cast_on_disk(tmp_path, 2048), batches_of(2048, 3)
    with Peak() as peak:
        list(map_batches(model, batches, model, in_flight=3))

    assert 16 * MIB < peak.nbytes < 4 * 32 * MIB


@torch.no_grad()
def test_memory_of_a_block_is_freed_at_the_end(tmp_path, monkeypatch):
    """Blocks of three results of 8 MiB: more than is kept unused, and taken once for all blocks."""
    model, batches = cast_on_disk(tmp_path, 1024), batches_of(1024, 3)
    monkeypatch.setattr(scratch, "_MOST_UNUSED", 8 * MIB)
    taken: list[int] = []
    plain = scratch.scratch
    monkeypatch.setattr(scratch, "scratch", lambda layout: (taken.append(layout.nbytes), plain(layout))[1])
    list(map_batches(model, batches, model, in_flight=3, blocks=[model[at] for at in range(0, LAYERS, 3)]))

    assert 2 <= len(taken) <= 3
    assert sum(flat.numel() for flat, _ in scratch._SCRATCH._blocks) <= 8 * MIB


@needs_page_cache
@torch.no_grad()
def test_the_pieces_of_a_result_are_not_held(tmp_path):
    model = cast_on_disk(tmp_path, 512, max_memory="6MiB", read_ahead="3MiB")
    held = after_each(model, lambda: sum(value.is_held for pool in Pool.all() for value in pool.values()))

    assert_as_one_by_one(model, batches_of(512), model, held, in_flight=4)
    assert {0} == {*held}


@torch.no_grad()
def test_results_are_counted_in_the_budget_which_has_room_for_them_or_for_their_pieces(tmp_path):
    """Each layer has 4 MiB, and its result 8 MiB."""
    model, batches = cast_on_disk(tmp_path, 1024, max_memory="40MiB", read_ahead="8MiB"), batches_of(1024)
    pool = handle_of(model[0].weight).composed.pieces[0].handle.page_state.pool
    staying = after_each(model, lambda: sum(value.nbytes for value in pool.values() if value.kept))
    reserved: list[int] = []

    def fn(batch: torch.Tensor) -> torch.Tensor:
        found = model(batch)
        reserved.append(pool.at_a_time)
        return found

    list(map_batches(fn, batches, model, in_flight=4))

    assert max(staying[4:]) <= 36 * MIB  # from the second layer on
    assert 8 * MIB == reserved[-1]  # and not for both


@torch.no_grad()
def test_pieces_are_reserved_for_when_their_result_does_not_fit(tmp_path, monkeypatch):
    """Blocks of three layers, in another order in each sweep: of three results of 8 MiB, two have room."""
    layers = cast_on_disk(tmp_path, 1024, max_memory="40MiB", read_ahead="8MiB")
    pool = handle_of(layers[0].weight).composed.pieces[0].handle.page_state.pool
    in_memory: list[int] = []
    plain = Lease.move_on

    def noting(self: Lease) -> None:
        held = {value for value in pool.values() if value.kept or value.is_held}
        in_memory.append(sum(one.nbytes for one in self.results.values()) + sum(value.nbytes for value in held))
        plain(self)

    monkeypatch.setattr(Lease, "move_on", noting)

    class Block(nn.Module):
        def __init__(self, layers: nn.Sequential) -> None:
            super().__init__()
            self.layers, self.calls = layers, 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sweep, self.calls = self.calls // 4, self.calls + 1
            for number in range(3):
                x = self.layers[(sweep + number) % 3](x)
            return x

    blocks = nn.Sequential(*(Block(layers[at : at + 3]) for at in range(0, LAYERS, 3)))

    list(map_batches(blocks, batches_of(1024, 20), blocks, in_flight=4, blocks=list(blocks)))

    assert len(in_memory) >= 20
    assert max(in_memory[8:]) <= (40 + 4) * MIB  # the window has room for half of itself beside the budget


@torch.no_grad()
@pytest.mark.parametrize("budget", ["2MiB", "9MiB"])
def test_a_recipe_may_use_several_pieces_of_one_value(tmp_path, budget):
    """Each value is joined anew from every other row of it."""
    layers = cast_on_disk(tmp_path, 512, max_memory=budget, read_ahead="4MiB")
    for layer in layers:
        [piece] = handle_of(layer.weight).composed.pieces
        halves = [Piece(piece.handle, piece.view_spec[at::2]) for at in (0, 1)]
        turned = Joined(contiguous(torch.float64, (512, 512)), halves, [(0, 0), (256, 0)])
        layer.weight = nn.Parameter(wrap_handle(Handle.compose(turned, "turned"), torch.device("cpu")), False)

    assert_as_one_by_one(layers, batches_of(512, 4), layers, in_flight=4)


@needs_page_cache
@torch.no_grad()
def test_without_capacity_a_value_is_computed_for_each_batch(tmp_path, computed):
    """Results of 2 MiB; the window and half of the budget take one."""
    model = cast_on_disk(tmp_path, 512, max_memory="2MiB", read_ahead="1MiB")

    assert_as_one_by_one(model, batches_of(512), model, computed, in_flight=4)
    assert LAYERS * 8 == len(computed)


@torch.no_grad()
@pytest.mark.parametrize(("size", "times"), [(64, 1), (160, 8)])
def test_small_values_are_computed_once_for_all_batches_and_those_below_half_a_megabyte_for_each(
    tmp_path, computed, size, times
):
    """Memory is taken in blocks of half a MiB."""
    model, batches = cast_on_disk(tmp_path, size), batches_of(size)
    list(map_batches(model, batches, model, in_flight=8))

    assert LAYERS * times == len(computed)


@torch.no_grad()
def test_a_single_batch_in_flight_keeps_no_results(tmp_path, computed):
    model, batches = cast_on_disk(tmp_path, 256), batches_of(256)
    alive: list[int] = []

    def fn(batch: torch.Tensor) -> torch.Tensor:
        found = model[0](batch)
        alive.append(sum(one() is not None for one in computed))
        return found

    list(map_batches(fn, batches, model, in_flight=1))

    assert {0} == {*alive}


@torch.no_grad()
def test_pieces_of_kept_results_are_not_read_ahead(tmp_path):
    model, batches = cast_on_disk(tmp_path, 256), batches_of(256, 4)
    views: list[int] = []

    class Asking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            handle = handle_of(self.weight)
            views.append(len(list(handle.composed.reads(meta_of(handle)))))
            return super().forward(x)

    for layer in model:
        layer.__class__ = Asking
    list(map_batches(model, batches, model, in_flight=4))

    assert [1, 0, 0, 0] * LAYERS == views


@torch.no_grad()
def test_only_the_outermost_result_of_nested_recipes_is_kept(tmp_path, monkeypatch):
    model = cast_on_disk(tmp_path, 512)
    weight = model[3].weight
    halves = [Piece(handle_of(weight), handle_of(weight).meta[at : at + 256]) for at in (0, 256)]
    swapped = Joined(contiguous(torch.float64, (512, 512)), halves, [(256, 0), (0, 0)])
    model[3].weight = nn.Parameter(wrap_handle(Handle.compose(swapped, "swapped"), torch.device("cpu")), False)
    kept: list[int] = []
    plain = Lease.keep
    monkeypatch.setattr(Lease, "keep", lambda self, *given: (kept.append(given[1].nbytes), plain(self, *given))[1])

    assert_as_one_by_one(model, batches_of(512, 4), model, in_flight=4)
    assert LAYERS == len(kept)


@needs_page_cache
@torch.no_grad()
def test_a_sweep_with_results_reads_the_bytes_over_the_budget_once(tmp_path):
    model = cast_on_disk(tmp_path, 512, max_memory="7MiB", read_ahead="3MiB")
    batches = batches_of(512, 12)
    list(map_batches(model, batches[:6], model, in_flight=6))
    before = counts().bytes_read
    list(map_batches(model, batches, model, in_flight=6))

    assert (counts().bytes_read - before) / 2 <= 1.1 * (LAYERS - 7 + 1 + 2) * MIB  # a result takes room for two


@torch.no_grad()
def test_the_next_batch_sees_a_value_that_a_batch_replaced(tmp_path):
    model = cast_on_disk(tmp_path, 64)
    weight = model[5].weight
    new = torch.full((64, 64), 0.5, dtype=torch.float64)
    batches = batches_of(64, 3)

    class Replacing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = super().forward(x)
            if x is not None and self.weight is weight and handle_of(weight).composed is not None:
                weight.update_values(new)
            return found

    model[5].__class__ = Replacing
    first, *others = map_batches(lambda batch: model[:6](batch), batches, model, in_flight=3)

    assert torch.equal(model[:5](batches[1]) @ new.T, others[0])
    assert torch.equal(model[:5](batches[2]) @ new.T, others[1])
    assert not torch.equal(model[:5](batches[0]) @ new.T, first)


@torch.no_grad()
def test_no_batch_sees_writes_of_another_into_a_result(tmp_path):
    """Ops that may return what they are given return a copy of what is kept."""
    model = cast_on_disk(tmp_path, 64)
    expected = model[3].weight.to(torch.float64).clone()
    ways = [
        lambda weight: weight.contiguous(),
        lambda weight: weight.to("cpu"),
        lambda weight: weight.double(),
        lambda weight: weight.reshape(-1),
        lambda weight: weight.expand_as(weight),
        lambda weight: torch.as_tensor(weight),
        lambda weight: torch.atleast_2d(weight),
        lambda weight: weight.narrow(0, 0, 64).contiguous(),
    ]

    class Writing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = ways[int(x[0, 0])](self.weight)
            if type(found) is not OffloadedTensor:
                found.zero_()
            return super().forward(x)

    model[3].__class__ = Writing
    batches = [torch.full((1, 64), float(at), dtype=torch.float64) for at in range(len(ways))]

    found = list(map_batches(model[3], batches, model, in_flight=len(ways), blocks=[model[3]]))

    for batch, one in zip(batches, found, strict=True):
        assert torch.equal(batch @ expected.T, one)


def test_each_recipe_computes_in_one_place():
    """A recipe that hands out computed values past `kept` would compute them for each batch."""
    assert all("_computed" in vars(kind) for kind in Plain.__subclasses__())
