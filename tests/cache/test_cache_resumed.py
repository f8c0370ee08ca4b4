"""Batches that are stopped anywhere and resumed: each row comes once per epoch, in the order as without a stop."""

from __future__ import annotations

import gc
import itertools
import json
import math
import pickle
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from offload import TensorCache
from offload.cache.batches import Batches, shuffled
from offload.errors import ArgumentError, CacheError, RowIndexError
from tests.campaigns import amount

N = 47
STOPS = amount("rows", 12, 1000)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[TensorCache]:
    with TensorCache.create(tmp_path / "rows", {"id": (torch.int64, ())}, N) as made:
        made[:] = {"id": torch.arange(N)}
        yield made


def rows_of(batches: Any) -> list[int]:
    return [row for batch in batches for row in batch["id"].tolist()]


def unstopped(cache: TensorCache, epoch: int = 0, **how: Any) -> list[int]:
    """All rows of an epoch in its order."""
    batches = cache.batches(N, prefetch=0, **how)
    batches.set_epoch(epoch)
    return rows_of(batches)


def test_a_seed_and_an_epoch_determine_the_order(cache: TensorCache) -> None:
    orders = [unstopped(cache, epoch, shuffle=seed) for seed in (0, 1, 2**62) for epoch in (0, 1, 9)]

    assert all(list(range(N)) == sorted(order) for order in orders)
    assert len(orders) == len({tuple(order) for order in orders})
    assert orders == [unstopped(cache, epoch, shuffle=seed) for seed in (0, 1, 2**62) for epoch in (0, 1, 9)]
    assert [0, 3, 2, 1, 4] == shuffled(np.arange(5), 5, seed=3, epoch=1).tolist()  # in every release
    assert list(range(N)) == unstopped(cache)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_all_orders_are_equally_likely(size: int) -> None:
    """By chi-squared, of 50 times as many epochs as there are orders."""
    count = math.factorial(size)
    seen = Counter(tuple(shuffled(np.arange(size), size, 7, epoch).tolist()) for epoch in range(50 * count))

    apart = sum((seen[order] - 50) ** 2 / 50 for order in itertools.permutations(range(size)))
    assert apart < count + 5 * math.sqrt(2 * count)


@pytest.mark.parametrize("size", [6, 1000, 65537, 1 << 20])
def test_every_row_has_one_place_far_from_its_neighbours(size: int) -> None:
    order = shuffled(np.arange(size), size, 5, 3)

    assert np.array_equal(np.arange(size), np.sort(order))
    assert order[1:3].tolist() == shuffled(np.arange(1, 3), size, 5, 3).tolist()
    if size > 100:
        assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 4 / math.sqrt(size)
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 4 / math.sqrt(size)


