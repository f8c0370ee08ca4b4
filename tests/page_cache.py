"""Memory in tests: whether files can be dropped from the page cache here, and memory be capped; a cache in memory.

Memory-backed folders have nothing to drop.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bench.memory_cap import memory_cap
from bench.page_cache import cached_fraction
from offload import TensorCache
from offload.prefetch.direct import can_be_read
from offload.prefetch.pages import Range
from offload.storage.file import TensorFile


def _can_be_dropped() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.safetensors"
        save_file({"w": torch.zeros(1 << 18)}, path)
        file = TensorFile.open(path)
        entry = file.entry("w")
        file.mapped(shared=True)
        probe = Range(file, entry.start, entry.layout.nbytes, shared=True)
        probe.bring_in()
        probe.let_go()
        return probe.cached_bytes() < entry.layout.nbytes // 2


def _can_be_read_past() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.safetensors"
        save_file({"w": torch.zeros(1 << 10)}, path)
        return can_be_read(TensorFile.open(path))


def _why_no_memory_cap() -> str:
    """The reason why this process can make no memory cgroup; empty if it can."""
    try:
        with memory_cap(64 << 20):
            return ""
    except OSError as error:
        return str(error)


_NO_CAP = _why_no_memory_cap()
needs_memory_cap = pytest.mark.skipif(bool(_NO_CAP), reason=_NO_CAP)
needs_page_cache = pytest.mark.skipif(
    not _can_be_dropped(), reason="cached files can't be dropped here (a temporary folder in memory)"
)
needs_direct_reads = pytest.mark.skipif(not _can_be_read_past(), reason="this file system has no direct reads")


def made_hot(cache: TensorCache) -> None:
    """Read all rows of a cache until they come out of mappings; skips if the system can't tell what is cached."""
    path = next(iter(cache.folder.glob("*.safetensors")))
    with path.open("rb", buffering=0) as file:
        try:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            pass
        except (AttributeError, OSError) as error:
            pytest.skip(f"whether rows are in memory can't be told here: {error}")
    rows = torch.arange(len(cache))
    for _ in range(20):  # the system may evict pages meanwhile
        cache[rows]
        if all(file.rowfile.mapped is not None for file in cache._store._files.values()):
            return
    raise AssertionError("the rows did not stay in memory")


def dropped(path: Path) -> Path:
    """A file that is not in memory: a page that the kernel is moving just then stays, and goes at the next try."""
    with path.open("rb") as file:
        for _ in range(100):
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if not cached_fraction([path]):
                break
            time.sleep(0.001)
    return path
