"""A stored value follows its file, whether it owns it or not, and never returns another value."""

from __future__ import annotations

import errno
import gc
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier

import pytest
import torch
from safetensors.torch import load_file, save_file

from offload.errors import (
    ChangedFileError,
    CorruptFileError,
    ForeignFileError,
    MissingFileError,
    NameInUseError,
    UnsupportedOpError,
    WriteError,
)
from offload.storage import handle as handle_module
from offload.storage import owning
from offload.storage.file import TensorFile
from offload.storage.folders import file_name
from offload.storage.handle import Handle
from offload.storage.layout import Layout
from offload.storage.owning import allocate_value, create_value, duplicate, open_owned, replace_whole, writable_base
from offload.storage.write import from_values, put_values
from tests.processes import in_fork


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}, path)
    return path


def put(folder: Path, value: torch.Tensor, name: str = "w") -> None:
    """Like another process: a new file at the path, without any handle knowing."""
    layouts = {name: Layout(value.dtype, tuple(value.shape), value.stride())}
    put_values(folder / file_name(name), layouts, from_values({name: value}, layouts), {"name": name}, durable=False)


NAMES = [
    *("w", "W", "a/b", "a\\b", "..", "../up", "a\0b", "é", "e\u0301", "名前", "🙂"),
    *("x" * 300, "x" * 301, "con", " ", "%2e", "."),
]


def test_names_of_every_kind_live_beside_each_other(tmp_path):
    handles = {name: create_value(torch.tensor(number), name, tmp_path) for number, name in enumerate(NAMES)}

    assert list(range(len(NAMES))) == [handle.base().item() for handle in handles.values()]
    assert len(NAMES) == len(os.listdir(tmp_path)) == len({name.casefold() for name in os.listdir(tmp_path)})
    for number, (name, handle) in enumerate(handles.items()):
        assert {name: torch.tensor(number)} == load_file(handle.path)
    assert not list(tmp_path.parent.glob("*.safetensors"))


def test_a_referenced_value_may_be_replaced_before_its_folder_is_there(checkpoint, tmp_path):
    handle = Handle.reference(TensorFile.open(checkpoint), "a", tmp_path / "own" / "deep")

    replace_whole(handle, torch.ones(3))

    assert torch.equal(torch.ones(3), load_file(tmp_path / "own" / "deep" / "a.safetensors")["a"])
    assert 1 == handle.generation


def test_a_value_opened_as_owned_is_written_in_place(tmp_path):
    create_value(torch.zeros(3), "w", tmp_path)
    gc.collect()

    handle = open_owned(TensorFile.open(tmp_path / "w.safetensors"), "w")
    writable_base(handle).fill_(2)

    assert torch.equal(torch.full((3,), 2.0), load_file(tmp_path / "w.safetensors")["w"])


def test_a_foreign_file_is_not_opened_as_owned(checkpoint):
    with pytest.raises(ForeignFileError, match=r"model\.safetensors was not written by offload: 'a' can be referenced"):
        open_owned(TensorFile.open(checkpoint), "a")


def test_two_live_values_cannot_claim_one_name_in_one_folder(tmp_path):
    handle = create_value(torch.zeros(3), "w", tmp_path)

    with pytest.raises(NameInUseError, match="'w' is in use"):
        create_value(torch.ones(3), "w", tmp_path)
    with pytest.raises(NameInUseError):
        allocate_value(Layout(torch.float32, (3,), (1,)), "w", tmp_path)
    with pytest.raises(NameInUseError):
        open_owned(TensorFile.open(tmp_path / "w.safetensors"), "w")
    assert torch.equal(torch.zeros(3), handle.base())
    assert torch.equal(torch.zeros(3), load_file(tmp_path / "w.safetensors")["w"])


def test_a_first_write_cannot_take_the_file_of_another_live_value(checkpoint, tmp_path):
    kept = create_value(torch.zeros(2), "a", tmp_path / "own")
    handle = Handle.reference(TensorFile.open(checkpoint), "a", tmp_path / "own")

    with pytest.raises(NameInUseError):
        writable_base(handle)
    with pytest.raises(NameInUseError):
        replace_whole(handle, torch.ones(2, 3))
    assert torch.equal(torch.zeros(2), kept.base())
    assert torch.equal(torch.arange(6.0).reshape(2, 3), handle.base())


