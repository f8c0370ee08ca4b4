"""A file is opened and mapped as it is, or refused with its name; reading changes nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save_file

from offload import OffloadedTensor, load_file
from offload.errors import (
    ChangedFileError,
    CheckpointError,
    CorruptFileError,
    ForeignFileError,
    MissingFileError,
    ReadError,
)
from offload.storage.file import TensorFile, is_ours
from offload.storage.layout import Entry, contiguous
from offload.storage.mapping import map_bytes
from offload.storage.state_file import Kind, write_state
from offload.storage.write import refuse_foreign
from offload.system.regular import owned
from tests import faults
from tests.processes import run_script
from tests.storage.test_write import write


def value_of(file: TensorFile, key: str = "w", *, shared: bool = False) -> torch.Tensor:
    return file.tensor(file.entry(key), shared=shared)


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.int64)}, path)
    return path


def test_a_link_in_a_folder_of_values_is_read_and_never_written_through(tmp_path):
    kept = OffloadedTensor.from_original_tensor(torch.ones(3), "v", tmp_path / "one")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "v.safetensors").symlink_to(kept.offload_path)
    before = kept.offload_path.read_bytes()

    with pytest.raises(ForeignFileError, match=r"two/v\.safetensors is a link: 'v' can be referenced"):
        load_file(tmp_path / "two", offload_dir=tmp_path / "two")
    read = load_file(tmp_path / "two")["v"]
    assert [1.0, 1.0, 1.0] == read.tolist()
    read.mul_(5)

    assert before == kept.offload_path.read_bytes()
    assert read.offload_path != kept.offload_path


def test_a_link_that_replaced_our_file_is_not_written_through(tmp_path):
    kept = OffloadedTensor.from_original_tensor(torch.ones(3), "v", tmp_path)
    kept.offload_path.rename(tmp_path / "elsewhere")
    kept.offload_path.symlink_to("elsewhere")
    before = (tmp_path / "elsewhere").read_bytes()

    for write_to in (lambda: kept.mul_(5), lambda: kept.update_values(torch.zeros(3))):
        with contextlib.suppress(ForeignFileError):
            write_to()
        assert before == (tmp_path / "elsewhere").read_bytes()


def test_a_checkpoint_of_links_as_the_hub_stores_it_is_referenced(tmp_path):
    (tmp_path / "blobs").mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "blobs" / "0123")
    (tmp_path / "model.safetensors").symlink_to("blobs/0123")
    before = (tmp_path / "blobs" / "0123").read_bytes()

    value = load_file(tmp_path)["w"]
    value.mul_(2)

    assert [2.0, 2.0, 2.0] == value.tolist()
    assert before == (tmp_path / "blobs" / "0123").read_bytes()


def test_a_header_is_parsed_once_per_file(checkpoint, monkeypatch):
    file = TensorFile.open(checkpoint)
    monkeypatch.setattr("offload.storage.header.parse", None)

    assert file is TensorFile.open(checkpoint)
    assert file is TensorFile.open(os.path.join(checkpoint.parent, ".", checkpoint.name))


def test_a_replaced_file_is_opened_again(tmp_path):
    path = write(tmp_path / "w.safetensors", torch.zeros(4))
    old = TensorFile.open(path)
    kept = value_of(old)

    write(path, torch.ones(4))
    new = TensorFile.open(path)

    assert old is not new
    assert torch.equal(torch.ones(4), value_of(new))
    assert torch.equal(torch.zeros(4), kept)


def test_an_entry_of_an_unknown_dtype_is_named_when_it_is_read(tmp_path):
    path = tmp_path / "w.safetensors"
    text = json.dumps({"w": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(3))

    with pytest.raises(CorruptFileError, match=r"'w' in .*w.safetensors is stored as F6_E2M3"):
        TensorFile.open(path).entry("w")


@given(st.binary(max_size=80), st.integers(0, 80), st.booleans())
@example(b"\x80", 0, False)
@example(b"\x80\x02", 0, False)
@example(b"PK\x03\x04", 0, False)
def test_any_content_opens_or_is_refused(tmp_path, content, length, honest):
    path = tmp_path / "any.safetensors"
    path.write_bytes(struct.pack("<Q", length) + content if honest else content)

    with contextlib.suppress(CorruptFileError, CheckpointError):
        TensorFile.open(path)


@pytest.mark.parametrize("length", [0x0280, 0x0480])
def test_a_header_whose_length_begins_as_a_pickle_does_is_read(tmp_path, length):
    header = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    path = tmp_path / "w.safetensors"
    path.write_bytes(struct.pack("<Q", length) + header.ljust(length) + b"\x07")

    assert [7] == value_of(TensorFile.open(path), "w").tolist()


def test_a_socket_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the name of a socket is at most 108 bytes long
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("w")

        with pytest.raises(CorruptFileError, match="w is not a regular file"):
            TensorFile.open(tmp_path / "w")


def test_an_unreadable_file_is_named_and_not_called_damaged(checkpoint):
    """Who gets damaged files again would remove a good one."""
    with faults.failing(0, errno.EACCES) as fault, pytest.raises(ReadError, match="Permission denied") as caught:
        TensorFile.open(checkpoint)

    assert "os.open" == fault.call.name
    assert (errno.EACCES, str(checkpoint)) == (caught.value.errno, caught.value.filename)


@pytest.mark.parametrize(
    ("harm", "error"),
    [(lambda path: os.truncate(path, 4100), ChangedFileError), (os.unlink, MissingFileError)],
    ids=["cut", "gone"],
)
@pytest.mark.parametrize("shared", [False, True])
def test_a_file_cut_or_gone_after_it_was_opened_is_neither_mapped_nor_made_whole(tmp_path, harm, error, shared):
    path = write(tmp_path / "w.safetensors", torch.ones(4))
    file = TensorFile.open(path)
    harm(path)

    with pytest.raises(error):
        value_of(file, shared=shared)
    assert [] == [place for place in tmp_path.iterdir() if place.stat().st_size != 4100]


def test_a_file_that_was_written_to_after_it_was_opened_is_mapped_only_if_it_is_shared(tmp_path):
    path = write(tmp_path / "w.safetensors", torch.ones(4))
    os.utime(path, ns=(1, 1))
    file = TensorFile.open(path)
    os.utime(path, ns=(2, 2))

    assert [1, 1, 1, 1] == value_of(file, shared=True).tolist()
    with pytest.raises(ChangedFileError):
        value_of(file)


def test_a_mapping_keeps_no_descriptor_and_ends_with_the_last_tensor_over_it(tmp_path):
    path = write(tmp_path / "w.safetensors", torch.ones(4))
    before = len(os.listdir("/proc/self/fd"))
    views = [value_of(TensorFile.open(path), shared=shared)[1:] for shared in (True, False)]

    assert before == len(os.listdir("/proc/self/fd"))
    assert str(path) in Path("/proc/self/maps").read_text()
    assert [3, 3] == [view.sum() for view in views]
    views.clear()
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_checkpoint_larger_than_the_commit_limit_is_mapped(tmp_path):
    script = """
        import json, os, struct, sys, torch
        from offload.storage.file import TensorFile
        size = 1 << 40
        text = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        with open(sys.argv[1], "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            os.truncate(file.fileno(), 8 + len(text) + size)
        file = TensorFile.open(sys.argv[1])
        print(file.storage(file.entry("w"), shared=False).nbytes() == size)
        os.unlink(sys.argv[1])
    """

    assert "True\n" == run_script(script, tmp_path / "large.safetensors")


def test_a_file_without_a_header_says_how_much_of_its_value_is_missing(tmp_path):
    (tmp_path / "w.bin").write_bytes(bytes(15))

    with pytest.raises(CorruptFileError, match=r"'w', torch.float32 \[3\], takes 16 bytes, and 15 are there"):
        TensorFile.raw(tmp_path / "w.bin", Entry("w", contiguous(torch.float32, (3,)), 4))


KIND = Kind(what="a list", stamp={"list": 1})


def put_json(path):
    write_state(path, KIND, {})


def put_begun(path):
    path.write_bytes(b"offload: and more")


def put_tensor(path):
    OffloadedTensor.from_original_tensor(torch.ones(2), "w", path.parent)
    (path.parent / "w.safetensors").rename(path)


@pytest.mark.parametrize(
    ("kind", "put"), [(KIND, put_json), (b"offload:", put_begun), (None, put_tensor)], ids=["json", "begun", "tensor"]
)
def test_links_and_foreign_files_do_not_count_as_written_by_offload(kind, put, tmp_path):
    put(tmp_path / "ours")
    (tmp_path / "link").symlink_to(tmp_path / "ours")
    (tmp_path / "folder").mkdir()
    (tmp_path / "theirs").write_text("mine")
    (tmp_path / "empty").touch()

    assert is_ours(tmp_path / "ours", kind)
    for name in ("link", "folder", "theirs", "empty"):
        assert not is_ours(tmp_path / name, kind)
        with pytest.raises(ForeignFileError, match=f"{name} is not mine"):
            refuse_foreign(tmp_path / name, kind, "is not mine")
    with pytest.raises(MissingFileError):
        is_ours(tmp_path / "missing", kind)
    refuse_foreign(tmp_path / "missing", kind)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "private"])
@pytest.mark.parametrize("start", [0, 4096, 4101])
def test_a_part_of_a_file_is_mapped_and_a_store_reaches_the_file_if_that_is_shared(tmp_path, start, shared):
    path, data = tmp_path / "data", bytes(range(256)) * 64
    path.write_bytes(data)
    with owned(os.open, path, os.O_RDWR) as opened:
        storage = map_bytes(opened.fileno(), path, start, 300, shared=shared)
    assert data[start : start + 300] == bytes(storage)

    torch.empty(0, dtype=torch.uint8).set_(storage)[5] = 99

    assert 99 == storage[5]
    assert (99 if shared else data[start + 5]) == path.read_bytes()[start + 5]


def test_unmappable_files_are_errors_with_their_path(tmp_path):
    with owned(os.open, tmp_path, os.O_RDONLY) as opened, pytest.raises(ReadError, match=str(tmp_path)):
        map_bytes(opened.fileno(), tmp_path, 0, 1, shared=False)
