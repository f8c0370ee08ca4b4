"""Ctrl-C wherever Python can handle it during a call.

Python checks for signals when a function begins or resumes, when a call returns, and when a loop jumps back.
`meets_interrupts` runs an act once for each such place in the package's code, and raises `KeyboardInterrupt` there, as
the SIGINT handler would. A line event is not such a place: a tracer can also stop between the end of a block and the
`__exit__` of its lock, where no signal is handled.
"""

from __future__ import annotations

import dis
import gc
import itertools
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import offload
from offload.integrations import torchao
from offload.prefetch import engine as engines
from offload.prefetch.plan import SMALL
from offload.storage.replacing import TEMPORARY
from offload.system.locks import _LOCKS
from tests import faults
from tests.crashes import Act, not_kept_open, remove_tried

_PACKAGE = str(Path(offload.__file__).parent) + os.sep
_LOOKS = {"RESUME", "JUMP_BACKWARD", "CALL", "CALL_KW", "CALL_FUNCTION_EX"}
_DELICATE = ("system/modes", "system/locks", "system/regular", "prefetch")
Place = tuple[CodeType, int]


@dataclass(frozen=True)
class Stop:
    """Where a program was interrupted."""

    place: Place
    turn: int

    def __str__(self) -> str:
        code, offset = self.place
        lines = [line for start, end, line in code.co_lines() if start <= offset < end]
        return f"{Path(code.co_filename).relative_to(_PACKAGE)}:{lines[0]} in {code.co_qualname}, time {self.turn}"


class _Tracer:
    """Counts the places, and raises at the chosen one."""

    def __init__(self, stop: Stop | None = None) -> None:
        self.seen: Counter[Place] = Counter()
        self.has_stopped = False
        self._stop = stop

    def __enter__(self) -> _Tracer:
        sys.unraisablehook = lambda _: None  # interrupts of a `__del__` are reported there
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        sys.unraisablehook = sys.__unraisablehook__

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(_PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        looks, ends = _places(code)
        last: int | None = None  # it begins, or resumes

        def local(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal last
            if event == "opcode":
                now = frame.f_lasti
                for _ in range((last is None or last in looks - ends) + (now in ends)):
                    self._at((code, now))
                last = now
            return local

        return local

    def _at(self, place: Place) -> None:
        self.seen[place] += 1
        if self._stop is not None and not self.has_stopped and self._stop == Stop(place, self.seen[place]):
            self.has_stopped = True
            raise KeyboardInterrupt


@cache
def _places(code: CodeType) -> tuple[set[int], set[int]]:
    """Where Python checks for signals; and which of these calls are the last in a block.

    What is raised when a call returns is raised in its block. A tracer sees the next instruction, so for a call at the
    end of a block it stops before the call.
    """
    blocks = [(entry.start, entry.end, entry.target) for entry in dis._parse_exception_table(code)]  # type: ignore[attr-defined]

    def block_of(offset: int) -> Any:
        return next((target for start, end, target in blocks if start <= offset < end), None)

    instructions = [(one.offset, one.opname) for one in dis.get_instructions(code)]
    looks = {offset for offset, name in instructions if name in _LOOKS}
    ends = {
        offset
        for (offset, _), (following, _) in pairwise(instructions)
        if offset in looks and block_of(offset) != block_of(following)
    }
    return looks, ends


def meets_interrupts(tried: Act, place: Path, seen: set[Place], step: int = 1) -> int:
    """Interrupt an act at places not yet `seen`, the first and last time, and check what is left.

    Every `step`-th place is chosen, and every delicate one. Returns the number of interrupts.

    Afterwards, torch's state and the package's locks and counters are as before, no temporary file is there, the act's
    check accepts what it finds, and the same act succeeds.
    """
    numbers = itertools.count()

    def begin() -> Any:
        return tried.begin(place / f"tried{next(numbers)}")

    expected = tried.result(begin())  # imports, and fills one-time caches
    given = begin()
    with _Tracer() as counting:
        tried.act(given)
    del given
    places = {place: most for place, most in counting.seen.items() if place not in seen}
    chosen = [place for number, place in enumerate(places) if not number % step or is_delicate(place[0])]
    stops = [Stop(place, turn) for place in chosen for turn in sorted({1, places[place]})]
    seen.update(places)
    stopped = 0
    for stop in stops:
        stopped += _stopped_at(stop, tried, begin(), expected, place)
        remove_tried(place)
    return stopped


def is_delicate(code: CodeType) -> bool:
    """Whether it changes thread or process state: modes, locks, descriptors, read-ahead."""
    return code.co_filename.removeprefix(_PACKAGE).startswith(_DELICATE)


def _stopped_at(stop: Stop, tried: Act, given: Any, expected: Any, place: Path) -> bool:
    before, descriptors = torch_state(), faults.descriptors()
    error: BaseException | None = None
    with _Tracer(stop) as tracer:
        try:
            tried.act(given)
        except BaseException as raised:
            error = raised
    try:
        assert tracer.has_stopped or error is None
        assert error is None or type(error) is KeyboardInterrupt, f"{error!r}"
        error = None
        assert [] == [*left_behind(before), *_temporaries(place), *not_kept_open(faults.left_open(descriptors))]
        tried.check(given)
        assert expected == tried.result(given)
    except BaseException as failure:
        failure.add_note(f"interrupted at {stop}")
        raise
    return tracer.has_stopped


def torch_state() -> tuple[Any, ...]:
    """torch's per-thread state."""
    return (
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch._C._get_torch_function_state(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._is_fwd_grad_enabled(),
        torch._C._dispatch_tls_local_exclude_set(),
        torch._C._dispatch_tls_local_include_set(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch._C._autograd._saved_tensors_hooks_is_enabled(),
    )


def _temporaries(place: Path) -> list[Path]:
    """Temporary files that stay: a thread may be writing its last one."""
    until = time.monotonic() + 10
    while (found := list(place.rglob(f"{TEMPORARY}*"))) and time.monotonic() < until:
        time.sleep(0.01)
    return found


def left_behind(state: tuple[Any, ...]) -> Iterator[str]:
    """What is not as it was in that `torch_state`, and whatever of the package is still held, on, or counted."""
    if changed := [number for number, now in enumerate(torch_state()) if state[number] != now]:
        yield f"torch's state, in places {changed}"
    yield from (f"a lock: {lock}" for lock in held_locks())
    yield from left_on()
    yield from wrong_counts()


def left_on() -> Iterator[str]:
    """What the package turns on for a block, and has not turned off."""
    if torchao._AT_WORK.get() is not None:
        yield "quantizing"
    if not gc.isenabled():
        yield "the collector is off"


def held_locks() -> Iterator[threading.RLock]:
    """The package's locks that this thread still holds."""
    locks: list[Any] = [*_LOCKS, engines.lock()]
    return (lock for lock in locks if lock._is_owned())


def wrong_counts() -> Iterator[str]:
    """Counts of the read-ahead that are not those of its values."""
    engine = engines._ENGINE
    with engine.reader.lock:
        for stream in engine.streams.live:
            total = sum(value.nbytes for value in (*stream.ahead, *stream._used))
            if stream.in_flight != total:
                yield f"{stream.in_flight} bytes in flight, of {total}"
            in_order = sum(value.nbytes > SMALL and not value.is_picked for value in stream.ahead)
            if stream._in_order != in_order:
                yield f"{stream._in_order} values of the order ahead, of {in_order}"
        if threading.get_ident() in engine.reader._going:
            yield "bytes that are still going"
