"""Measured properties of this machine.

Always true:
- the disk is measured by reading an existing file, or one of our own, which is removed afterwards, even after a
  failure
- nothing is guessed: what could not be measured is None
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from offload.errors import ArgumentError, MissingFileError
from offload.kernels import accelerated
from offload.kernels.native import Product, description, library
from offload.kernels.packed import BLOCKS, GgufRows, NumberRows
from offload.memory import available_bytes, total_bytes
from offload.prefetch.parallel import read_in_parallel
from offload.prefetch.staging import bus_rate
from offload.storage.replacing import remove, temporary_for
from offload.system.reasons import reading, writing
from offload.system.regular import absolute, owned
from offload.tensor.blocks import decode
from offload.torch_api import TESTED as TESTED_TORCH
from offload.torch_api import usable_devices
from offload.transformers_api import TESTED as TESTED_TRANSFORMERS

_PACKAGES = ("safetensors", "transformers", "accelerate", "huggingface-hub", "psutil", "peft", "torchao")
_BLOCK = 4 << 20
_LEAST, _MOST = 16 << 20, 256 << 20  # bytes to read: fewer say little about a disk


@dataclass(frozen=True)
class Disk:
    """Measurements of a folder's disk. Rates in bytes per second; None where they could not be measured."""

    folder: Path
    free: int  # bytes that can still be written there
    writes: float | None  # synced
    reads: float | None  # past the page cache, or from cold if the file system refuses that


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found. Sizes in bytes."""

    versions: dict[str, str]  # of Python, and of the packages that are installed; says which are newer than tested ones
    kernels: str  # how packed weights are decoded here
    devices: dict[str, int]  # the accelerators, each with its memory
    memory: int  # of the machine
    available: int  # to this process
    disk: Disk


def diagnose(folder: str | os.PathLike[str]) -> Diagnosis:
    """Look at this machine, and measure the disk of a folder.

    Args:
        folder: where values are to be kept.

    Raises:
        MissingFileError: there is no such folder.
        WriteError: nothing can be written there.
    """
    place = absolute(folder)
    if not place.is_dir():
        raise MissingFileError(errno.ENOENT, "no such folder: name an existing one, or make it first", str(place))
    return Diagnosis(
        versions=_installed(),
        kernels=f"{description()}; on a GPU: {accelerated.description()}",
        devices={str(device): int(torch.accelerator.get_memory_info(device)[1]) for device in usable_devices()},
        memory=total_bytes(),
        available=available_bytes(),
        disk=_measured(place),
    )


@dataclass(frozen=True)
class Computing:
    """Measurements of a compute device, in a model's dtype, per second."""

    streams: float  # bytes of weights in a matrix-vector product, limited by memory bandwidth
    multiplies: float  # floating-point operations in a product with many rows
    packed: float  # packed bytes of a form that are multiplied by one row; that are decoded, if no kernel does that
    call: float  # seconds that an op takes from Python, whatever it computes
    sends: float | None = None  # bytes from main memory to an accelerator; None on the CPU


_ENOUGH = 0.25  # seconds to measure something for
_ROWS, _COLUMNS = 16384, 4096  # more than the caches of a processor hold
_IN_8_BITS = ("fp8", "float-quantized", "int8", "int-quantized")  # forms whose numbers take a byte
_CALLS = 200


def computing_rates(device: torch.device, form: str = "") -> Computing:
    """Measure products in bfloat16 on a device, and calls of a small one. Takes some tenths of a second, and 70 MB.

    Args:
        device: where to compute.
        form: in which weights are packed: a kind of blocks of GGUF files, or a method; "" for some in 4 bits.
    """
    streams, multiplies, calling = _dense_rates(device)
    sends = None if device.type == "cpu" else bus_rate(device)
    packed = _packed_rate(form, torch.zeros(1, _COLUMNS, dtype=torch.bfloat16, device=device))
    return Computing(streams, multiplies, packed, calling, sends)


