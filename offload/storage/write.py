"""Writing a file whole, or not at all.

Always true:
- a target is only ever replaced by a complete file, in one step
- after a failure the old file stands and no temporary file is left; one left by a killed process is swept later
- only files that `offload` wrote are replaced; only temporary files of its dead processes are removed
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from offload.errors import ForeignFileError, OffloadError, WriteError
from offload.storage.file import TensorFile
from offload.storage.header import Entry, Layout, build
from offload.storage.process import is_dead, process_tag

_TEMPORARY = ".offload-tmp-"
_BLOCK = 32 << 20  # bytes that are gathered at a time from a value that is not contiguous, or not on the CPU
_STEP = 1 << 20  # bytes that are copied or zeroed at a time


def layout_of(tensor: torch.Tensor) -> Layout:
    """The layout under which a tensor is stored: its own strides if dense, else those a copy of it would have."""
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    dense = torch.ops.aten.is_non_overlapping_and_dense.default(twin)
    return Layout(tensor.dtype, tuple(tensor.shape), (twin if dense else torch.empty_like(twin)).stride())


def write_values(
    path: Path,
    values: Mapping[str, torch.Tensor],
    layouts: Mapping[str, Layout],
    notes: Mapping[str, Any],
    *,
    durable: bool,
) -> None:
    """Put a file with these plain tensors at `path`, atomically; `durable` also makes it survive a power cut.

    Raises:
        ForeignFileError: a file that `offload` did not write stands there.
        WriteError: the disk is full, the folder is read-only...
    """
    head, starts = build(layouts, notes)
    with _replacing(path, _end(head, layouts), durable=durable) as fd:
        _write_all(fd, memoryview(head), 0)
        for (key, tensor), start in zip(values.items(), starts, strict=True):
            at = start
            for block in _blocks(tensor.permute(layouts[key].order)):
                at += _write_all(fd, _bytes_of(block), at)


def write_empty(path: Path, key: str, layout: Layout, notes: Mapping[str, Any], *, durable: bool) -> None:
    """Put a file at `path` whose one value reads as zeros; where the disk can, its blocks are reserved unwritten.

    Raises: as `write_values`.
    """
    head, starts = build({key: layout}, notes)
    total = _end(head, {key: layout})
    with _replacing(path, total, durable=durable) as fd:
        _write_all(fd, memoryview(head), 0)
        if os.fstat(fd).st_blocks * 512 < total:  # a store into a hole of a full disk would end the process
            _write_zeros(fd, starts[0], layout.nbytes)


def copy_entries(
    source: TensorFile,
    entries: Sequence[Entry],
    path: Path,
    notes: Mapping[str, Any],
    *,
    settled: bool,
    durable: bool,
) -> None:
    """Copy values from one file to a file of their own, inside the kernel where it can.

    `settled` is as for `TensorFile.descriptor`.

    Raises: as `write_values` and `TensorFile.descriptor`.
    """
    layouts = {entry.key: entry.layout for entry in entries}
    head, starts = build(layouts, notes)
    fd_from = source.descriptor(settled=settled)
    try:
        with _replacing(path, _end(head, layouts), durable=durable) as fd:
            _write_all(fd, memoryview(head), 0)
            for entry, start in zip(entries, starts, strict=True):
                _copy_range(fd_from, entry.start, fd, start, entry.layout.nbytes)
    finally:
        os.close(fd_from)


def sweep(folder: Path) -> None:
    """Remove the temporary files that killed processes left in a folder."""
    with os.scandir(folder) as items:
        left = [Path(item.path) for item in items if item.name.startswith(_TEMPORARY)]
    for path in left:
        if is_dead(path.name.removeprefix(_TEMPORARY).rpartition("-")[0]):
            _remove(path)


def refuse_foreign(path: Path) -> None:
    """Raises `ForeignFileError` if something that `offload` did not write stands at `path`."""
    if not os.path.lexists(path):
        return
    if path.is_symlink():
        raise ForeignFileError(f"{path} is a link that offload did not make: move it away, or take another offload_dir")
    try:
        ours = TensorFile.open(path).is_ours
    except OffloadError as error:
        raise ForeignFileError(
            f"{path} exists and is not a file of offload ({error}): move it away, or take another offload_dir"
        ) from error
    if not ours:
        raise ForeignFileError(
            f"{path} exists and was not written by offload: it is left as it is. Take another offload_dir."
        )


@contextmanager
def _replacing(path: Path, size: int, *, durable: bool) -> Iterator[int]:
    """A descriptor of a temporary file of `size` bytes that becomes `path` if the block ends well."""
    refuse_foreign(path)
    temporary = path.with_name(f"{_TEMPORARY}{process_tag()}-{secrets.token_hex(4)}")
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                _reserve(fd, size)
                yield fd
                if durable:
                    os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(temporary, path)
        except BaseException:
            _remove(temporary)
            raise
    except OSError as error:
        if isinstance(error, OffloadError):
            raise
        raise WriteError(error.errno, _explain(error, size), str(path)) from error
    if durable:
        _sync_folder(path.parent)


def _explain(error: OSError, size: int) -> str:
    ways_out = {
        errno.ENOSPC: "free some space, or take another offload_dir",
        errno.EDQUOT: "your quota is used up: take another offload_dir",
        errno.EFBIG: "files may not be that large here (ulimit -f, or the file system)",
        errno.EACCES: "the folder is not writable: take another offload_dir",
        errno.EPERM: "the folder is not writable: take another offload_dir",
        errno.EROFS: "the file system is read-only: take another offload_dir",
        errno.ENOENT: "the folder is gone: make it again, or take another offload_dir",
        errno.EMFILE: "too many files are open in this process (ulimit -n)",
    }
    way_out = ways_out.get(error.errno or 0, "try again, or take another offload_dir")
    return f"{size} bytes could not be written ({error.strerror}); nothing was changed: {way_out}"


def _reserve(fd: int, size: int) -> None:
    """Make the file `size` bytes long, with its blocks, so that a full disk is an error here and not a SIGBUS later."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
        else:
            return
    os.ftruncate(fd, size)


