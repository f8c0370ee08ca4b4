"""Putting files into the page cache, and dropping them.

Always true:
- cold is verified, not assumed: it is an error if more than one percent of the files stays cached
- a file's data is never changed
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)
_DONTNEED = 4  # MADV_DONTNEED of <sys/mman.h>
_LEFT = 0.01
_TRIES = 100  # a page that the kernel is moving just then stays


def files_in(*folders: Path) -> list[Path]:
    """All regular files in the folders, symlinks followed, without duplicates."""
    found = (path.resolve() for folder in folders for path in folder.rglob("*") if path.is_file())
    return sorted(set(found))


def warm(files: Iterable[Path]) -> None:
    """Read files into the page cache."""
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def make_cold(files: Sequence[Path]) -> None:
    """Drop files from the page cache.

    This process's mappings of them are released: the next access reads the file again. What another process has mapped
    stays cached.

    Raises:
        RuntimeError: more than that is still cached.
    """
    for folder in {path.parent for path in files}:
        _write_out(folder)
    left = 1.0
    for _ in range(_TRIES):  # a thread of this process may still be reading ahead
        for address, size in _mapped(set(map(str, files))):
            _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _DONTNEED)
        for path in files:
            _drop(path)
        left = cached_fraction(files)
        if not left:
            break
        time.sleep(0.01)
    if left >= _LEFT:
        raise RuntimeError(f"{left:.0%} of {len(files)} files stay cached: another process has them mapped")


def cached_fraction(files: Iterable[Path]) -> float:
    """The cached fraction of the files' pages."""
    pages = [_cached_pages(path) for path in files if path.stat().st_size]
    return sum(cached for cached, _ in pages) / max(1, sum(of for _, of in pages))


def _write_out(folder: Path) -> None:
    """Write out all dirty pages of its file system, which can't be dropped. Thousands take long one by one."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _LIBC.syncfs(descriptor)
    finally:
        os.close(descriptor)


def _drop(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _cached_pages(path: Path) -> tuple[int, int]:
    """The numbers of cached pages and of all pages. Source: mincore(2)."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        contents = np.frombuffer(mapping, np.uint8)
        states = np.zeros(-(-len(contents) // mmap.PAGESIZE), np.uint8)
        refused = _LIBC.mincore(
            ctypes.c_void_p(contents.ctypes.data), ctypes.c_size_t(len(contents)), ctypes.c_void_p(states.ctypes.data)
        )
        del contents  # otherwise the mapping could not be closed
    if refused:
        raise OSError(ctypes.get_errno(), f"{path}: this system does not tell what is cached")
    return int((states & 1).sum()), len(states)


def _mapped(names: set[str]) -> Iterator[tuple[int, int]]:
    """Address and size of this process's mappings of the files. Source: proc_pid_maps(5)."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        addresses, *_, name = line.split(maxsplit=5)
        if name in names:
            start, end = (int(address, 16) for address in addresses.split("-"))
            yield start, end - start