def _dense_rates(device: torch.device) -> tuple[float, float, float]:
    """Bytes of weights, and operations, per second, and the seconds of a call."""
    linear = torch.nn.functional.linear
    with torch.no_grad(), torch.device(device):
        weight = torch.zeros(_ROWS // 2, _COLUMNS, dtype=torch.bfloat16)
        one, many = (torch.zeros(rows, _COLUMNS, dtype=weight.dtype) for rows in (1, 256))
        small, x = torch.nn.Linear(8, 8, dtype=weight.dtype), torch.zeros(1, 8, dtype=weight.dtype)
        streaming = _seconds(lambda: linear(one, weight), device)
        multiplying = _seconds(lambda: linear(many, weight[:_COLUMNS]), device)
        calling = _seconds(lambda: [small(x) for _ in range(_CALLS)], device) / _CALLS
    return weight.nbytes / streaming, 2 * len(many) * _COLUMNS * _COLUMNS / multiplying, calling


def _packed_rate(form: str, x: torch.Tensor) -> float:
    """How many packed bytes per second are multiplied by a row of activations, or decoded."""
    packed, pieces = _packed_in(form, x.device)
    nbytes = sum(piece.nbytes for piece in pieces)
    if x.device.type == "cpu" and library() is not None and packed.by_role(pieces, _COLUMNS) is not None:
        product, out = Product([(packed.matrix(pieces, _COLUMNS), _ROWS)]), torch.empty(1, _ROWS, dtype=x.dtype)
        return nbytes / _seconds(lambda: product.into(x, None, out), x.device)
    kind = packed.kind if isinstance(packed, GgufRows) else "Q8_0" if form in _IN_8_BITS else "Q4_K"
    _, [blocks] = _packed_in(kind, x.device)
    return blocks.nbytes / _seconds(lambda: decode(blocks, kind=kind), x.device)


def _packed_in(form: str, device: torch.device) -> tuple[GgufRows | NumberRows, list[torch.Tensor]]:
    """Rows of zeros in this form: blocks, or numbers whose factors are stored elsewhere."""
    kind = form.upper()
    if kind in BLOCKS:
        numbers, nbytes = BLOCKS[kind]
        rows = torch.zeros(_ROWS, _COLUMNS // numbers * nbytes, dtype=torch.uint8, device=device)
        return GgufRows(kind), [rows]
    is_byte = form in _IN_8_BITS
    values = torch.zeros(_ROWS, _COLUMNS if is_byte else _COLUMNS // 2, dtype=torch.uint8, device=device)
    scales = torch.ones(_ROWS, 1 if is_byte else _COLUMNS // 32, dtype=torch.bfloat16, device=device)
    return (NumberRows("e4m3") if is_byte else NumberRows("halves_low", group=32)), [values, scales]


def _seconds(act: Callable[[], object], device: torch.device) -> float:
    """The least time of five runs, or of as many as take a quarter of a second, after a warm-up."""
    taken: list[float] = []
    while len(taken) < 2 or (len(taken) < 6 and sum(taken[1:]) < _ENOUGH):
        started = time.perf_counter()
        act()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        taken.append(time.perf_counter() - started)
    return min(taken[1:])


def reading_rate(path: Path) -> float | None:
    """Rate of reading a file past the page cache in bytes per second; None if impossible, or if the file is too small.

    Raises:
        ReadError
    """
    with reading(path):
        size = min(_MOST, path.stat().st_size) // _BLOCK * _BLOCK
        if size < _LEAST:
            return None
        with suppress(OSError):
            return _rate(size, lambda: _read(path, os.O_DIRECT, size))
    return None


def disk_rate_at(file: Path | None) -> float:
    """Rate of reading the file of a model, or in the folder where the hub's would be.

    Raises:
        ArgumentError: it could not be measured.
    """
    rate = None if file is None else reading_rate(file)
    if rate is None:
        folder = Path.cwd() if file is None else file.parent
        rate = _measured(folder if os.access(folder, os.W_OK) else Path.cwd()).reads
    if rate is None:
        raise ArgumentError("the disk could not be measured here: give disk_rate, as '2GB'")
    return rate


def _installed() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    for package, newest in (("torch", TESTED_TORCH[-1]), ("transformers", TESTED_TRANSFORMERS[-1])):
        if _minor(versions.get(package, "0.0")) > _minor(newest):
            versions[package] += f", newer than what was tested ({newest})"
    return versions


def _minor(release: str) -> list[int]:
    return [int(part) for part in release.split(".")[:2]]


def _measured(folder: Path) -> Disk:
    free = shutil.disk_usage(folder).free
    size = min(_MOST, free // 4) // _BLOCK * _BLOCK
    if size < _LEAST:
        return Disk(folder, free, writes=None, reads=None)
    path = temporary_for(folder / "doctor")
    try:
        with writing(path, size):
            writes = _rate(size, lambda: _write(path, size))
        reads = reading_rate(path)
        if reads is None:
            with owned(os.open, path, os.O_RDONLY) as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            reads = _rate(size, lambda: _read(path, 0, size))
        return Disk(folder, free, writes, reads)
    finally:
        remove(path)


def _rate(size: int, act: Callable[[], None]) -> float:
    started = time.perf_counter()
    act()
    return size / (time.perf_counter() - started)


def _write(path: Path, size: int) -> None:
    """Writes random bytes: some disks are faster with zeros."""
    block = os.urandom(_BLOCK)
    with path.open("xb", buffering=0) as file:
        for _ in range(0, size, _BLOCK):
            file.write(block)
        os.fsync(file.fileno())


def _read(path: Path, flags: int, size: int) -> None:
    """As the prefetcher does: by as many threads as the disk is clearly faster with."""
    with owned(os.open, path, os.O_RDONLY | flags) as opened:
        fd = opened.fileno()

        def read(start: int, nbytes: int) -> None:
            with mmap.mmap(-1, min(nbytes, _BLOCK)) as buffer:
                for at in range(start, start + nbytes, _BLOCK):
                    os.preadv(fd, [buffer], at)

        read_in_parallel(0, size, _BLOCK, read)
