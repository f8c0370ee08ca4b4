"""Files and folders are put in place whole, and leftovers of dead processes are removed."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from offload.errors import ForeignFileError, WriteError
from offload.storage import replacing as module
from offload.storage.replacing import (
    made_folder,
    process_tag,
    remove_folder,
    replacing,
    replacing_all,
    replacing_folder,
)
from tests import faults
from tests.conftest import contents


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()], ids=["full", "stop"])
def test_a_block_that_fails_leaves_what_was_there_and_nothing_else(tmp_path, error):
    (tmp_path / "a").write_text("old")
    (tmp_path / "folder").mkdir()
    before = contents(tmp_path)

    for begin in (
        lambda: replacing(tmp_path / "a", 3),
        lambda: replacing_all([tmp_path / "b", tmp_path / "a"], 3),
        lambda: replacing_folder(tmp_path / "folder"),
    ):
        with pytest.raises((WriteError, KeyboardInterrupt)), begin():
            raise error

    assert before == contents(tmp_path)


def test_a_file_gets_its_name_after_its_sync_and_is_announced_before_its_folder_is_synced(tmp_path):
    seen = []
    with faults.watched() as calls, replacing(tmp_path / "a", 3, placed=lambda: seen.append(len(calls))) as new:
        assert 3 == os.fstat(new.fd).st_size
        new.path.write_text("new")

    order = [call.name for call in calls if call.name in ("os.fsync", "os.replace")]
    assert ["os.fsync", "os.replace", "os.fsync"] == order
    assert "os.fsync" in [call.name for call in calls[seen[0] :]]
    assert "new" == (tmp_path / "a").read_text()


def test_a_link_is_replaced_and_not_written_through(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "a").symlink_to("mine")

    with replacing(tmp_path / "a") as new:
        new.path.write_text("new")

    assert ("mine", "new", False) == (
        (tmp_path / "mine").read_text(),
        (tmp_path / "a").read_text(),
        (tmp_path / "a").is_symlink(),
    )


def test_the_last_of_several_files_is_placed_last_and_its_failure_removes_the_others(tmp_path):
    (tmp_path / "index").write_text("old")
    before = contents(tmp_path)
    paths = [tmp_path / "one", tmp_path / "two", tmp_path / "index"]

    def put() -> None:
        with replacing_all(paths, 3) as temporaries:
            for path in paths:
                temporaries[path].write_text("new")

    with faults.failing(2, errno.EIO, only=lambda call: call.name == "os.replace"), pytest.raises(WriteError):
        put()
    assert before == contents(tmp_path)
    put()
    assert [b"new"] * 3 == [path.read_bytes() for path in paths]
    assert 3 == len(os.listdir(tmp_path))


@pytest.mark.parametrize(
    "make", [Path.touch, lambda path: path.symlink_to("."), lambda path: (path / "in").mkdir(parents=True)]
)
def test_only_an_empty_folder_is_replaced(tmp_path, make):
    make(tmp_path / "a")

    with pytest.raises(ForeignFileError, match="is not an empty folder"), replacing_folder(tmp_path / "a"):
        raise AssertionError

    (tmp_path / "b").mkdir()
    with replacing_folder(tmp_path / "b") as folder:
        (folder / "file").touch()
    assert ["file"] == os.listdir(tmp_path / "b")
    assert ["a", "b"] == sorted(os.listdir(tmp_path))


def test_a_folder_that_appears_meanwhile_is_left(tmp_path):
    with pytest.raises(ForeignFileError), replacing_folder(tmp_path / "a") as folder:  # noqa: PT012
        (folder / "file").touch()
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "mine").touch()

    assert {"a/mine"} == set(contents(tmp_path))


def test_a_folder_to_write_in_is_made_and_what_is_swept_is_logged(tmp_path, caplog):
    machine, pid, _ = process_tag().split("-")
    left = tmp_path / "new" / f".offload-tmp-{machine}-{pid}-1-aa"
    made_folder(left.parent)
    (left / "in").mkdir(parents=True)

    with caplog.at_level(logging.INFO, "offload.storage"):
        made_folder(left.parent)

    assert [] == os.listdir(left.parent)
    assert [f"{left} was left by a process that has ended, and is removed"] == caplog.messages


def test_a_folder_that_cannot_be_removed_at_once_has_lost_its_name(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").touch()

    with faults.failing(1, errno.EIO, only=lambda call: call.name == "os.unlink"):
        remove_folder(tmp_path / "a")

    assert [True] == [name.startswith(".offload-tmp-") for name in os.listdir(tmp_path)]


def replace_it(path: Path) -> None:
    with replacing_folder(path, refuse=lambda _: None) as folder:
        (folder / "new").touch()


@pytest.mark.parametrize(("act", "left"), [(replace_it, {"a/new"}), (remove_folder, set())])
def test_an_interrupt_while_the_old_folder_is_removed_leaves_nothing_of_it(tmp_path, monkeypatch, act, left):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old").touch()
    real = module.remove

    def interrupted(_: Path) -> None:
        monkeypatch.setattr(module, "remove", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "remove", interrupted)
    with pytest.raises(KeyboardInterrupt):
        act(tmp_path / "a")

    assert left == set(contents(tmp_path))
    assert [] == list(tmp_path.glob(".offload-tmp-*"))
