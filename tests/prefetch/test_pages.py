"""Pages of mapped files: which are in memory, according to the kernel, and dropping them without losing data."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import offload
from offload import OffloadedTensor
from offload.errors import CorruptFileError
from offload.prefetch import pages
from offload.prefetch.pages import Range
from offload.storage.file import TensorFile
from tests.page_cache import dropped, needs_page_cache

pytestmark = needs_page_cache
MIB = 1 << 20


@pytest.fixture
def values() -> torch.Tensor:
    return torch.arange(MIB, dtype=torch.float32)  # 4 MiB


@pytest.fixture
def file(tmp_path: Path, values: torch.Tensor) -> TensorFile:
    path = tmp_path / "w.safetensors"
    save_file({"w": values}, path)
    dropped(path)
    return TensorFile.open(path)


def cold_zeros(folder: Path, mib: int) -> TensorFile:
    """So many MiB of zeros, on disk alone."""
    save_file({"w": torch.zeros(mib * MIB // 4)}, folder / "w.safetensors")
    dropped(folder / "w.safetensors")
    return TensorFile.open(folder / "w.safetensors")


def whole(file: TensorFile, *, shared: bool = False) -> Range:
    entry = file.entry("w")
    return Range(file, entry.start, entry.layout.nbytes, shared=shared)


def mapped(file: TensorFile, *, shared: bool = False) -> torch.Tensor:
    entry = file.entry("w")
    return torch.empty(0).set_(file.storage(entry, shared=shared), 0, entry.layout.shape)


def test_a_range_is_read_in_and_dropped(file, values):
    found = whole(file)
    cold = found.is_cached(), found.cached_bytes()
    found.bring_in()
    warm = found.is_cached(), found.cached_bytes()
    found.let_go()

    assert not cold[0]
    assert cold[1] < 64 << 10  # read along with the header
    assert (True, 4 * MIB) == warm
    assert found.cached_bytes() < 64 << 10
    assert torch.equal(values, mapped(file))


def test_a_partly_cached_range_is_not_cached(file):
    found = whole(file)
    found.bring_in()
    Range(file, 2 * MIB, MIB, shared=False).let_go()

    assert not found.is_cached()
    assert 2 * MIB < found.cached_bytes() < 4 * MIB


@pytest.mark.parametrize("huge", [True, False])
def test_a_range_can_be_read_without_its_neighbours(tmp_path, monkeypatch, huge):
    """Nor what shares a 2 MiB page with it at either end, where there are such pages."""
    monkeypatch.setattr(pages, "_READS_HUGE_PAGES", huge and pages._READS_HUGE_PAGES)
    monkeypatch.setattr(pages, "_HOST_TAKES_FREE_PAGES", False)
    file = cold_zeros(tmp_path, 64)
    Range(file, 20 * MIB, 9 * MIB, shared=False).bring_in(exactly=True)

    assert 9 * MIB <= whole(file).cached_bytes() <= 9 * MIB + (64 << 10)
    assert Range(file, 20 * MIB, 9 * MIB, shared=False).is_cached()


@pytest.mark.parametrize("huge", [True, False])
@pytest.mark.parametrize("exactly", [True, False])
def test_a_range_is_dropped_whole_and_its_neighbours_stay(tmp_path, monkeypatch, huge, exactly):
    """Even if it shares a 2 MiB page with one of them."""
    monkeypatch.setattr(pages, "_READS_HUGE_PAGES", huge and pages._READS_HUGE_PAGES)
    monkeypatch.setattr(pages, "_HOST_TAKES_FREE_PAGES", False)
    file = cold_zeros(tmp_path, 32)
    parts = [Range(file, 4096 + start * MIB, 7 * MIB, shared=False) for start in (1, 8, 15)]
    for part in parts:
        part.bring_in(exactly=exactly)
    parts[1].let_go()

    left = [part.cached_bytes() for part in parts]
    assert (7 * MIB, 7 * MIB) == (left[0], left[2])
    assert left[1] < MIB // 4


@pytest.mark.skipif(not pages._READS_HUGE_PAGES, reason="this kernel reads files in small pages")
def test_huge_pages_are_requested_while_some_are_free(tmp_path, monkeypatch):
    """Otherwise the kernel makes room for them by evicting what should stay, although there is enough memory."""
    file, blocks = cold_zeros(tmp_path, 32), tmp_path / "buddyinfo"
    monkeypatch.setattr(pages, "_FREE_BLOCKS", blocks)
    monkeypatch.setattr(pages, "_HOST_TAKES_FREE_PAGES", False)
    part = Range(file, 4 * MIB, 8 * MIB, shared=False)
    asked = []
    for free in 150, 1000, 100, 150:  # the first read leaves twice as many as those after it
        dropped(file.path)
        blocks.write_text(f"Node 0, zone Normal {'9 ' * 9} {free} 0\nNode 0, zone DMA {'9 ' * 9} 3 1\n")
        part.bring_in(exactly=True)
        asked.append("hg" in flags_of(file.path))
        assert 8 * MIB <= whole(file).cached_bytes() <= 8 * MIB + (64 << 10)
        part.let_go()

    assert [False, True, False, True] == asked
    assert 310 * MIB == pages.bytes_free(huge=True)


@pytest.mark.skipif(not pages._READS_HUGE_PAGES, reason="this kernel reads files in small pages")
@pytest.mark.parametrize(
    ("takes", "streams", "expected"),
    [
        (True, True, [False, True, True]),
        (True, False, [False, False, False]),
        (False, True, [True, True, True]),
        (False, False, [True, True, True]),
    ],
)
def test_huge_pages_that_the_host_has_taken_are_asked_for_where_they_are_used_again(
    tmp_path, monkeypatch, takes, streams, expected
):
    file, blocks = cold_zeros(tmp_path, 32), tmp_path / "buddyinfo"
    blocks.write_text(f"Node 0, zone Normal {'9 ' * 9} 1000 0\n")
    monkeypatch.setattr(pages, "_FREE_BLOCKS", blocks)
    monkeypatch.setattr(pages, "_HOST_TAKES_FREE_PAGES", takes)
    part = Range(file, 4 * MIB, 8 * MIB, shared=False)
    asked, small = [], []
    exactly = pages.bring_in_exactly
    monkeypatch.setattr(pages, "bring_in_exactly", lambda *given: (small.append(len(asked)), exactly(*given)))
    for _ in range(3):
        dropped(file.path)
        part.bring_in(exactly=streams)
        assert part.is_cached()
        asked.append("hg" in flags_of(file.path))

    assert expected == asked
    assert {at for at, is_huge in enumerate(expected) if not is_huge} == set(small)


@pytest.mark.parametrize(
    ("takes", "small", "nbytes", "expected"),
    [
        (True, 2, 2 * MIB, True),  # in blocks of less than 2 MiB there are 2 * (2 MiB - 4 KiB)
        (True, 2, 4 * MIB - 8192, True),
        (True, 2, 4 * MIB, False),
        (True, 2, 2 * MIB - 1, False),  # what is that small is read in small pages anyway
        (True, None, 2 * MIB, False),  # the system does not tell
        (False, 2, 2 * MIB, False),
    ],
)
def test_small_pages_are_taken_while_the_host_has_left_them(tmp_path, monkeypatch, takes, small, nbytes, expected):
    blocks = tmp_path / "buddyinfo"
    if small is not None:
        blocks.write_text(f"Node 0, zone Normal {f'{small} ' * 9} 1000 0\n")
    monkeypatch.setattr(pages, "_FREE_BLOCKS", blocks)
    monkeypatch.setattr(pages, "_HOST_TAKES_FREE_PAGES", takes)

    assert pages.should_take_small_pages(nbytes) is expected


@pytest.mark.parametrize(("text", "expected"), [("9\n", True), ("0\n", True), ("-1\n", False), ("4294967295", False)])
def test_a_host_that_takes_free_pages_is_known_by_their_order(tmp_path, text, expected):
    order = tmp_path / "order"
    assert not pages.host_takes_free_pages(order)

    order.write_text(text)

    assert pages.host_takes_free_pages(order) is expected


def flags_of(path: Path) -> set[str]:
    """The kernel's flags for this process's mappings of a file."""
    flags: set[str] = set()
    is_ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_ours = line.endswith(str(path))
        elif is_ours and line.startswith("VmFlags:"):
            flags.update(line.split()[1:])
    return flags


def test_neighbours_on_the_same_page_stay(file):
    """Only pages that belong to it alone are dropped."""
    whole(file).bring_in()
    Range(file, 100, 4096, shared=False).let_go()

    assert whole(file).is_cached()


@pytest.mark.parametrize("shared", [False, True])
def test_stores_into_a_mapping_are_not_lost(file, values, shared):
    """Compiled code does that: such pages of a private one are memory, and the only copy."""
    tensor = mapped(file, shared=shared)
    for each in (tensor, values):
        each[: MIB // 2].neg_()
    whole(file, shared=shared).let_go()

    assert (whole(file, shared=shared).cached_bytes() < 64 << 10) or not shared
    assert torch.equal(values, tensor)


def test_pages_that_could_not_be_written_are_not_dropped_and_flush_raises(tmp_path, monkeypatch):
    """The kernel calls such pages clean, and the next read would return the old value."""
    w = OffloadedTensor.from_original_tensor(torch.zeros(512, 512), "w", tmp_path)
    w.add_(1)
    w.sum()
    monkeypatch.setattr(pages, "write_out", lambda *_: False)
    offload.budget.evict(w)
    monkeypatch.undo()

    assert 512 * 512 == w.sum()
    with pytest.raises(offload.errors.WriteError, match=r"'w'.*did not reach the disk"):
        w.flush()


@pytest.mark.parametrize(
    ("release", "expected"), [("6.18.44-fc", (6, 18)), ("6.18-rc1", (6, 18)), ("5.4.0", (5, 4)), ("odd", (0, 0))]
)
def test_the_kernel_release_is_parsed(monkeypatch, release, expected):
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))

    assert expected == pages._kernel()


def test_a_range_does_not_keep_its_file_alive(tmp_path):
    save_file({"w": torch.ones(9)}, tmp_path / "w.safetensors")
    found = whole(TensorFile.open(tmp_path / "w.safetensors"))

    assert not found.is_cached()
    assert 0 == found.cached_bytes()
    found.announce(exactly=True)
    found.bring_in()
    found.let_go()


def test_a_truncated_file_is_an_error_and_not_a_signal(file):
    """A plain read of the mapping would kill the process."""
    found = whole(file)
    mapped(file)
    os.truncate(file.path, 4096)

    with pytest.raises(CorruptFileError, match=str(file.path)):
        found.bring_in()


def test_pages_are_announced_on_kernels_without_the_call(file, monkeypatch):
    """Kernels before 5.14 lack it."""
    announced: list[tuple[int, int]] = []
    monkeypatch.setattr(pages, "_MADV_POPULATE_READ", 12345)
    monkeypatch.setattr(pages, "announce", lambda *given: announced.append(given))
    place = mapped(file).data_ptr(), MIB

    assert not pages.bring_in(*place)
    assert [place] == announced


def test_ranges_of_other_users_files_never_count_as_cached(file, monkeypatch):
    """To users without write permission, the kernel says that all of a file is in memory."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    found = whole(file)
    found.bring_in()

    assert not found.is_cached()


