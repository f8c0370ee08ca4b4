"""The pages of a mapped file: tell which are in memory, bring them in, drop them.

Always true:
- nothing here changes what a read returns, only when the disk is read
- dirty memory is never dropped
- huge pages are used while there are free ones: if the system has to make them, it evicts pages that should stay; and
  in a virtual machine whose host takes free ones, only for what is read again and again for want of room
- a large range is read by two threads; announced block by block if it may not be read around, or if only the
  smallest pages have memory behind them
- if the kernel has no call for it, pages are announced, and read as they are touched
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import sys
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from offload.errors import CorruptFileError, OffloadError
from offload.prefetch.parallel import read_in_parallel
from offload.storage.file import TensorFile
from offload.storage.mapping import libc
from offload.system.reasons import explained

PAGE = mmap.PAGESIZE
_SAMPLES = 8  # pages to check in a large range
_ASKED_WHOLE = 1 << 20  # bytes up to which every page is checked
_BLOCK = 2 << 20  # bytes per read; the kernel honours a hint only up to its read-ahead
_BLOCKS = 4  # blocks in flight
_PART = 16 << 20  # bytes that one of two threads announces and reads
_HUGE = 2 << 20
_LEAVE_FREE = 256 << 20  # bytes of free huge pages to leave for others; as many again, for what is read repeatedly
_FREE_BLOCKS = Path("/proc/buddyinfo")
_REPORTED_ORDER = Path("/sys/module/page_reporting/parameters/page_reporting_order")
_MOST_ORDER = 16  # of blocks of memory, 1 << order pages: 256 MiB of pages of 4 KiB
# The kernel can refuse to prefetch pages that are still readable: it lacks the call, or is short of something.
_MAY_BE_TOUCHED = {errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ENOMEM, errno.EAGAIN, errno.EINTR}
_MADV_NORMAL, _MADV_RANDOM, _MADV_WILLNEED = 0, 1, 3
_MADV_HUGEPAGE, _MADV_NOHUGEPAGE, _MADV_PAGEOUT, _MADV_POPULATE_READ = 14, 15, 21, 22


class Range:
    """Bytes of a mapped file that are read together. Keeps neither the file nor its mapping alive.

    Attributes:
        start: where the first one is in the file.
        nbytes: how many there are.
        checked_until: until when (`clock.now`) they are assumed to be in memory without checking; 0 if that is open.
        is_part: whether the rest of the value may stay unread: nothing around them is read along.
    """

    def __init__(self, file: TensorFile, start: int, nbytes: int, *, shared: bool, is_part: bool = False) -> None:
        self._file = weakref.ref(file)
        self.start = start
        self._shared = shared
        self._may_ask: bool | None = None
        self._was_read = False
        self.nbytes = nbytes
        self.checked_until = 0.0
        self.is_part = is_part

    def follows(self, other: Range) -> bool:
        return other._file is self._file and 0 <= self.start - other.start - other.nbytes < PAGE * 2

    def through(self, last: Range) -> Range:
        """From the beginning of this one to the end of `last`, in the same file."""
        joined = Range.__new__(Range)
        joined._file, joined._shared, joined._may_ask = self._file, self._shared, self._may_ask
        joined._was_read = self._was_read and last._was_read
        joined.start, joined.nbytes = self.start, last.start + last.nbytes - self.start
        joined.is_part = self.is_part or last.is_part
        return joined

    @property
    def has_file(self) -> bool:
        return self._file() is not None

    @property
    def is_apart(self) -> bool:
        """Whether its neighbours in the file are not to be read along, as a page fault would, by megabytes."""
        file = self._file()
        return file is not None and file.is_picked_from

    def missing_bytes(self) -> int:
        """Bytes still to be read from the disk, in whole pages; all of them if the kernel does not tell."""
        return self.nbytes - self.cached_bytes() if self.may_ask else self.nbytes

    def is_cached(self) -> bool:
        """Whether it is in memory, as far as the kernel tells. False if the file is gone."""
        mapped = self._mapped()
        return mapped is not None and self.may_ask and are_cached(mapped.data_ptr() + self.start, self.nbytes)

    @property
    def may_ask(self) -> bool:
        """Whether the kernel tells this process what is cached; for other users' files it says that everything is."""
        file = self._file()
        if self._may_ask is None and file is not None:
            with suppress(OSError):
                writes = os.access(file.path, os.W_OK)
                self._may_ask = writes or os.stat(file.path).st_uid == os.geteuid()
        return bool(self._may_ask)

    def cached_bytes(self) -> int:
        """Bytes in memory, in whole pages; 0 while its file is not mapped."""
        file = self._file()
        mapped = None if file is None else file.mapping(shared=self._shared)
        return 0 if mapped is None else min(cached_bytes(mapped.data_ptr() + self.start, self.nbytes), self.nbytes)

    def announce(self, *, exactly: bool = False) -> None:
        """Start reading it in the background, unless `bring_in` with these arguments reads it in larger pages."""
        mapped, exactly = self._mapped(), exactly or self.is_apart
        if mapped is not None:
            address = mapped.data_ptr() + self.start
            is_small = self.nbytes < _HUGE  # it is never read in huge pages, which those here would be in the way of
            takes_care = not is_small and self._ask_for_huge_pages(address, exactly=exactly)
            if is_small or (not takes_care and self._is_announced(exactly)):
                announce(address, self.nbytes)

    def bring_in(self, *, exactly: bool = False) -> None:
        """Read it from the disk unless it is in memory.

        Args:
            exactly: read little of its neighbours, which some disks read along by megabytes.

        Raises:
            ReadError: the disk failed.
            CorruptFileError: the file has been truncated.
        """
        mapped, exactly = self._mapped(), exactly or self.is_apart
        if mapped is None:
            return
        address = mapped.data_ptr() + self.start
        takes_care = self._ask_for_huge_pages(address, exactly=exactly)
        if takes_care and exactly:  # of the huge pages shared with neighbours, read only its own part
            head = min(-self.start % _HUGE, self.nbytes)
            tail = min((self.start + self.nbytes) % _HUGE, self.nbytes - head)
            announce(address, head)
            announce(address + self.nbytes - tail, tail)
        is_announced = not takes_care and self._is_announced(exactly)
        read, part = (bring_in_exactly, _PART) if is_announced else (bring_in, _BLOCK)

        def read_part(start: int, nbytes: int) -> None:
            read(mapped.data_ptr() + start, nbytes)

        try:
            read_in_parallel(self.start, self.nbytes, part, read_part)
        except OSError as error:
            raise self._explained(error) from error
        self._was_read = True

    def _is_announced(self, exactly: bool) -> bool:
        """Whether it is announced block by block, unless it is read in huge pages."""
        return exactly or self.is_part or should_take_small_pages(self.nbytes)

    def let_go(self) -> None:
        """Drop it from memory unless others use it, writing it out first if needed; the next read brings it back.

        Does nothing if the file is not mapped, nor (a kernel rule) for files that this user may not write to.
        """
        self.checked_until = 0.0
        file = self._file()
        mapped = None if file is None else file.mapping(shared=self._shared)
        if file is None or mapped is None:
            return
        with suppress(OffloadError, OSError), file.descriptor(settled=False) as opened:
            fd = opened.fileno()
            if self._shared and not write_out(fd, self.start, self.nbytes):
                file.lost_writes = True  # memory holds the only copy
                return
            let_go(mapped.data_ptr() + self.start, self.nbytes)
            os.posix_fadvise(fd, self.start, self.nbytes, os.POSIX_FADV_DONTNEED)  # partial huge pages at both ends

    def _ask_for_huge_pages(self, address: int, *, exactly: bool) -> bool:
        """Read it in 2 MiB pages, and with `exactly` in no others; returns whether the system will.

        Not for writable values: a store would dirty a whole huge page. Nor for a part of a value.
        """
        if not _READS_HUGE_PAGES or self._shared or self.is_part or self.nbytes < _HUGE:
            return False
        takes_care = read_in_huge_pages(address, self.nbytes, again=exactly and self._was_read)
        libc.madvise(*_whole_pages(address, self.nbytes), _MADV_RANDOM if exactly and takes_care else _MADV_NORMAL)
        return takes_care

    def _explained(self, error: OSError) -> OffloadError:
        file = self._file()
        if file is None:
            return explained(Path("a file that is gone"), error)
        with suppress(OSError):
            if os.stat(file.path).st_size < self.start + self.nbytes:
                return CorruptFileError(
                    f"{file.path} was truncated after it had been opened: download or copy the file again"
                )
        return explained(file.path, error)

    def _mapped(self) -> torch.UntypedStorage | None:
        """None if the file is gone or has changed: the reader of the value reports that."""
        file = self._file()
        with suppress(OffloadError, OSError):
            return None if file is None else file.mapped(shared=self._shared)
        return None


