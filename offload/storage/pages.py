"""The pages of a mapped file: which are in memory, bring them in, let them go.

Always true:
- nothing here changes what a read gives, only when the disk is read for it
- memory that was stored into is never dropped
- huge pages are asked for while there are free ones: where the system has to make them, it drops what should stay
- where the kernel has no call for it, pages are read by touching them
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
from offload.storage.file import TensorFile
from offload.storage.mapping import libc, view_memory
from offload.storage.reasons import explained
from offload.storage.regular import closed_after

PAGE = mmap.PAGESIZE
_SAMPLES = 8  # pages that are asked for, of many
_ASKED_WHOLE = 1 << 20  # bytes up to which every page is asked for
_BLOCK = 2 << 20  # bytes that are read at a time; the kernel takes no more for an announcement than it reads ahead
_BLOCKS = 4  # that are on their way at a time
_HUGE = 2 << 20
_SPARE = 256 << 20  # bytes of free huge pages that are left to others
_FREE_BLOCKS = Path("/proc/buddyinfo")
# Why the kernel may not bring pages in that can be read all the same: it does not know how, or has better to do.
_MAY_BE_TOUCHED = {errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ENOMEM, errno.EAGAIN, errno.EINTR}
_MADV_NORMAL, _MADV_RANDOM, _MADV_WILLNEED = 0, 1, 3
_MADV_HUGEPAGE, _MADV_NOHUGEPAGE, _MADV_PAGEOUT, _MADV_POPULATE_READ = 14, 15, 21, 22


class Range:
    """Bytes of a mapped file that are read as one. It keeps neither the file nor its mapping.

    Attributes:
        nbytes: how many.
        calm_until: until when (`time.monotonic`) they are taken to be in memory without asking.
        is_part: whether others of the same value may stay unread: nothing around them is read along.
    """

    __slots__ = ("__weakref__", "_file", "_may_ask", "_shared", "_start", "calm_until", "is_part", "nbytes")

    def __init__(self, file: TensorFile, start: int, nbytes: int, *, shared: bool) -> None:
        self._file = weakref.ref(file)
        self._start = start
        self._shared = shared
        self._may_ask: bool | None = None
        self.nbytes = nbytes
        self.calm_until = 0.0
        self.is_part = False

    def follows(self, other: Range) -> bool:
        """Whether it comes next in the same file."""
        return other._file is self._file and 0 <= self._start - other._start - other.nbytes < PAGE * 2

    def through(self, last: Range) -> Range:
        """From the beginning of this one to the end of `last`, in the same file."""
        joined = Range.__new__(Range)
        joined._file, joined._shared, joined._may_ask = self._file, self._shared, self._may_ask
        joined._start, joined.nbytes = self._start, last._start + last.nbytes - self._start
        joined.is_part = self.is_part or last.is_part
        return joined

    @property
    def has_file(self) -> bool:
        """Whether somebody in this process has its file."""
        return self._file() is not None

    def missing_bytes(self) -> int:
        """How much of it the disk has to give, in whole pages; all, where the kernel does not tell."""
        return self.nbytes - self.cached_bytes() if self.may_ask else self.nbytes

    def is_cached(self) -> bool:
        """Whether it is in memory, as far as the kernel tells. False for a file that is gone."""
        file, mapped = self._file(), self._mapped()
        if file is None or mapped is None:
            return False
        return self.may_ask and are_cached(mapped.data_ptr() + self._start, self.nbytes)

    @property
    def may_ask(self) -> bool:
        """Whether the kernel tells this process what is in memory; of files of others' it says that all is."""
        file = self._file()
        if self._may_ask is None and file is not None:
            with suppress(OSError):
                writes = os.access(file.path, os.W_OK)
                self._may_ask = writes or os.stat(file.path).st_uid == os.geteuid()
        return bool(self._may_ask)

    def cached_bytes(self) -> int:
        """How much of it is in memory, in whole pages; nothing while its file is not mapped."""
        file = self._file()
        mapped = None if file is None else file.mapping(shared=self._shared)
        return 0 if mapped is None else min(cached_bytes(mapped.data_ptr() + self._start, self.nbytes), self.nbytes)

    def announce(self) -> None:
        """Have the system begin to read it."""
        mapped = self._mapped()
        if mapped is not None:
            announce(mapped.data_ptr() + self._start, self.nbytes)

    def bring_in(self, *, exactly: bool = False, spare: int = 0) -> None:
        """Read it from the disk, if it is not in memory.

        Args:
            exactly: and little of its neighbours, which on some disks the system reads along by megabytes.
            spare: bytes of free huge pages that it is to leave, for what comes and goes.

        Raises:
            ReadError: the disk did not give it.
            CorruptFileError: the file has been cut.
        """
        file, mapped = self._file(), self._mapped()
        if file is None or mapped is None:
            return
        exactly = exactly or file.is_picked_from
        address = mapped.data_ptr() + self._start
        takes_care = self._ask_for_huge_pages(address, exactly=exactly, spare=spare)
        if takes_care and exactly:  # of the huge pages that it shares with its neighbours, its own part only
            head = min(-self._start % _HUGE, self.nbytes)
            tail = min((self._start + self.nbytes) % _HUGE, self.nbytes - head)
            announce(address, head)
            announce(address + self.nbytes - tail, tail)
        read = bring_in_exactly if (exactly or self.is_part) and not takes_care else bring_in
        try:
            read(address, self.nbytes)
        except OSError as error:
            raise self._explained(error) from error

    def let_go(self) -> None:
        """Drop it from memory, written out if need be, unless others use it too; the next read brings it back.

        Does nothing where the file is not mapped, nor, as the kernel has it, for files that this user may not write to.
        """
        self.calm_until = 0.0
        file = self._file()
        mapped = None if file is None else file.mapping(shared=self._shared)
        if file is None or mapped is None:
            return
        with suppress(OffloadError, OSError), closed_after(file.descriptor(settled=False)) as fd:
            if self._shared and not write_out(fd, self._start, self.nbytes):
                file.lost_writes = True  # what is in memory is all that there is
                return
            let_go(mapped.data_ptr() + self._start, self.nbytes)
            os.posix_fadvise(fd, self._start, self.nbytes, os.POSIX_FADV_DONTNEED)  # the ends of huge pages

    def _ask_for_huge_pages(self, address: int, *, exactly: bool, spare: int) -> bool:
        """Have it read in pages of 2 MiB, and with `exactly` in no others; whether the system will.

        Not where it may be written to: a store makes a whole page dirty. Nor for a part of a value.
        """
        if not _READS_HUGE_PAGES or self._shared or self.is_part or self.nbytes < _HUGE:
            return False
        takes_care = read_in_huge_pages(address, self.nbytes, spare=spare)
        libc.madvise(*_whole_pages(address, self.nbytes), _MADV_RANDOM if exactly and takes_care else _MADV_NORMAL)
        return takes_care

    def _explained(self, error: OSError) -> OffloadError:
        file = self._file()
        if file is None:
            return explained(Path("a file that is gone"), error)
        with suppress(OSError):
            if os.stat(file.path).st_size < self._start + self.nbytes:
                return CorruptFileError(
                    f"{file.path} has been cut off since it was opened: download or copy the file again"
                )
        return explained(file.path, error)

    def _mapped(self) -> torch.UntypedStorage | None:
        """None for a file that is gone, or has changed: it is for who reads the value to say so."""
        file = self._file()
        with suppress(OffloadError, OSError):
            return None if file is None else file.mapped(shared=self._shared)
        return None


