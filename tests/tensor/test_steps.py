"""Steps of a decoded value, against a decoder whose rows are numbers."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from offload.tensor.runs import Decoder
from offload.tensor.steps import Step, steps


def assert_decodes_its_rows(step: Step, unit: Decoder, start: int) -> None:
    """The rows of each piece that a step takes include those that its own rows come from."""
    granule, first = unit.granule, start // unit.granule
    for count, taken in zip(unit.per, step.taken, strict=True):
        if count is None:
            assert taken is None
            continue
        assert taken is not None
        for row in range(start + step.low, start + step.high):
            of_granule = (row // granule - first) * count
            own = of_granule + (row % granule) * count // granule if count >= granule else of_granule
            assert taken[0] <= own < taken[1]


@pytest.mark.parametrize("is_divisible", [True, False])
@pytest.mark.parametrize("granule", [1, 3, 4])
@pytest.mark.parametrize("most", [1, 2, 4, 5, 9, 100])
def test_steps_give_each_wanted_row_once_and_in_order(granule: int, most: int, is_divisible: bool) -> None:
    unit = Decoder(torch.cat, (granule, 2 * granule, 1, None), granule, is_divisible)
    for start, count in product(range(9), range(1, 14)):
        found = list(steps(start, count, most, unit))

        assert [*range(count)] == [row for step in found for row in range(step.low, step.high)]
        for step in found:
            assert_decodes_its_rows(step, unit, start)


@pytest.mark.parametrize("granule", [1, 3, 4])
@pytest.mark.parametrize("most", [1, 2, 4, 5, 9, 100])
def test_a_step_has_no_more_rows_than_asked_for_unless_a_granule_has(granule: int, most: int) -> None:
    for is_divisible, start, count in product((True, False), range(9), range(1, 14)):
        found = list(steps(start, count, most, Decoder(torch.cat, (granule,), granule, is_divisible)))

        assert max(step.high - step.low for step in found) <= (most if is_divisible else max(most, granule))


@pytest.mark.parametrize("most", [1, 2, 5, 100])
def test_a_granule_that_is_divisible_is_decoded_for_the_wanted_rows_alone(most: int) -> None:
    """A piece with fewer rows per granule gives all of them."""
    [step, *_] = steps(6, 1, most, Decoder(torch.cat, (8, 1, None), 4, True))

    assert Step(0, 1, ((4, 6), (0, 1), None), 0) == step


@pytest.mark.parametrize("most", [1, 2, 5, 100])
def test_rows_before_the_wanted_ones_are_skipped_in_a_granule_that_is_not_divisible(most: int) -> None:
    [step] = steps(6, 1, most, Decoder(torch.cat, (8, 1, None), 4, False))

    assert Step(0, 1, ((0, 8), (0, 1), None), 2) == step


def test_a_step_over_several_granules_takes_all_of_their_rows() -> None:
    """The first and the last of them are wanted in part."""
    found = list(steps(6, 8, 8, Decoder(torch.cat, (4, 2), 4, True)))

    assert [Step(0, 6, ((0, 8), (0, 4)), 2), Step(6, 8, ((8, 10), (4, 6)), 0)] == found


def test_rows_of_pieces_are_counted_from_the_first_wanted_granule() -> None:
    assert [step.taken for step in steps(8, 8, 4, Decoder(torch.cat, (1,), 4, False))] == [((0, 1),), ((1, 2),)]