def _write_all(fd: int, data: memoryview, at: int) -> int:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done : done + (1 << 30)], at + done)
    return done


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Contiguous CPU tensors that make up `tensor` in row-major order, without a whole copy of it."""
    lies_as_it_reads = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    if tensor.numel() == 0:
        return
    if lies_as_it_reads and tensor.device.type == "cpu":
        yield tensor
    elif tensor.numel() * tensor.itemsize <= _BLOCK:
        yield tensor.cpu().contiguous().resolve_conj().resolve_neg()
    elif tensor.dim() == 1:
        for part in tensor.split(_BLOCK // tensor.itemsize):
            yield from _blocks(part)
    else:
        rows = max(1, _BLOCK * len(tensor) // (tensor.numel() * tensor.itemsize))
        for part in tensor.split(rows) if rows > 1 else tensor.unbind():
            yield from _blocks(part)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    nbytes = tensor.numel() * tensor.itemsize
    flat.set_(tensor.untyped_storage(), tensor.storage_offset() * tensor.itemsize, (nbytes,), (1,))
    return flat.numpy().data


def _write_zeros(fd: int, at: int, count: int) -> None:
    zeros = memoryview(bytes(min(count, _STEP)))
    for done in range(0, count, _STEP):
        _write_all(fd, zeros[: count - done], at + done)


def _copy_range(source: int, start: int, target: int, at: int, count: int) -> None:
    """Copy bytes from file to file; `sendfile` copies fewer than asked for, or cannot (macOS: sockets only)."""
    done = _send_range(source, start, target, at, count)
    while done < count:
        block = os.pread(source, min(count - done, _STEP), start + done)
        if not block:
            raise OSError(errno.EIO, "the source file ended early")
        done += _write_all(target, memoryview(block), at + done)


def _send_range(source: int, start: int, target: int, at: int, count: int) -> int:
    """Copy as much as the kernel will by itself, and say how much that was."""
    done = 0
    if not hasattr(os, "sendfile"):
        return done
    os.lseek(target, at, os.SEEK_SET)
    while done < count:
        try:
            sent = os.sendfile(target, source, start + done, min(count - done, 1 << 30))
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOSYS, errno.ENOTSOCK, errno.EOPNOTSUPP):
                return done
            raise
        if not sent:
            return done
        done += sent
    return done


def _end(head: bytes, layouts: Mapping[str, Layout]) -> int:
    return len(head) + sum(layout.nbytes for layout in layouts.values())


def _remove(path: Path) -> None:
    """Remove a temporary file if it is there and the folder lets us; what stays is swept later."""
    with suppress(OSError):
        path.unlink()


def _sync_folder(folder: Path) -> None:
    """Make a replacement survive a power cut, where folders can be synced."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP):
            reason = (
                f"a value was replaced, but may be lost in a power cut ({error.strerror}): write it again, elsewhere"
            )
            raise WriteError(error.errno, reason, str(folder)) from error
    finally:
        os.close(fd)