@pytest.mark.parametrize(
    ("mib", "exactly", "is_part", "picked", "small", "huge", "expected"),
    [
        (4, True, False, False, False, False, True),
        (4, False, True, False, False, False, True),
        (4, False, False, True, False, False, True),
        (4, False, False, False, True, False, True),
        (4, False, False, False, False, False, False),  # populated, in pages of any size
        (4, True, False, False, True, True, False),  # populated in huge pages; small ones would be in their way
        (1, False, False, False, False, False, True),  # smaller than a huge page
    ],
)
def test_a_range_is_announced_if_it_is_read_block_by_block(
    file, monkeypatch, mib, exactly, is_part, picked, small, huge, expected
):
    announced: list[int] = []
    monkeypatch.setattr(pages, "announce", lambda _, nbytes: announced.append(nbytes))
    monkeypatch.setattr(pages, "should_take_small_pages", lambda _: small)
    monkeypatch.setattr(pages, "read_in_huge_pages", lambda *_, **__: huge)
    monkeypatch.setattr(pages, "_READS_HUGE_PAGES", True)
    monkeypatch.setattr(file, "is_picked_from", picked)
    found = Range(file, 4096, mib * MIB, shared=False, is_part=is_part)
    found.announce(exactly=exactly)

    assert [found.nbytes] * expected == announced


def test_an_empty_range_is_cached(file):
    nothing = Range(file, 4096, 0, shared=False)
    nothing.bring_in()
    nothing.let_go()

    assert nothing.is_cached()
