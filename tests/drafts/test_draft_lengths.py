"""The length of a draft follows what passes and drafts cost: passes of an imagined machine, whose times are exact."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from offload.drafts.costs import FIRST, MOST, Acceptance, Curve, Pass, PassCosts, Trials, of_assistant
from offload.drafts.lookup import looked_up

RATE = 1e9  # bytes per second


@dataclass(frozen=True)
class Machine:
    """What a pass over n tokens takes: the slower of reading and computing. An assistant is right at a rate."""

    streams: float  # bytes
    experts: float = 0.0  # bytes; a token picks a sixteenth
    computing: float = 0.1  # seconds of any pass
    per_token: float = 0.02
    drafting: float = 0.02
    right: float = 0.8

    def bytes_of(self, tokens: int) -> float:
        return self.streams + self.experts * (1 - (15 / 16) ** tokens)

    def seconds(self, tokens: int) -> float:
        return max(self.bytes_of(tokens) / RATE, self.computing + self.per_token * tokens)

    def accepted(self, drafted: int, chance: random.Random) -> int:
        wrong = (place for place in range(drafted) if chance.random() >= self.right)
        return next(wrong, drafted)

    def pass_over(self, drafted: int, *, prompt: int = 0) -> Pass:
        tokens = drafted + 1 + prompt
        seconds, nbytes = self.seconds(tokens), self.bytes_of(tokens)
        waited = max(0.0, seconds - self.computing - self.per_token * tokens)
        return Pass(tokens, seconds, waited, int(nbytes), is_first=prompt > 0)


def tokens_per_second(machine: Machine, length: int | None, *, tokens: int = 300, seed: int = 0) -> float:
    """With drafts of one length; None for the length that follows from what was measured."""
    chance, costs, trials = random.Random(seed), None, Trials()
    source, time, done = of_assistant(), 0.0, 0
    costs = PassCosts(int(machine.streams), int(machine.experts), 0.0)
    while done < tokens:
        drafted = length
        if drafted is None:
            drafted = trials.best(costs, [(source, MOST)]).tokens if costs.number else FIRST
        ran = machine.pass_over(drafted, prompt=0 if done else 20)
        accepted = machine.accepted(drafted, chance)
        costs.learn(ran)
        trials.earn(ran.seconds)
        if drafted:
            source.acceptance.learn(accepted, drafted)
            assert source.drafting is not None
            source.drafting.learn(drafted, drafted * machine.drafting, costs.number)
        time += ran.seconds + drafted * machine.drafting
        done += accepted + 1
    return done / time


def best_fixed(machine: Machine) -> float:
    return max(tokens_per_second(machine, length) for length in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 63))


MEMORY = Machine(streams=0)


@pytest.mark.parametrize("right", [0.5, 0.8, 0.95])
def test_a_dense_model_on_disk_gets_nine_tenths_of_the_best_fixed_length(right: float):
    machine = Machine(streams=1.3e9, right=right)

    assert tokens_per_second(machine, None) >= 0.9 * best_fixed(machine)


@pytest.mark.parametrize("right", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("drafting", [0.002, 0.05])
@pytest.mark.parametrize(("streams", "experts"), [(0, 0), (0.1e9, 8e9)])
def test_drafts_never_cost_more_than_a_twentieth(streams: float, experts: float, drafting: float, right: float):
    machine = Machine(streams=streams, experts=experts, drafting=drafting, right=right, per_token=0.05)
    share = 0.93 if experts and drafting == 0.05 and right == 0.95 else 0.95  # one case loses more: not mended

    assert tokens_per_second(machine, None) >= share * tokens_per_second(machine, 0)


def test_a_model_in_memory_whose_rows_are_cheap_gets_nine_tenths_of_the_best_fixed_length():
    machine = Machine(streams=0, per_token=0.002, drafting=0.005)

    assert tokens_per_second(machine, None) >= 0.9 * best_fixed(machine)


def test_drafts_are_longer_on_a_slow_disk_than_in_memory():
    costs, chance = {}, random.Random(0)
    for name, machine in {"disk": Machine(streams=4e9), "memory": MEMORY}.items():
        costs[name] = known = PassCosts(int(machine.streams), 0, RATE)
        for drafted in (0, 4, 16):
            known.learn(machine.pass_over(drafted))
    source = of_assistant()
    for _ in range(20):
        source.acceptance.learn(MEMORY.accepted(16, chance), 16)
    source.drafting.learn(16, 0.16, 1)
    chosen = {name: Trials().best(known, [(source, MOST)]).tokens for name, known in costs.items()}

    assert chosen["disk"] > 2 * chosen["memory"] > 0


def test_a_draft_that_stopped_paying_is_tried_again_from_time_to_time():
    costs, trials, source = PassCosts(0, 0, RATE), Trials(), of_assistant()
    for drafted in (0, 1, 3, 7):
        costs.learn(MEMORY.pass_over(drafted))
        source.drafting.learn(max(drafted, 1), 0.02 * max(drafted, 1), costs.number)
    for _ in range(20):
        source.acceptance.learn(0, 4)
    chosen = []
    for _ in range(60):
        chosen.append(trials.best(costs, [(source, MOST)]).tokens)
        costs.learn(MEMORY.pass_over(chosen[-1]))
        trials.earn(MEMORY.seconds(1))

    assert 0 < sum(map(bool, chosen)) < 12


def test_old_measurements_are_forgotten():
    curve = Curve(lambda tokens: 1.0)
    curve.learn(1, 5.0, 0)
    curve.learn(30, 9.0, 100)

    assert (9.0, False, True) == (curve.at(1), curve.is_known(1, 100), curve.is_known(30, 100))


def test_between_two_lengths_a_curve_is_a_line():
    curve = Curve(lambda tokens: 1.0)
    curve.learn(4, 1.0, 0)
    curve.learn(8, 3.0, 0)

    assert [1.0, 1.0, 2.0, 3.0, 3.0] == [curve.at(tokens) for tokens in (1, 4, 6, 8, 60)]


def test_acceptance_is_known_by_position():
    seen = Acceptance(0.5)
    for _ in range(100):
        seen.learn(1, 4)
    expected = seen.expected(3)

    assert 1.0 == expected[0]
    assert expected[1] - expected[0] > 0.9
    assert expected[2] - expected[1] < 0.1


@pytest.mark.parametrize(
    ("text", "most", "found", "matched"),
    [
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
def test_a_draft_from_the_text_follows_its_longest_match(text: list[int], most: int, found: list[int], matched: int):
    assert (found, matched) == looked_up(text, most)
