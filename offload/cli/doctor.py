"""What this machine can do for tensors on disk.

Always true:
- the disk is measured with a file of our own, which goes when it is done, also after a failure
- nothing is guessed: what could not be measured is None
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from offload.errors import MissingFileError
from offload.memory import available_bytes, cgroup_room
from offload.prefetch.residency import Pool
from offload.storage.reasons import writing
from offload.storage.regular import absolute, closed_after
from offload.storage.replacing import remove, temporary_for

_PACKAGES = ("safetensors", "transformers", "accelerate", "huggingface-hub", "psutil", "peft", "torchao")
_BLOCK = 4 << 20
_LEAST = 16 << 20  # bytes to measure with; less says nothing


@dataclass(frozen=True)
class Disk:
    """What was measured of the disk that a folder is on. Rates in bytes a second.

    Attributes:
        folder: the folder.
        free: bytes that can still be written there.
        writes: rate of writing, synced.
        reads: rate of reading it back, past what the system keeps in memory.
        reads_direct: the same past the page cache (O_DIRECT); None where the file system refuses it.
    """

    folder: Path
    free: int
    writes: float | None
    reads: float | None
    reads_direct: float | None


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found. Sizes in bytes.

    Attributes:
        versions: of Python, and of the packages that are installed.
        devices: the accelerators, each with its memory.
        memory: of the machine.
        available: what this process can still take.
        limit: what its control group still allows; None without a limit.
        budget: how much of the values on disk may stay in memory if `max_memory` is not set.
        read_ahead: how much is read ahead if that is not set.
        disk: what was measured of the disk.
    """

    versions: dict[str, str]
    devices: dict[str, int]
    memory: int
    available: int
    limit: int | None
    budget: int
    read_ahead: int
    disk: Disk


def diagnose(folder: str | os.PathLike[str], *, nbytes: int = 256 << 20) -> Diagnosis:
    """Look at this machine, and measure the disk of a folder.

    Args:
        folder: where values are to be kept.
        nbytes: to write and read for it; less where less is free.

    Raises:
        MissingFileError: there is no such folder.
        WriteError: nothing can be written there.

    Example:
        >>> import tempfile
        >>> diagnosis = diagnose(tempfile.mkdtemp(), nbytes=16 << 20)
        >>> diagnosis.budget <= diagnosis.available <= diagnosis.memory
        True
    """
    place = absolute(folder)
    if not place.is_dir():
        raise MissingFileError(errno.ENOENT, "there is no such folder: name one, or make it first", str(place))
    pool = Pool()
    pool.reconsider(anew=True)
    return Diagnosis(
        versions={"python": platform.python_version(), "torch": str(torch.__version__), **_installed()},
        devices=_devices(),
        memory=psutil.virtual_memory().total,
        available=available_bytes(),
        limit=cgroup_room(),
        budget=pool.room,
        read_ahead=pool.window,
        disk=_measured(place, nbytes),
    )


def _installed() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _devices() -> dict[str, int]:
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return {}
    devices = [torch.device(kind.type, number) for number in range(torch.accelerator.device_count())]
    return {str(device): int(torch.accelerator.get_memory_info(device)[1]) for device in devices}


def _measured(folder: Path, nbytes: int) -> Disk:
    free = psutil.disk_usage(str(folder)).free
    size = min(nbytes, free // 4) // _BLOCK * _BLOCK
    if size < _LEAST:
        return Disk(folder, free, writes=None, reads=None, reads_direct=None)
    path = temporary_for(folder / "doctor")
    try:
        with writing(path, size):
            writes = _rate(size, lambda: _write(path, size))
        _forget(path)
        reads = _rate(size, lambda: _read(path, 0))
        with suppress(OSError):  # the file system has no O_DIRECT
            return Disk(folder, free, writes, reads, _rate(size, lambda: _read(path, os.O_DIRECT)))
        return Disk(folder, free, writes, reads, reads_direct=None)
    finally:
        remove(path)


def _rate(size: int, act: Callable[[], None]) -> float:
    started = time.perf_counter()
    act()
    return size / (time.perf_counter() - started)


def _write(path: Path, size: int) -> None:
    """Noise: some disks are quick with zeros."""
    block = os.urandom(_BLOCK)
    with path.open("xb", buffering=0) as file:
        for _ in range(0, size, _BLOCK):
            file.write(block)
        os.fsync(file.fileno())


def _read(path: Path, flags: int) -> None:
    buffer = mmap.mmap(-1, _BLOCK)
    with closed_after(os.open(path, os.O_RDONLY | flags)) as fd:
        at = 0
        while done := os.preadv(fd, [buffer], at):
            at += done


def _forget(path: Path) -> None:
    """Drop a file from the page cache."""
    with closed_after(os.open(path, os.O_RDONLY)) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
