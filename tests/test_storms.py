"""Real signals at any moment of a public call: no foreign close, no thread, no hook, no other error is left of them."""

from __future__ import annotations

import os
import sys
from multiprocessing import util

import pytest
import torch

from offload import TensorCache
from tests.campaigns import amount, campaign
from tests.public_calls import CALLS
from tests.storms import run_put_off_finalizers, weathers

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


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="open descriptors can't be listed here")
def test_a_cache_whose_finalizer_was_interrupted_stays_open_and_loses_no_rows(tmp_path, monkeypatch):
    def interrupted(frame, *_):
        if frame.f_code is util.Finalize.__call__.__code__:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    tracing = sys.gettrace()
    cache = TensorCache.create(tmp_path, {"x": (torch.float32, ())}, num_rows=1)
    cache[0] = {"x": torch.tensor(1.0)}

    sys.settrace(interrupted)
    try:
        del cache
    finally:
        sys.settrace(tracing)
    left_open = open_in(tmp_path)
    run_put_off_finalizers()

    assert left_open
    assert [] == open_in(tmp_path)
    assert TensorCache.open(tmp_path)[0]["x"] == 1


def open_in(folder):
    """The files of a folder that this process has open."""
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    opened = [os.readlink(link) for link in links if os.path.islink(link)]
    return [path for path in opened if path.startswith(f"{folder}/")]
