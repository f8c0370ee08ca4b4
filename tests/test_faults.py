"""What cuts acts short in other tests does it at exactly the right calls."""

import errno
import os

import pytest
import torch

import offload
from offload import OffloadedTensor
from offload.errors import ReadError, WriteError
from tests import faults
from tests.page_cache import dropped, needs_page_cache


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


HWPOISON = 133  # Python has no name for it


@needs_page_cache
@pytest.mark.parametrize(
    ("name", "code", "told"),
    [("mmap", errno.ENODEV, errno.ENODEV), ("madvise", HWPOISON, HWPOISON), ("madvise", errno.EFAULT, errno.EIO)],
)
def test_pages_that_the_system_does_not_give_are_an_error_of_the_read(name, code, told, tmp_path):
    """EFAULT is the kernel's where a read would be a SIGBUS. The next call reads them."""
    value = torch.arange(1 << 18)
    dropped(OffloadedTensor.from_original_tensor(value, "w", tmp_path).offload_path)
    w = OffloadedTensor.from_file(tmp_path / "w.safetensors", "w")

    with (
        faults.failing(0, code, lasting=True, only=lambda call: call.name == f"libc.{name}"),
        pytest.raises(ReadError) as caught,
    ):
        w.materialize()

    assert told == caught.value.errno
    assert torch.equal(value, w.materialize())


@pytest.mark.parametrize("code", [errno.EIO, errno.EINTR])
def test_a_file_that_the_kernel_does_not_copy_goes_through_memory(code, tmp_path):
    torch.save({"w": torch.ones(4)}, tmp_path / "w.pt")
    w = OffloadedTensor.from_file(tmp_path / "w.pt", "w")

    with faults.failing(0, code, only=lambda call: call.name == "os.sendfile") as fault:
        w.add_(1)

    assert fault.call is not None
    assert [2.0] * 4 == w.tolist()


@pytest.mark.parametrize(
    ("act", "fails", "told"),
    [
        (lambda w: w.update_values(torch.zeros(4)), "os.pwrite", "take another offload_dir"),
        (lambda w: offload.map_values(lambda _, one: one * 2, {"w": w}), "os.pwrite", "take another offload_dir"),
        (lambda w: offload.load_file(w.offload_dir)["w"].add_(1), "os.open", "write to another folder"),
    ],
)
def test_a_read_only_disk_is_reported_with_the_way_out(act, fails, told, tmp_path):
    w = saved(tmp_path)
    with (
        faults.failing(0, errno.EROFS, lasting=True, only=lambda call: call.name == fails),
        pytest.raises((ReadError, WriteError), match=f"the file system is read-only: {told}"),
    ):
        act(w)

    assert [1.0] * 4 == offload.load_file(tmp_path)["w"].tolist()
