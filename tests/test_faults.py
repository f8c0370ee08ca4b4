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


def test_calls_of_the_package_are_seen_and_calls_of_others_are_not(tmp_path):
    open_before = open
    with faults.watched() as calls:
        saved(tmp_path)
        (tmp_path / "mine").write_text("by the test")
        os.stat(tmp_path)

    assert {"os.open", "os.pwrite", "os.fsync", "os.replace"} <= {call.name for call in calls}
    assert all(call.where.startswith("storage/") for call in calls)
    assert not any("mine" in call.where for call in calls)
    assert [] == [call for call in calls if call.name in ("os.replace", "os.fsync") and not call.changes]
    assert open is open_before


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


def test_each_kind_of_fault_comes_at_each_line(tmp_path):
    numbers = iter(range(10_000))
    found = list(faults.each_failure(lambda: tmp_path / str(next(numbers)), saved))

    assert {"EIO", "ENOSPC", "EMFILE", "EACCES"} == {errno.errorcode[failure.code] for failure in found}
    assert {errno.EMFILE, errno.EIO, errno.ENOSPC, errno.EACCES} == {
        failure.code for failure in found if failure.call.name == "os.open" and failure.call.changes
    }


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
