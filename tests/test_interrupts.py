"""Ctrl-C at any point of a public call leaves torch unchanged, and every value old or new."""

from __future__ import annotations

import pytest

from tests.campaigns import amount
from tests.interrupts import Place, interrupted
from tests.public_calls import CALLS, new_folder

# A place is tried in the first call that reaches it: every twelfth one, or all of them in the campaign.
_STEP = amount("interrupts", 12, 1)
_TRIED: set[Place] = set()


@pytest.mark.campaign("interrupts")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_interrupted(name, tmp_path):
    call = CALLS[name]

    interrupted(
        lambda: call.prepare(new_folder(tmp_path)), call.act, call.check, folder=tmp_path, tried=_TRIED, step=_STEP
    )
