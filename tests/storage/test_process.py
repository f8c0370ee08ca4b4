"""A tag identifies living and dead processes, and a lock survives a fork."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading

import pytest

from offload.storage import replacing
from offload.storage.replacing import is_dead, process_tag
from offload.system.locks import fork_safe_lock
from tests import faults
from tests.processes import in_fork


def tag_of(pid: int) -> str:
    machine = process_tag().partition("-")[0]
    return f"{machine}-{pid}-{replacing._start(pid)}"


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

    monkeypatch.setattr(replacing, "_start", lambda pid: "")
    machine = process_tag().partition("-")[0]

    assert is_dead(f"{machine}-{2**22 + 1}-7")
    monkeypatch.setattr(os, "kill", refuse)
    assert not is_dead(f"{machine}-{2**22 + 1}-7")


def test_processes_are_not_called_dead_while_too_many_files_are_open():
    """What a living process is writing, and its private folder, would be removed."""
    tag = process_tag()
    replacing._machine.cache_clear()

    found = list(faults.each_failure(replacing._machine.cache_clear, lambda _: is_dead(tag)))

    assert {errno.EMFILE, errno.EIO} <= {failure.code for failure in found}
    assert [] == [str(failure) for failure in found if failure.result is not False]


def test_a_failed_tag_is_made_the_next_time():
    tag = process_tag()

    def forget():
        replacing._machine.cache_clear()
        replacing._tag.cache_clear()

    for failure in faults.each_failure(forget, lambda _: process_tag(), [errno.EMFILE, errno.EIO]):
        assert isinstance(failure.error, OSError), str(failure)
        assert tag == process_tag(), str(failure)


def test_a_forked_child_has_a_tag_of_its_own():
    mine = process_tag()

    assert in_fork(lambda: mine != process_tag() or os._exit(1))


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


def test_a_lock_keeps_other_threads_out_and_lets_its_own_in_again():
    lock = fork_safe_lock()
    order = []

    def second():
        with lock:
            order.append("second")

    with lock:
        thread = threading.Thread(target=second)
        thread.start()
        with lock:
            order.append("first")
    thread.join()

    assert ["first", "second"] == order
