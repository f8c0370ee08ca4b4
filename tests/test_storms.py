"""Real signals at any moment of a public call: no foreign close, no thread, no hook, no other error is left of them."""

from __future__ import annotations

import pytest

from tests.campaigns import amount, campaign
from tests.public_calls import CALLS
from tests.storms import weathers

# Those that open files, or begin threads; in the campaign, all.
_PRINTS = {
    "repr, named",
    "repr, private",
}  # an interrupt of torch's own printing leaves torch's dispatcher broken (2.13)
_OFTEN = ("from_file", "update_values, named", "map_batches", "cache: open", "flush, named")
_INTERRUPTS = amount("storms", 40, -(-100_000 // (len(CALLS) - len(_PRINTS))))


@pytest.mark.campaign("storms")
@pytest.mark.timeout(10_000)
@pytest.mark.parametrize("name", [name for name in CALLS if name not in _PRINTS] if campaign("storms") else _OFTEN)
def test_nothing_is_left_of_interrupts_at_random_moments(name, private_place):
    assert weathers(CALLS[name], private_place, _INTERRUPTS, seed=list(CALLS).index(name))
