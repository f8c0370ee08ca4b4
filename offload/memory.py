"""How much memory there is, how much of it is ours, returning freed memory, and pausing garbage collection.

Always true:
- nothing is cached except the amount freed: each call measures again
- a limit that cannot be read is no limit

Source of cgroups: https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1/memory.html.
"""

from __future__ import annotations

import ctypes
import gc
import operator
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from offload.errors import ArgumentError

_SIZES = Path("/proc/self/statm")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?b|b|)\s*", re.IGNORECASE)
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", 1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_malloc_trim = ctypes.CDLL(None).malloc_trim
_MUCH = 32 << 20  # bytes that may be freed before they are returned to the system
_freed = 0
_LEAST_BUDGET = 1 << 20
_MOST_DIGITS = 30  # in an amount
_UNLIMITED = 1 << 62  # cgroup v1 says "no limit" with the largest number of whole pages


def anonymous_bytes() -> int:
    """Memory of this process not backed by files; if that can't be read, the most resident memory that it has had.

    Source: proc_pid_statm(5). psutil looks for the process by its number: some sandboxes have another one in `/proc`.
    """
    try:
        _, resident, shared, *_ = map(int, _SIZES.read_text(encoding="ascii").split())
    except (OSError, ValueError):  # an empty file
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (resident - shared) * resource.getpagesize()


def available_bytes() -> int:
    """Memory that this process can use without swapping, in its cgroup; of one of several ranks here, its share."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = max(int(said), 1) if said.isdecimal() else 1
    free, in_cgroup = _of_machine("available", "SC_AVPHYS_PAGES"), cgroup_available()
    return (free if in_cgroup is None else min(free, in_cgroup)) // ranks


def total_bytes() -> int:
    return _of_machine("total", "SC_PHYS_PAGES")


def _of_machine(what: str, pages: str) -> int:
    try:
        return int(getattr(psutil.virtual_memory(), what))
    except (OSError, psutil.Error):  # there is no /proc, as in a chroot
        return os.sysconf(pages) * resource.getpagesize()


def as_budget(amount: int | str) -> int:
    """Like `as_bytes`, for a budget: less than 1 MiB is an error unless 0."""
    nbytes = as_bytes(amount)
    if 0 < nbytes < _LEAST_BUDGET:
        raise ArgumentError(f"{amount!r} is less than 1 MiB: give more, such as '8GiB', or 0 to keep nothing")
    return nbytes


def as_bytes(amount: int | str) -> int:
    """A number of bytes: an int, "8GiB", "500MB" or "4096"; else an `ArgumentError`."""
    if not isinstance(amount, bool | str):
        with suppress(TypeError):
            if (nbytes := operator.index(amount)) >= 0:
                return nbytes
    match = _AMOUNT.fullmatch(amount) if isinstance(amount, str) else None
    number, unit = match.groups() if match else ("", "")
    if not match or ("." in number and not unit) or len(number) > _MOST_DIGITS:
        raise ArgumentError(f"{amount!r} is not an amount of memory: use bytes (4096) or '8GiB'")
    return int(float(number) * _UNITS[unit.lower()]) if "." in number else int(number) * _UNITS[unit.lower()]


def cgroup_available(own: Path = _OWN_CGROUPS, mounted: Path = _CGROUPS) -> int | None:
    """What the tightest limit of this process's cgroups still allows, with the page cache; None without one."""
    limits = map(_available_in, _memory_cgroups(own, mounted))
    tightest = min((available for available in limits if available is not None), default=None)
    return None if tightest is None else max(tightest, 0)


def _memory_cgroups(own: Path, mounted: Path) -> Iterator[Path]:
    """The folders of this process's cgroups that may limit memory, from its own up to the root."""
    try:
        lines = os.fsdecode(own.read_bytes()).split("\n")  # a path may contain what `splitlines` takes for a line end
    except OSError:
        return
    for line in filter(None, lines):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = mounted / "memory" if controllers else mounted
        folder = root / path.lstrip("/")
        yield from (parent for parent in (folder, *folder.parents) if parent.is_relative_to(root))


def _available_in(folder: Path) -> int | None:
    for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        with suppress(OSError, ValueError):  # not there, or "max"
            most = int((folder / limit).read_bytes())
            if most < _UNLIMITED:
                return most - int((folder / usage).read_bytes()) + _cached_in(folder)
    return None


def _cached_in(folder: Path) -> int:
    try:
        pairs = [line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return 0
    stat = {name: int(count) for name, count in pairs}
    prefix = "total_" if "total_inactive_file" in stat else ""  # version 1: including child groups
    return stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)


def count_freed(nbytes: int) -> None:
    """Count freed bytes of tensors; when they add up, return them to the system.

    glibc keeps much of what was allocated in blocks below 32 MiB: small allocations settle in gaps, and a freed block
    can't serve an aligned one of the same size (2.36). A walk over many values would take the memory of all of them.
    """
    global _freed
    _freed += nbytes  # without a lock: races between threads don't matter
    if _freed >= _MUCH:
        return_freed()


def return_freed() -> None:
    """Return freed memory to the system now. No effect without glibc."""
    global _freed
    _freed = 0
    _malloc_trim(0)


@contextmanager
def uncollected() -> Iterator[None]:
    """Pauses cyclic garbage collection in all threads: for creating very many objects that stay, without cycles.

    Otherwise the collector visits all of them, and the model, again and again in vain: half of the time of loading
    10,000 tensors (`python -m bench.load`).
    """
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_on:
            gc.enable()