def test_a_name_is_free_after_a_failed_write_whose_error_is_still_referenced(tmp_path):
    (tmp_path / "w.safetensors").write_bytes(b"mine")
    with pytest.raises(ForeignFileError) as caught:
        create_value(torch.zeros(3), "w", tmp_path)
    (tmp_path / "w.safetensors").unlink()

    assert torch.equal(torch.ones(3), create_value(torch.ones(3), "w", tmp_path).base())
    assert caught


@pytest.mark.parametrize("layout", [Layout(torch.qint8, (3,), (1,)), Layout(torch.float32, (-3,), (1,))], ids=str)
def test_values_that_cannot_be_stored_are_refused_and_leave_no_file(tmp_path, layout):
    with pytest.raises((UnsupportedOpError, ValueError), match="'w'"):
        allocate_value(layout, "w", tmp_path)
    assert [] == os.listdir(tmp_path)


def looks(handle: Handle) -> tuple[Callable[[], object], ...]:
    """All that opens the file of a value."""
    return handle.base, partial(writable_base, handle), handle.pointers, partial(duplicate, handle)


def test_a_first_write_without_a_folder_to_write_to_leaves_the_reference_as_it_was(checkpoint, tmp_path):
    (tmp_path / "file").write_bytes(b"mine")
    handle = Handle.reference(TensorFile.open(checkpoint), "a", tmp_path / "file")

    for write in (partial(writable_base, handle), lambda: replace_whole(handle, torch.ones(2, 3))):
        with pytest.raises(
            WriteError, match=r"tensor 'a': .*a file is where a folder should be: take another offload_dir"
        ):
            write()
    assert not handle.owned
    assert checkpoint == handle.path
    assert torch.equal(torch.arange(6.0).reshape(2, 3), handle.base())


WRITES = {
    "create": lambda _, folder: create_value(torch.ones(3), "new", folder),
    "allocate": lambda _, folder: allocate_value(Layout(torch.float32, (3,), (1,)), "new", folder),
    "replace": lambda handle, _: replace_whole(handle, torch.ones(3)),
}


@pytest.mark.parametrize("act", WRITES)
def test_a_failure_to_write_names_tensor_path_and_way_out_and_changes_nothing(tmp_path, monkeypatch, act):
    handle = create_value(torch.zeros(3), "old", tmp_path)
    name = "old" if act == "replace" else "new"

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        broken.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(WriteError, match=rf"tensor '{name}': .*take another offload_dir") as caught:
            WRITES[act](handle, tmp_path)
    assert (errno.ENOSPC, str(tmp_path / f"{name}.safetensors")) == (caught.value.errno, caught.value.filename)
    assert torch.equal(torch.zeros(3), handle.base())
    assert ["old.safetensors"] == os.listdir(tmp_path)


MISSING = (MissingFileError, "the file is missing")
CUT = (CorruptFileError, "can't be used.*Download or copy the file again")
HARMS = {
    "missing": (os.unlink, *MISSING),
    "empty": (lambda path: os.truncate(path, 0), *CUT),
    "cut in the header": (lambda path: os.truncate(path, 100), *CUT),
    "cut": (lambda path: os.truncate(path, 4100), *CUT),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), CorruptFileError, "is a folder"),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), CorruptFileError, "not a regular file"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_harmed_file_is_named_with_the_tensor_and_left_as_it_is(tmp_path, harm):
    """Neither created nor extended."""
    act, error, words = HARMS[harm]
    handle = create_value(torch.zeros(3), "w", tmp_path)
    handle.base()
    act(handle.path)
    before = [os.lstat(path)[:7] for path in tmp_path.iterdir()]

    for look in (*looks(handle), handle.flush):
        with pytest.raises(error, match=rf"tensor 'w': .*{words}") as caught:
            look()
        assert 1 == str(caught.value).count("tensor 'w'")
        assert str(handle.path) in str(caught.value)
    assert before == [os.lstat(path)[:7] for path in tmp_path.iterdir()]
    if harm in ("a folder", "a pipe"):
        with pytest.raises(ForeignFileError, match="tensor 'w'"):
            replace_whole(handle, torch.ones(3))


