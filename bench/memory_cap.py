"""A memory limit for one process: a version 1 cgroup.

Always true:
- memory from before joining does not count; everything after does, including cached files
- the group is a child of this process's, and is removed at the end
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_MOUNTED = Path("/sys/fs/cgroup/memory")
_STAT = ("total_cache", "total_rss", "total_pgpgin", "total_pgmajfault")


@dataclass(frozen=True)
class Group:
    """A memory cgroup."""

    folder: Path

    def join(self) -> None:
        """Put this process into it.

        The garbage collector writes to all objects, so that pages shared with the parent process are copied before.
        """
        gc.collect()
        (self.folder / "cgroup.procs").write_text(str(os.getpid()), encoding="utf-8")

    def facts(self) -> dict[str, int]:
        """The peak usage, how often the limit was hit, and parts of `memory.stat`."""
        stat = dict(line.split() for line in (self.folder / "memory.stat").read_text(encoding="utf-8").splitlines())
        counts = {
            name: int((self.folder / f"memory.{name}").read_bytes()) for name in ("max_usage_in_bytes", "failcnt")
        }
        return counts | {name: int(stat[name]) for name in _STAT if name in stat}

    def kills(self) -> int:
        """How many processes the kernel has ended in it, for want of memory."""
        lines = (self.folder / "memory.oom_control").read_text(encoding="utf-8").splitlines()
        return next(int(count) for name, count in map(str.split, lines) if name == "oom_kill")


@contextmanager
def memory_cap(limit: int, *, kills: bool = True) -> Iterator[Group]:
    """A group with this limit in bytes.

    Args:
        limit: in bytes.
        kills: whether a process that finds no memory is killed, also if all of it is being written to a slow disk.
            Otherwise it waits, and what file systems allocate may exceed the limit by some pages.

    Raises:
        OSError: this process can't create one.
    """
    try:
        group = Group(Path(tempfile.mkdtemp(prefix="offload-bench-", dir=_own_folder())))
    except OSError as error:
        raise OSError(f"no memory cgroup can be made: {error}") from error
    try:
        (group.folder / "memory.limit_in_bytes").write_text(str(limit), encoding="utf-8")
        (group.folder / "memory.oom_control").write_text(str(int(not kills)), encoding="utf-8")
        yield group
    finally:
        group.folder.rmdir()


def _own_folder() -> Path:
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _MOUNTED / path.lstrip("/")
    raise OSError("no memory cgroup of version 1 here")
