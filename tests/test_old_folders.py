"""Files of earlier releases can be opened, read equal, and continued."""

from __future__ import annotations

import tarfile

import pytest

from tests.old_folders import DATA, KINDS, make

ARCHIVES = sorted(DATA.glob("*/*.tar.xz"))


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: f"{path.parent.name} {path.name.split('.')[0]}")
def test_a_folder_of_an_earlier_release_opens_and_goes_on(archive, tmp_path):
    kind = archive.name.split(".")[0]
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")

    KINDS[kind][1](tmp_path / kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_this_release_opens_and_goes_on(kind, tmp_path):
    folder = tmp_path / kind
    folder.mkdir()
    KINDS[kind][0](folder)

    KINDS[kind][1](folder)


def test_every_kind_has_been_kept_of_each_release():
    assert set(KINDS) <= {path.name.split(".")[0] for path in (DATA / "0.1.0").iterdir()}


def test_an_archive_holds_what_was_made(tmp_path):
    make("memmap", tmp_path / "memmap.tar.xz")

    with tarfile.open(tmp_path / "memmap.tar.xz") as packed:
        assert "memmap/x.memmap" in packed.getnames()
        assert all((member.uid, member.uname) == (0, "") for member in packed)
