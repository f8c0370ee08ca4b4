"""Budgets with real files: what stays, what is dropped, and that values are always right."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import offload
from offload import ON_DISK, OffloadedTensor
from offload.budget import is_read_by_each_pass
from offload.errors import BudgetError
from offload.prefetch.engine import POOL, counts
from offload.prefetch.plan import Pool
from offload.prefetch.value import page_state_of
from offload.tensor.views import handle_of
from tests.engines import rest
from tests.page_cache import dropped, needs_page_cache

MIB = 1 << 20
LAYERS = 12

pytestmark = pytest.mark.usefixtures("only_own_values", "still_clock")


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    with offload.set_max_memory(None), offload.budget.set_read_ahead(True):
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 layers of 1 MiB."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("budget") / "model.safetensors"
    save_file(network().state_dict(), path)
    return path


def network() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(LAYERS)])


def in_memory(path: Path) -> nn.Module:
    model = network()
    model.load_state_dict(offload.materialize(offload.load_file(path)))
    return model


def on_disk(path: Path, **options: object) -> nn.Module:
    dropped(path)
    with offload.init_empty_weights():
        model = network()
    return offload.load_checkpoint_and_dispatch(model, path, device_map=ON_DISK, **options)  # type: ignore[arg-type]


@needs_page_cache
def test_resident_values_are_within_the_budget_and_the_rest_is_dropped(checkpoint):
    model = on_disk(checkpoint, max_memory="6MiB", read_ahead="2MiB")
    with torch.no_grad():
        for number in range(7):
            if number == 3:
                before = counts().bytes_read
            model(torch.randn(3, 512))
            rest()  # otherwise the next pass may find values that are still to be dropped

    pool = page_state_of(next(model.parameters())._handle).pool  # type: ignore[attr-defined]
    resident = sum(value.cached_bytes() for value in pool.values())
    assert resident <= 6 * MIB + 2 * MIB + 2 * LAYERS * 4096  # a page at each end may be a neighbour's, too
    read = (counts().bytes_read - before) / 4
    assert 5 * MIB < read <= 1.1 * (LAYERS - 6 + 1) * MIB


def test_the_order_of_a_model_is_known_before_its_first_pass(checkpoint):
    model = on_disk(checkpoint)
    handles = [handle_of(one) for layer in model for one in (layer.bias, layer.weight)]  # what stays first
    values = [page_state_of(handle).ranges[handle.extent] for handle in handles]

    assert values[1:] == [value.follower(None) for value in values[:-1]]


@needs_page_cache
def test_a_model_that_fits_is_read_once(checkpoint):
    model = on_disk(checkpoint)
    before = counts()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(3, 512))

    after = counts()
    assert after.bytes_read - before.bytes_read <= (12.1 + 4) * MIB  # neighbours that are read in one go count as one
    reads = after.ahead + after.found + after.missed - before.ahead - before.found - before.missed
    assert reads <= 3 * LAYERS  # each value once, and large ones again after some time


@needs_page_cache
def test_a_write_is_seen_whatever_is_dropped(tmp_path):
    """In place, and as a whole; before, between and after dropping."""
    w = OffloadedTensor.from_original_tensor(torch.zeros(512, 512), "w", tmp_path)
    expected = torch.zeros(512, 512)
    with offload.set_max_memory(0), torch.no_grad():
        for number in range(1, 5):
            offload.budget.evict(w)
            w.add_(number)
            expected.add_(number)
            assert torch.equal(expected, w.materialize())
            w.update_values(expected.mul_(2))
            assert expected.sum() == w.sum()
            w[3:5] = 7
            expected[3:5] = 7
            offload.budget.evict(w)
            assert torch.equal(expected[2:6], w[2:6].clone())


@needs_page_cache
def test_evicted_values_leave_memory_and_come_back(checkpoint):
    model = on_disk(checkpoint)
    x = torch.randn(3, 512)
    with torch.no_grad():
        expected = model(x)
        full = offload.memory_summary().resident
        offload.budget.evict(model)
        empty = offload.memory_summary().resident

        assert full - empty >= LAYERS * MIB * 0.95
        before = counts().bytes_read
        assert torch.equal(expected, model(x))
        assert counts().bytes_read > before  # they were read in, and not left to the mapping


@needs_page_cache
def test_pinned_values_stay_under_a_budget_that_would_not_keep_them(checkpoint):
    model = on_disk(checkpoint, max_memory="3MiB", read_ahead="2MiB")
    last = list(model)[-1]
    offload.budget.keep_resident(last)
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(3, 512))

    value = page_state_of(last.weight._handle).ranges[last.weight._handle.extent]
    assert value.kept
    assert value.is_cached()
    offload.budget.evict(last)
    assert not value.pinned
    assert value.cached_bytes() < MIB // 8


def test_more_than_the_budget_cannot_be_pinned(checkpoint):
    model = on_disk(checkpoint, max_memory="3MiB")

    with pytest.raises(BudgetError, match=r"12\d+ bytes can't stay in memory: the budget is 3145728"):
        offload.budget.keep_resident(model)

    assert not any(value.pinned for value in page_state_of(next(model.parameters())._handle).pool.values())  # type: ignore[attr-defined]


def test_a_setting_ends_with_its_block_or_stays_without_one():
    """A block may raise."""
    with offload.set_max_memory("1GiB"), offload.budget.set_read_ahead("1MiB"):
        assert (1 << 30, MIB) == (POOL.max_memory, POOL.window)
        with suppress(KeyError), offload.set_max_memory({"cpu": 5 * MIB}):
            assert 5 * MIB == POOL.max_memory
            raise KeyError
        assert 1 << 30 == POOL.max_memory
    assert (None, None) == (POOL.max_memory, POOL.fixed_window)

    offload.set_max_memory(7 * MIB)
    assert 7 * MIB == POOL.max_memory


@pytest.mark.parametrize("device", ["cuda:77", None, "gpu"])
def test_a_budget_for_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(ValueError, match=f"{device!r} is neither 'cpu' nor an accelerator of this machine"):
        offload.set_max_memory({device: 1})


@needs_page_cache
def test_the_summary_reports_budget_and_reads(checkpoint):
    model = on_disk(checkpoint, max_memory="6MiB", read_ahead="2MiB")
    before = offload.memory_summary()
    with torch.no_grad():
        model(torch.randn(3, 512))
    summary = offload.memory_summary()

    assert summary.counts.bytes_read - before.counts.bytes_read >= 11 * MIB
    assert 5 * MIB <= summary.kept <= summary.values
    lines, names = str(summary).splitlines(), ["budget", "values", "  to stay", "  to stream", "resident now"]
    assert names == [line[:24].rstrip() for line in lines[:5]]
    assert all(line == lines[0] or len(line) == len(lines[0]) for line in lines)


@needs_page_cache
def test_a_forward_reads_only_the_experts_that_it_is_routed_to(tmp_path):
    """Parts of one stored value are read in and dropped separately."""
    path = tmp_path / "experts.safetensors"
    save_file({"experts": torch.randn(16, 512, 512)}, path)
    dropped(path)
    experts = OffloadedTensor.from_file(path)
    expected = {index: experts._on_cpu()[index].clone() for index in (3, 9)}
    offload.budget.evict(experts)
    [whole] = page_state_of(handle_of(experts)).ranges.values()
    while whole.cached_bytes() > 2 * 4096:  # a page that the kernel is moving just then stays
        offload.budget.evict(experts)
    before = counts().bytes_read

    x = torch.randn(2, 512)
    for index in (3, 9, 3):
        assert torch.equal(F.linear(x, expected[index]), F.linear(x, experts[index]))

    assert 2 * MIB == counts().bytes_read - before


@needs_page_cache
def test_threads_with_models_of_their_own_share_a_budget(checkpoint):
    """Right results in all of them, while their values are read in and dropped."""
    x = torch.randn(3, 512)
    expected = in_memory(checkpoint)(x)
    models = [on_disk(checkpoint) for _ in range(8)]

    @torch.no_grad()
    def are_right(model: nn.Module) -> list[bool]:
        return [torch.equal(expected, model(x)) for _ in range(5)]

    with offload.set_max_memory("8MiB"), offload.budget.set_read_ahead("8MiB"), ThreadPoolExecutor(8) as pool:
        assert [[True] * 5] * 8 == list(pool.map(are_right, models))


@pytest.mark.parametrize(("budget", "expected"), [(0, True), ("1GiB", False)])
def test_each_pass_reads_what_does_not_stay(checkpoint, budget, expected):
    assert expected is is_read_by_each_pass(on_disk(checkpoint, max_memory=budget))


@pytest.mark.parametrize(("shape", "expected"), [((64, 2048), False), ((4, 64, 512), True)], ids=["table", "experts"])
def test_each_pass_reads_what_it_picks_but_for_rows(tmp_path, shape, expected):
    model = nn.Module()
    model.weight = nn.Parameter(OffloadedTensor.from_original_tensor(torch.ones(shape), "w", tmp_path))

    assert expected is is_read_by_each_pass(model)


@needs_page_cache
@pytest.mark.parametrize("budget", [0, "2MiB", 6 * MIB, "1GiB"])
def test_results_and_gradients_within_any_budget_equal_those_in_memory(checkpoint, budget):
    """Backward reads in reverse order, and what it needs may have been dropped."""
    x = torch.randn(3, 512)
    plain, model = in_memory(checkpoint), on_disk(checkpoint, max_memory=budget, read_ahead="2MiB")
    for _ in range(3):
        for one in (plain, model):
            one.zero_grad()
        expected, found = plain(x), model(x)
        assert torch.equal(expected, found)
        for one in (expected, found):
            one.square().mean().backward()

    for left, right in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)


@pytest.mark.parametrize("act", [offload.budget.keep_resident, offload.budget.evict])
def test_names_of_modules_are_refused(act):
    """It would be ignored silently."""
    with pytest.raises(TypeError, match=r"'layers\.0' is neither a tensor nor a module"):
        act(nn.Linear(2, 2, bias=False), None, ["layers.0"])


# Tracking ranges of files


@pytest.fixture
def cold(tmp_path, monkeypatch):
    """Creates a value that is not in memory, as a tensor over its file; the summary only covers such values."""
    pool = Pool()
    monkeypatch.setattr(Pool, "all", lambda: [pool])

    def make(*shape):
        path = tmp_path / "w.safetensors"
        save_file({"w": torch.randn(shape)}, path)
        w = OffloadedTensor.from_file(path)
        page_state_of(handle_of(w)).pool = pool
        dropped(path)  # also what was read along with the header
        return w

    return make


def counted(read):
    """The summary's figures after a read: bytes read from the disk, total bytes, and resident bytes."""
    before = counts().bytes_read
    read()
    summary = offload.memory_summary()
    return summary.counts.bytes_read - before, summary.values, summary.resident


