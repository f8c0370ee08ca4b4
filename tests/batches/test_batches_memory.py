"""How much many batches read, and hold in memory."""

import pytest
import torch
from torch import nn

from offload.batches import mapping
from offload.batches.mapping import map_batches
from offload.memory import return_freed
from offload.prefetch.engine import counts
from offload.prefetch.plan import Pool
from tests.batches.lockstep import on_disk
from tests.page_cache import needs_page_cache
from tests.peak import Peak

MIB = 1 << 20
LAYERS = 16


@needs_page_cache
@torch.no_grad()
def test_a_sweep_reads_the_bytes_over_the_budget_once(tmp_path):
    model = on_disk(tmp_path, 512, LAYERS, max_memory="5MiB", read_ahead="3MiB")  # layers of 1 MiB
    batches = [torch.randn(2, 512) for _ in range(12)]
    expected = [model(batch) for batch in batches]
    list(map_batches(model, batches[:2], model, in_flight=2))
    before = counts().bytes_read
    found = list(map_batches(model, batches, model, in_flight=6))

    sweep = (counts().bytes_read - before) / 2
    assert all(map(torch.equal, expected, found))
    assert 2 * MIB < sweep <= 1.1 * (LAYERS - 5 + 1) * MIB

    before = counts().bytes_read
    for batch in batches[:3]:
        model(batch)
    one_by_one = (counts().bytes_read - before) / 3
    assert sweep / 6 < one_by_one / 4


@torch.no_grad()
def test_values_that_a_block_read_are_held_for_the_next_batch(tmp_path):
    model = on_disk(tmp_path, 512, LAYERS, max_memory="5MiB", read_ahead="3MiB")
    held: list[int] = []

    class Looking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            held.append(sum(value.is_held for pool in Pool.all() for value in pool.values()))
            return super().forward(x)

    for at in range(3, 12):
        model[at].__class__ = Looking
    model(torch.randn(2, 512))
    held.clear()
    list(map_batches(model, [torch.randn(2, 512) for _ in range(4)], model, in_flight=4))

    firsts, others = held[::4], [count for at, count in enumerate(held) if at % 4]
    assert {0} == {*firsts}
    assert 3 * len(firsts) > sum(others) > len(firsts)  # some stay anyway


class Wide(nn.Module):
    """Creates 8 MiB on the way, of 8192 rows, and returns half a MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 256, bias=False), nn.Linear(256, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu_())


@torch.no_grad()
def test_freed_memory_is_not_kept_by_each_thread():
    """Each thread has its own memory pools, which glibc does not share with other threads."""
    model, flight = nn.Sequential(*(Wide() for _ in range(4))), 16
    fn = lambda at: model(torch.full((8192, 16), float(at))).sum()  # noqa: E731
    fn(0)
    return_freed()
    with Peak() as peak:
        list(map_batches(fn, range(2 * flight), model, in_flight=flight, blocks=list(model)))

    assert peak.nbytes < flight * 8 * MIB


@pytest.mark.parametrize("grad", [True, False])
def test_graphs_limit_the_batches_in_flight(monkeypatch, grad):
    """Each layer leaves 4 MiB in a graph; 4 MiB wait."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(12)))
    monkeypatch.setattr(mapping, "available_bytes", lambda: 4 * 256 * MIB)
    most, running = 0, 0

    def fn(at: int) -> float:
        nonlocal most, running
        running += 1
        most = max(most, running)
        found = model(torch.full((32768, 32), float(at))).sum()
        running -= 1
        return float(found.detach())

    return_freed()
    with torch.set_grad_enabled(grad):
        list(map_batches(fn, range(24), model))

    assert most <= 5 if grad else most > 12


def test_an_adapter_is_trained_over_batches_in_flight_as_over_one_after_the_other(tmp_path):
    peft = pytest.importorskip("peft", reason="needs peft, which is not installed")
    torch.manual_seed(0)
    base = on_disk(tmp_path, 64, LAYERS)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=[str(at) for at in range(LAYERS)], r=2))
    trained = [one for one in model.parameters() if one.requires_grad]
    with torch.no_grad():
        for one in trained:
            one.normal_(std=0.1)
    batches = [torch.randn(3, 64) for _ in range(6)]

    def fn(batch: torch.Tensor) -> float:
        loss = model(batch).pow(2).mean()
        loss.backward()
        return float(loss.detach())

    expected = [fn(batch) for batch in batches]
    gradients = [one.grad.clone() for one in trained]
    model.zero_grad()

    found = list(map_batches(fn, batches, model, in_flight=4))

    assert expected == found
    assert all(torch.equal(gradient, one.grad) for gradient, one in zip(gradients, trained, strict=True))
