"""What can be cut short, and two ways to do it: each of its system calls fails, or the process is killed at it.

`tests/acts.py` has the table of acts, `tests/interrupts.py` and `tests/power_cut.py` the other ways.

Always true:
- each run begins in a folder of its own, and is compared with a run that nothing disturbs
- an error is one of ours and of the system's, with its errno, and names the file and the tensor; nothing stays open
- afterwards the old state or the new one is there, without temporary files; and the same act succeeds
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
from offload.cache.states import FILE as STATES
from offload.errors import MapError, OffloadError
from offload.storage.replacing import TEMPORARY
from tests import faults
from tests.processes import in_fork

FAULT, KILL, INTERRUPT, POWER_CUT = "fault", "kill", "interrupt", "power cut"
READS, WRITES = frozenset({FAULT, INTERRUPT}), frozenset({FAULT, KILL, INTERRUPT, POWER_CUT})


@dataclass(frozen=True)
class Act:
    """What is cut short."""

    begin: Callable[[Path], Any]  # prepares a folder that does not exist yet, and returns the argument of `act`
    act: Callable[[Any], Any]  # repeated, it gives the same again
    check: Callable[[Any], object] = lambda given: None  # raises if what is left is neither the old state nor the new
    name: str = ""  # the tensor's name, or whatever else each error has to name
    crashes: frozenset[str] = WRITES  # those that it meets
    changes: frozenset[str] = frozenset()  # the global state that it is meant to change
    codes: Sequence[int] = faults.CODES  # the errors that it meets outside of a campaign
    all_threads: bool = False  # whether calls of other threads may fail, too

    def result(self, given: Any) -> Any:
        """What the act gives, in a form that can be compared."""
        return plain(self.act(given))


def plain(result: Any) -> Any:
    """Tensors as lists of numbers; of other objects their kind."""
    if isinstance(result, torch.Tensor):
        return result.tolist()
    if isinstance(result, list | tuple):
        return [plain(part) for part in result]
    if isinstance(result, dict):
        return {name: plain(part) for name, part in result.items()}
    return result if isinstance(result, str | float | int | None) else type(result).__name__


def meets_each_fault(tried: Act, place: Path, codes: Sequence[int], *, lasting: bool = False) -> int:
    """Make each call fail in each way; returns how many times that was. A lasting fault affects removal, too."""
    numbers, seen = itertools.count(), 0
    expected = tried.result(tried.begin(place / "expected"))
    for failure in faults.each_failure(
        lambda: tried.begin(place / f"tried{next(numbers)}"),
        tried.result,
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
            assert [] == not_kept_open(failure.leaked)
            tried.check(failure.given)
            assert expected == tried.result(failure.given)
            assert lasting or _is_of_removing(failure.call) or [] == list(place.rglob(f"{TEMPORARY}*"))
        except Exception as error:
            raise AssertionError(str(failure)) from error
        del failure
        remove_tried(place)
    return seen


def remove_tried(place: Path) -> None:
    """The folders of earlier tries: all of them would be searched for what is left."""
    for folder in place.glob("tried*"):
        shutil.rmtree(folder)


def dies_at_each_call(tried: Act, place: Path) -> int:
    """Kill it at each call that changes files; returns their number. The next process completes it, and sweeps."""
    numbers = itertools.count()
    expected = tried.result(tried.begin(place / "expected"))

    def check(given: Any, call: faults.Call) -> None:
        tried.check(given)
        assert in_fork(lambda: (expected == tried.result(given) and use_again(place)) or os._exit(1))
        assert [] == left_in(place)
        remove_tried(place)

    return len(faults.killed_at_each(lambda: tried.begin(place / f"tried{next(numbers)}"), tried.result, check))


def _check_error(failure: faults.Failure[Any], name: str, place: Path) -> None:
    error = failure.error
    assert isinstance(error, OffloadError)
    if failure.call.name != "mmap.anonymous":  # memory has no file
        assert str(place) in str(error)
        assert name in str(error)
    if isinstance(error, MapError):  # of the function: the cause is what it met
        error = error.__cause__
    assert isinstance(error, OSError)
    assert failure.code == error.errno


def not_kept_open(descriptors: list[str]) -> list[str]:
    """Without that of a cache's states, which are mapped again as they grow."""
    return [name for name in descriptors if not name.endswith(STATES)]


def _is_of_removing(call: faults.Call) -> bool:
    """What could not be removed is removed later."""
    return call.name in faults.REMOVES or "_sweep" in call.where or call.where.endswith(" remove")


def left_in(place: Path) -> list[Path]:
    """Temporary files, but for those in private folders, which go as a whole."""
    return [path for path in place.rglob(f"{TEMPORARY}*") if not any("offload-" in part for part in path.parent.parts)]


def use_again(place: Path) -> bool:
    """Store a value of another name in each folder in which something was left."""
    for folder in {path.parent for path in left_in(place)}:
        OffloadedTensor.from_original_tensor(torch.ones(1), "another", folder)
    return True