def test_a_value_put_back_where_its_file_went_missing_is_found_again(tmp_path):
    handle = create_value(torch.zeros(3), "w", tmp_path)
    handle.path.unlink()

    replace_whole(handle, torch.ones(3))

    assert torch.equal(torch.ones(3), handle.base())


@pytest.mark.parametrize("mapped_before", [True, False])
def test_a_changed_checkpoint_is_an_error_that_names_tensor_and_file(checkpoint, mapped_before):
    before = checkpoint.stat()
    content = checkpoint.read_bytes()

    def replace_it():
        other = checkpoint.with_name("other")
        other.write_bytes(content)
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
        os.replace(other, checkpoint)

    changes = [lambda: os.utime(checkpoint, ns=(0, 0)), lambda: os.truncate(checkpoint, before.st_size + 1), replace_it]
    for change in changes:
        handle = Handle.reference(TensorFile.open(checkpoint), "a")
        if mapped_before:
            handle.base()
        change()

        for look in looks(handle):
            with pytest.raises(ChangedFileError, match=rf"tensor 'a': {checkpoint} has changed"):
                look()
        os.truncate(checkpoint, before.st_size)


def test_a_value_that_another_process_replaced_is_followed(tmp_path):
    handle = create_value(torch.zeros(3), "w", tmp_path)
    old = handle.base()

    put(tmp_path, torch.ones(3))

    assert torch.equal(torch.ones(3), handle.base())
    assert torch.equal(torch.zeros(3), old)
    writable_base(handle).add_(1)
    handle.flush()
    assert torch.equal(torch.full((3,), 2.0), load_file(handle.path)["w"])


@pytest.mark.parametrize("value", [torch.ones(4), torch.ones(3, dtype=torch.float64)], ids=["shape", "dtype"])
def test_a_replacement_of_another_layout_is_an_error(tmp_path, value):
    handle = create_value(torch.zeros(3), "w", tmp_path)
    generation = handle.generation

    put(tmp_path, value)

    with pytest.raises(ChangedFileError, match=r"tensor 'w': .*w\.safetensors now holds .*open it again"):
        handle.base()
    assert generation < handle.generation


def test_a_file_of_another_name_or_maker_at_the_path_is_an_error(tmp_path):
    handle = create_value(torch.zeros(3), "w", tmp_path)

    put(tmp_path, torch.ones(3), "v")
    os.replace(tmp_path / "v.safetensors", handle.path)
    with pytest.raises(ChangedFileError, match=r"tensor 'w': .*now holds another tensor.*it has 1: v"):
        handle.base()
    save_file({"w": torch.ones(3)}, handle.path)
    with pytest.raises(ChangedFileError, match="offload did not write"):
        handle.base()


@pytest.mark.parametrize("times", [3, 10**6])
def test_a_replacement_between_check_and_mapping_is_followed_but_not_for_ever(tmp_path, monkeypatch, times):
    handle = create_value(torch.zeros(3), "w", tmp_path)
    handle.unmap()
    follow, count = Handle._follow, itertools.count()

    def replaced_after(self):
        follow(self)
        if (number := next(count)) < times:
            put(tmp_path, torch.full((3,), float(number)))

    monkeypatch.setattr(Handle, "_follow", replaced_after)

    if times == 3:
        assert torch.equal(torch.full((3,), 2.0), handle.base())
    else:
        with pytest.raises(ChangedFileError, match="replaced faster than it can be mapped"):
            handle.base()


def test_a_replaced_value_of_one_layout_keeps_its_strides_and_readers_keep_the_old_one(tmp_path):
    handle = create_value(torch.zeros(3, 2).t(), "w", tmp_path)
    old = handle.base()

    replace_whole(handle, torch.ones(2, 3))

    assert (1, 2) == handle.base().stride()
    assert torch.equal(torch.ones(2, 3), handle.base())
    assert torch.equal(torch.zeros(2, 3), old)
    assert 0 == handle.generation
    replace_whole(handle, torch.ones(4))
    replace_whole(handle, torch.ones(4, dtype=torch.int8))
    assert 2 == handle.generation


def test_a_copy_has_what_was_stored_last_and_is_independent(tmp_path):
    handle = create_value(torch.zeros(3), "w", tmp_path)
    writable_base(handle).fill_(1)
    os.utime(handle.path)

    copied = duplicate(handle)
    writable_base(handle).fill_(2)

    assert torch.equal(torch.ones(3), copied.base())
    assert handle.path != copied.path
    assert "w" == copied.name


