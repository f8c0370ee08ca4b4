"""Ranks for tests: forked processes that form a torch.distributed group with gloo.

Always true:
- a rank that fails or hangs fails the test, with its output
- a forked child never returns into the test
- the process of the tests forms no group: DTensor's caches keep one even after `destroy_process_group`, and a child
  that another thread forks later destroys it as it begins, which waits forever for threads that it does not have
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_LIMIT = 100  # seconds


def run_ranks(world: int, act: Callable[[int], Any], *, ends: dict[int, int] | None = None) -> list[Any]:
    """The results of `act` in each rank of a group, called with the rank's number.

    Args:
        act: its result is pickled.
        ends: ranks that should be ended by a signal, with its number.
    """
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.flush()
        children = [_forked(rank, world, act, Path(folder)) for rank in range(world)]
        _wait(children, dict(ends or {}), Path(folder))
        found = [Path(folder, str(rank)) for rank in range(world)]
        return [pickle.loads(path.read_bytes()) if path.exists() else None for path in found]


def in_a_rank(test: Callable[..., None]) -> Callable[..., None]:
    """A test that runs as the only rank of a group."""

    @functools.wraps(test)
    def alone(*args: Any, **given: Any) -> None:
        run_ranks(1, lambda _: test(*args, **given))

    return alone


def _wait(children: list[int], ends: dict[int, int], folder: Path) -> None:
    left, failed, end = dict(enumerate(children)), [], time.monotonic() + _LIMIT
    while left and not failed and time.monotonic() < end:
        for rank, pid in list(left.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del left[rank]
                code = os.waitstatus_to_exitcode(status)
                failed += [rank] if code != -ends.get(rank, 0) else []
        time.sleep(0.01)
    time.sleep(0.5 if failed else 0)
    for pid in left.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    said = "\n".join(f"rank {path.suffix[1:]}: {path.read_text(encoding='utf-8')}" for path in folder.glob("error.*"))
    stuck_or_failed = failed or left
    assert not stuck_or_failed, f"ranks {failed} failed, {list(left)} were still at work\n{said}"


def _forked(rank: int, world: int, act: Callable[[int], Any], folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=timedelta(seconds=60))
        found = act(rank)
        dist.barrier()
        (folder / str(rank)).write_bytes(pickle.dumps(found))
    except BaseException:
        (folder / f"error.{rank}").write_text(traceback.format_exc(), encoding="utf-8")
        os._exit(1)
    os._exit(0)
