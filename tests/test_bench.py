"""The benchmarks at toy size: they measure what they say, and leave nothing out. Never how fast."""

from __future__ import annotations

import ast
import importlib
import json
import math
import os
import subprocess
import sys
from functools import partial

import pytest
import torch

from bench import cache, memory_cap, page_cache, report
from bench.apart import run_apart
from bench.limits import MIB
from bench.models import bytes_of_a_pass, bytes_of_a_token, toy_sliced_experts, toy_sliced_llama
from bench.peers import IN_MEMORY, OURS, WAYS, absent
from bench.rounds import Figure, in_turn
from bench.row_stores import Reader, values_of
from tests.page_cache import needs_memory_cap
from tests.processes import ROOT

CASES = (
    *("dispatch", "load", "decode", "generate", "forms", "gguf", "experts", "routed", "cold", "capped", "larger"),
    *(
        "larger-packed",
        "drafts",
        "plan",
        "batches",
        "larger-batches",
        "serve",
        "ranks",
        "update",
        "small",
        "tables",
        "cache",
    ),
)
LACKING = (  # may be missing on another machine
    *("is not installed", "cannot grow", "memory cgroup", "O_DIRECT", "stay cached", "no room"),
)


@pytest.mark.parametrize("path", sorted((ROOT / "bench").glob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_uses_names_that_modules_of_the_package_have(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "offload":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = (ROOT / f"{whole.replace('.', '/')}.py").exists()
                modules |= {alias.asname or alias.name: importlib.import_module(whole)} if is_module else {}
                assert is_module or hasattr(importlib.import_module(node.module), alias.name), whole
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            assert hasattr(modules[node.value.id], node.attr), f"{node.value.id}.{node.attr}"


@pytest.fixture
def figure():
    values = {OURS: [2.0, 4.0, 8.0], "slow": [8.0, 8.0, 16.0], "slower": [9.0, 9.0, 90.0]}
    return Figure("a case", "s", values, [1.0, 4.0, 2.0], "the best", {"absent": "absent is not installed"})


@pytest.mark.slow(25)
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(("dispatch", "generate", "update"), id="some"),
        pytest.param(CASES, id="all", marks=pytest.mark.campaign("bench", only=True)),
    ],
)
def test_a_toy_run_has_its_cases_and_every_arm_with_the_same_answers_or_a_reason(tmp_path, cases):
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    only = [] if cases is CASES else ["--only", ",".join(cases)]
    command = [sys.executable, "-m", "bench", "--quick", *only, "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)

    assert not done.returncode, done.stdout + done.stderr
    (said,) = (tmp_path / "out").glob("*.json")
    found = json.loads(said.read_text())
    assert str(tmp_path) not in said.read_text()
    assert {"processor", "cores", "memory", "kernel", "file system", "versions", "date"} <= found.keys()
    assert found["bytes a second"]["memcpy"] > 0
    assert set(cases) == {figure["case"].split(":")[0].split(",")[0] for figure in found["figures"]}
    for figure in found["figures"]:
        _require_whole(figure)
        assert figure["case"] in done.stdout
    memory = [*(tmp_path / "out").glob("*-memory-*.png")]
    assert memory
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in memory)
    assert not [*(tmp_path / "cache" / "offload").glob("tmp*")]


def _require_whole(figure):
    missing = figure["missing"]
    if figure["case"].startswith(("forms", "routed", "batches, experts", "larger, experts")):  # not for every peer
        missing = {arm: reason for arm, reason in missing.items() if arm == OURS}
    assert all(any(lack in reason for lack in LACKING) for reason in missing.values()), (figure["case"], missing)
    assert OURS in figure["values"] or figure["missing"]
    numbers = [number for values in figure["values"].values() for number in values]
    assert all(math.isfinite(number) for number in numbers)
    for ratio in (figure["ratio to peer"], figure["ratio to limit"]):
        assert ratio is None or 0 < ratio < math.inf


def test_a_ratio_is_the_median_of_pairs_and_more_is_better(figure):
    assert figure.best_peer == "slow"
    assert figure.ratio_to_peer == 2
    assert figure.ratio_to_limit == 0.5
    assert Figure("bytes", "B", {OURS: [0.0], "other": [5.0]}, [], "", {}).ratio_to_peer is None


def test_the_table_lists_all_arms_and_the_reasons_of_missing_ones(figure):
    assert ("a case", "4 s", "8 s (slow)", "2 s (the best)", "2.00", "0.50") == report.row(figure)
    assert ["absent: no figure in a case: absent is not installed"] == report.reasons([figure])


def test_arms_run_in_turn_each_after_different_ones():
    ran: list[str] = []
    arms = {name: partial(ran.append, name) for name in "abcd"}

    in_turn(arms, 20, {})

    rounds = ["".join(ran[at : at + 4]) for at in range(0, len(ran), 4)]
    assert rounds[0] == "abcd"
    assert {"abcd"} == {"".join(sorted(order)) for order in rounds}
    assert {"a", "b", "c"} == {order[order.index("d") - 1] for order in rounds if order.index("d")}
    before, ran[:] = rounds, []
    in_turn(arms, 20, {})
    assert before == ["".join(ran[at : at + 4]) for at in range(0, len(ran), 4)]


def test_an_arm_that_fails_or_answers_otherwise_has_a_reason_and_does_not_stop_the_others():
    done = in_turn({"a": lambda: 1, "b": lambda: 1 / 0, "c": lambda: 2, "wrong": lambda: 3}, 2, {"c": "not installed"})
    assert {"a": [1, 1], "wrong": [3, 3]} == done.results
    assert {"b": "ZeroDivisionError: division by zero", "c": "not installed"} == done.missing

    done.strike(lambda answer: answer, 1, "tokens")

    assert {"a": [1, 1]} == done.results
    assert "tokens differ" in done.missing["wrong"]


def test_a_missing_package_is_reported():
    assert {"peer": "no_such_package is not installed"} == absent({"peer": "no_such_package", OURS: "offload"})
    assert {IN_MEMORY, OURS} <= WAYS.keys()


def test_a_failure_in_another_process_or_its_end_is_raised_here():
    with pytest.raises(ValueError, match="invalid literal"):
        run_apart(int, "x")
    with pytest.raises(RuntimeError, match="killed"):
        run_apart(os._exit, 9)


def test_warm_files_are_cached_and_cold_files_are_not(tmp_path):
    file = tmp_path / "values"
    file.write_bytes(bytes(3 * MIB + 5))
    page_cache.warm([file])
    assert page_cache.cached_fraction([file]) == 1

    try:
        page_cache.make_cold([file])
    except RuntimeError:
        pytest.skip("this file system cannot drop its cache")

    assert page_cache.cached_fraction([file]) == 0
    assert file.read_bytes() == bytes(3 * MIB + 5)


def _take(group, size):
    group.join()
    return len(bytearray(os.urandom(1)) * size)


@needs_memory_cap
def test_a_process_in_a_capped_group_is_counted_or_killed_and_the_group_goes():
    with memory_cap.memory_cap(64 * MIB) as group:
        run_apart(_take, group, 32 * MIB)
        most = group.facts()["max_usage_in_bytes"]
        with pytest.raises(RuntimeError, match="memory cap"):
            run_apart(_take, group, 96 * MIB)

    assert 32 * MIB <= most <= 64 * MIB
    assert not group.folder.exists()


@pytest.mark.parametrize("read", [cache.read_batches, cache.read_all])
def test_rows_that_were_not_asked_for_are_an_error(read):
    table = cache.Table(rows=512, columns=4, batches=2, seconds=1.0)
    shifted = Reader(
        lambda rows: values_of(rows + 1, 4), lambda start, stop: values_of(torch.arange(start, stop) + 1, 4)
    )

    with pytest.raises(ValueError, match="these are not the values of the rows"):
        read(shifted, table)


def test_a_token_needs_the_experts_that_it_is_routed_to(tmp_path):
    dense, experts = toy_sliced_llama(tmp_path / "dense", 0), toy_sliced_experts(tmp_path / "experts", 0)
    layers, each = 2, 3 * 64 * 64 * 2  # of an expert, in bytes

    assert bytes_of_a_pass(dense) == bytes_of_a_token(dense)
    assert layers * (8 - 4) * each == bytes_of_a_pass(experts) - bytes_of_a_token(experts)
