"""The stages of a value: which follow one another, and that nothing else changes them."""

from __future__ import annotations

import ast

import pytest

from offload.prefetch.engine import Engine
from offload.prefetch.pages import Range
from offload.prefetch.plan import AWAY, IN_USE, LEAVING, QUEUED, READING, RESIDENT, Stage
from tests.engines import rest
from tests.prefetch.fakes import MIB, Made, Memory, made, read, seed
from tests.processes import ROOT


def test_a_value_does_not_skip_stages(memory: Memory):
    [value] = made(memory, "a")

    with pytest.raises(AssertionError, match="nothing is known about its pages can't become one that is being read"):
        value.move_to(READING)

    assert AWAY is value.stage


def test_a_value_can_be_dropped_by_two_threads_at_once(memory: Memory, monkeypatch: pytest.MonkeyPatch):
    """As by the dropper, and by `evict`: the second one has looked at the stage before the first one changes it."""
    [value] = made(memory, "a")
    value.stage = LEAVING
    move_to = Made.move_to

    def late(self: Made, stage: Stage) -> None:
        monkeypatch.setattr(Made, "move_to", move_to)
        self.let_go()
        self.move_to(stage)

    monkeypatch.setattr(Made, "move_to", late)
    value.let_go()

    assert AWAY is value.stage


def test_a_value_that_is_used_while_it_is_dropped_stays_in_use(memory: Memory, monkeypatch: pytest.MonkeyPatch):
    [value] = made(memory, "a")
    value.stage = LEAVING
    monkeypatch.setattr(Range, "let_go", lambda self: self.move_to(IN_USE))

    value.let_go()

    assert IN_USE is value.stage


def test_values_that_wait_to_be_read_can_be_given_up(engine: Engine, memory: Memory):
    with engine.reader.lock:
        stream = engine.streams.own()
        stream.bring_soon(made(memory, "abc"))
        stream.give_up()
    rest(engine)

    assert [] == memory.log
    assert 0 == engine.reader.counts.wasted


def test_one_function_assigns_stages():
    """Besides the constructors of values and of loads."""
    found = []
    for path in sorted((ROOT / "offload").rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                found += [(path.name, function.name) for node in ast.walk(function) if _assigns_a_stage(node)]

    assert [("direct.py", "__init__"), ("plan.py", "move_to"), ("plan.py", "__init__")] == found


def _assigns_a_stage(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "stage" and isinstance(node.ctx, ast.Store)


def test_a_value_that_stays_is_in_use_until_it_is_evicted(engine: Engine, memory: Memory):
    [value] = made(memory, "a", budget=MIB)
    read(engine, [value])
    assert IN_USE is value.stage

    value.let_go()

    assert AWAY is value.stage


def test_a_value_that_is_evicted_while_it_is_queued_is_still_read_ahead(engine: Engine, memory: Memory):
    a, b = seed(made(memory, "ab"))
    with engine.reader.lock:
        engine.reader.queue(b)
        b.let_go()
        assert QUEUED is b.stage
        work = engine.reader.take()
    assert work is not None
    engine.reader.carry_out(work)

    assert RESIDENT is b.stage
    assert AWAY is a.stage


def test_a_value_that_is_needed_before_it_is_dropped_stays(engine: Engine, memory: Memory):
    [value] = made(memory, "a")
    engine.arrive(value)
    with engine.reader.lock:
        engine.reader.drop(value)
        assert LEAVING is value.stage
        leaving = engine.reader.take_leaving()
        engine.streams.own()._use(value)
    engine.reader.let_go(leaving)

    assert IN_USE is value.stage
    assert value.is_cached()


def test_a_queued_value_is_not_dropped_for_another_thread(engine: Engine, memory: Memory):
    [value] = made(memory, "a", window=0)
    value.stage = QUEUED
    with engine.reader.lock:
        engine.reader.drop(value)

    assert QUEUED is value.stage
    assert 0 == engine.reader.leaving_bytes


def test_a_value_that_does_not_stay_leaves_after_an_interrupt(engine: Engine, memory: Memory, monkeypatch):
    [value] = made(memory, "a")

    def interrupted(self: Made, **_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Made, "bring_in", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.arrive(value)
    rest(engine)

    assert AWAY is value.stage
