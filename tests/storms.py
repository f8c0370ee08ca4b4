"""Storms: real signals at random moments, anywhere in Python, in torch, or in a system call.

`tests.interrupts` places interrupts in the package's own code. Here a timer goes off from 1 us to 10 ms after a call
has begun, and another thread opens and closes files meanwhile.

Always true:
- a storm runs in a forked child, whose signals and timers are its own
- what a round leaves is looked at after the exception is gone: its traceback keeps what it has passed alive
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import util
from pathlib import Path
from typing import Any

from torch import nn

from offload.system import background
from tests.acts import new_folder
from tests.crashes import Act
from tests.interrupts import left_behind, torch_state
from tests.processes import in_fork

_SHORTEST, _LONGEST = 1e-6, 1e-2  # seconds


def weathers(call: Act, folder: Path, interrupts: int, seed: int) -> bool:
    """Whether a call leaves nothing behind in that many interrupts; prints what it does leave."""

    def storm() -> None:
        left = _storm(call, folder, interrupts, random.Random(seed))
        assert not left, dict(left.most_common(10))

    return in_fork(storm)


def _storm(call: Act, folder: Path, interrupts: int, rng: random.Random) -> Counter[str]:
    """Whatever is not as it should be, and how often."""
    background.IDLE = 0.05
    sys.unraisablehook = lambda _: None  # interrupts of a `__del__` are reported there
    signal.signal(signal.SIGALRM, _interrupt)
    left: Counter[str] = Counter()
    arrived = 0
    longest = min(1.2 * _seconds(call, folder), _LONGEST)
    before, descriptors = set(threading.enumerate()), _descriptors()
    with _bystander(folder) as seen:
        while arrived < interrupts:
            place = new_folder(folder)
            given, state = call.begin(place), torch_state()
            arrived += _interrupted(call, given, rng.uniform(_SHORTEST, longest), left)
            left.update(_left_by(call, given, state))
            del given
            shutil.rmtree(place, ignore_errors=True)
    left.update(seen)
    gc.collect()
    run_put_off_finalizers()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    left.update(f"a thread: {thread.name}" for thread in set(threading.enumerate()) - before)
    if (more := _descriptors() - descriptors) > 0:
        left["open descriptors"] = more
    return left


def run_put_off_finalizers() -> None:
    """Run those whose object is gone: an interrupt at the start of one puts it off until the process ends.

    Python's collector runs finalizers, and an interrupt that arrives in the collector is raised in the first of them.
    """
    for finalizer in list(util._finalizer_registry.values()):  # type: ignore[attr-defined]
        object_of = getattr(finalizer, "_weakref", None)
        if object_of is not None and object_of() is None:
            finalizer()


def _interrupted(call: Act, given: Any, seconds: float, faults: Counter[str]) -> bool:
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            call.act(given)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    except BaseException as error:
        faults[_named(error)] += 1
    return False


def _left_by(call: Act, given: Any, state: tuple[Any, ...]) -> Iterator[str]:
    yield from left_behind(state)
    for module in given.modules() if isinstance(given, nn.Module) else ():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            yield f"a hook on {type(module).__name__}"
    try:
        call.check(given)
        call.result(given)
    except Exception as error:
        yield f"afterwards {_named(error)}"


@contextmanager
def _bystander(folder: Path) -> Iterator[Counter[str]]:
    """Another thread, which opens and closes files of its own; yields what happens to these."""
    seen: Counter[str] = Counter()
    has_ended = threading.Event()
    mine = [folder / name for name in ("one", "other")]
    for path in mine:
        path.touch()

    def stand_by() -> None:
        for path in itertools.cycle(mine):
            if has_ended.is_set():
                return
            try:
                fd = os.open(path, os.O_RDONLY)
                inode = os.fstat(fd).st_ino
                time.sleep(1e-4)
                if os.fstat(fd).st_ino != inode:
                    seen["a file became another"] += 1
                os.close(fd)
            except OSError as error:
                seen[f"a foreign close: {_named(error)}"] += 1

    thread = threading.Thread(target=stand_by, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        has_ended.set()
        thread.join()


def _seconds(call: Act, folder: Path) -> float:
    """How long the call takes, once everything is imported."""
    call.act(call.begin(new_folder(folder)))
    given = call.begin(new_folder(folder))
    started = time.perf_counter()
    call.act(given)
    return time.perf_counter() - started


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _named(error: BaseException) -> str:
    """Without the numbers, which differ from round to round."""
    return re.sub(r"\d+", "#", f"{type(error).__name__}: {str(error)[:200]}")


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
