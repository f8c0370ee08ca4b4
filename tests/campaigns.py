"""Campaigns: cases that are too many for every run of the suite.

`make campaign` runs all of them; `OFFLOAD_CAMPAIGN=kills,faults` says which, for any way to call pytest.

Always true:
- each campaign is in `CAMPAIGNS`, and any other name is an error
- the suite without campaigns checks each fact; a campaign has more cases of it
- a test that takes part has the marker `campaign` with the campaign's name; with `only=True`, a test (or one of its
  parameters) is left out of the suite
"""

from __future__ import annotations

import os
from typing import TypeVar

import pytest

T = TypeVar("T")

CAMPAIGNS = {
    "architectures": "every model class of transformers that generates, from disk",
    "bench": "every benchmark, at toy size",
    "devices": "every form of checkpoint on an accelerator, and 10,000 steps of late streams",
    "faults": "every call to the system fails once, in every way",
    "interrupts": "Ctrl-C at every place of every public call",
    "kills": "writers are killed at every line, and at hundreds of random moments",
    "mixtures": "experts in every form that checkpoints store them in",
    "ops": "torch's whole databases of ops and modules: more samples and dtypes, traces",
    "requests": "200 random requests to a server, alone and sixteen at a time",
    "rows": "a cache of ten million rows, and batches that are stopped at 1,000 moments",
    "shapes": "10,000 shapes of packed rows, 100,000 with flipped bits, and one of more than 2^31 numbers",
}


def asked() -> set[str]:
    """The campaigns that `OFFLOAD_CAMPAIGN` names.

    Raises:
        pytest.UsageError: one of them is unknown.
    """
    names = {word.strip() for word in os.environ.get("OFFLOAD_CAMPAIGN", "").split(",")} - {""}
    if unknown := names - {*CAMPAIGNS, "all"}:
        raise pytest.UsageError(
            f"OFFLOAD_CAMPAIGN names {', '.join(sorted(unknown))}: there are {', '.join(CAMPAIGNS)}, and all"
        )
    return set(CAMPAIGNS) if "all" in names else names


def campaign(name: str) -> bool:
    """Whether this campaign runs."""
    if name not in CAMPAIGNS:
        raise ValueError(f"no campaign is called {name!r}: there are {', '.join(CAMPAIGNS)}")
    return name in asked()


def amount(name: str, usual: T, whole: T) -> T:
    """`whole` in the campaign, else `usual`: how many kills, which dtypes..."""
    return whole if campaign(name) else usual


def left_out(item: pytest.Item) -> bool:
    """Whether a test has a marker `campaign` with `only=True`, and this campaign was not asked for."""
    marks = list(item.iter_markers("campaign"))
    wanted = [campaign(mark.args[0]) for mark in marks]
    return any(mark.kwargs.get("only") and not want for mark, want in zip(marks, wanted, strict=True))
