"""Memory and reads while a block runs."""

from __future__ import annotations

import gc
import time

import pytest
import torch

from offload import OffloadedTensor
from offload.memory import anonymous_bytes, return_freed
from offload.recording import Recording


def test_a_mark_knows_what_was_read_so_far():
    weight = OffloadedTensor.from_original_tensor(torch.ones(1 << 20), "w")

    with Recording().running() as recording:
        recording.mark()
        weight.sum()
        recording.mark()

    before, after = recording.marks
    assert 0 <= before.second <= after.second <= recording.end.second
    assert 0 <= before.read <= after.read <= recording.end.read


def test_memory_between_marks_counts_for_the_peak():
    """Whatever earlier tests have left is let go first, and may not hide it."""
    size = 256 << 20
    gc.collect()
    return_freed()
    before = anonymous_bytes()

    with Recording().running() as recording:
        value = torch.ones(size, dtype=torch.uint8)
        tries = 60_000
        while recording.peak < before + size // 2 and (tries := tries - 1):
            time.sleep(0.001)
        del value

    assert recording.peak >= before + size // 2


def test_a_block_that_raises_is_watched_to_its_end():
    recording = Recording()

    with pytest.raises(ZeroDivisionError), recording.running():
        1 / 0

    assert recording.end.second > 0
    assert not recording._thread.is_running
