"""A small file of ours is read as it was written, and nothing else passes for one."""

from __future__ import annotations

import json

import pytest

from offload.errors import CacheError, CorruptFileError, ForeignFileError, MissingFileError, ReadError
from offload.storage.state_file import Kind, read_state, state_if_ours, write_state

KIND = Kind(
    what="a list of things",
    stamp={"offload": {"things": 2}, "format": "things"},
    missing="no things are here",
    foreign=ForeignFileError,
    later=CacheError,
    most=1000,
)
STAMP = dict(KIND.stamp)


def test_a_state_file_is_read_back_with_its_stamp(tmp_path):
    write_state(tmp_path / "a.json", KIND, {"of": ["ü", None, "\ud800", float("inf")]})

    assert {**STAMP, "of": ["ü", None, "\ud800", float("inf")]} == read_state(tmp_path / "a.json", KIND)
    assert ["a.json"] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("", ForeignFileError, r"can't be read as a list of things \(Expecting value"),
        ("[" * 100_000, CorruptFileError, "larger than 1000 bytes"),
        ('{"offload": 1, "offload": 2}', ForeignFileError, "names 'offload' twice"),
        ("[]", ForeignFileError, "is not a list of things: it is left as it is"),
        ("{}", ForeignFileError, "is not a list of things"),
        (json.dumps({**STAMP, "offload": 3}), ForeignFileError, "is not a list of things"),
        (json.dumps({**STAMP, "format": "others"}), ForeignFileError, "is not a list of things"),
        (
            json.dumps({**STAMP, "offload": {"things": 3}}),
            CacheError,
            "of version 3, and this release of offload reads version 2",
        ),
    ],
)
def test_another_file_is_an_error_of_its_kind_with_the_path(tmp_path, text, error, words):
    path = tmp_path / "a.json"
    path.write_text(text)

    with pytest.raises(error, match=words) as caught:
        read_state(path, KIND)
    assert str(path) in str(caught.value)
    assert state_if_ours(path, KIND) is None
    assert text == path.read_text()


def test_a_missing_state_file_raises_the_message_of_its_kind(tmp_path):
    with pytest.raises(MissingFileError, match="no things are here"):
        read_state(tmp_path / "a.json", KIND)
    assert state_if_ours(tmp_path / "a.json", KIND) is None


def test_an_unreadable_state_file_is_not_called_foreign(tmp_path):
    (tmp_path / "a.json").symlink_to("a.json")

    with pytest.raises(ReadError, match="form a loop"):
        state_if_ours(tmp_path / "a.json", KIND)
