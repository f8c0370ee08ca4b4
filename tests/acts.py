"""Acts that meet a fault, or are killed, at each of their calls of the system.

Always true:
- each time begins in a folder of its own, and is compared with what comes of no fault
- an error is one of ours and of the system's, with its errno, and names the file and the tensor; nothing stays open
- after it there is what was there before or what there was to be; no temporary file; and the same act goes well
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload import OffloadedTensor
from offload.errors import MapError, OffloadError
from offload.storage.replacing import TEMPORARY
from tests import faults
from tests.processes import in_fork


@dataclass(frozen=True)
class Act:
    """What is tried.

    Attributes:
        begin: prepares a folder, and gives what `act` is given.
        act: what meets a fault; what it returns is compared.
        check: raises if what is left is neither as before nor as after.
        name: of the tensor, or whatever else each error is to name.
        all_threads: whether calls of other threads than the one that acts may fail too.
    """

    begin: Callable[[Path], Any]
    act: Callable[[Any], Any]
    check: Callable[[Any], object] = lambda given: None
    name: str = ""
    all_threads: bool = False


def meets_each_fault(tried: Act, place: Path, codes: Sequence[int] = faults.CODES, *, lasting: bool = False) -> int:
    """Have each call fail in each way; how many times that was. One that lasts stands in the way of removing, too."""
    numbers, seen = itertools.count(), 0
    expected = tried.act(tried.begin(place / "expected"))
    for failure in faults.each_failure(
        lambda: tried.begin(place / f"tried{next(numbers)}"),
        tried.act,
        codes,
        lasting=lasting,
        all_threads=tried.all_threads,
    ):
        seen += 1
        try:
            if failure.error is None:
                assert expected == failure.result
            else:
                _check_error(failure, tried.name, place)
            assert [] == failure.leaked
            tried.check(failure.given)
            assert expected == tried.act(failure.given)
            assert lasting or _is_of_removing(failure.call) or [] == list(place.rglob(f"{TEMPORARY}*"))
        except Exception as error:
            raise AssertionError(str(failure)) from error
        del failure
        for folder in place.glob("tried*"):
            shutil.rmtree(folder)
    return seen


def dies_at_each_call(tried: Act, place: Path) -> int:
    """Have it killed at each call that changes files; how many these are. The next process does it, and sweeps."""
    numbers = itertools.count()
    expected = tried.act(tried.begin(place / "expected"))

    def check(given: Any, call: faults.Call) -> None:
        tried.check(given)
        assert in_fork(lambda: (expected == tried.act(given) and _use_again(place)) or os._exit(1))
        assert [] == _left_in(place)

    return len(faults.killed_at_each(lambda: tried.begin(place / f"tried{next(numbers)}"), tried.act, check))


def _check_error(failure: faults.Failure[Any], name: str, place: Path) -> None:
    error = failure.error
    assert isinstance(error, OffloadError)
    if failure.call.name != "mmap.anonymous":  # memory is of no file
        assert str(place) in str(error)
        assert name in str(error)
    if isinstance(error, MapError):  # of the function: what it met is what it comes from
        error = error.__cause__
    assert isinstance(error, OSError)
    assert failure.code == error.errno


def _is_of_removing(call: faults.Call) -> bool:
    """What could not be removed is removed later."""
    return call.name in faults.REMOVES or "_sweep" in call.where or "_remove" in call.where


def _left_in(place: Path) -> list[Path]:
    """Temporary files, but for those in private folders, which go as a whole."""
    return [path for path in place.rglob(f"{TEMPORARY}*") if not any("offload-" in part for part in path.parent.parts)]


def _use_again(place: Path) -> bool:
    """Have a value of another name in each folder that something was left in."""
    for folder in {path.parent for path in _left_in(place)}:
        OffloadedTensor.from_original_tensor(torch.ones(1), "another", folder)
    return True
