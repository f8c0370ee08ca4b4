"""The user's folders stay; private ones go with their process. Tensor names become file names, without loss."""

from __future__ import annotations

import os
import string
import sys
import tempfile
from urllib.parse import unquote

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import NameInUseError, WriteError
from offload.storage.folders import SUFFIX, claim, discard, file_name, named_folder, private_folder, release
from offload.storage.replacing import process_tag
from tests.processes import in_fork, run_script


class Owner:
    """An object that claims a name."""


def test_a_named_folder_is_made_with_its_parents_and_again_if_it_was_removed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    for _ in range(2):
        folder = named_folder("a/b")

        assert tmp_path / "a" / "b" == folder
        assert folder.is_dir()
        folder.rmdir()


def test_a_file_where_the_folder_should_be_is_an_error_with_a_way_out(tmp_path):
    (tmp_path / "file").write_bytes(b"mine")

    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(
            WriteError, match=r"it could not be made .*: a file is where a folder should be: take another offload_dir"
        ) as caught:
            named_folder(folder)
        assert str(folder) == caught.value.filename
    assert b"mine" == (tmp_path / "file").read_bytes()


def test_the_first_use_of_a_folder_sweeps_what_killed_processes_left(tmp_path):
    dead = process_tag().rpartition("-")[0] + "-1"  # a process with this pid, started long ago
    for name in (f".offload-tmp-{dead}-aa", f".offload-tmp-{process_tag()}-aa", "mine"):
        (tmp_path / name).touch()

    named_folder(tmp_path)

    assert sorted([f".offload-tmp-{process_tag()}-aa", "mine"]) == sorted(os.listdir(tmp_path))


def test_two_live_owners_cannot_claim_one_name_in_one_folder(tmp_path):
    owner = Owner()
    path = claim("w", tmp_path, owner)

    assert path == claim("w", tmp_path, owner)
    assert path != claim("W", tmp_path, other := Owner())
    assert other
    with pytest.raises(NameInUseError, match=rf"'w' is in use in {tmp_path}: .*(another name|drop it)"):
        claim("w", tmp_path, Owner())


def test_a_name_is_free_again_once_its_owner_is_gone_or_releases_it(tmp_path):
    owner = Owner()
    owner.itself = owner  # in a reference cycle, as parts of models are
    path = claim("w", tmp_path, owner)
    del owner

    second = Owner()
    assert path == claim("w", tmp_path, second)
    release(path, Owner())
    with pytest.raises(NameInUseError):
        claim("w", tmp_path, Owner())
    release(path, second)
    third = Owner()
    assert path == claim("w", tmp_path, third)


def test_a_folder_and_a_link_to_it_are_one_folder(tmp_path):
    (tmp_path / "true").mkdir()
    (tmp_path / "link").symlink_to("true")
    owner = Owner()
    claim("w", tmp_path / "true", owner)

    with pytest.raises(NameInUseError):
        claim("w", tmp_path / "link", Owner())


def test_in_a_private_folder_a_name_may_be_used_again():
    owners = [Owner() for _ in range(3)]
    paths = [claim("same name", None, owner) for owner in owners]

    assert 3 == len(set(paths))
    assert all(path.name.endswith("same%20name.safetensors") for path in paths)
    assert all(path.is_relative_to(private_folder()) for path in paths)
    for path in paths:
        path.touch()
        discard(path)
    assert not any(path.exists() for path in paths)


