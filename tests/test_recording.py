"""Memory and reads while a block runs."""

import pytest
import torch

from offload import OffloadedTensor
from offload.recording import Recording


def test_a_mark_knows_what_was_read_so_far():
    weight = OffloadedTensor.from_original_tensor(torch.ones(1 << 20), "w")
    with Recording().running() as recording:
        recording.mark()
        weight.sum()
        recording.mark()

    before, after = recording.marks
    assert before.second <= after.second <= recording.samples[-1].second
    assert before.read <= after.read
    assert recording.peak >= min(before.anonymous, after.anonymous)
    assert min(before.anonymous, after.anonymous, after.mapped) > 0


def test_a_block_that_raises_is_watched_to_its_end():
    recording = Recording()

    with pytest.raises(ZeroDivisionError), recording.running():
        1 / 0

    assert len(recording.samples) > 1
    assert not recording._thread.is_running


def test_a_long_recording_keeps_few_samples(monkeypatch):
    monkeypatch.setattr("offload.recording._MOST", 10)
    monkeypatch.setattr("offload.recording._EVERY", 0.0001)
    recording = Recording()
    with recording.running():
        while recording._every < 0.0004:
            pass

    assert len(recording.samples) <= 12
    seconds = [sample.second for sample in recording.samples]
    assert sorted(seconds) == seconds
