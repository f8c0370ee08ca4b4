"""The machine on which figures were measured.

Always true:
- it is described without a host name, user or path
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

import offload
from bench.limits import copying_rate, reading_rates
from bench.page_cache import files_in, make_cold

_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "compressed-tensors", "torch-to-nnef", "tensordict")


def facts(folder: Path) -> dict[str, object]:
    """Processor, memory, system, versions and date; `folder` is on the measured file system."""
    return {
        "date": today(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads of torch": torch.get_num_threads(),
        "memory": psutil.virtual_memory().total,
        "kernel": f"{platform.system()} {platform.release()}",
        "file system": file_system(folder),
        "python": platform.python_version(),
        "versions": _versions(),
    }


def rates(folder: Path) -> dict[str, object]:
    """Bytes per second: reading a folder's files with O_DIRECT, by threads and block size; and copying in memory."""
    files = files_in(folder)
    make_cold(files)
    reading = {f"{one.threads} x {one.block >> 20} MiB": round(rate) for one, rate in reading_rates(files).items()}
    return {"O_DIRECT": reading, "memcpy": round(copying_rate())}


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def name() -> str:
    """For example `2-cores-24-gib`."""
    return f"{os.cpu_count()}-cores-{round(psutil.virtual_memory().total / 2**30)}-gib"


def file_system(folder: Path) -> str:
    """The type of a folder's file system."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    around = [(point, kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
    return max(around, key=lambda mount: len(mount[0]))[1]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _versions() -> dict[str, str]:
    found = {"offload": offload.__version__}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
