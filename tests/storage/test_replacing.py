"""Files and folders are put in place whole; what dead processes left is removed, and a tag tells which are dead."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from offload.errors import ForeignFileError, WriteError
from offload.storage import replacing as module
from offload.storage.replacing import (
    is_dead,
    made_folder,
    process_tag,
    remove_folder,
    replacing,
    replacing_all,
    replacing_folder,
    sweep,
)
from offload.system.locks import fork_safe_lock
from tests import faults
from tests.conftest import contents
from tests.processes import in_fork


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


def test_an_interrupt_while_a_folder_is_removed_leaves_nothing_of_it(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old").touch()
    real = module.remove

    def interrupted(_: Path) -> None:
        monkeypatch.setattr(module, "remove", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "remove", interrupted)
    with pytest.raises(KeyboardInterrupt):
        remove_folder(tmp_path / "a")

    assert [] == os.listdir(tmp_path)


def tag_of(pid: int) -> str:
    machine = process_tag().partition("-")[0]
    return f"{machine}-{pid}-{module._start(pid)}"


def test_a_sweep_removes_only_what_dead_processes_left(tmp_path):
    machine, pid, _ = process_tag().split("-")
    kept = [
        f".offload-tmp-{process_tag()}",
        f".offload-tmp-{tag_of(os.getppid())}",
        f".offload-tmp-00000000-{pid}-1",
        ".offload-tmp-nonsense",
        f"{machine}-{pid}-1",
        "mine",
    ]
    for name in [*kept, f".offload-tmp-{machine}-{pid}-1"]:
        (tmp_path / f"{name}-aa").touch()
        (tmp_path / f"{name}-bb").mkdir()
        (tmp_path / f"{name}-bb" / "file").touch()

    sweep(tmp_path)

    assert sorted(f"{name}-{end}" for name in kept for end in ("aa", "bb")) == sorted(os.listdir(tmp_path))


def test_a_living_process_is_not_dead():
    assert not is_dead(process_tag())
    assert process_tag() == tag_of(os.getpid())


def test_a_process_is_dead_once_it_has_ended_even_if_not_reaped():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    tag = tag_of(child.pid)
    assert not is_dead(tag)

    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_dead(tag)
    child.communicate()
    assert is_dead(tag)


def test_another_process_under_the_same_number_or_none_that_there_can_be_is_not_alive():
    machine, pid, start = process_tag().split("-")

    assert is_dead(f"{machine}-{pid}-{int(start) - 1}")
    assert is_dead(f"{machine}-{10**30}-7")


@pytest.mark.parametrize(
    "tag",
    ["", "-", "x-1-1", "{machine}", "{machine}-", "{machine}-1", "{machine}-x-1", "{machine}-1-", "{machine}-²-1"],
)
def test_processes_of_unknown_state_are_not_called_dead(tag):
    assert not is_dead(tag.format(machine=process_tag().partition("-")[0]))


def test_a_hidden_process_of_another_user_is_not_called_dead(monkeypatch):
    def refuse(pid, signal):
        raise PermissionError

    monkeypatch.setattr(module, "_start", lambda pid: "")
    machine = process_tag().partition("-")[0]

    assert is_dead(f"{machine}-{2**22 + 1}-7")
    monkeypatch.setattr(os, "kill", refuse)
    assert not is_dead(f"{machine}-{2**22 + 1}-7")


def test_processes_are_not_called_dead_while_too_many_files_are_open():
    """What a living process is writing, and its private folder, would be removed."""
    tag = process_tag()
    module._machine.cache_clear()

    found = list(faults.each_failure(module._machine.cache_clear, lambda _: is_dead(tag)))

    assert {errno.EMFILE, errno.EIO} <= {failure.code for failure in found}
    assert [] == [str(failure) for failure in found if failure.result is not False]


def test_a_failed_tag_is_made_the_next_time():
    tag = process_tag()

    def forget():
        module._machine.cache_clear()
        module._tag.cache_clear()

    for failure in faults.each_failure(forget, lambda _: process_tag(), [errno.EMFILE, errno.EIO]):
        assert isinstance(failure.error, OSError), str(failure)
        assert tag == process_tag(), str(failure)


def test_a_child_forked_while_another_thread_holds_a_lock_finds_it_free():
    lock = fork_safe_lock()
    held, done = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()

    def take_it_in_many_threads():
        count = [0]

        def take():
            with lock:
                count[0] += 1

        threads = [threading.Thread(target=take, daemon=True) for _ in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(10)
        assert 8 == count[0]

    assert in_fork(take_it_in_many_threads)
    done.set()
    thread.join()