def test_a_flush_syncs_the_very_file_and_a_failure_names_tensor_and_path(tmp_path, monkeypatch):
    handle = create_value(torch.zeros(3), "w", tmp_path)
    before, synced = len(os.listdir("/proc/self/fd")), []

    def refuse(fd):
        synced.append(os.readlink(f"/proc/self/fd/{fd.fileno()}"))
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)

    with pytest.raises(WriteError, match=r"tensor 'w': written data may not be on the disk") as caught:
        handle.flush()
    assert (errno.EIO, str(handle.path)) == (caught.value.errno, caught.value.filename)
    assert [str(handle.path)] == synced
    assert before == len(os.listdir("/proc/self/fd"))


def test_pointers_lie_in_a_storage_that_no_op_computes_with(tmp_path):
    handle = create_value(torch.arange(3.0), "w", tmp_path)

    storage = handle.pointers()

    assert handle.base().untyped_storage().data_ptr() == storage.data_ptr()
    assert handle.base().untyped_storage()._cdata != storage._cdata
    assert 12 == storage.nbytes()


def test_the_oldest_of_too_many_mappings_are_dropped_and_mapped_again(tmp_path, monkeypatch):
    monkeypatch.setattr(handle_module, "MOST_MAPPINGS", 4)
    handles = [create_value(torch.tensor(number), f"w{number}", tmp_path) for number in range(10)]

    def mapped():
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    assert list(range(10)) == [handle.base().item() for handle in handles]
    assert mapped() <= 4
    assert list(range(10)) == [handle.base().item() for handle in handles]
    assert mapped() <= 4


def test_a_private_file_that_is_gone_already_causes_no_error(capsys):
    handle = create_value(torch.zeros(3), "w", None)
    handle.path.unlink()
    del handle
    gc.collect()

    assert "" == capsys.readouterr().err


@pytest.mark.parametrize("first", ["drops", "replaces", "writes", "copies"])
def test_a_forked_child_never_deletes_its_parents_file(first):
    held = [create_value(torch.zeros(3), "w", None)]
    path = held[0].path

    def child():
        if first == "replaces":
            replace_whole(held[0], torch.ones(3))
        if first == "writes":
            writable_base(held[0]).fill_(1)
        if first == "copies":
            copied = duplicate(held[0])
            assert torch.equal(torch.zeros(3), copied.base())
            assert copied.path.parent != path.parent
        held.clear()
        gc.collect()

    assert in_fork(child)
    expected = torch.ones(3) if first in ("replaces", "writes") else torch.zeros(3)
    assert torch.equal(expected, held[0].base())
    held.clear()
    assert not path.exists()


def test_a_child_that_makes_a_reference_its_own_writes_to_its_own_folder(checkpoint):
    handle = Handle.reference(TensorFile.open(checkpoint), "a")
    handle_path = handle.path

    def child():
        writable_base(handle).fill_(9)
        assert handle.path != handle_path
        assert str(os.getpid()) in str(handle.path)

    assert in_fork(child)
    assert torch.equal(torch.arange(6.0).reshape(2, 3), handle.base())


def test_holes_of_a_file_that_others_write_are_filled_once(tmp_path, monkeypatch):
    path = create_value(torch.zeros(1 << 16), "w", tmp_path).path
    filled = []
    monkeypatch.setattr(owning, "fill_holes", lambda fd, size: filled.append(size))
    handle = Handle.shared(TensorFile.open(path), "w", tmp_path, in_place=True)

    writable_base(handle)[0] = 1
    writable_base(handle)[1] = 2

    assert [path.stat().st_size] == filled
    with pytest.raises(UnsupportedOpError, match="written in place by others"):
        replace_whole(handle, torch.ones(1 << 16))


# As a user meets it


def test_all_threads_share_one_lock() -> None:
    start = Barrier(8)

    def lock_of(handle: Handle) -> int:
        start.wait()
        return id(handle.lock)

    with ThreadPoolExecutor(8) as threads:
        for _ in range(20):
            assert 1 == len(set(threads.map(lock_of, [Handle("w", None)] * 8)))
