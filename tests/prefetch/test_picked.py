"""Picked values: which ones stay, how much is read of them, and that they are not part of an order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from string import ascii_letters

import pytest
import torch
from safetensors.torch import save_file

import offload
from bench.page_cache import cached_fraction, make_cold
from bench.traces import COLUMNS, ROWS, hits_in_hindsight, orders, replayed, stack
from offload.prefetch import pages
from offload.prefetch.engine import CHECKED_FOR, POOL, Engine, expect
from offload.prefetch.picked import _RESCALE, Picked
from offload.prefetch.plan import Pool, Value
from offload.prefetch.tables import has_rows_here, runs_of
from offload.prefetch.value import page_state_of
from offload.tensor.views import handle_of
from tests.checkpoints.gguf_files import finish
from tests.engines import Clock, rest
from tests.page_cache import needs_page_cache
from tests.prefetch.fakes import MIB, Memory, made, read, seed, values_of

pytestmark = pytest.mark.usefixtures("only_own_values", "still_clock")
COUNT, LENGTH = 32, 2500
ORDERS = orders(COUNT, LENGTH)


def picked(pool: Pool, count: int) -> list[Value]:
    return values_of(pool, [MIB] * count, is_picked=True)


def use(pool: Pool, values: list[Value]) -> list[Value]:
    """Use values as the engine does; returns what was dropped."""
    left = []
    for value in values:
        pool.picked.count(value)
        value.checked_until = 1.0
        left += pool.admit(value)
    return left


def test_a_more_used_value_takes_the_place_of_a_less_used_one():
    pool = Pool(2 * MIB, 0)
    a, b, c = picked(pool, 3)
    stays = [value for value in (a, b, c) if value.kept]
    other = next(value for value in (a, b, c) if not value.kept)
    use(pool, [stays[0]] * 4 + [stays[1]])

    assert [] == use(pool, [other, other])  # no more than that one: the use that reads it does not count
    assert [stays[1]] == use(pool, [other])
    assert stays[0].kept
    assert other.kept
    assert not stays[1].kept


def test_a_large_value_takes_the_places_of_several_or_of_none():
    pool = Pool(4 * MIB, 0)
    small = picked(pool, 4)
    [large] = values_of(pool, [3 * MIB], 8 * MIB, is_picked=True)
    pool.reconsider(anew=True)
    use(pool, [value for value in small if value.kept] + small[:2] * 5)
    large.kept = False

    assert [] == use(pool, [large] * 2)
    assert sum(value.nbytes for value in [*small, large] if value.kept) <= 4 * MIB
    left = use(pool, [large] * 9)
    assert large.kept
    assert sum(value.nbytes for value in [*small, large] if value.kept) <= 4 * MIB
    assert set(left) == {value for value in small if not value.kept}


def test_values_of_every_pass_stay_before_picked_ones():
    pool = Pool(6 * MIB, 0)
    chosen = picked(pool, 8)
    use(pool, chosen * 9)
    dense = values_of(pool, [MIB] * 4, 8 * MIB)
    pool.reconsider(anew=True)

    assert all(value.kept for value in dense)
    assert 2 == sum(value.kept for value in chosen)


def test_a_place_is_free_once_its_value_is_gone():
    pool = Pool(2 * MIB, 0)
    values = picked(pool, 3)
    use(pool, values * 5)
    other = next(value for value in values if not value.kept)
    del values
    assert [] == use(pool, [other])
    assert other.kept


def test_a_use_counts_less_with_time_and_never_overflows():
    places = Picked()
    pool = Pool(MIB, 0)
    old, new = picked(pool, 2)
    places.choose([old], MIB)
    for _ in range(100):
        places.count(old)
    for _ in range(30):
        places.count(new)
    assert new.uses > old.uses
    places.worth = 2 * _RESCALE
    old.uses, new.uses = _RESCALE, 3 * _RESCALE
    places.rescale([old, new])
    assert (0.5, 1.5) == (old.uses, new.uses)
    assert places.worth == 1


@needs_page_cache
@pytest.mark.parametrize("share", [4, 2])
@pytest.mark.parametrize("name", ORDERS)
def test_as_many_reads_hit_as_with_the_best_fixed_set(tmp_path: Path, name: str, share: int) -> None:
    """Or a share of them, if all are used alike: there, the best set with hindsight is slightly better by chance."""
    order, places = ORDERS[name], COUNT // share
    found = replayed(stack(tmp_path, COUNT), order, places)

    best = LENGTH / share if name == "uniform" else hits_in_hindsight(order, places)
    assert found.hits >= {"drifting": 1.2, "topics": 1.0, "uniform": 0.9}.get(name, 0.95) * best
    assert found.bytes_read <= (LENGTH - found.hits) * ROWS * COLUMNS * 4


def test_the_order_continues_past_picked_values(engine: Engine, memory: Memory) -> None:
    """The next layer is read ahead, whichever experts are picked before it."""
    values = made(memory, "abcdefghijwxyz")
    dense, experts = values[:10], values[10:]
    for value in experts:
        value.is_picked = True
    for number in range(4):
        if number == 2:
            memory.log.clear()
        read(engine, [*dense[:3], experts[number], experts[3 - number], *dense[3:]])

    assert dict.fromkeys("wxyz", False).items() & set(memory.log)
    assert {("d", True), ("e", True)} <= set(memory.log)
    assert not {("d", False), ("e", False), ("w", True), ("z", True)} & set(memory.log)
    assert not engine.reader.counts.wasted


def test_announced_values_are_read_before_others_ahead(engine: Engine, memory: Memory) -> None:
    a, *values = made(memory, "abcwxyz", window=16 * MIB)
    experts = values[2:]
    for value in experts:
        value.is_picked = True
    engine.arrive(a)
    with engine.reader.lock:
        engine.streams.own().bring_soon(experts)
        assert experts == list(engine.reader._queue)[: len(experts)]
    rest(engine)
    for value in experts:
        engine.arrive(value)

    assert [("w", True), ("x", True), ("y", True), ("z", True)] == memory.log[1:]
    assert len(experts) == engine.reader.counts.ahead


def test_announced_values_stay_within_the_window(engine: Engine, memory: Memory) -> None:
    values = made(memory, "abcdefgh", window=3 * MIB, is_picked=True)
    with engine.reader.lock:
        engine.streams.own().bring_soon(values)
        assert 3 * MIB == engine.streams.in_flight()


def test_values_announced_in_vain_return_their_part_of_the_window(engine: Engine, memory: Memory) -> None:
    """A guess may be wrong: of which experts come next, too."""
    wrong, right = made(memory, "abcdefgh", window=8 * MIB), made(memory, "stuvwxyz", window=8 * MIB)
    for value in (*wrong, *right):
        value.is_picked = True
        value.pool = wrong[0].pool
    with engine.reader.lock:
        engine.streams.own().bring_soon(wrong)
    rest(engine)
    for _ in range(3):
        read(engine, right)
    assert len(wrong) == engine.reader.counts.wasted
    assert not any(value.is_cached() for value in wrong)
    with engine.reader.lock:
        engine.streams.own().bring_soon(right[:4])
    rest(engine)
    before = engine.reader.counts.ahead
    read(engine, right[:4])

    assert 4 == engine.reader.counts.ahead - before


def test_picked_values_ahead_are_overtaken_by_picked_ones_only(engine: Engine, memory: Memory) -> None:
    """However many values of the order come before them."""
    values = made(memory, ascii_letters, window=24 * MIB)
    first, *dense, experts = *seed(values[:-4]), values[-4:]
    for value in experts:
        value.is_picked = True
    with engine.reader.lock:
        engine.streams.own()._picked = len(experts) * MIB  # as many were picked before: the window has room for them
    read(engine, [first])
    with engine.reader.lock:
        engine.streams.own().bring_soon(experts)
    read(engine, dense)
    before = engine.reader.counts.ahead
    for value in experts:
        engine.arrive(value)

    assert len(experts) == engine.reader.counts.ahead - before
    assert not engine.reader.counts.wasted


def cold_table(folder: Path) -> tuple[Path, offload.OffloadedTensor]:
    """4096 rows of 1024 numbers, 0, 1, 2..., on disk alone."""
    path = folder / "t.safetensors"
    save_file({"table": torch.arange(4096 * 1024, dtype=torch.float32).view(4096, 1024)}, path)
    table = offload.load_file(path)["table"]
    make_cold([path])
    return path, table


@needs_page_cache
@pytest.mark.parametrize(
    "pick",
    [torch.nn.functional.embedding, lambda rows, table: table[rows], lambda rows, table: table.index_select(0, rows)],
    ids=["embedding", "index", "index_select"],
)
def test_rows_are_read_without_their_neighbours(tmp_path: Path, pick: Callable[..., torch.Tensor]) -> None:
    """Nor is anything tracked for them, however many are picked one after the other."""
    path, table = cold_table(tmp_path)
    rows = torch.tensor([7, 4000, 1500, 1501, 7])

    found = pick(rows, table)

    assert torch.equal(found[:, 0], rows * 1024.0)
    assert cached_fraction([path]) * 4097 <= 4 * 2 + 1
    assert {} == page_state_of(handle_of(table)).ranges


@needs_page_cache
def test_rows_of_a_packed_table_are_read_without_their_neighbours(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    numbers = torch.arange(4096, dtype=torch.float32).view(-1, 1).expand(-1, 4096).contiguous()
    packed = gguf.quants.quantize(numbers.numpy(), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("table", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    finish(writer)
    table = offload.load_file(tmp_path / "t.gguf")["table"]
    rows = torch.tensor([7, 4000, 1500, 1501, 7])
    expected = torch.from_numpy(gguf.quants.dequantize(packed[rows], gguf.GGMLQuantizationType.Q8_0))
    make_cold([tmp_path / "t.gguf"])

    found = torch.nn.functional.embedding(rows, table)

    assert torch.equal(expected, found)
    assert packed.nbytes * cached_fraction([tmp_path / "t.gguf"]) <= 4 * 3 * pages.PAGE + 4 * pages.PAGE


@needs_page_cache
@pytest.mark.parametrize("pick", [torch.nn.functional.embedding, lambda rows, table: table.index_select(0, rows)])
def test_a_table_counts_as_in_memory_once_all_of_it_is(tmp_path: Path, pick: Callable[..., torch.Tensor]) -> None:
    path, table = cold_table(tmp_path)
    rows = torch.tensor([7, 4000])

    for _ in range(2):
        pick(rows, table)
    assert not has_rows_here(handle_of(table))

    path.read_bytes()
    pick(rows, table)
    assert has_rows_here(handle_of(table))

    offload.budget.evict(table)
    assert not has_rows_here(handle_of(table))


def test_runs_of_rows_stay_within_the_table():
    assert [(0, 2), (5, 6)] == list(runs_of([-3, 0, 1, 5, 9], 6))
    assert [(0, 6)] == list(runs_of([0, 1, 5], 6, 3))


@needs_page_cache
@pytest.mark.parametrize("is_expected", [True, False])
def test_a_small_value_that_the_system_dropped_is_read_alone_again(
    tmp_path: Path, still_clock: Clock, is_expected: bool
) -> None:
    """Small values stay once they are read; but where memory is short, the system drops them, too."""
    path = tmp_path / "w.safetensors"
    save_file({**{f"{number:02}": torch.zeros(1 << 20) for number in range(16)}, "08a": torch.ones(16)}, path)
    small = offload.load_file(path)["08a"]
    handle_of(small).read_apart()
    if is_expected:
        expect([handle_of(small)])
    for _ in range(3):
        make_cold([path])
        still_clock.time += 2 * CHECKED_FOR

        assert 16 == float(small.sum())
        assert cached_fraction([path]) <= 0.01


@needs_page_cache
def test_a_whole_value_is_read_alone_in_a_file_that_is_picked_from(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({f"{number:02}": torch.ones(1 << 16) for number in range(64)}, path)
    whole = offload.load_file(path)["32"]
    handle_of(offload.load_file(path)["00"]).read_apart()
    make_cold([path])

    assert 1 << 16 == float(whole.sum())
    assert cached_fraction([path]) <= 1.2 / 64


@needs_page_cache
@pytest.mark.parametrize(("columns", "pieces"), [(64, 256), (1024, 4)])
def test_pieces_of_a_view_are_read_alone_in_a_file_that_is_picked_from(
    tmp_path: Path, columns: int, pieces: int
) -> None:
    """A rank's columns, for example, where a mapping would read megabytes around each piece."""
    path = tmp_path / "w.safetensors"
    values = {f"{number:02}": torch.ones(pieces, 64 * 1024 * 64 // pieces) for number in range(4)}
    save_file(values, path)
    share = offload.load_file(path)["02"][:, 128 : 128 + columns]
    handle_of(share).read_apart()
    make_cold([path])

    assert pieces * columns == float(share.sum())
    assert cached_fraction([path]) * path.stat().st_size <= pieces * (columns * 4 + 4096) + 2 * 4096


def test_every_use_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even for values in memory that are not checked again for a while."""
    monkeypatch.setattr(POOL, "picked", Picked())  # a use counts 1 before the first plan
    tensor = offload.load_file(stack(tmp_path, 4))["experts"]
    for _ in range(5):
        tensor[1].amax()

    [value] = page_state_of(handle_of(tensor)).ranges.values()
    assert value.is_picked
    assert value.uses == pytest.approx(5)
