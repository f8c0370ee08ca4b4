"""What is in place of a file is checked before it is read, and reading is bounded."""

from __future__ import annotations

import os

import pytest

from offload.errors import CorruptFileError, ForeignFileError, MissingFileError
from offload.storage.state_file import read_json
from offload.system.regular import open_regular

FLAGS = [os.O_RDONLY, os.O_RDWR, os.O_RDWR | os.O_CREAT]


@pytest.mark.parametrize("flags", FLAGS)
def test_a_regular_file_is_opened(tmp_path, flags):
    (tmp_path / "file").write_bytes(b"bytes")

    with open_regular(tmp_path / "file", flags) as file:
        fd = file.fileno()

        assert b"bytes" == os.read(fd, 10)
        assert not os.get_inheritable(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_special_files_are_refused_without_waiting(tmp_path, make, flags):
    path = tmp_path / "it's"
    make(path)

    with pytest.raises((CorruptFileError, ForeignFileError), match=r"it's is (a folder|a link|not a regular file)"):
        open_regular(path, flags)


def test_a_link_is_followed_to_read_and_never_to_write(tmp_path):
    (tmp_path / "file").write_bytes(b"bytes")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("nowhere")

    open_regular(tmp_path / "link").close()

    for flags in (os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_CREAT, os.O_RDONLY | os.O_NOFOLLOW):
        with pytest.raises(ForeignFileError, match="link is a link"):
            open_regular(tmp_path / "link", flags)
    with pytest.raises(ForeignFileError, match="dangling is a link"):
        open_regular(tmp_path / "dangling", os.O_RDWR | os.O_CREAT)
    with pytest.raises(MissingFileError):
        open_regular(tmp_path / "dangling")
    assert {"file", "link", "dangling"} == set(os.listdir(tmp_path))


def test_a_missing_file_is_not_created(tmp_path):
    with pytest.raises(MissingFileError, match="nothing"):
        open_regular(tmp_path / "nothing", os.O_RDWR)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "Expecting value"),
        (b'{"a": 1', "delimiter"),
        (b'{"a": "\xff"}', "utf-8"),
        (b'{"a": 1, "a": 2}', "it names 'a' twice"),
        (b"[" * 200_000, "recursion"),
        (b"9" * 10_000, "digits"),
        (b"[" + b"1," * 60_000 + b"1]", "larger than 100000 bytes"),
    ],
)
def test_invalid_json_is_refused_with_the_path(tmp_path, data, reason):
    path = tmp_path / "a.json"
    path.write_bytes(data)

    with pytest.raises(CorruptFileError, match=reason) as caught:
        read_json(path, "a list", most=100_000 if len(data) < 200_000 else 1 << 20)

    assert str(path) in str(caught.value)
