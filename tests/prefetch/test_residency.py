"""Which values stay in memory under a budget."""

from __future__ import annotations

import gc
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.prefetch import residency
from offload.prefetch.residency import SMALL, Pool, Value

MIB = 1 << 20


class File:
    """Stands for a file."""


FILE = File()


def values_of(pool: Pool, sizes: list[int], start: int = 0) -> list[Value]:
    """Behind one another in a file."""
    starts = itertools.accumulate(sizes, initial=start)
    values = [Value(pool, FILE, start, size, shared=False) for start, size in zip(starts, sizes, strict=False)]  # type: ignore[arg-type]
    pool.add(values)
    return values


def kept(values: list[Value]) -> list[int]:
    return [index for index, value in enumerate(values) if value.kept]


def test_what_fits_stays():
    assert [0, 1, 2] == kept(values_of(Pool(3 * MIB), [MIB] * 3))


def test_half_of_what_does_not_fit_stays_and_is_spread():
    """Not the first half: then the second would be read without a pause to compute in."""
    assert [1, 3, 5, 7] == kept(values_of(Pool(4 * MIB), [MIB] * 8))


def test_without_a_budget_what_is_available_is_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(residency, "available_bytes", lambda: 10 * MIB)

    values = values_of(Pool(), [MIB] * 20)

    assert 8 == len(kept(values))


def test_a_budget_is_never_more_than_what_is_available(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(residency, "available_bytes", lambda: 10 * MIB)

    assert 8 == len(kept(values_of(Pool(15 * MIB, 2 * MIB), [MIB] * 20)))


@given(sizes=st.lists(st.integers(SMALL + 1, 8 * MIB), max_size=40), budget=st.integers(0, 100 * MIB))
def test_the_budget_is_kept_and_used(sizes: list[int], budget: int):
    """What is left of it is less than any value that does not stay."""
    values = values_of(Pool(budget), sizes)

    size = sum(value.nbytes for value in values if value.kept)
    assert size <= budget
    assert all(value.kept or value.nbytes > budget - size for value in values)


@given(share=st.floats(0.1, 0.9), count=st.integers(20, 200))
def test_what_stays_is_spread_evenly(share: float, count: int):
    """At any point of the pass as much has been kept as was due, but for one value."""
    values = values_of(Pool(int(share * count * MIB)), [MIB] * count)

    for done in range(count):
        assert abs(len(kept(values[:done])) - share * done) <= 2


@given(count=st.integers(4, 60), budgets=st.lists(st.integers(0, 60), min_size=1, max_size=6))
def test_another_budget_changes_as_little_as_it_can(count: int, budgets: list[int]):
    """What leaves has to be read again, and what comes too."""
    pool = Pool(count * MIB // 3)
    values = values_of(pool, [MIB] * count)
    for budget in budgets:
        before = set(kept(values))
        pool.max_memory = budget * MIB
        pool.reconsider(anew=True)

        after = set(kept(values))
        assert len(after) == min(budget, count)
        assert before <= after or after <= before


def test_small_and_pinned_values_stay_whatever_the_plan():
    pool = Pool(2 * MIB)
    values = values_of(pool, [MIB, SMALL, MIB, SMALL, MIB, MIB])
    values[0].pinned = values[5].pinned = True

    leaving = pool.reconsider(anew=True)

    assert {1, 3} < {0, 1, 3, 5} == set(kept(values))
    assert set(leaving) <= {values[2], values[4]}


def test_a_smaller_budget_says_what_has_to_leave():
    pool = Pool(4 * MIB)
    values = values_of(pool, [MIB] * 4)
    pool.max_memory = 2 * MIB

    leaving = pool.reconsider(anew=True)

    assert 2 == len(kept(values))
    assert {value for value in values if not value.kept} == set(leaving)


def test_values_that_come_one_by_one_are_planned_for():
    pool = Pool(10 * MIB)
    values = [value for place in range(40) for value in values_of(pool, [MIB], place * MIB)]

    assert 8 <= len(kept(values)) <= 10
    assert kept(values)[-1] > 20


def test_values_that_are_gone_leave_their_room():
    pool = Pool(4 * MIB)
    first = values_of(pool, [MIB] * 4)
    del first
    gc.collect()

    second = values_of(pool, [MIB] * 4)

    assert 4 == len(kept(second))
    assert 4 == len(pool.values())


def test_available_memory_is_not_asked_for_at_each_read(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []

    def available() -> int:
        asked.append(1)
        return 10 * MIB

    monkeypatch.setattr(residency, "available_bytes", available)
    pool = Pool()
    values_of(pool, [MIB] * 20)
    for _ in range(100):
        pool.reconsider()

    assert 1 == len(asked)


def test_a_plan_is_told_in_the_log(caplog: pytest.LogCaptureFixture):
    pool = Pool(3 * MIB)
    values = values_of(pool, [MIB] * 8)  # kept alive: a pool knows the live ones

    with caplog.at_level("DEBUG", "offload.prefetch"):
        pool.reconsider(anew=True)

    assert 8 == len(values)
    assert [f"{3 * MIB} bytes may stay: 3 of 8 values, {8 * MIB} bytes in all"] == caplog.messages
