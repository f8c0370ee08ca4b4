"""Mapped memory: bytes of files, and scratch memory for one value in transit; and libc calls that Python lacks.

Always true:
- mapped memory is writable; a store reaches the file only through a shared mapping
- mapping never creates or extends a file, keeps no descriptor, and reserves no memory: files may be larger than RAM
- a mapping is released with its last storage, and not at exit, when others may still read it
- scratch memory goes back to the system when it is dropped: what torch frees below 32 MB can stay in glibc's heap,
  where small allocations move in, and a whole model's worth accumulates
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from contextlib import suppress
from pathlib import Path

import torch

from offload.errors import ReadError
from offload.storage.layout import Layout
from offload.system.reasons import explained

_FAILED = ctypes.c_void_p(-1).value
_NO_RESERVE = 0x4000  # Python exposes it since 3.13
_WRITABLE = 0x200  # PyBUF_WRITE
_HUGE = 2 << 20


def map_bytes(fd: int, path: Path, start: int, nbytes: int, *, shared: bool) -> torch.UntypedStorage:
    """`nbytes` bytes of an open file that is at least that long, as a storage: shared or copy-on-write.

    Not with `UntypedStorage.from_file`, which counts a private mapping against the commit limit, and for a shared one
    creates a missing file and extends a short one; nor with `mmap`, which keeps a descriptor (before Python 3.13).

    Raises `ReadError` if the system refuses to map it.
    """
    inside = start % mmap.PAGESIZE
    flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | _NO_RESERVE
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    address = libc.mmap(None, inside + nbytes, rights, flags, fd, start - inside)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise explained(path, OSError(code, os.strerror(code)))
    whole = _storage_of(address, inside + nbytes)
    return whole[inside:] if inside else whole


def addresses(count: int) -> torch.UntypedStorage:
    """Unique addresses that can't be read, for code that tells tensors apart by address.

    Raises `ReadError` if the system has no address space left.
    """
    address = libc.mmap(None, max(count, 1), 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE, -1, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise ReadError(code, f"there are no {count} addresses left for a value ({os.strerror(code)})")
    return _storage_of(address, max(count, 1))


def _storage_of(address: int, size: int) -> torch.UntypedStorage:
    """A mapping as a storage, with which it is released."""
    buffer = view_memory(address, size)
    weakref.finalize(buffer, libc.munmap, address, size).atexit = False
    return torch.frombuffer(buffer, dtype=torch.uint8, requires_grad=False).untyped_storage()


def scratch(layout: Layout) -> torch.Tensor:
    """A plain tensor of zeros with that layout; in huge pages where available, which are faster to fault in.

    Raises `ReadError` if there is not enough memory.
    """
    try:
        memory = mmap.mmap(-1, max(layout.nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        reason = f"there are no {layout.nbytes} bytes of memory for a value in transit ({error.strerror}): free some"
        raise ReadError(error.errno, reason) from error
    if layout.nbytes >= _HUGE:
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(memory, dtype=torch.uint8, requires_grad=False)
    empty = torch.empty(0, dtype=layout.dtype, device="cpu")
    return empty.set_(flat.untyped_storage(), 0, layout.shape, layout.stride)


def view_memory(address: int, size: int) -> memoryview:
    """Writable memory as a buffer; a ctypes array would create a class per size."""
    buffer: memoryview = _view_memory(address, size, _WRITABLE)
    return buffer


def _calls() -> ctypes.CDLL:
    calls = ctypes.CDLL(None, use_errno=True)
    calls.mmap.restype = ctypes.c_void_p
    calls.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    calls.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    calls.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    calls.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    calls.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return calls


libc = _calls()
_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_view_memory.restype = ctypes.py_object