def test_a_private_folder_vanishes_however_its_process_ends_and_a_killed_ones_is_swept(tmp_path):
    script = """
        import multiprocessing, os, signal, sys, torch
        from offload import OffloadedTensor

        def folders():
            return sorted(name for name in os.listdir(os.environ["TMPDIR"]) if name.startswith("offload-"))

        def ended(act):
            pid = os.fork()
            if pid:
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                print(act, code, len(folders()))
                return False
            global w
            w = OffloadedTensor.from_original_tensor(torch.ones(3), "w")
            return bool(folders())

        def work(fails):
            w = OffloadedTensor.from_original_tensor(torch.ones(3), "w")
            assert len(folders()) == 1
            if fails:
                raise ValueError

        sys.stdout.reconfigure(line_buffering=True)
        if ended("end"):
            sys.exit(0)
        if ended("exit"):
            sys.exit(3)
        if ended("exception"):
            raise ValueError
        for fails in (False, True):
            child = multiprocessing.get_context("fork").Process(target=work, args=(fails,))
            child.start()
            child.join()
            print("child", child.exitcode, len(folders()))
        mine = OffloadedTensor.from_original_tensor(torch.ones(3), "w")
        if ended("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        os.mkdir(os.path.join(os.environ["TMPDIR"], "offload-notes-of-a-user"))
        if ended("later"):
            assert len(folders()) == 3, folders()   # its own, that of its living parent, the user's
            sys.exit(0)
        print(mine.sum().item())
    """

    said = run_script(script, env={"TMPDIR": str(tmp_path)}).splitlines()

    assert ["end 0 0", "exit 3 0", "exception 1 0", "child 0 0", "child 1 0", "kill -9 2", "later 0 2", "3.0"] == said
    assert ["offload-notes-of-a-user"] == os.listdir(tmp_path)


def test_a_forked_child_gets_a_folder_of_its_own_and_leaves_the_parents():
    mine = private_folder()
    (mine / "mine").touch()

    def ask():
        assert mine != private_folder()
        private_folder().rmdir()
        sys.exit(0)

    in_fork(ask)

    assert (mine / "mine").exists()
    (mine / "mine").unlink()


def test_a_private_folder_that_was_removed_is_made_again(monkeypatch):
    monkeypatch.setattr("offload.storage.folders._PRIVATE_FOLDERS", {})
    folder = private_folder()
    assert folder == private_folder()

    folder.rmdir()

    assert private_folder().is_dir()
    assert folder != private_folder()


def test_without_a_temporary_folder_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "gone"))
    monkeypatch.setattr("offload.storage.folders._PRIVATE_FOLDERS", {})

    with pytest.raises(WriteError, match="set TMPDIR, or give an offload_dir"):
        private_folder()


def test_files_left_by_an_interrupt_do_not_block_a_private_folder():
    from offload import OffloadedTensor

    first = OffloadedTensor.from_original_tensor(torch.zeros(2), "left behind")
    place = first.offload_path
    del first
    place.write_bytes(b"half of a file")

    again = OffloadedTensor.from_original_tensor(torch.ones(2), "left behind")

    assert [1.0, 1.0] == again.tolist()
    assert place != again.offload_path
    place.unlink()


ALLOWED = set(string.ascii_lowercase + string.digits + "._-%~")
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=400).filter(
    lambda n: n != "__metadata__"
)


@given(NAMES)
def test_a_file_name_is_safe_on_every_file_system(name):
    file = file_name(name)

    assert ALLOWED >= set(file)
    assert len(file.encode()) <= 200
    assert file.endswith(SUFFIX)
    assert not file.startswith(".")


@given(NAMES)
def test_a_file_name_that_was_not_cut_gives_its_name_back(name):
    file = file_name(name)

    assert "%~" in file or name == unquote(file.removesuffix(SUFFIX), errors="strict")


@given(NAMES, NAMES)
def test_two_names_have_two_files_even_where_case_is_folded(one, other):
    assert (one == other) == (file_name(one).casefold() == file_name(other).casefold())


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("model.layers.0.mlp.weight", "model.layers.0.mlp.weight.safetensors"),
        ("W", "%57.safetensors"),
        ("w", "w.safetensors"),
        ("a/b", "a%2fb.safetensors"),
        ("..", "%2e..safetensors"),
        ("../../etc/passwd", "%2e.%2f..%2fetc%2fpasswd.safetensors"),
        ("%2e.", "%252e..safetensors"),
        ("a\0b", "a%00b.safetensors"),
        ("é", "%c3%a9.safetensors"),
        (" ", "%20.safetensors"),
    ],
)
def test_escaped_names_stay_readable(name, file):
    assert file == file_name(name)
    assert name == unquote(file.removesuffix(SUFFIX), errors="strict")


@pytest.mark.parametrize(("name", "why"), [("", "empty"), ("\ud800", "unicode"), ("__metadata__", "safetensors")])
def test_a_name_that_cannot_be_stored_is_refused(name, why):
    with pytest.raises(ValueError, match=why):
        file_name(name)
