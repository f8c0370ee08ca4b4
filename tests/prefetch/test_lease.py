"""Values that several threads use one after the other stay until all have used them, and are then dropped."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from offload.prefetch.engine import Engine
from offload.prefetch.order import Lease
from offload.prefetch.value import PageState
from tests.engines import rest
from tests.prefetch.fakes import MIB, Made, Memory, made, read, seed


def in_thread(work: object) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def lockstep(engine: Engine, lease: Lease, blocks: list[list[Made]], threads: int) -> None:
    """Each block is read by one thread after the other."""
    for block in blocks:
        for _ in range(threads):

            def work(block: list[Made] = block) -> None:
                with engine.reader.lock:
                    engine.streams.join(lease._stream)
                read(engine, block)

            in_thread(work)
        lease.move_on()


def test_each_value_is_read_once_for_all_threads(engine: Engine, memory: Memory) -> None:
    values = made(memory, "abcdefgh")
    lease = Lease(engine.streams)

    lockstep(engine, lease, [values[:4], values[4:]], threads=5)

    assert "abcdefgh" == "".join(sorted(name for name, _ in memory.log))
    lease.end()
    rest(engine)
    assert not memory.here


def test_the_next_block_is_read_ahead_while_one_is_held(engine: Engine, memory: Memory) -> None:
    values = seed(made(memory, "abcdefgh", window=4 * MIB))
    lease = Lease(engine.streams)

    lockstep(engine, lease, [values[:4]], threads=3)
    rest(engine)

    assert {("e", True), ("f", True)} <= set(memory.log)
    assert len(memory.log) == len(set(memory.log)) <= 8
    lease.end()


def test_the_end_of_a_lease_drops_values_ahead_and_frees_their_part_of_the_window(
    engine: Engine, memory: Memory
) -> None:
    values = seed(made(memory, "abcdefgh", window=4 * MIB))
    lease = Lease(engine.streams)
    lockstep(engine, lease, [values[:2]], threads=2)
    rest(engine)
    assert memory.here

    lease.end()
    rest(engine)

    assert not memory.here
    assert not engine.streams.live


def test_held_values_count_towards_the_budget_from_then_on(engine: Engine, memory: Memory) -> None:
    values = made(memory, "abcdefgh", budget=4 * MIB, window=MIB)
    pool = values[0].pool
    lease = Lease(engine.streams)
    assert 4 == sum(value.kept for value in values)

    lockstep(engine, lease, [values[:4], values[4:]], threads=2)

    assert pool.reserved > 0
    assert sum(value.nbytes for value in values if value.kept) <= 4 * MIB - pool.reserved
    lease.end()
    assert 0 == pool.reserved
    assert 4 == sum(value.kept for value in values)


def test_blocks_that_are_expected_have_their_part_of_the_budget_before_they_are_read(
    engine: Engine, memory: Memory
) -> None:
    values, states = made(memory, "abcdefgh", budget=6 * MIB, window=MIB), [PageState(), PageState()]
    for state, block in zip(states, (values[:4], values[4:]), strict=True):
        state.ranges = {(value.start, value.nbytes): value for value in block}
    lease = Lease(engine.streams)

    lease.expect([[SimpleNamespace(page_state=state)] for state in states])  # type: ignore[list-item]

    assert 0 < values[0].pool.reserved < 2 * MIB
    lease.end()
    assert 0 == values[0].pool.reserved


def test_values_that_do_not_fit_are_read_each_time(engine: Engine, memory: Memory) -> None:
    values = made(memory, "abcdefgh", window=2 * MIB)
    lease = Lease(engine.streams)
    lockstep(engine, lease, [values], threads=3)

    assert len(memory.log) > 8
    assert memory.most <= 5 * MIB
    lease.end()


def test_several_leases_end_in_any_order(engine: Engine, memory: Memory) -> None:
    values = made(memory, "abcdefgh", budget=4 * MIB, window=MIB)
    first, second = Lease(engine.streams), Lease(engine.streams)
    lockstep(engine, first, [values[:4]], threads=2)
    lockstep(engine, second, [values[2:]], threads=2)
    first.end()
    second.end()

    assert 0 == values[0].pool.reserved
    assert not any(value.is_held for value in values)
