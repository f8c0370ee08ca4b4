"""Figures in the README's table match the result files."""

from __future__ import annotations

import json
import re
from statistics import median

import pytest

from bench.peers import IN_MEMORY, OURS
from bench.picture import RESULTS
from tests.processes import ROOT

# For each row of the table: the file, and the case in it.
ROWS = {
    "bytes written by loading": ("2026-11-21-loading.json", "generate: bytes written by loading"),
    "warm, time per token": ("2026-11-21-loading.json", "generate: a token"),
    "peak anonymous memory, warm": ("2026-11-21-loading.json", "generate: peak anonymous memory"),
    "cold, the first pass, one token": ("2026-11-23-cold-capped.json", "cold, first pass: prompt of 1"),
    "cold, a later pass, one token": ("2026-11-23-cold-capped.json", "cold, later: prompt of 1"),
    "a model of 30 GB, nothing set, time per token (one round)": (
        "2026-11-23-larger.json",
        "larger, dense: a token",
    ),
    "a model of 30 GB, bytes read per token": ("2026-11-23-larger.json", "larger, dense: bytes read, a token"),
    "capped, the model 1.5 times the budget, time per token": ("2026-11-23-cold-capped.json", "capped, 1.5x: a token"),
    "capped, bytes read per token": ("2026-11-23-cold-capped.json", "capped, 1.5x: bytes read, a token"),
}
ARMS = {
    "transformers": "transformers",
    "transformers, on disk": "transformers",
    "mapped, plain transformers": IN_MEMORY,
    "accelerate": "accelerate",
    "compressed-tensors": "compressed-tensors",
}
UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "MB": 1e6, "GB": 1e9}


def table() -> dict[str, list[str]]:
    """The cells of the README's table, by row name."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What was measured")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows[2:]}


def figure(name: str) -> dict:
    file, case = ROWS[name]
    figures = json.loads((RESULTS / file).read_text(encoding="utf-8"))["figures"]
    return next(one for one in figures if one["case"] == case)


def are_one(said: str, measured: float) -> bool:
    """Whether a figure with a unit equals a number, to its precision."""
    digits, unit = re.fullmatch(r"([\d.]+) ?(\w*)", said).groups()
    last = 10.0 ** -len(digits.partition(".")[2])
    return abs(measured / UNITS[unit] - float(digits)) <= last / 2 * 1.001


def test_every_row_of_the_table_has_a_result():
    assert ROWS.keys() == table().keys()


@pytest.mark.parametrize("name", ROWS)
def test_a_figure_is_that_of_the_result(name):
    ours, peers, limit = table()[name]
    found = figure(name)

    assert are_one(ours, median(found["values"][OURS]))
    for said, arm in re.findall(r"([\d.]+(?: \w+)?) \(([^)]*)\)", peers):
        assert are_one(said, median(found["values"][ARMS[arm]]))
    if limit:
        assert are_one(limit.partition(" (")[0], median(found["limit"]))


@pytest.mark.parametrize("name", ROWS)
def test_the_peer_is_the_best_one(name):
    values = {arm: median(rounds) for arm, rounds in figure(name)["values"].items() if rounds and arm != OURS}
    arms = [ARMS[arm] for arm in re.findall(r"\(([^)]*)\)", table()[name][1])]

    assert values[arms[0]] == min(values.values())


def test_a_figure_is_compared_to_its_last_digit():
    assert are_one("0.91 s", 0.9083)
    assert are_one("58 ms", 0.0581)
    assert not are_one("0.90 s", 0.9083)
    assert not are_one("58 ms", 0.0589)
