"""Writers that are killed at random moments, again and again, while another process reads: what is there is whole.

`tests/crashes.py` kills at each call that changes files; here the kill comes anywhere, also between two stores.

Always true:
- what is written is one number everywhere, so that a mix of two is recognised; the numbers only grow
- a fork is killed, which has torch already; it notes what it is about to write, and has written, in shared memory
- every second writer has written, and the reader has read, before the kill
"""

from __future__ import annotations

import mmap
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from offload import OffloadedTensor, TensorCache, load_tree, save_tree
from offload.errors import ChangedFileError, MissingFileError
from offload.storage.file import TensorFile
from offload.storage.handle import Handle
from tests.crashes import left_in, use_again
from tests.processes import ended, forked, in_fork, kill

TRIED, WRITTEN, ENDS, READ, SEEN = range(5)  # numbers; whether the reader should end; the last one read, and how many


@dataclass(frozen=True)
class Numbered:
    """What holds a number.

    Attributes:
        begin: writes 0 to a folder; what it returns is given to the others.
        write: writes a number.
        reading: called in the process that reads, returns a function that does it; None if the files were replaced
            meanwhile.
    """

    begin: Callable[[Path], Any]
    write: Callable[[Any, int], object]
    reading: Callable[[Any], Callable[[], int | None]]


@dataclass
class Killed:
    """How many writers left the old number, a new one that was not noted yet, a temporary file; how many were read."""

    old: int = 0
    new: int = 0
    left: int = 0
    seen: int = 0


def survives_kills(tried: Numbered, folder: Path, kills: int) -> Killed:
    """Kill this many writers, and check what each leaves, and what is left in the end.

    Raises:
        AssertionError: a value is a mix, or neither the old nor the new one; or the reader met an older one.
    """
    chance, found = random.Random(0), Killed()
    board = memoryview(mmap.mmap(-1, 40)).cast("q")
    given = tried.begin(folder)
    files = _files_in(folder)
    longest = 2 * statistics.median(_seconds(lambda: tried.write(given, 0)) for _ in range(3))
    read = tried.reading(given)
    reader = forked(lambda: _read_for_ever(tried.reading(given), board))
    try:
        for turn in range(kills):
            before = board[READ]
            pid = forked(lambda: _write_for_ever(tried, given, board))
            while turn % 2 and board[READ] == before:
                assert (0, 0) == os.waitpid(pid, os.WNOHANG) == os.waitpid(reader, os.WNOHANG), "it failed: see above"
                time.sleep(0.0005)
            time.sleep(chance.uniform(0, longest) + 0.003)
            kill(pid)
            number = read()
            assert number in (board[TRIED], board[WRITTEN]), f"{number}, not {board[WRITTEN]} or {board[TRIED]}"
            found.new += number == board[TRIED] != board[WRITTEN]
            found.left += bool(left_in(folder))
            board[TRIED] = board[WRITTEN] = number
    finally:
        board[ENDS] = 1
        assert 0 == ended(reader), "the reader failed: see above"
    tried.write(given, board[WRITTEN] + 1)
    assert board[WRITTEN] + 1 == read()
    if isinstance(given, OffloadedTensor):  # an update leaves it to the next value that is made in the folder
        assert in_fork(lambda: use_again(folder))
        files += 1
    assert [] == left_in(folder)
    assert files == _files_in(folder)
    found.old, found.seen = kills - found.new, board[SEEN]
    return found


def _files_in(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


def _write_for_ever(tried: Numbered, given: Any, board: memoryview) -> None:
    number = board[WRITTEN]
    while True:
        number += 1
        board[TRIED] = number
        tried.write(given, number)
        board[WRITTEN] = number


def _read_for_ever(read: Callable[[], int | None], board: memoryview) -> None:
    while not board[ENDS]:
        number = read()
        if number is not None and number != board[READ]:
            assert number > board[READ], f"{number} was read after {board[READ]}"
            board[READ] = number
            board[SEEN] += 1


def _seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def the_number(*values: torch.Tensor) -> int:
    """The one that all values hold."""
    found = {number.item() for value in values for number in value.aminmax()}
    assert 1 == len(found), f"a mix of {found}"
    return int(found.pop())


# Values


def _value(folder: Path, size: int) -> OffloadedTensor:
    return OffloadedTensor.from_original_tensor(torch.zeros(size), "w", folder)


def _update(weight: OffloadedTensor, number: int) -> None:
    weight.update_values(torch.full(weight.shape, float(number)))


def _own_handle(weight: OffloadedTensor, *, unmaps: bool) -> Callable[[], int]:
    handle = Handle.shared(TensorFile.open(weight.offload_path), "w", None)
    return lambda: (unmaps and handle.unmap(), the_number(handle.base()))[1]


def _value_of(size: int, reading: Callable[[Any], Callable[[], int | None]]) -> Numbered:
    return Numbered(partial(_value, size=size), _update, reading)


# Trees, and rows of a file


def _save_tree(folder: Path, number: int) -> None:
    """One leaf is kept."""
    kept = load_tree(folder)["kept"][0] if (folder / "tree.json").exists() else torch.full((50_000,), -1.0)
    new = [torch.full((size,), float(number)) for size in (1, 100_000)]
    save_tree({"number": number, "new": new, "kept": [kept, torch.tensor(number)]}, folder)


def _read_tree(folder: Path) -> int | None:
    tree = load_tree(folder)
    try:
        assert -1 == the_number(tree["kept"][0])
        assert tree["number"] == the_number(*tree["new"], tree["kept"][1])
    except MissingFileError:  # it was replaced after it was opened
        return None
    return int(tree["number"])


def _save_rows(path: Path, number: int) -> None:
    x, y = torch.full((20_000,), float(number)), torch.full((20_000,), number)
    TensorCache(tensors={"x": x, "y": y}, metadata={"number": number}).to_disk(path)


def _read_rows(path: Path) -> int | None:
    try:
        cache = TensorCache.from_disk(path)
        batch = cache[:]
    except ChangedFileError:  # it was replaced while it was opened
        return None
    assert cache.metadata["number"] == the_number(batch["x"], batch["y"])
    return int(cache.metadata["number"])


def _begun(save: Callable[[Path, int], object], name: str) -> Callable[[Path], Path]:
    return lambda folder: (save(folder / name, 0), folder / name)[1]


NUMBERED = {
    "a value, by a handle of its own": _value_of(1 << 16, partial(_own_handle, unmaps=False)),
    "a value, by a handle that is mapped again": _value_of(1 << 16, partial(_own_handle, unmaps=True)),
    "a value, by a tensor from before the fork": _value_of(1 << 16, lambda weight: lambda: the_number(weight + 0)),
    "a value, by the safetensors library": _value_of(
        1 << 16, lambda weight: lambda: the_number(load_file(weight.offload_path)["w"])
    ),
    "a small value": _value_of(1 << 10, lambda weight: lambda: the_number(weight.materialize())),
    "a large value": _value_of(1 << 21, lambda weight: lambda: the_number(weight.materialize())),
    "a tree": Numbered(_begun(_save_tree, "tree"), _save_tree, lambda folder: lambda: _read_tree(folder)),
    "a file of rows": Numbered(_begun(_save_rows, "x.pt"), _save_rows, lambda path: lambda: _read_rows(path)),
}
