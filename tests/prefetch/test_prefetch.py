"""Reading ahead, with fake values: what is read when, in which order, and how much at a time."""

from __future__ import annotations

import threading
import time

import pytest

from offload.prefetch import engine as engines
from offload.prefetch import plan
from offload.prefetch.engine import CHECKED_FOR
from offload.prefetch.plan import LEAVING, QUEUED, READING, RESIDENT, SMALL, Pool
from offload.system import clock
from tests.engines import rest
from tests.prefetch.fakes import MIB, Made, made, read, seed
from tests.processes import in_fork


def test_the_order_of_the_first_pass_is_read_ahead_in_the_second(engine, memory):
    values = made(memory, "abcdefgh")
    read(engine, values)
    assert [(name, False) for name in "abcdefgh"] == memory.log
    memory.log.clear()

    read(engine, values)

    assert [("a", False)] == [entry for entry in memory.log if not entry[1]]
    assert "bcdefghab" == "".join(name for name, by_reader in memory.log if by_reader)  # and on to the next pass
    assert (7, 0) == (engine.reader.counts.ahead, engine.reader.counts.wasted)
    assert (16 + 2) * MIB == engine.reader.counts.bytes_read
    memory.log.clear()
    read(engine, values * 3)
    assert [] == [entry for entry in memory.log if not entry[1]]
    assert 0 == engine.reader.counts.wasted