@pytest.mark.campaign("rows")
@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (3, 3), (2, 3), (3, 1, 2)], ids=str)
@pytest.mark.parametrize("shuffle", [None, 4])
def test_batches_go_on_where_they_were_stopped_on_any_number_of_ranks(
    cache: TensorCache, ranks: tuple[int, ...], shuffle: int | None
) -> None:
    chance = random.Random(f"{ranks} {shuffle}")
    for stop in range(STOPS):
        epoch, state, given = chance.randrange(3), None, []
        for turn, world in enumerate(ranks, 1):
            size, prefetch = chance.choice([1, 2, 5, 16]), chance.choice([0, 1, 3])
            each = [
                cache.batches(size, shuffle=shuffle, rank=at, world_size=world, prefetch=prefetch)
                for at in range(world)
            ]
            for batches in each:
                batches.set_epoch(epoch)
                if state is not None:
                    batches.load_state_dict(json.loads(state))
            steps = N if turn == len(ranks) else chance.randrange((N - len(given)) // (size * world) + 1)
            for _ in range(steps):
                given += rows_of(batch for batches in each if (batch := next(batches, None)))
            state = json.dumps(each[0].state_dict())

        assert unstopped(cache, epoch, shuffle=shuffle) == given, stop


@pytest.fixture
def forks() -> Iterator[None]:
    """Worker processes that do not copy this process's objects to see whether they are garbage: five times as fast."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.campaign("rows")
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [(1, 2), (3, 2), (2, 3)], ids=str)
def test_a_data_loader_goes_on_where_it_was_stopped(cache: TensorCache, workers: int, ranks: tuple[int, int]) -> None:
    """The loop counts the steps, which workers do not tell; the ranks may be others afterwards."""
    chance = random.Random(f"{workers} {ranks}")
    expected = unstopped(cache, 2, shuffle=1)
    for stop in range(amount("rows", 2, 500)):
        each, later = ([loader_of(cache, workers, at, world, chance) for at in range(world)] for world in ranks)
        steps = chance.randrange(N // (5 * ranks[0]) + 1)
        given = taken_in_turn([itertools.islice(loader, steps) for loader, _ in each])
        for _, batches in later:
            batches.load_state_dict(each[0][1].state_dict(steps if workers else None))
        given += taken_in_turn([loader for loader, _ in later])

        assert expected == given, stop


def taken_in_turn(loaders: Iterable[Iterable[Any]]) -> list[int]:
    """The rows that all ranks are given, step by step; each worker runs while the others do."""
    steps = itertools.zip_longest(*loaders, fillvalue={"id": torch.empty(0, dtype=torch.int64)})
    return [row for step in steps for row in rows_of(step)]


def loader_of(
    cache: TensorCache, workers: int, rank: int, world: int, chance: random.Random
) -> tuple[DataLoader[Any], Batches]:
    batches = cache.batches(5, shuffle=1, rank=rank, world_size=world, prefetch=chance.choice([0, 2]))
    batches.set_epoch(2)
    return DataLoader(batches, batch_size=None, num_workers=workers), batches


@pytest.mark.campaign("rows")
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 3])
def test_the_loader_of_torchdata_goes_on_where_it_was_stopped(cache: TensorCache, workers: int, world: int) -> None:
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")
    chance = random.Random(f"{workers} {world}")

    def loaders() -> list[Any]:
        ranks = [loader_of(cache, workers, rank, world, chance)[1] for rank in range(world)]
        return [module.StatefulDataLoader(each, batch_size=None, num_workers=workers) for each in ranks]

    expected = unstopped(cache, 2, shuffle=1)
    for stop in range(amount("rows", 2, 1000)):
        first, second, steps = loaders(), loaders(), chance.randrange(N // (5 * world) + 1)
        given = taken_in_turn([itertools.islice(loader, steps) for loader in first])
        for old, new in zip(first, second, strict=True):
            new.load_state_dict(pickle.loads(pickle.dumps(old.state_dict())))
        given += taken_in_turn(second)

        assert expected == given, stop


def test_iterating_again_gives_the_next_epoch_and_goes_on_after_a_break(cache: TensorCache) -> None:
    batches, given = cache.batches(10, shuffle=3), []
    for batch in batches:
        given += batch["id"].tolist()
        break
    given += rows_of(batches)

    assert unstopped(cache, 0, shuffle=3) == given
    assert 1 == batches.epoch
    assert next(batches, None) is None  # as any iterator
    assert unstopped(cache, 1, shuffle=3) == rows_of(batches)
    assert 2 == batches.epoch
    assert 5 == len(batches)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_length_is_that_of_the_epoch_of_a_rank(cache: TensorCache, world: int, drop_last: bool) -> None:
    for size in (1, 4, 9, 23, 46, 47, 100):
        counts = []
        for rank in range(world):
            batches = cache.batches(size, rank=rank, world_size=world, drop_last=drop_last)
            counts.append(len(list(batches)))
            assert counts[-1] == len(batches)
        assert not drop_last or {N // (size * world)} == set(counts)


def test_a_sampler_that_gives_the_same_again_can_be_resumed(cache: TensorCache) -> None:
    sampler = BatchSampler(SequentialSampler(range(N)), 4, drop_last=False)
    stopped, resumed = cache.batches(sampler), cache.batches(sampler)
    first = [next(stopped) for _ in range(3)]
    resumed.load_state_dict(stopped.state_dict())

    assert list(range(N)) == rows_of(first) + rows_of(resumed)
    assert len(sampler) == len(stopped)
    with pytest.raises(CacheError, match="an iterator has no state"):
        cache.batches(iter(sampler)).state_dict()
    with pytest.raises(CacheError, match="a sampler may differ from worker to worker"):
        list(DataLoader(cache.batches(sampler), batch_size=None, num_workers=2))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_sampler_that_gives_other_rows_is_not_resumed(cache: TensorCache, prefetch: int) -> None:
    def batches(seed: int) -> Batches:
        order = RandomSampler(range(N), generator=torch.Generator().manual_seed(seed))
        return cache.batches(BatchSampler(order, 4, drop_last=False), prefetch=prefetch)

    stopped, resumed = batches(1), batches(1)
    first = [next(stopped) for _ in range(3)]
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed.load_state_dict(state)
    assert list(range(N)) == sorted(rows_of(first) + rows_of(resumed))
    assert list(range(N)) == sorted(rows_of(resumed)), "the next epoch has an order of its own"

    for other in (batches(2), resumed):
        other.load_state_dict(state)
        with pytest.raises(CacheError, match="the sampler gives other rows than before"):
            next(other)


def test_a_batch_that_could_not_be_read_is_tried_again(cache: TensorCache, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = cache.batches(20, prefetch=2)
    get = TensorCache.get
    monkeypatch.setattr(batches, "_read", lambda rows: get(cache, [99] if rows.start == 20 else rows))
    given = rows_of([next(batches)])
    with pytest.raises(RowIndexError):
        next(batches)
    assert next(batches, None) is None
    monkeypatch.setattr(batches, "_read", lambda rows: get(cache, rows))

    assert 20 == batches.state_dict()["row"]
    assert list(range(N)) == given + rows_of(batches)


def test_a_state_of_other_batches_is_refused(cache: TensorCache) -> None:
    state = cache.batches(4, shuffle=1).state_dict()

    for wrong, said in [
        ({**state, "rows": 46}, "rows is 46, and here 47"),
        ({**state, "seed": None}, "seed is None, and here 1"),
        ({**state, "row": -1}, "negative numbers"),
        ({**state, "workers": 2, "step": 4, "steps": 1}, "workers is 2, and here 1"),
        ({}, "no state of batches"),
        ({**state, "row": "x"}, "no state of batches"),
        ([], "no state of batches"),
    ]:
        with pytest.raises(CacheError, match=said):
            cache.batches(4, shuffle=1).load_state_dict(wrong)


def test_ranks_seeds_and_samplers_that_do_not_go_together_are_refused(cache: TensorCache) -> None:
    for how, error in [
        ({"rank": 2, "world_size": 2}, CacheError),
        ({"rank": -1}, CacheError),
        ({"shuffle": -1}, ArgumentError),
    ]:
        with pytest.raises(error):
            cache.batches(4, **how)
    for how in ({"shuffle": 1}, {"drop_last": True}, {"world_size": 2}):
        with pytest.raises(CacheError, match="go with a number of rows"):
            cache.batches([[0]], **how)
    with pytest.raises(ArgumentError, match="epoch should be 0 or more"):
        cache.batches(4).set_epoch(-1)
