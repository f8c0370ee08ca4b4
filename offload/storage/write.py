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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from offload.errors import ForeignFileError, OffloadError, WriteError
from offload.storage.file import TensorFile
from offload.storage.header import Layout, build
from offload.storage.process import is_dead, process_tag

_TEMPORARY = ".offload-tmp-"
_BLOCK = 32 << 20  # bytes that are gathered at a time from a value that is not contiguous, or not on the CPU


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
    total = starts[-1] + layouts[next(reversed(layouts))].nbytes
    with _replacing(path, total, durable=durable) as fd:
        _write_all(fd, memoryview(head), 0)
        for (key, tensor), start in zip(values.items(), starts, strict=True):
            at = start
            for block in _blocks(tensor.permute(layouts[key].order)):
                at += _write_all(fd, _bytes_of(block), at)


def write_empty(path: Path, key: str, layout: Layout, notes: Mapping[str, Any], *, durable: bool) -> None:
    """Put a file at `path` whose one value reads as zeros; its blocks are reserved, nothing is written to them.

    Raises: as `write_values`.
    """
    head, starts = build({key: layout}, notes)
    with _replacing(path, starts[0] + layout.nbytes, durable=durable) as fd:
        _write_all(fd, memoryview(head), 0)


def copy_entry(source: TensorFile, keys: list[str], path: Path, notes: Mapping[str, Any], *, durable: bool) -> None:
    """Copy values from one file to a file of their own, inside the kernel where it can.

    Raises: as `write_values`.
    """
    entries = [source.entry(key) for key in keys]
    head, starts = build({entry.key: entry.layout for entry in entries}, notes)
    source.check()
    with (
        _replacing(path, starts[-1] + entries[-1].layout.nbytes, durable=durable) as fd,
        open(source.path, "rb", buffering=0) as file,
    ):
        _write_all(fd, memoryview(head), 0)
        for entry, start in zip(entries, starts, strict=True):
            _copy_range(file.fileno(), entry.start, fd, start, entry.layout.nbytes)


def sweep(folder: Path) -> None:
    """Remove the temporary files that killed processes left in a folder."""
    with os.scandir(folder) as items:
        left = [Path(item.path) for item in items if item.name.startswith(_TEMPORARY)]
    for path in left:
        if is_dead(path.name.removeprefix(_TEMPORARY).rpartition("-")[0]):
            path.unlink(missing_ok=True)


def refuse_foreign(path: Path) -> None:
    """Raises `ForeignFileError` if something that `offload` did not write stands at `path`."""
    if not os.path.lexists(path):
        return
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
            _reserve(fd, size)
            yield fd
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
        if durable:
            _sync_folder(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, OffloadError):
            raise WriteError(error.errno, _explain(error, size), str(path)) from error
        raise


def _explain(error: OSError, size: int) -> str:
    ways_out = {
        errno.ENOSPC: "free some space, or take another offload_dir",
        errno.EDQUOT: "your quota is used up: take another offload_dir",
        errno.EFBIG: "files may not be that large here (ulimit -f, or the file system)",
        errno.EACCES: "the folder is not writable: take another offload_dir",
        errno.EPERM: "the folder is not writable: take another offload_dir",
        errno.EROFS: "the file system is read-only: take another offload_dir",
    }
    way_out = ways_out.get(error.errno or 0, "the value is as it was before")
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
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous() and tensor.device.type == "cpu":
        yield tensor
    elif tensor.numel() * tensor.itemsize <= _BLOCK:
        yield tensor.cpu().contiguous()
    elif tensor.dim() == 1:
        for part in tensor.split(_BLOCK // tensor.itemsize):
            yield part.cpu().contiguous()
    else:
        rows = max(1, _BLOCK * len(tensor) // (tensor.numel() * tensor.itemsize))
        for part in tensor.split(rows) if rows > 1 else tensor.unbind():
            yield from _blocks(part)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    nbytes = tensor.numel() * tensor.itemsize
    flat.set_(tensor.untyped_storage(), tensor.storage_offset() * tensor.itemsize, (nbytes,))
    return memoryview(flat.numpy())


def _copy_range(source: int, start: int, target: int, at: int, count: int) -> None:
    os.lseek(target, at, os.SEEK_SET)
    while count:
        sent = os.sendfile(target, source, start, min(count, 1 << 30))
        if not sent:
            raise OSError(errno.EIO, "the source file ended early")
        start, count = start + sent, count - sent


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
