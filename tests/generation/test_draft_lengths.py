"""The length of a draft follows what passes and drafts cost: passes of an imagined machine, whose times are exact."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from offload.generation.candidates import MOST, PassCosts, Source, looked_up

FIXED = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 63)
SEEDS = range(4)


@dataclass(frozen=True)
class Machine:
    """What a pass over n tokens takes: the slower of reading and computing. An assistant is right at a rate."""

    streams: float = 0.0  # seconds of reading
    experts: float = 0.0  # seconds of reading all; a token picks a sixteenth
    per_token: float = 0.02
    drafting: float = 0.02
    right: float = 0.8

    def seconds(self, tokens: int) -> float:
        return max(self.streams + self.experts * (1 - (15 / 16) ** tokens), 0.1 + self.per_token * tokens)


def tokens_per_second(machine: Machine, length: int | None, seed: int = 0, *, tokens: int = 300) -> float:
    """With drafts of one length; None for the length that follows from what was measured."""
    chance, costs, source = random.Random(seed), PassCosts(), Source(0.7, None)
    time, done = 0.0, 0
    while done < tokens:
        drafted = costs.best([(source, MOST)]).tokens if length is None else length
        wrong = (place for place in range(drafted) if chance.random() >= machine.right)
        accepted, seconds = next(wrong, drafted), machine.seconds(drafted + 1)
        costs.learn(drafted + 1, seconds)
        source.learn(accepted, drafted)
        source.learn_seconds(machine.drafting)
        time += seconds + drafted * machine.drafting
        done += accepted + 1
    return done / time


def share_of_best(machine: Machine, tokens: int) -> float:
    """Of the best fixed length in hindsight, over some texts."""
    best = sum(max(tokens_per_second(machine, length, seed, tokens=tokens) for length in FIXED) for seed in SEEDS)
    return sum(tokens_per_second(machine, None, seed, tokens=tokens) for seed in SEEDS) / best


@pytest.mark.parametrize("right", [0.0, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("drafting", [0.002, 0.05])
@pytest.mark.parametrize("per_token", [0.002, 0.05])
@pytest.mark.parametrize(("streams", "experts"), [(0, 0), (1.3, 0), (4, 0), (0.1, 8)])
def test_drafts_give_0_85_of_the_best_fixed_length_and_never_cost_a_twentieth(
    streams, experts, per_token, drafting, right
):
    machine = Machine(streams, experts, per_token, drafting, right)

    assert share_of_best(machine, 600 if experts else 300) >= 0.85  # what many experts take shows late
    assert tokens_per_second(machine, None) >= 0.95 * tokens_per_second(machine, 0)


def known(machine: Machine, *lengths: int) -> PassCosts:
    """Of a machine whose passes with such drafts were measured."""
    costs = PassCosts()
    for drafted in lengths:
        costs.learn(drafted + 1, machine.seconds(drafted + 1))
    return costs


def test_drafts_are_longer_on_a_slow_disk_than_in_memory():
    source = Source(0.8, 0.01)
    disk, memory = (known(machine, 0, 4, 16).best([(source, MOST)]) for machine in (Machine(streams=4), Machine()))

    assert disk.tokens > 2 * memory.tokens > 0


def chosen(costs: PassCosts, source: Source, count: int) -> list[int]:
    """The lengths of drafts, each of which is then made and measured."""
    found: list[int] = []
    for _ in range(count):
        found.append(costs.best([(source, MOST)]).tokens)
        costs.learn(found[-1] + 1, Machine().seconds(found[-1] + 1))
    return found


def test_a_draft_that_stopped_paying_and_no_draft_are_tried_again_from_time_to_time():
    costs, source = known(Machine(), 0, 1, 3, 7, 15, 31, 63), Source(0.7, 0.02)
    for _ in range(20):
        source.learn(0, 4)

    assert 0 < sum(map(bool, chosen(costs, source, 200))) < 40
    assert 0 < chosen(known(Machine(), 0, 4), Source(0.9, 0.002), 300).count(0) < 10


def test_old_measurements_are_forgotten():
    costs = PassCosts()
    costs.learn(1, 5.0)
    for _ in range(100):
        costs.learn(30, 9.0)
    costs.learn(1, 1.0)

    assert (1.0, 9.0) == (costs.seconds(1), costs.seconds(30))


def test_longer_passes_are_not_taken_for_quicker_ones():
    costs = PassCosts()
    costs.learn(1, 2.0)
    costs.learn(8, 1.0)

    assert 1.0 == costs.seconds(64)


@pytest.mark.parametrize(
    ("text", "most", "found", "matched"),
    [
        ([1, 2, 3, -9, 1, 2], 4, [3], 2),  # a token that ends the text ends the draft before it
        ([], 4, [], 0),
        ([1, 2, 3], 4, [], 0),
        ([1, 2, 3, 9, 1, 2], 2, [3, 9], 2),
        ([1, 2, 3, 7, 2, 5, 1, 2], 1, [3], 2),
        ([4, 2, 5, 6, 2], 3, [5, 6, 2], 1),
        ([7, 7], 3, [7, 7, 7], 1),
        ([1, 2, 1, 2, 1], 4, [2, 1, 2, 1], 3),
        ([1, 2, 3, 1], 0, [], 0),
    ],
)
def test_a_draft_from_the_text_follows_its_longest_match(text, most, found, matched):
    assert (found, matched) == looked_up(text, most, {-9})