def joined(ranges: Iterable[Range]) -> list[Range]:
    """The same bytes as ranges that neither overlap nor touch."""
    merged: list[Range] = []
    for one in sorted(ranges, key=lambda one: (id(one._file), one.start)):
        last = merged[-1] if merged else None
        if last is None or last._file is not one._file or one.start > last.start + last.nbytes:
            merged.append(one)
        elif one.start + one.nbytes > last.start + last.nbytes:
            merged[-1] = last.through(one)
    return merged


def are_cached(address: int, nbytes: int) -> bool:
    """Whether a mapped range is in memory; of a large one, only some pages are checked."""
    if nbytes == 0:
        return True
    first, length = _whole_pages(address, nbytes)
    if length <= _ASKED_WHOLE:
        return _count(first, length) * PAGE == length
    step = (length // PAGE - 1) // (_SAMPLES - 1) * PAGE
    return all(_count(first + place * step, PAGE) for place in range(_SAMPLES))


def cached_bytes(address: int, nbytes: int) -> int:
    first, length = _whole_pages(address, nbytes)
    return _count(first, length) * PAGE


def announce(address: int, nbytes: int) -> None:
    """Start reading a mapped range in the background."""
    if nbytes > 0:
        for start in range(0, nbytes, _BLOCK):
            libc.madvise(*_whole_pages(address + start, min(nbytes - start, _BLOCK)), _MADV_WILLNEED)


def bring_in(address: int, nbytes: int) -> bool:
    """Read a mapped range from the disk unless it is in memory, and wait. Other threads run meanwhile.

    Returns:
        Whether it was read. If the kernel has no call for it (before Linux 5.14), its reading has begun.

    Raises:
        OSError: the disk failed.
    """
    if not nbytes or not libc.madvise(*_whole_pages(address, nbytes), _MADV_POPULATE_READ):
        return True
    code = ctypes.get_errno()
    if code == errno.EFAULT:
        raise OSError(errno.EIO, "the disk did not return the data")
    if code not in _MAY_BE_TOUCHED:
        raise OSError(code, os.strerror(code))
    announce(address, nbytes)
    return False


def read_in_huge_pages(address: int, nbytes: int, *, again: bool = False) -> bool:
    """Read a mapped range in 2 MiB pages from now on, if enough are free; returns whether the system will.

    Args:
        again: whether it is read again and again, in pages that are freed in between. Otherwise the host of a virtual
            machine may have taken the memory behind free huge pages, and supplying it again takes longer than the
            read. It leaves free small pages alone.
    """
    are_there = again or not _HOST_TAKES_FREE_PAGES
    spare = _LEAVE_FREE if again else 2 * _LEAVE_FREE
    has_enough = _READS_HUGE_PAGES and are_there and bytes_free(huge=True) >= nbytes + spare
    refused = libc.madvise(*_whole_pages(address, nbytes), _MADV_HUGEPAGE if has_enough else _MADV_NOHUGEPAGE)
    return has_enough and not refused


def bring_in_exactly(address: int, nbytes: int) -> None:
    """Like `bring_in`, block by block, keeping several blocks in flight; in the smallest pages.

    Raises: as `bring_in`.
    """
    announce(address, min(nbytes, _BLOCK * _BLOCKS))
    for start in range(0, nbytes, _BLOCK):
        coming = start + _BLOCK * _BLOCKS
        if coming < nbytes:
            announce(address + coming, min(nbytes - coming, _BLOCK))
        bring_in(address + start, min(nbytes - start, _BLOCK))


def let_go(address: int, nbytes: int) -> None:
    """Drop the clean pages that lie entirely in a mapped range and that nobody else has mapped."""
    first = -(-address // PAGE) * PAGE
    length = (address + nbytes) // PAGE * PAGE - first
    if length > 0:
        libc.madvise(first, length, _MADV_PAGEOUT)


def write_out(fd: int, start: int, nbytes: int) -> bool:
    """Write out the dirty pages of a file range and wait; returns whether that worked. Not durable by itself."""
    return bool(libc.sync_file_range(fd, start, nbytes, 7) == 0)  # wait for writes under way, write, wait


def begin_to_write_out(fd: int, start: int, nbytes: int) -> None:
    """Start writing out the dirty pages of a file range. Errors are left to the later wait."""
    libc.sync_file_range(fd, start, nbytes, 2)  # write what is not being written yet


def _whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    """The pages that a range touches, as address and length."""
    first = address // PAGE * PAGE
    return first, -(-(address + nbytes - first) // PAGE) * PAGE


def _count(first: int, length: int) -> int:
    if length == PAGE:
        one = _ONE_PAGE()
        return one[0] & 1 if libc.mincore(first, length, one) == 0 else 1
    pages = np.empty(length // PAGE, dtype=np.uint8)
    if libc.mincore(first, length, pages.ctypes.data):
        return len(pages)
    return int(np.count_nonzero(pages & 1))


def should_take_small_pages(nbytes: int) -> bool:
    """Whether there is room for a range in small blocks of free memory, and the host has taken the larger ones."""
    return _HOST_TAKES_FREE_PAGES and nbytes >= _HUGE and nbytes <= bytes_free(huge=False) < sys.maxsize


def bytes_free(*, huge: bool) -> int:
    """Bytes free in blocks of 2 MiB and more, or in smaller ones; infinite if the system does not tell.

    Source: https://docs.kernel.org/filesystems/proc.html, buddyinfo: free blocks by size, from one page up.
    """
    try:
        lines = _FREE_BLOCKS.read_text(encoding="ascii").splitlines()
    except OSError:
        return sys.maxsize
    zones = [[int(count) << order for order, count in enumerate(line.split()[4:])] for line in lines]
    first = (_HUGE // PAGE).bit_length() - 1  # the order of a huge page
    return PAGE * sum(sum(zone[first:] if huge else zone[:first]) for zone in zones)


def host_takes_free_pages(order: Path = _REPORTED_ORDER) -> bool:
    """Whether this is a virtual machine that tells its host which of its larger blocks of memory are free.

    Source: https://docs.kernel.org/mm/free_page_reporting.html; the order is out of range until a driver has set it.
    """
    with suppress(OSError, ValueError):
        return 0 <= int(order.read_text(encoding="ascii")) <= _MOST_ORDER
    return False


def _kernel() -> tuple[int, ...]:
    """The major and minor number of the kernel's release."""
    match = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return tuple(map(int, match.groups())) if match else (0, 0)


_ONE_PAGE = ctypes.c_ubyte * 1
# Since Linux 5.18, a mapping that asks for huge pages is read in them, whatever the disk's read-ahead; before that, a
# mapping with random access is read in single small pages.
_READS_HUGE_PAGES = _kernel() >= (5, 18)
_HOST_TAKES_FREE_PAGES = host_takes_free_pages()
