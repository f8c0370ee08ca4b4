"""Every act meets every crash that it can meet, and the old state or the new one is there.

A failing system call has no other effect: the error names it, and the same line works the next time. A process that is
killed leaves nothing half done. Ctrl-C at any point leaves torch unchanged. A power cut takes nothing that was put in
place. The acts are in `tests/acts.py`; the crashes in `tests/crashes.py`, `interrupts.py`, `power_cut.py`.
"""

import errno
import os
import sys
from multiprocessing import util
from pathlib import Path

import pytest
import torch

from offload import TensorCache
from offload.storage.replacing import put_file
from tests import faults
from tests.acts import ACTS, meeting
from tests.campaigns import amount, campaign
from tests.crashes import FAULT, INTERRUPT, KILL, POWER_CUT, Act, dies_at_each_call, meets_each_fault
from tests.interrupts import Place, meets_interrupts
from tests.power_cut import written_by


@pytest.mark.campaign("faults")
@pytest.mark.timeout(10_000)
@pytest.mark.parametrize("name", meeting(FAULT))
def test_an_error_of_the_system_is_reported_and_leaves_the_rest_intact(name, private_place):
    """Each of its calls fails, with each error that is possible for it."""
    codes = faults.CODES if campaign("faults") else ACTS[name].codes

    assert meets_each_fault(ACTS[name], private_place, codes) > (1 if name.startswith("cache") else 3)


@pytest.mark.campaign("faults")
@pytest.mark.timeout(10_000)
@pytest.mark.parametrize("name", meeting(FAULT))
def test_a_lasting_error_is_reported_and_once_it_is_gone_everything_works(name, private_place):
    """A full disk, or too many open files, can persist while the act is undone."""
    codes = faults.CODES if campaign("faults") else [errno.ENOSPC, errno.EMFILE]

    meets_each_fault(ACTS[name], private_place, codes, lasting=True)


@pytest.mark.campaign("faults")
@pytest.mark.parametrize("name", meeting(KILL))
def test_a_process_that_is_killed_leaves_the_old_or_the_new_and_what_it_left_goes(name, private_place):
    assert dies_at_each_call(ACTS[name], private_place) > 2


# Interrupts

# A place is tried in the first call that reaches it: every twelfth one, or all of them in the campaign.
_STEP = amount("interrupts", 12, 1)
_TRIED: set[Place] = set()


@pytest.mark.campaign("interrupts")
@pytest.mark.parametrize("name", meeting(INTERRUPT))
def test_an_interrupted_call_leaves_torch_unchanged_and_every_value_old_or_new(name, private_place):
    meets_interrupts(ACTS[name], private_place, _TRIED, _STEP)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="open descriptors can't be listed here")
def test_a_cache_whose_finalizer_was_interrupted_stays_open_and_loses_no_rows(tmp_path, monkeypatch):
    def interrupted(frame, *_):
        if frame.f_code is util.Finalize.__call__.__code__:
            raise KeyboardInterrupt

    def open_here():
        links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
        return [link for link in links if os.path.islink(link) and os.readlink(link).startswith(f"{tmp_path}/")]

    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    tracing = sys.gettrace()
    cache = TensorCache.create(tmp_path, {"x": (torch.float32, ())}, num_rows=1)
    cache[0] = {"x": torch.tensor(1.0)}

    sys.settrace(interrupted)
    try:
        del cache
    finally:
        sys.settrace(tracing)
    left_open = open_here()
    for finalizer in [*util._finalizer_registry.values()]:  # as when the process ends
        if getattr(finalizer, "_weakref", lambda: True)() is None:
            finalizer()

    assert left_open
    assert [] == open_here()
    assert TensorCache.open(tmp_path)[0]["x"] == 1


# Power cuts

# The rows of a cache count as empty until their column's file is synced, and a header that was torn is known from the
# manifest: `FixedColumn.create`.
_LATER = {"x.safetensors", "t%2findex.safetensors", "note%2findex.safetensors"}


@pytest.mark.parametrize("name", meeting(POWER_CUT))
def test_files_are_synced_before_they_are_put_in_place(name, private_place):
    """No file is renamed before its data are on the disk, no folder before all in it; new folders around them stay."""
    disk = written_by(ACTS[name], private_place / "named")

    later = _LATER if name.startswith("cache: ") else set()
    assert [] == [fault for fault in disk.faults if Path(fault.split(" was put ")[0]).name not in later]
    assert set() == {path for path in disk.unsynced if Path(path).name not in later}
    assert set() == disk.unnamed


def test_a_writer_that_does_not_sync_is_found(private_place):
    writer = Act(lambda folder: folder.parent.parent, lambda folder: put_file(folder / "x", b"data", durable=False))
    disk = written_by(writer, private_place / "named")

    [fault] = disk.faults
    path = str(private_place / "named" / "x")
    assert fault.startswith(f"{path} was put in place while the data of ")
    assert ({path}, {path}) == (disk.unsynced, disk.unnamed)
