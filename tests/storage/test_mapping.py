"""Bytes of files as memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from offload.errors import ReadError
from offload.storage.mapping import map_bytes
from offload.system.regular import owned

DATA = bytes(range(256)) * 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(DATA)
    return path


def private(path: Path, start: int, nbytes: int) -> torch.UntypedStorage:
    with owned(os.open, path, os.O_RDONLY) as opened:
        return map_bytes(opened.fileno(), path, start, nbytes, shared=False)


@pytest.mark.parametrize(("start", "nbytes"), [(0, len(DATA)), (4096, 1), (5, 300), (4097, 8192)], ids=str)
def test_any_part_of_a_file_is_mapped(path, start, nbytes):
    assert DATA[start : start + nbytes] == bytes(private(path, start, nbytes))


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "private"])
def test_a_store_reaches_the_file_through_a_shared_mapping_alone(path, shared):
    fd = os.open(path, os.O_RDWR)
    storage = map_bytes(fd, path, 0, len(DATA), shared=shared)
    os.close(fd)

    torch.empty(0, dtype=torch.uint8).set_(storage)[5] = 99

    assert 99 == storage[5]
    assert (99 if shared else DATA[5]) == path.read_bytes()[5]


def test_unmappable_files_are_errors_with_their_path(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(ReadError, match=str(tmp_path)):
        map_bytes(fd, tmp_path, 0, 1, shared=False)
    os.close(fd)