def joined(ranges: Iterable[Range]) -> list[Range]:
    """The same bytes in ranges of which no two overlap, or touch."""
    found: list[Range] = []
    for one in sorted(ranges, key=lambda one: (id(one._file), one._start)):
        last = found[-1] if found else None
        if last is None or last._file is not one._file or one._start > last._start + last.nbytes:
            found.append(one)
        elif one._start + one.nbytes > last._start + last.nbytes:
            found[-1] = last.through(one)
    return found


def are_cached(address: int, nbytes: int) -> bool:
    """Whether a mapped range is in memory: of a large one, some pages are asked for."""
    if nbytes == 0:
        return True
    first, length = _whole_pages(address, nbytes)
    if length <= _ASKED_WHOLE:
        return _count(first, length) * PAGE == length
    step = (length // PAGE - 1) // (_SAMPLES - 1) * PAGE
    return all(_count(first + place * step, PAGE) for place in range(_SAMPLES))


def cached_bytes(address: int, nbytes: int) -> int:
    """How much of a mapped range is in memory, in whole pages."""
    first, length = _whole_pages(address, nbytes)
    return _count(first, length) * PAGE


def has_holes(status: os.stat_result) -> bool:
    """Whether most of a file was never written."""
    return status.st_blocks * 512 < status.st_size // 2


def announce(address: int, nbytes: int) -> None:
    """Have the system begin to read a mapped range, and go on."""
    if nbytes > 0:
        for start in range(0, nbytes, _BLOCK):
            libc.madvise(*_whole_pages(address + start, min(nbytes - start, _BLOCK)), _MADV_WILLNEED)


def bring_in(address: int, nbytes: int) -> None:
    """Read a mapped range from the disk, if it is not in memory, and wait for it. Other threads run meanwhile.

    Raises:
        OSError: the disk did not give it.
    """
    if nbytes and not populated(address, nbytes):
        touch(address, nbytes)


def populated(address: int, nbytes: int) -> bool:
    """As `bring_in`; whether the kernel has a call for it. Where it has none, nothing was read.

    Raises: as `bring_in`.
    """
    if not libc.madvise(*_whole_pages(address, nbytes), _MADV_POPULATE_READ):
        return True
    code = ctypes.get_errno()
    if code == errno.EFAULT:
        raise OSError(errno.EIO, "the disk did not deliver the data")
    if code not in _MAY_BE_TOUCHED:
        raise OSError(code, os.strerror(code))
    return False


def read_in_huge_pages(address: int, nbytes: int, *, spare: int = 0) -> bool:
    """Have a mapped range read in pages of 2 MiB from now on, if so many are free; whether the system will.

    Args:
        spare: bytes of free ones that are to be left.
    """
    has_enough = _READS_HUGE_PAGES and free_in_huge_pages() >= nbytes + spare + _SPARE
    refused = libc.madvise(*_whole_pages(address, nbytes), _MADV_HUGEPAGE if has_enough else _MADV_NOHUGEPAGE)
    return has_enough and not refused


def bring_in_exactly(address: int, nbytes: int) -> None:
    """As `bring_in`, block by block, each announced while those before it are on their way.

    Raises: as `bring_in`.
    """
    announce(address, min(nbytes, _BLOCK * _BLOCKS))
    for start in range(0, nbytes, _BLOCK):
        coming = start + _BLOCK * _BLOCKS
        if coming < nbytes:
            announce(address + coming, min(nbytes - coming, _BLOCK))
        bring_in(address + start, min(nbytes - start, _BLOCK))


def let_go(address: int, nbytes: int) -> None:
    """Drop the clean pages that lie in a mapped range as a whole and that nobody else has mapped."""
    first = -(-address // PAGE) * PAGE
    length = (address + nbytes) // PAGE * PAGE - first
    if length > 0:
        libc.madvise(first, length, _MADV_PAGEOUT)


def write_out(fd: int, start: int, nbytes: int) -> bool:
    """Have what is dirty of a range of a file written, and wait for it; whether that went well. Not durable by that."""
    return bool(libc.sync_file_range(fd, start, nbytes, 7) == 0)  # wait for what is under way, write, wait


def begin_to_write_out(fd: int, start: int, nbytes: int) -> None:
    """Have the system begin to write what is dirty of a range of a file. An error is left for who waits for it."""
    libc.sync_file_range(fd, start, nbytes, 2)  # write what is not under way


def _whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    """The pages that a range touches: address and length."""
    first = address // PAGE * PAGE
    return first, -(-(address + nbytes - first) // PAGE) * PAGE


def _count(first: int, length: int) -> int:
    """How many of these pages are in memory."""
    if length == PAGE:
        one = _ONE_PAGE()
        return one[0] & 1 if libc.mincore(first, length, one) == 0 else 1
    pages = np.empty(length // PAGE, dtype=np.uint8)
    if libc.mincore(first, length, pages.ctypes.data):
        return len(pages)
    return int(np.count_nonzero(pages & 1))


def free_in_huge_pages() -> int:
    """Bytes that are free in pieces of 2 MiB and more; no end of them where the system does not tell.

    Source: https://docs.kernel.org/filesystems/proc.html, buddyinfo: free blocks by size, from a page on.
    """
    try:
        lines = _FREE_BLOCKS.read_text(encoding="ascii").splitlines()
    except OSError:
        return sys.maxsize
    zones = [[int(count) for count in line.split()[4:]] for line in lines]
    return sum(count * (PAGE << order) for zone in zones for order, count in enumerate(zone) if PAGE << order >= _HUGE)


def touch(address: int, nbytes: int) -> None:
    """Read a byte of each page."""
    np.frombuffer(view_memory(address, nbytes), dtype=np.uint8)[::PAGE].sum()


def _kernel() -> tuple[int, ...]:
    """The first two numbers of the kernel's release."""
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return tuple(map(int, found.groups())) if found else (0, 0)


_ONE_PAGE = ctypes.c_ubyte * 1
# Since Linux 5.18 a mapping that asks for huge pages is read in them, whatever the disk's read-ahead; before, a mapping
# with random access is read in single small ones.
_READS_HUGE_PAGES = _kernel() >= (5, 18)
