"""TensorDicts and their folders: as rows of a cache, sparse, written through, and with failing calls."""

import os
import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree  # noqa: F401  tensordict's import needs it loaded

from offload import TensorCache, is_offloaded
from offload.errors import (
    ArgumentError,
    CacheError,
    ChangedFileError,
    ForeignFileError,
    OffloadError,
    UnsupportedOpError,
)
from offload.integrations import cache_from
from tests.equal import assert_equal
from tests.processes import in_fork

tensordict = pytest.importorskip("tensordict")
from tensordict import TensorDict  # noqa: E402

from offload.integrations.tensordict import load_memmap, memmap_like  # noqa: E402


def rows() -> TensorDict:
    return TensorDict(
        {
            "a": torch.arange(12.0).view(4, 3),
            "in": {"b": torch.arange(4), "deep": {"c": torch.ones(4, 2, 2, dtype=torch.bfloat16)}},
        },
        batch_size=[4],
    )


def assert_rows(cache: TensorCache) -> None:
    expected = {"a": rows()["a"], "in.b": rows()["in", "b"], "in.deep.c": rows()["in", "deep", "c"]}
    assert_equal(expected, dict(cache[:]))


@pytest.mark.parametrize("small", [False, True])
def test_a_tensordict_becomes_rows(monkeypatch, small):
    if small:
        monkeypatch.setattr("offload.cache.incoming._BATCH", 1)
    lazy = tensordict.LazyStackedTensorDict(*rows().unbind(0))

    assert_rows(cache_from(rows()))
    assert_rows(cache_from(lazy))
    assert ["in.b"] == list(cache_from(rows(), columns=["in.b"]).schema)
    assert (2, 4, 3) == tuple(cache_from(torch.stack([rows(), rows()]), columns=["a"]).column("a").shape)


def test_data_without_rows_is_refused():
    with pytest.raises(CacheError, match="has no batch_size, which is the number of rows"):
        cache_from(TensorDict(a=torch.ones(3)))
    with pytest.raises(CacheError, match="'b' in the dict is a dict, neither tensor nor array"):
        cache_from({"a": torch.ones(3), "b": {"c": torch.ones(3)}})
    with pytest.raises(CacheError, match=r"'b' in the TensorDict is a NonTensorData, .*leave it out with columns="):
        cache_from(TensorDict(a=torch.ones(3), b="text", batch_size=[3]))


def test_a_folder_to_be_filled_takes_no_disk_for_what_is_not(tmp_path: Path) -> None:
    td = TensorDict(image=torch.empty(1, 3072, device="meta").expand(1_000_000, 3072), batch_size=[1_000_000])
    made = memmap_like(td, tmp_path / "made")

    assert 1_000_000 * 3072 * 4 == (tmp_path / "made" / "image.memmap").stat().st_size
    assert sum(path.stat().st_blocks * 512 for path in (tmp_path / "made").iterdir()) < 1 << 20
    made[999_999] = TensorDict(image=torch.ones(3072), batch_size=[])
    assert 3072.0 == load_memmap(tmp_path / "made")[999_999]["image"].sum().item()
    assert (tmp_path / "made" / "image.memmap").stat().st_blocks * 512 < 1 << 20


def test_a_folder_opened_to_be_written_is_written_through(tmp_path: Path) -> None:
    rows().memmap(tmp_path / "data")
    theirs = TensorDict.load_memmap(tmp_path / "data")

    td = load_memmap(tmp_path / "data", mode="r+")
    assert is_offloaded(td["a"])
    td["a"].mul_(2)
    td["in", "b"][1] = 70
    td[2]["in", "deep", "c"].zero_()

    expected = rows()
    expected["a"].mul_(2)
    expected["in", "b"][1] = 70
    expected["in", "deep", "c"][2] = 0
    for key in ("a", ("in", "b"), ("in", "deep", "c")):
        assert torch.equal(expected[key], theirs[key])
        assert torch.equal(expected[key], td[key].clone())
        assert torch.equal(expected[key], TensorDict.load_memmap(tmp_path / "data")[key])
    theirs["a"].fill_(5)
    assert 5 == td["a"][3, 2].item()
    td["a"].flush()


def test_files_written_through_are_never_replaced_or_confused(tmp_path: Path) -> None:
    rows().memmap(tmp_path / "data")
    td = load_memmap(tmp_path / "data", mode="r+")
    inode = (tmp_path / "data" / "a.memmap").stat().st_ino

    with pytest.raises(UnsupportedOpError, match="written in place by others"):
        td["a"].update_values(torch.zeros(4, 3))
    assert inode == (tmp_path / "data" / "a.memmap").stat().st_ino
    assert torch.equal(rows()["a"], td["a"].clone())
    (tmp_path / "other").write_bytes(b"\0" * 48)
    os.replace(tmp_path / "other", tmp_path / "data" / "a.memmap")
    with pytest.raises(ChangedFileError, match="is not the file that was opened"):
        td["a"].sum()
    os.truncate(tmp_path / "data" / "in" / "b.memmap", 8)
    with pytest.raises(OffloadError, match=r"b\.memmap"):
        td["in", "b"].sum()
    assert 8 == (tmp_path / "data" / "in" / "b.memmap").stat().st_size


def test_a_link_is_not_written_through_and_another_mode_is_refused(tmp_path):
    rows().memmap(tmp_path / "data")
    (tmp_path / "data" / "a.memmap").rename(tmp_path / "mine")
    (tmp_path / "data" / "a.memmap").symlink_to(tmp_path / "mine")

    with pytest.raises(ForeignFileError, match=r"a\.memmap is a link"):
        load_memmap(tmp_path / "data", mode="r+")
    assert torch.equal(rows()["a"], load_memmap(tmp_path / "data")["a"].clone())
    with pytest.raises(ArgumentError, match=r"unknown mode 'w': 'r' protects .*, 'r\+' writes"):
        load_memmap(tmp_path / "data", mode="w")


def test_other_processes_write_through_too(tmp_path: Path) -> None:
    rows().memmap(tmp_path / "data")
    leaf = load_memmap(tmp_path / "data", mode="r+")["a"]
    passed = pickle.loads(bytes(ForkingPickler.dumps(leaf)))

    assert in_fork(lambda: leaf[0].fill_(9))
    passed[1] = 8

    assert [[9.0] * 3, [8.0] * 3] == TensorDict.load_memmap(tmp_path / "data")["a"][:2].tolist()
    with pytest.raises(UnsupportedOpError, match="written in place by others"):
        passed.update_values(torch.zeros(4, 3))
