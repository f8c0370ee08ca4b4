"""`resumable_folder`: what a run has done is kept until the new folder is complete, and nothing stands in its way."""

from __future__ import annotations

import errno
import itertools
import os
import signal
from pathlib import Path

import pytest

from offload.checkpoints.conversion import resumable_folder
from offload.errors import ForeignFileError, JournalError, MissingFileError, WriteError
from offload.storage.replacing import put_file
from tests import faults
from tests.acts import resumed
from tests.processes import ended, forked

RUN = {"source": "a", "size": 3}


def must_succeed(call: faults.Call) -> bool:
    """Whether it changes something: what can't be removed at the end stays."""
    return call.changes and call.name != "os.rmdir"


@pytest.mark.parametrize("is_killed", [False, True], ids=["error", "kill"])
def test_the_same_call_goes_on_wherever_a_run_ended(is_killed: bool, private_place: Path) -> None:
    def killed() -> None:
        with faults.killed(index):
            resumed(folder)

    for index in itertools.count():
        folder = private_place / str(index)
        if is_killed:
            assert -signal.SIGKILL == ended(forked(killed))
        else:
            with faults.failing(index, errno.ENOSPC, only=must_succeed), pytest.raises(WriteError):
                resumed(folder)
        is_begun = (folder / "new.partial").exists()
        assert ["value"] == resumed(folder)
        assert ["new"] == os.listdir(folder)
        if is_begun:
            break

    assert index > 3


def left_by_a_dead_process(folder: Path) -> None:
    """A file that a process was killed in."""

    def killed() -> None:
        with faults.killed(1):
            put_file(folder / "value", b"2")

    assert -signal.SIGKILL == ended(forked(killed))
    assert 1 == len(os.listdir(folder))


@pytest.mark.parametrize("left", [lambda folder: None, left_by_a_dead_process], ids=["empty", "temporary"])
def test_a_folder_without_files_of_a_run_counts_as_not_there(left, tmp_path):  # type: ignore[no-untyped-def]
    (tmp_path / "new.partial").mkdir()
    left(tmp_path / "new.partial")

    assert ["value"] == resumed(tmp_path)

    assert ["new"] == os.listdir(tmp_path)


def refused(error: type[Exception], words: str, target: Path, run: object = RUN) -> None:
    with pytest.raises(error, match=words), resumable_folder(target, run):
        pass


def test_a_folder_of_others_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "thesis").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link.partial").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(MissingFileError, match="holds no run that could be resumed"):
        resumed(tmp_path)
    refused(MissingFileError, "holds no run that could be resumed", tmp_path / "link")

    assert ["thesis"] == os.listdir(tmp_path / "new.partial")
    assert [] == os.listdir(tmp_path / "elsewhere")


def test_a_run_that_failed_before_any_progress_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), resumable_folder(tmp_path / "new", RUN):
        raise ZeroDivisionError

    assert [] == os.listdir(tmp_path)


def test_another_run_does_not_go_on_with_a_folder(tmp_path: Path) -> None:
    def fail(work: Path) -> None:
        put_file(work / "value", b"1")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), resumable_folder(tmp_path / "new", RUN) as work:
        fail(work)

    refused(JournalError, "has an unfinished run with another size", tmp_path / "new", {**RUN, "size": 4})


def test_a_target_that_is_filled_is_refused(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "thesis").write_text("mine")

    refused(ForeignFileError, "is not an empty folder", tmp_path / "new")

    assert ["new"] == os.listdir(tmp_path)
