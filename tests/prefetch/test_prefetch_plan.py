"""Which values stay in memory under a budget."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.prefetch import plan
from offload.prefetch.plan import SMALL, WINDOW, Pool, Users, Value
from offload.prefetch.room import OnDevice
from tests.prefetch.fakes import FILE, MIB, values_of


@contextmanager
def available(nbytes: int) -> Iterator[None]:
    """So much memory is available."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "available_bytes", lambda: nbytes)
        yield


def kept(values: list[Value]) -> list[int]:
    return [index for index, value in enumerate(values) if value.kept]


@pytest.mark.parametrize(("budget", "window"), [(None, None), (15 * MIB, 2 * MIB)], ids=["none is set", "one is set"])
def test_a_budget_never_exceeds_the_available_memory(budget: int | None, window: int | None):
    """Which is the budget if none is set, but for what the rest of the program needs."""
    with available(10 * MIB):
        assert 8 == len(kept(values_of(Pool(budget, window), [MIB] * 20)))


def test_a_budget_set_later_leaves_memory_for_its_own_window():
    """The window of all memory on a fast disk would be more than a small budget."""
    pool = Pool()
    with available(100 << 30):
        pool.reconsider(anew=True)
    pool.learn_rate(2 << 30, 1.0)
    assert 512 * MIB == pool.window
    pool.max_memory = 400 * MIB

    with available(500 * MIB):
        pool.reconsider(anew=True)

    assert 400 * MIB == pool.capacity
    assert 64 * MIB == pool.window


@given(sizes=st.lists(st.integers(SMALL + 1, 8 * MIB), max_size=40), budget=st.integers(0, 100 * MIB))
def test_the_budget_is_respected_and_used(sizes: list[int], budget: int):
    """The remainder is smaller than any value that does not stay."""
    values = values_of(Pool(budget), sizes)

    size = sum(value.nbytes for value in values if value.kept)
    assert size <= budget
    assert all(value.kept or value.nbytes > budget - size for value in values)


@given(share=st.floats(0.1, 0.9), count=st.integers(20, 200))
def test_values_that_stay_are_spread_evenly(share: float, count: int):
    """At any point of the pass the resident share is right, up to one value."""
    values = values_of(Pool(int(share * count * MIB)), [MIB] * count)

    for done in range(count):
        assert abs(len(kept(values[:done])) - share * done) <= 2


@pytest.mark.parametrize(("budget", "stays"), [(300, [40]), (150, [])], ids=["it fits", "it does not fit"])
def test_a_value_larger_than_the_window_stays_if_it_fits(budget: int, stays: list[int]):
    """A head, which comes last: while it is used it would take as much memory again, beside what stays."""
    values = values_of(Pool(budget * MIB), [10 * MIB] * 40 + [200 * MIB])

    assert stays == [index for index in kept(values) if index == 40]
    assert 0 <= budget * MIB - sum(value.nbytes for value in values if value.kept) < 10 * MIB


