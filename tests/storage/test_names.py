"""Tensor names become file names, without loss."""

from __future__ import annotations

import string
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.storage.folders import SUFFIX, file_name

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
        ("con", "%63on.safetensors"),
        ("nul.weight", "%6eul.weight.safetensors"),
        ("console", "console.safetensors"),
        (" ", "%20.safetensors"),
    ],
)
def test_escaped_names_stay_readable(name, file):
    assert file == file_name(name)
    assert name == unquote(file.removesuffix(SUFFIX), errors="strict")


def test_long_names_that_begin_alike_have_files_of_their_own():
    names = ["x" * 300, "x" * 301, "x" * 299 + "y", "é" * 300, "é" * 301, "x" * 188, "x" * 189]

    files = {file_name(name) for name in names}

    assert len(names) == len(files)
    assert all(len(file) <= 200 for file in files)


def test_a_cut_leaves_no_half_of_an_escape():
    for start in range(4):
        stem = file_name("x" * start + "é" * 300).partition("%~")[0]

        assert "x" * start == stem.replace("%c3", "").replace("%a9", "")


@pytest.mark.parametrize(("name", "why"), [("", "empty"), ("\ud800", "unicode"), ("__metadata__", "safetensors")])
def test_a_name_that_cannot_be_stored_is_refused(name, why):
    with pytest.raises(ValueError, match=why):
        file_name(name)