def test_reads_of_ops_and_values_that_arrive_meanwhile_are_counted(engine, memory, monkeypatch, still_clock):
    def late(self: Made, **_: object) -> None:
        still_clock.time += 3
        memory.take(self)

    first, second = made(memory, "ab", budget=2 * MIB)
    monkeypatch.setattr(Made, "missing_bytes", lambda self: self.nbytes // 4)
    monkeypatch.setattr(Made, "bring_in", late)
    engine.arrive(first)
    looks = iter([False, True])
    monkeypatch.setattr(Made, "is_cached", lambda _: next(looks))
    engine.arrive(second)

    counts = engine.reader.counts
    assert (1, MIB // 4, 3.0, 1) == (counts.missed, counts.bytes_read, counts.waited, counts.found)


@pytest.mark.usefixtures("still_clock")
def test_values_that_stay_are_looked_at_again_one_by_one(engine, memory):
    """So that it is soon noticed if something else takes their memory."""
    values = made(memory, "abcdefgh", budget=8 * MIB)
    for value in values:
        engine.arrive(value)
    left = [value.checked_until - clock.now() for value in values]

    assert all(0 < one <= CHECKED_FOR for one in left)
    assert len(set(left)) > 1


def test_an_announced_order_is_read_ahead_at_once(engine, memory):
    values = seed(made(memory, "abcdefgh"))

    read(engine, values)

    assert [("a", False)] == [entry for entry in memory.log if not entry[1]]
    assert 7 == engine.reader.counts.ahead


@pytest.mark.parametrize("order", ["abcdefedcb", "abcdefuvwxyz"], ids=["forward and backward", "two models in turn"])
def test_an_order_that_was_read_twice_is_not_missed(engine, memory, order):
    """On the way back, another value follows the same one."""
    values = dict(zip("abcdefuvwxyz", made(memory, "abcdefuvwxyz"), strict=True))
    passes = [values[name] for name in order * 2]
    read(engine, passes)
    missed, wasted = engine.reader.counts.missed, engine.reader.counts.wasted

    read(engine, passes)

    assert missed == engine.reader.counts.missed
    assert "u" in order or wasted == engine.reader.counts.wasted


def test_little_is_wasted_where_the_order_branches(engine, memory):
    """After `r`, any of the experts may follow, as picked by a router; what follows these is still predicted."""
    *layer, router = made(memory, "abcdr")
    experts = made(memory, "0123456789")
    picks = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
    for pick in picks:
        read(engine, [*layer, router, experts[pick]])

    assert engine.reader.counts.wasted <= 4
    assert engine.reader.counts.ahead >= 3 * len(picks)
    for name in "0123456789":
        read_ahead = [entry for entry in memory.log if entry == (name, True)]
        assert len(read_ahead) <= 1


def test_a_branch_that_settles_is_read_ahead_again(engine, memory):
    a, b, c, d = made(memory, "abcd")
    read(engine, [a, b, c, a, b, d, a, b, c, a, b, c, a, b])

    assert c.stage is RESIDENT


def test_small_values_are_not_part_of_the_order(engine, memory):
    """They are read once; their absence later must not look like a branch."""
    pool = Pool(0, 4 * MIB)
    large = [Made(name, memory, pool, MIB) for name in "ABCDEF"]
    small = [Made(name, memory, pool, SMALL) for name in "abcdef"]
    pool.add([*large, *small])
    read(engine, [value for pair in zip(small, large, strict=True) for value in pair])
    read(engine, large)
    missed = engine.reader.counts.missed

    read(engine, large * 2)

    assert missed == engine.reader.counts.missed
    assert set(small) <= memory.here


def test_values_read_in_another_order_than_announced_are_still_read_ahead(engine, memory):
    """Query, key and value may be read in any order."""
    values = seed(made(memory, "abcdefghij", window=6 * MIB))

    read(engine, [values[index] for index in (0, 2, 1, 3, 5, 4, 6, 7, 9, 8)])

    assert 1 == engine.reader.counts.missed
    assert 0 == engine.reader.counts.wasted


def test_a_wrong_guess_is_given_up(engine, memory):
    """After an early exit the rest is not waited for, and what was read in vain is dropped."""
    values = seed(made(memory, "abcdefgh"))
    others = made(memory, "uvwxyz")

    read(engine, [values[0], *others])
    rest(engine)

    assert 3 == engine.reader.counts.wasted
    assert memory.here <= set(others)


@pytest.mark.parametrize(("size", "expected"), [(8 * MIB, 4), (10 * MIB, 3), (17 * MIB, 1), (40 * MIB, 1)])
def test_values_are_requested_together_up_to_32_mib(engine, memory, size, expected):
    """The disk is faster with more requests."""
    values = made(memory, "abcdef", size=size, window=6 * size, is_picked=True)
    with engine.reader.lock:
        engine.streams.own().bring_soon(values)
        work = engine.reader.take()
        assert work is not None
        assert values[:expected] == work
    engine.reader.carry_out(work)
    rest(engine)

    assert all(value.stage is RESIDENT for value in values)


@pytest.mark.parametrize(
    ("names", "budget", "expected"), [("abc", 0, [True] * 3), ("ab", 9, [False] * 2), ("a", 0, [])]
)
def test_values_requested_together_are_announced_first(engine, memory, monkeypatch, names, budget, expected):
    """A single one, or one run in a file, is read at once. They count as read, though they arrive meanwhile."""
    announced: dict[Made, bool] = {}
    monkeypatch.setattr(Made, "announce", lambda self, exactly: announced.setdefault(self, exactly))
    monkeypatch.setattr(Made, "missing_bytes", lambda self: 0 if self in announced else self.nbytes)
    values = made(memory, names, budget=budget * MIB, window=8 * MIB)
    with engine.reader.lock:
        engine.streams.own().bring_soon(values)
    rest(engine)

    assert expected == list(announced.values())
    assert len(names) * MIB == engine.reader.counts.bytes_read


@pytest.mark.parametrize("window", [2 * MIB, 4 * MIB, 8 * MIB])
def test_streaming_values_stay_within_the_window(engine, memory, window):
    """Plus a value in use."""
    values = seed(made(memory, "abcdefghijklmnopqrstuvwxyz", window=window))

    read(engine, values * 3)

    assert memory.most <= window + MIB


def test_the_disk_does_not_wait_for_what_is_dropped(engine, memory, monkeypatch):
    """Dropping takes the kernel a while."""
    values = seed(made(memory, "abcdefghijklmnop", window=8 * MIB))
    drop, has_begun, may_go, droppers, read_before = memory.drop, threading.Event(), threading.Event(), set(), []
    went_on = []

    def slowly(value: Made) -> None:
        read_before.append(len(memory.log))
        droppers.add(threading.current_thread())
        has_begun.set()
        went_on.append(may_go.wait(10))
        may_go.set()
        drop(value)

    monkeypatch.setattr(memory, "drop", slowly)
    for value in values:
        while value.stage in (QUEUED, READING):
            time.sleep(0.0005)
        engine.arrive(value)
        if any(one.stage is LEAVING for one in values):
            assert has_begun.wait(60)
    may_go.set()
    rest(engine)

    assert all(went_on)  # all values were read while the first was being dropped
    assert engine.reader.thread not in droppers
    assert any(by_reader for _, by_reader in memory.log[read_before[0] :])


@pytest.mark.parametrize(("count", "most"), [(5, 7), (12, 24)])
def test_streaming_values_that_fit_in_the_window_are_not_dropped_just_before_their_use(engine, memory, count, most):
    """A value used a moment ago may be needed again next."""
    values = made(memory, "abcdefghijklmnop"[:count], size=4 * MIB, window=64 * MIB)

    read(engine, values * 6)

    assert len(memory.log) <= most
    for stream in engine.streams.live:
        assert stream.in_flight == sum(value.nbytes for value in [*stream.ahead, *stream._used])


def test_a_value_that_is_dropped_while_it_is_read_is_read_again(engine, memory):
    """It must not be assumed to be in memory."""
    value, *_ = made(memory, "a")
    value.stage = RESIDENT
    value.let_go()

    engine.arrive(value)

    assert value.is_cached()


def test_a_value_dropped_while_it_waits_in_a_batch_does_not_stay(engine, memory, monkeypatch):
    """The reader has asked for it already."""
    values = made(memory, "abcd", window=16 * MIB, is_picked=True)
    bring_in, begins, goes_on = Made.bring_in, threading.Event(), threading.Event()

    def slowly(self: Made, **given: object) -> None:
        begins.set()
        goes_on.wait(10)
        bring_in(self, **given)

    monkeypatch.setattr(Made, "bring_in", slowly)
    with engine.reader.lock:
        stream = engine.streams.own()
        stream.bring_soon(values)
    begins.wait(10)
    with engine.reader.lock:
        stream.give_up()
    while engine.reader.leaving_bytes:  # they are dropped before they are read
        time.sleep(0.0005)
    reader = engine.reader.thread
    assert reader is not None
    goes_on.set()
    reader.join(60)
    rest(engine)

    assert not memory.here
    assert 0 == engine.reader.leaving_bytes


def test_a_value_that_is_larger_than_the_window_is_read_ahead_alone(engine, memory):
    values = seed(made(memory, "abcd", size=10 * MIB, window=MIB))

    read(engine, values)

    assert 3 == engine.reader.counts.ahead
    assert memory.most <= 30 * MIB  # in use, ahead, and not yet dropped


def test_the_next_three_values_are_ahead_where_they_are_larger_than_the_window(engine, memory, monkeypatch):
    """If a budget has room for them; otherwise the window is kept."""
    monkeypatch.setattr(plan, "available_bytes", lambda: 1 << 40)
    ahead = []
    for budget in 2500 * MIB, 300 * MIB:
        pool = Pool(budget)
        values = seed([Made(name, memory, pool, 50 * MIB, place << 30) for place, name in enumerate("abcdefgh")])
        pool.add(values)
        for value in values:
            value.kept = False
        assert 64 * MIB == pool.window

        engine.arrive(values[0])
        rest(engine)
        ahead.append("".join(sorted(value.name for value in memory.here & set(values[1:]))))
        engine.streams.own().give_up()

    assert ["bcd", "b"] == ahead


def test_resident_values_are_read_once(engine, memory):
    values = made(memory, "abcdefgh", budget=4 * MIB)
    for _ in range(4):
        read(engine, values)
        for value in values:
            value.checked_until = min(value.checked_until, 0.0)  # simulates a second passing

    kept = [value.name for value in values if value.kept]
    assert 4 == len(kept)
    for name in kept:
        assert 1 == sum(entry[0] == name for entry in memory.log)
    assert 4 * 4 <= sum(entry[0] not in kept for entry in memory.log) <= 4 * 4 + 3


def test_nothing_is_dropped_and_no_thread_runs_if_everything_fits(engine, memory):
    values = made(memory, "abcdefgh", budget=8 * MIB)

    read(engine, values * 3)

    assert set(values) == memory.here
    assert 8 == len(memory.log)
    assert engine.reader.thread is None


def test_all_values_are_read_ahead_again_after_memory_was_taken(engine, memory):
    """One missing value is reason enough to check the others, including small ones."""
    pool = Pool(16 * MIB, 4 * MIB)
    values = [Made(name, memory, pool, SMALL if name in "bd" else MIB) for name in "abcdefgh"]
    pool.add(seed(values))
    read(engine, values)
    memory.here.clear()
    values[0].checked_until = 1e-9  # simulates a second passing, for this one only

    missed = engine.reader.counts.missed
    read(engine, values)

    assert set(values) == memory.here
    assert engine.reader.counts.missed - missed <= 3  # the first, and the two small ones


def test_nothing_is_read_ahead_without_a_window(engine, memory):
    values = seed(made(memory, "abcdefgh", window=0))

    read(engine, values * 2)

    assert 16 == engine.reader.counts.missed
    assert 0 == engine.reader.counts.ahead
    assert memory.most <= 2 * MIB


def test_the_reader_ends_when_it_is_idle_and_starts_again(engine, memory):
    values = seed(made(memory, "abcd"))
    read(engine, values)
    reader = engine.reader.thread
    if reader is not None:
        reader.join(10)
        assert not reader.is_alive()

    read(engine, values)

    assert engine.reader.counts.ahead >= 6


def test_a_value_that_the_reader_cannot_read_is_an_error_for_the_op(engine, memory):
    first, *_ = values = seed([*made(memory, "a"), *made(memory, ["broken"]), *made(memory, "c")])
    engine.arrive(first)
    rest(engine)

    with pytest.raises(OSError, match="broken"):
        engine.arrive(values[1])
    rest(engine)
    engine.arrive(values[2])

    assert values[2].is_cached()


def test_a_failed_reader_is_replaced_and_no_op_waits_forever(engine, memory, monkeypatch):
    """Whatever goes wrong in it."""
    values = seed(made(memory, "abcd"))
    monkeypatch.setattr(threading, "excepthook", lambda *_: None)
    monkeypatch.setattr(engine.reader, "_read", lambda batch: 1 / 0)
    read(engine, values)
    monkeypatch.undo()

    read(engine, values * 2)

    assert engine.reader.counts.ahead > 0


def test_eight_threads_share_one_window(engine, memory):
    """Each reads its own model many times; together they stay within the window."""
    pool = Pool(0, 16 * MIB)
    models = [[Made(f"{thread}{name}", memory, pool, MIB) for name in "abcdefghijkl"] for thread in range(8)]
    for values in models:
        pool.add(seed(values))

    def run(values: list[Made]) -> None:
        for value in values * 5:
            engine.arrive(value)
            time.sleep(0.0005)

    threads = [threading.Thread(target=run, args=(values,)) for values in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rest(engine)

    assert memory.most <= (16 + 2 * 8 + 4) * MIB  # one in use and one leaving per thread, plus the reader's
    assert engine.reader.counts.ahead > 0
    assert 8 * 12 * 5 == engine.reader.counts.ahead + engine.reader.counts.missed + engine.reader.counts.found


def test_threads_that_have_ended_return_their_part_of_the_window(engine, memory):
    values = seed(made(memory, "abcdefgh"))
    thread = threading.Thread(target=engine.arrive, args=(values[0],))
    thread.start()
    thread.join()
    rest(engine)
    assert 4 * MIB == sum(stream.in_flight for stream in engine.streams.live)

    others = seed(made(memory, "stuvwxyz"))
    read(engine, others)

    assert 1 == sum(name in "stuvwxyz" and not by_reader for name, by_reader in memory.log)


def test_a_forked_child_has_an_engine_of_its_own(memory):
    """Even if its parent's reader was working: nothing waits for that one."""
    values = seed(made(memory, "abcd"))
    values[1].stage = READING

    def child() -> bool:
        for value in values:
            engines._ENGINE.arrive(value)
        return values[-1] in memory.here

    assert in_fork(child)
