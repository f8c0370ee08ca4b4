"""What cuts acts short in other tests does it at exactly the right calls."""

import errno
import os

import pytest
import torch

import offload
from offload import OffloadedTensor
from offload.errors import WriteError
from tests import faults


def saved(folder):
    return OffloadedTensor.from_original_tensor(torch.ones(4), "w", folder)


def test_one_call_fails_and_the_next_does_not(tmp_path):
    with (
        faults.failing(0, errno.EIO, only=lambda call: call.name == "os.pwrite") as fault,
        pytest.raises(WriteError) as caught,
    ):
        saved(tmp_path)

    assert errno.EIO == caught.value.errno
    assert fault.call.where.startswith("storage/replacing.py:")
    assert [1.0] * 4 == saved(tmp_path).tolist()


def test_a_lasting_fault_does_not_affect_removals(tmp_path):
    with faults.failing(0, errno.ENOSPC, lasting=True, only=lambda call: call.changes), pytest.raises(WriteError):
        saved(tmp_path)

    assert [] == os.listdir(tmp_path)


def test_a_process_dies_at_each_call_that_changes_files(tmp_path):
    numbers, states = iter(range(100)), []

    def check(folder, call):
        states.append((call.name, sorted(name.partition("-")[0] for name in os.listdir(folder))))

    def begin():
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        return folder

    calls = faults.killed_at_each(begin, saved, check)

    assert [call.name for call in calls] == [name for name, _ in states]
    assert ("os.replace", [".offload"]) in states
    assert ("os.fsync", ["w.safetensors"]) == states[-1]
    assert [1.0] * 4 == offload.load_file(tmp_path / str(next(numbers) - 1))["w"].tolist()
