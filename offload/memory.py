"""How much memory there is, how much of it is ours, giving it back, and when nobody need look for garbage.

Always true:
- nothing is kept, but how much was freed: each call looks anew
- a limit that cannot be read is no limit
"""

from __future__ import annotations

import ctypes
import gc
import operator
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from offload.errors import ArgumentError

_STATUS = Path("/proc/self/status")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?b|b|)\s*", re.IGNORECASE)
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", 1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_malloc_trim = ctypes.CDLL(None).malloc_trim
_MUCH = 32 << 20  # bytes that may be freed until the system gets them back
_freed = 0
_LEAST_BUDGET = 1 << 20
_MOST_DIGITS = 30  # of an amount
_UNLIMITED = 1 << 62  # version 1 says "no limit" with the largest number of whole pages


def anonymous_bytes() -> int:
    """Memory of this process that no file backs: what it has allocated, and not what it has mapped.

    Where the system does not tell them apart, all resident memory.
    """
    found = _in_status("RssAnon")
    return int(psutil.Process().memory_info().rss) if found is None else found


def mapped_bytes() -> int:
    """Memory of files that this process has mapped and used; the kernel can drop it. 0 where it is not told apart."""
    return _in_status("RssFile") or 0


def _in_status(field: str) -> int | None:
    """Bytes, of a line of this process's status that counts kilobytes."""
    with suppress(OSError):
        for line in _STATUS.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None


def available_bytes() -> int:
    """Memory that this process can still take without swapping, and within its cgroup's limit.

    Where a launcher says that it is one of several ranks on this host (`LOCAL_WORLD_SIZE`), its share of that; of a
    cgroup that it has for itself, all.
    """
    ranks = _local_ranks()
    free, room = int(psutil.virtual_memory().available) // ranks, cgroup_room(ranks=ranks)
    return free if room is None else min(free, room)


def _local_ranks() -> int:
    """How many ranks share this host, as torchrun says."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(said), 1) if said.isdecimal() else 1


def as_bytes(amount: int | float | str, whole: int) -> int:
    """A number of bytes as people write it.

    Args:
        amount: a whole number; text such as "8GiB", "500MB" or "4096"; or a fraction of `whole`: 0.5.

    Raises:
        ArgumentError: it is none of these, or negative; or 1.0, which could be a byte, or all.

    Example:
        >>> as_bytes("1.5KiB", 0), as_bytes(0.5, 1000), as_bytes(12, 0)
        (1536, 500, 12)
    """
    if isinstance(amount, float) and amount == 1:
        raise ArgumentError("1.0 may mean all of the memory, or one byte: give 1 for a byte, or a fraction below 1")
    return _in_bytes(amount, whole)


def as_budget(amount: int | float | str, whole: int) -> int:
    """As `as_bytes`, of what values are to fit into: 1.0 is all of `whole`, and a few bytes are a mistake.

    Raises:
        ArgumentError: as `as_bytes`; or it is less than 1 MiB, and not 0.

    Example:
        >>> as_budget("8GiB", 0), as_budget(1.0, 1000), as_budget(0, 0)
        (8589934592, 1000, 0)
    """
    nbytes = _in_bytes(amount, whole)
    if 0 < nbytes < _LEAST_BUDGET and not isinstance(amount, float):
        number, unit = _AMOUNT.fullmatch(str(amount)).groups()  # type: ignore[union-attr]
        meant = f"{number}{'MiB' if unit or nbytes >= 1024 else 'GiB'}"
        raise ArgumentError(
            f"{amount!r} is less than 1 MiB, and no value fits into it: {meant!r} was probably meant. Give 1MiB or "
            "more, a fraction of the memory (0.5; 1.0 for all), or 0 to keep nothing"
        )
    return nbytes


def _in_bytes(amount: Any, whole: int) -> int:
    if isinstance(amount, float) and 0 <= amount <= 1:
        return int(amount * whole)
    with suppress(TypeError):
        if not isinstance(amount, bool) and operator.index(amount) >= 0:
            return operator.index(amount)
    found = _AMOUNT.fullmatch(amount) if isinstance(amount, str) else None
    number, unit = found.groups() if found else ("", "")
    if not found or ("." in number and not unit) or len(number) > _MOST_DIGITS:
        raise ArgumentError(f"{amount!r} is not an amount of memory: use bytes (4096), '8GiB', or a fraction (0.5)")
    return int(float(number) * _UNITS[unit.lower()]) if "." in number else int(number) * _UNITS[unit.lower()]


def cgroup_room(own: Path = _OWN_CGROUPS, mounted: Path = _CGROUPS, *, ranks: int = 1) -> int | None:
    """What the tightest memory limit of the cgroups that this process is in still allows; None without a limit.

    Files that are only cached count as room: the kernel drops them first.

    Args:
        own, mounted: where the system tells of cgroups.
        ranks: how many processes share each cgroup that this one does not have for itself.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1/memory.html.
    """
    rooms = [
        room if ranks == 1 or _is_alone_in(folder) else room // ranks
        for folder in _memory_cgroups(own, mounted)
        if (room := _room_in(folder)) is not None
    ]
    return max(min(rooms), 0) if rooms else None


def _memory_cgroups(own: Path, mounted: Path) -> Iterator[Path]:
    """The folders of the cgroups of this process that may limit memory, from its own up to the root."""
    try:
        lines = os.fsdecode(own.read_bytes()).split("\n")  # a path may hold what `splitlines` takes for an end
    except OSError:
        return
    for line in filter(None, lines):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = mounted / "memory" if controllers else mounted
        folder = root / path.lstrip("/")
        yield from (parent for parent in (folder, *folder.parents) if parent.is_relative_to(root))


def _room_in(folder: Path) -> int | None:
    for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        with suppress(OSError, ValueError):  # not there, or "max"
            most = int((folder / limit).read_bytes())
            if most < _UNLIMITED:
                return most - int((folder / usage).read_bytes()) + _cached_in(folder)
    return None


def _is_alone_in(folder: Path) -> bool:
    """Whether a cgroup, with those below, has this process and what it has started, and no other."""
    try:
        found = {int(pid) for path in folder.rglob("cgroup.procs") for pid in path.read_bytes().split()}
    except OSError:
        return False
    others = found - {os.getpid()}
    return others < found and (not others or others <= {one.pid for one in psutil.Process().children(recursive=True)})


def _cached_in(folder: Path) -> int:
    try:
        pairs = [line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return 0
    stat = {name: int(count) for name, count in pairs}
    prefix = "total_" if "total_inactive_file" in stat else ""  # version 1: with the groups below
    return stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)


def count_freed(nbytes: int) -> None:
    """Say that tensors of so many bytes were freed; when it comes to much, it is given back.

    glibc keeps much of what was below 32 MiB a piece: small things settle in the gaps, and a freed block does not serve
    for an aligned one of the same size (2.36). A walk over many values would take the memory of all of them.
    """
    global _freed
    _freed += nbytes  # without a lock: what threads lose between them does not matter
    if _freed >= _MUCH:
        return_freed()


def return_freed() -> None:
    """Give freed memory back to the system now. Elsewhere than with glibc nothing happens."""
    global _freed
    _freed = 0
    _malloc_trim(0)


@contextmanager
def uncollected() -> Iterator[None]:
    """No search for reference cycles in the block, in any thread: for making very many objects that stay, and no cycle.

    Else the collector goes over all of them, and over the model, again and again and in vain: that took half of the
    time of loading 10,000 tensors (`python -m bench.load`).
    """
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_on:
            gc.enable()
