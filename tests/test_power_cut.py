"""A power cut takes nothing that a writer of the package has put in place: see `tests/power_cut.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.power_cut import Disk, has_strace, traced
from tests.processes import ROOT
from tests.writers import BAD, WRITERS

# The rows of a cache count as empty until their column's file is synced, and a header that was torn is known from the
# manifest: `FixedColumn.create`.
LATER = {"cache": {"x.safetensors", "text%2findex.safetensors"}}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder that all writers have written to, and the system calls that they made."""
    if not has_strace():
        pytest.skip("this system has no strace, or it may not trace")
    root = tmp_path_factory.mktemp("power")
    done = traced([sys.executable, "-m", "tests.writers", str(root)], root / "log", cwd=ROOT)
    assert 0 == done.returncode, f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return root / "made", (root / "log").read_text().splitlines()


@pytest.mark.slow(30)
@pytest.mark.parametrize("name", WRITERS)
def test_files_are_synced_before_they_are_put_in_place(name: str, log: tuple[Path, list[str]]) -> None:
    """No file is renamed before its data are on the disk, no folder before all in it; new folders around them stay."""
    root, lines = log

    disk = Disk(root / name).follow(lines)

    later = LATER.get(name, set())
    assert [] == [fault for fault in disk.faults if Path(fault.split(" was put ")[0]).name not in later]
    assert set() == {path for path in disk.unsynced if Path(path).name not in later}
    assert set() == disk.unnamed
    assert disk.seen


@pytest.mark.slow(30)
@pytest.mark.parametrize(
    ("name", "unsynced", "faults"),
    [
        ("a file before its data", {"deep/er/made"}, ["while the data of"]),
        ("a folder before its files", set(), ["while the folder around"]),
        ("a new parent folder", set(), []),
    ],
)
def test_writers_that_do_not_sync_are_found(
    name: str, unsynced: set[str], faults: list[str], log: tuple[Path, list[str]]
) -> None:
    assert name in BAD
    root, lines = log

    disk = Disk(root / name).follow(lines)

    assert {str(root / name / path) for path in unsynced} == disk.unsynced
    assert [part in fault for part, fault in zip(faults, disk.faults, strict=True)] == [True] * len(faults)
    assert {str(root / name / "deep"), str(root / name / "deep" / "er")} <= disk.unnamed