@needs_page_cache
def test_overlapping_views_are_counted_once(cold):
    w = cold(2048, 256)

    def read():
        for part in (w[:1024], w[1024:], w, w[500:1500], w.t()):
            part.sum()

    pool = page_state_of(handle_of(w)).pool
    pool.max_memory = 3 * MIB

    for number in counted(read):
        assert 2 * MIB - 2 * 4096 <= number <= 2 * MIB + 2 * 4096  # parts may share a page
    pool.reconsider(anew=True)
    assert [True] * 3 == [value.kept for value in pool.values()]  # their bytes fit; the last two views are the whole
    assert (0, 2 * MIB) == counted(w.sum)[:2]


@needs_page_cache
@pytest.mark.parametrize(
    ("shape", "cut", "gives"),
    [
        ((2048, 1024), lambda w: w[:, 256:512], 8 * MIB),  # gaps are read along
        ((2048, 1024), lambda w: w[:, :32], 8 * MIB),
        ((4, 16, 64, 1024), lambda w: w[:, 3], MIB),  # and distant pieces are not
        ((32, 64, 1024), lambda w: w[::4], 2 * MIB),
        ((16, 4, 64, 1024), lambda w: w[::8, ::2], MIB),
    ],
)
def test_a_strided_view_counts_the_bytes_that_the_disk_reads(shape, cut, gives, cold):
    w = cold(*shape)
    results = []

    for number in counted(lambda: results.append(cut(w).sum())):
        assert gives * 0.99 <= number <= gives * 1.05
    assert torch.equal(cut(w.materialize()).sum(), results[0])