@pytest.mark.parametrize("window", [None, 0])
@given(count=st.integers(4, 60), budgets=st.lists(st.integers(0, 60), min_size=1, max_size=6))
def test_another_budget_changes_as_little_as_possible(window: int | None, count: int, budgets: list[int]):
    """What is dropped has to be read again, and so has what is new."""
    pool = Pool(count * MIB // 3, window)
    values = values_of(pool, [MIB] * count)
    for budget in budgets:
        before = set(kept(values))
        pool.max_memory = budget * MIB
        leaving = pool.reconsider(anew=True)

        after = set(kept(values))
        assert {values[place] for place in before - after} == set(leaving)
        assert len(after) == min(budget, count)
        assert before <= after or after <= before


def test_a_later_value_displaces_none_of_the_others():
    """A view of the token table, for example: resident values stay for the next pass."""
    pool = Pool(20 * MIB)
    values = values_of(pool, [MIB] * 40)
    before = kept(values)
    later = values_of(pool, [2 * MIB], 40 * MIB)
    leaving = pool.reconsider(anew=True)

    assert before == kept(values)
    assert [] == leaving == kept(later)


@given(taken=st.lists(st.integers(0, 30), min_size=1, max_size=8))
def test_memory_that_others_take_and_return_displaces_no_more_than_that(taken: list[int]):
    """Without a budget; nothing is dropped for something that was not there before."""
    pool = Pool()
    with available(40 * MIB):
        values = values_of(pool, [MIB] * 60)
    for value in values:
        value.checked_until = 1.0  # it was read
    for others in taken:
        before = set(kept(values))
        with available((40 - others) * MIB):
            leaving = pool.reconsider(anew=True)

        after = set(kept(values))
        assert after <= before or before <= after
        assert {values[place] for place in before - after} == set(leaving)
        assert abs(int(0.85 * (40 - others)) - len(after)) <= 1


@pytest.mark.parametrize(
    ("room", "fixed", "rate", "window", "widest"),
    [
        (100 * MIB, None, 0, 64 * MIB, 64 * MIB),  # the disk rate is unknown
        (100 * MIB, None, 2000 * MIB, 64 * MIB, 64 * MIB),  # beside a small budget the window is small
        (3000 * MIB, None, 2000 * MIB, 300 * MIB, 300 * MIB),
        (20_000 * MIB, None, 2000 * MIB, 500 * MIB, 2000 * MIB),
        (20_000 * MIB, None, 100 * MIB, 64 * MIB, 2000 * MIB),  # a slow disk
        (20_000 * MIB, 5 * MIB, 10_000 * MIB, 5 * MIB, 5 * MIB),  # the user has set it
    ],
)
def test_the_window_follows_the_disk_and_the_budget(room: int, fixed: int | None, rate: int, window: int, widest: int):
    pool = Pool(room, fixed)
    with available(1 << 40):
        pool.reconsider(anew=True)
    pool.learn_rate(100 * MIB, 100 * MIB / rate if rate else 0)

    assert (window, widest) == (pool.window, pool.widest)


def test_short_reads_do_not_change_the_disk_rate():
    pool = Pool(20_000 * MIB)
    pool.learn_rate(MIB, 1e-6)
    assert 0 == pool.rate

    pool.learn_rate(8 * MIB, 0.01)
    pool.learn_rate(8 * MIB, 0.02)

    assert 400 * MIB < pool.rate < 800 * MIB


def blocks_of(pool: Pool, blocks: list[list[int]]) -> tuple[list[list[Value]], Users]:
    """Values of these sizes, used block by block."""
    made = []
    for start, sizes in enumerate(blocks):
        values = values_of(pool, sizes, start << 40)
        made.append(values)
    return made, Users(lambda: made)


def streams(block: list[Value]) -> int:
    return sum(value.nbytes for value in block if not value.kept)


BLOCK = [8 * MIB] * 4 + [22 * MIB] * 3  # a Llama of a gigabyte


def test_the_streaming_part_of_a_block_fits_beside_resident_values():
    pool = Pool(283 * MIB)
    blocks, users = blocks_of(pool, [*([BLOCK] * 8), [62 * MIB]])
    pool.users.append(users)
    pool.reconsider(anew=True)

    stays = sum(value.nbytes for block in blocks for value in block if value.kept)
    most = max(map(streams, blocks))
    assert WINDOW // 2 < pool.at_a_time - SMALL <= most <= pool.at_a_time
    assert stays + most <= 283 * MIB + WINDOW // 2
    assert sum(map(streams, blocks)) <= 1.08 * (sum(sum(BLOCK) for _ in range(8)) + 62 * MIB - 283 * MIB)


@given(
    blocks=st.lists(st.lists(st.integers(SMALL + 1, 20 * MIB), max_size=6), min_size=1, max_size=8),
    budget=st.integers(0, 200 * MIB),
    others=st.integers(0, 8 * MIB),
)
def test_any_blocks_stay_within_the_budget(blocks: list[list[int]], budget: int, others: int):
    pool = Pool(budget)
    made, users = blocks_of(pool, blocks)
    users.others = others
    pool.users.append(users)
    pool.reconsider(anew=True)

    stays = sum(value.nbytes for block in made for value in block if value.kept)
    assert stays <= max(0, budget - pool.reserved)
    if budget >= sum(map(sum, blocks)):
        assert stays == sum(map(sum, blocks))
    elif pool.at_a_time < others + min(pool.most_at_a_time, max(map(sum, blocks))):
        assert max(map(streams, made)) + others <= pool.at_a_time


def test_values_of_a_block_that_have_another_budget_count_there_alone():
    pool, other = Pool(64 * MIB), Pool(64 * MIB)
    [block], users = blocks_of(pool, [BLOCK])
    pool.users.append(users)
    pool.reconsider(anew=True)
    before = pool.at_a_time, [value.kept for value in block]

    block += values_of(other, [20 * MIB] * 4, 1 << 41)
    pool.reconsider(anew=True)

    assert before == (pool.at_a_time, [value.kept for value in block[:-4]])


@pytest.mark.parametrize("budget", [100, 150, 200])
def test_the_next_users_of_blocks_find_the_same_values_resident(budget: int):
    pool = Pool(budget * MIB)
    blocks, users = blocks_of(pool, [BLOCK] * 4)
    before: list[Value] = []
    for _ in range(3):
        pool.users.append(users)
        pool.reconsider(anew=True)
        found = [value for block in blocks for value in block if value.kept]
        assert before in ([], found)
        for value in found:  # they are read
            value.checked_until = 1.0
        pool.users.remove(users)
        pool.reconsider(anew=True)
        before = found

    assert before
    assert 0 == pool.reserved


def test_small_and_pinned_values_stay_whatever_the_plan():
    pool = Pool(2 * MIB)
    values = values_of(pool, [MIB, SMALL, MIB, SMALL, MIB, MIB])
    values[0].pinned = values[5].pinned = True

    leaving = pool.reconsider(anew=True)

    assert {1, 3} < {0, 1, 3, 5} == set(kept(values))
    assert set(leaving) <= {values[2], values[4]}


def test_values_added_one_by_one_are_planned_for():
    pool = Pool(10 * MIB)
    values = [value for place in range(40) for value in values_of(pool, [MIB], place * MIB)]

    assert 8 <= len(kept(values)) <= 10
    assert kept(values)[-1] > 20


@given(share=st.floats(0.1, 0.9), sizes=st.lists(st.integers(SMALL + 1, 8 * MIB), min_size=2, max_size=60))
def test_on_a_device_what_stays_after_a_first_pass_is_there(share: float, sizes: list[int]):
    """So that the second pass sends what exceeds the budget, and no more."""
    pool, values, there = OnDevice(int(share * sum(sizes)), torch.device("meta")), list[Value](), set[Value]()
    for place, size in enumerate(sizes):
        value = Value(pool, FILE, place * 8 * MIB, size, shared=False)  # type: ignore[arg-type]
        values.append(value)
        for left in pool.add([value]):
            left.checked_until = 0.0
            there.discard(left)
        if value.kept:
            value.checked_until = 1.0  # it was sent
            there.add(value)

        assert sum(one.nbytes for one in there) <= pool.max_memory
    stays = {value for value in values if value.kept}
    assert there <= stays
    assert all(value.nbytes > pool.max_memory - sum(one.nbytes for one in stays) for value in values if not value.kept)


@given(share=st.floats(0.1, 0.9), count=st.integers(20, 200))
def test_on_a_device_values_of_a_first_pass_are_spread_evenly(share: float, count: int):
    """Though how many there are is known only at its end."""
    pool, values = OnDevice(int(share * count * MIB), torch.device("meta")), list[Value]()
    for place in range(count):
        [value] = values_of(pool, [MIB], place * MIB)
        values.append(value)
        value.checked_until = float(value.kept)

    for done in range(count):
        assert abs(len(kept(values[:done])) - share * done) <= 3


def test_deleted_values_free_their_memory():
    pool = Pool(4 * MIB)
    first = values_of(pool, [MIB] * 4)
    del first
    gc.collect()

    second = values_of(pool, [MIB] * 4)

    assert 4 == len(kept(second))
    assert 4 == len(pool.values())


def test_available_memory_is_not_queried_at_each_read(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []

    def counted() -> int:
        asked.append(1)
        return 10 * MIB

    monkeypatch.setattr(plan, "available_bytes", counted)
    pool = Pool()
    values_of(pool, [MIB] * 20)
    for _ in range(100):
        pool.reconsider()

    assert 1 == len(asked)
