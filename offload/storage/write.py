"""Writing values into a file.

Always true:
- a file of values is put in place by `replacing`: whole, or the old one is kept
- only files that `offload` wrote are replaced
- no value is copied as a whole: what is not contiguous is gathered block by block
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import torch

from offload.annotations import Json
from offload.errors import ChangedFileError, ForeignFileError, MissingFileError, NameInUseError
from offload.storage.file import TensorFile, is_ours
from offload.storage.header import Head, build
from offload.storage.layout import Entry, Layout, contiguous
from offload.storage.mapping import scratch
from offload.storage.replacing import new_file, replacing, write_all
from offload.storage.state_file import Kind
from offload.system.reasons import naming, reading, writing

Take: TypeAlias = Callable[[TensorFile], object]
Fill: TypeAlias = Callable[[int, str, int], object]  # writes a value: descriptor, key, and its first byte there

_FOREIGN = (
    "exists and was not written by offload (or is a link): it is left as it is. Move it away, or take another "
    "offload_dir."
)
_BLOCK = 4 << 20  # bytes gathered at a time from a value that is not contiguous, or not on the CPU
_STEP = 1 << 20  # bytes copied or zeroed at a time


def layout_of(tensor: torch.Tensor) -> Layout:
    """The layout in which a tensor is stored: its own strides if dense, else those of a copy of it."""
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    dense = torch.ops.aten.is_non_overlapping_and_dense.default(meta)
    return Layout(tensor.dtype, tuple(tensor.shape), (meta if dense else torch.empty_like(meta)).stride())


def put_values(
    path: Path,
    layouts: Mapping[str, Layout],
    fill: Fill,
    notes: Mapping[str, Json],
    *,
    durable: bool,
    take: Take | None = None,
) -> None:
    """Put a file with values of these layouts, which `fill` writes, at `path`.

    `notes` are as for `header.build`; with `durable`, it survives a power cut. `take` is called with the file as soon
    as it is at `path`: from then on no error removes it.

    Raises `ForeignFileError` if there is a file that `offload` did not write; `WriteError` if the disk is full, the
    folder is read-only...
    """
    head = build(layouts, notes)

    def placed() -> None:
        if take is not None:
            written.moved_to(path)
            take(written)

    refuse_foreign(path)
    with replacing(path, head.size, place="offload_dir", durable=durable, placed=placed) as new:
        _fill(new.fd, head, fill)
        written = TensorFile.written(new.path, head.header)


def write_beside(
    temporary: Path,
    path: Path,
    layouts: Mapping[str, Layout],
    metadata: Mapping[str, str],
    fill: Fill,
    notes: Mapping[str, Json] | None = None,
) -> None:
    """Write a whole file, meant for `path`, as `temporary`, which the caller renames or removes.

    `notes` and `metadata` are as for `header.build`.

    Raises `WriteError` if the disk is full, the folder is read-only...
    """
    head = build(layouts, notes or {}, metadata)
    with writing(path, head.size), new_file(temporary, head.size, like=path) as fd:
        _fill(fd, head, fill)


def _fill(fd: int, head: Head, fill: Fill) -> None:
    write_all(fd, memoryview(head.data), 0)
    for key in head.header.entries:
        fill(fd, key, head.header.entries[key].start)


def from_values(values: Mapping[str, torch.Tensor], layouts: Mapping[str, Layout]) -> Fill:
    """Writes plain tensors."""
    return lambda fd, key, start: write_tensor(fd, start, values[key].permute(layouts[key].order))


def from_blocks(blocks: Mapping[str, Iterable[torch.Tensor]]) -> Fill:
    """Writes values that are given as contiguous CPU tensors which make them up in layout order."""
    return lambda fd, key, start: write_blocks(fd, start, blocks[key])


def of_zeros(fd: int, _: str, start: int) -> None:
    """Makes the values of a new file read as zeros; if the disk can, its blocks are reserved unwritten."""
    status = os.fstat(fd)
    if status.st_blocks * 512 < status.st_size:  # a store into a hole on a full disk would kill the process
        zeros = memoryview(bytes(_STEP))
        for at in range(start, status.st_size, _STEP):
            write_all(fd, zeros[: status.st_size - at], at)


@contextmanager
def from_file(source: TensorFile, entries: Iterable[Entry], *, settled: bool) -> Iterator[Fill]:
    """Copies values from another file, inside the kernel where possible; `settled` is as for `TensorFile.descriptor`.

    Raises: as `TensorFile.descriptor`.
    """
    by_key = {entry.key: entry for entry in entries}
    with source.descriptor(settled=settled) as opened:

        def copy(fd: int, key: str, start: int) -> None:
            entry = by_key[key]
            copy_range(opened.fileno(), entry.start, fd, start, entry.layout.nbytes, source.path)

        yield copy


def write_tensor(fd: int, at: int, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Write the elements of a plain tensor in row-major order, as `dtype` if one is given, piece by piece."""
    write_blocks(fd, at, _blocks(tensor, dtype or tensor.dtype))


def write_blocks(fd: int, at: int, blocks: Iterable[torch.Tensor]) -> None:
    """Write contiguous CPU tensors one after the other."""
    for block in blocks:
        at += write_all(fd, bytes_of(block), at)


def refuse_foreign(path: Path, kind: Kind | bytes | None = None, why: str = _FOREIGN) -> None:
    """Do nothing if the place is free or holds a file that `offload` wrote; `kind` is as for `is_ours`.

    Raises `ForeignFileError` if there is another file; `ReadError` if the system does not tell what is there.
    """
    with suppress(MissingFileError):  # also if it was removed just now
        if not is_ours(path, kind):
            raise ForeignFileError(f"{path} {why}")


def refuse_earlier(path: Path, name: str) -> None:
    """Raises `NameInUseError` if an earlier tensor left a file at `path`; `ForeignFileError` as `refuse_foreign`."""
    with naming(name):
        refuse_foreign(path)
        if os.path.lexists(path):
            raise NameInUseError(
                f"{path} holds the value of an earlier tensor: open that with OffloadedTensor.from_file, take another "
                "name or folder, or pass exist_ok=True to replace it"
            )


def fill_holes(fd: int, size: int) -> None:
    """Allocate the missing blocks of a file of `size` bytes, in place.

    Raises `OSError` if the disk is full, or this file system can't allocate them.
    """
    if os.fstat(fd).st_blocks * 512 < size:
        os.posix_fallocate(fd, 0, size)


def _blocks(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Contiguous CPU tensors that make up `tensor` in row-major order, as `dtype`, without a whole copy of it.

    They share one buffer: each overwrites the last.
    """
    lies_as_it_reads = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    if tensor.numel() == 0:
        return
    if lies_as_it_reads and tensor.device.type == "cpu" and tensor.dtype == dtype:
        yield tensor
        return
    most = max(_BLOCK // max(tensor.itemsize, dtype.itemsize), 1)
    buffer = scratch(contiguous(dtype, (min(most, tensor.numel()),)))
    for part in _parts(tensor, most):
        block = buffer[: part.numel()].view(part.shape)
        yield block.copy_(part)


def _parts(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Views of at most `most` elements that make up `tensor` in row-major order."""
    if tensor.numel() <= most:
        yield tensor
        return
    rows = most * len(tensor) // tensor.numel()
    for part in tensor.split(rows) if rows > 1 else tensor.unbind():
        yield from _parts(part, most)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a plain, contiguous tensor on the CPU."""
    flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    nbytes = tensor.numel() * tensor.itemsize
    flat.set_(tensor.untyped_storage(), tensor.storage_offset() * tensor.itemsize, (nbytes,), (1,))
    return flat.numpy().data


def copy_range(source: int, start: int, target: int, at: int, count: int, path: Path) -> None:
    """Copy bytes from file to file; what the kernel can't copy goes through memory. `path` is the source's.

    Raises `OSError` if writing fails; `ReadError` if reading does; `ChangedFileError` if the source has become shorter.
    """
    done = _send_range(source, start, target, at, count)
    while done < count:
        with reading(path):
            block = os.pread(source, min(count - done, _STEP), start + done)
        if not block:
            raise ChangedFileError(f"{path} has become shorter while it was copied: download or copy the file again")
        done += write_all(target, memoryview(block), at + done)


def _send_range(source: int, start: int, target: int, at: int, count: int) -> int:
    """Copy as much as the kernel can by itself, and return how much that was.

    An error does not say which of the two files it is about; the caller's read or write will meet it again, and know.
    """
    done = 0
    with suppress(OSError):
        os.lseek(target, at, os.SEEK_SET)
        while done < count and (sent := os.sendfile(target, source, start + done, min(count - done, 1 << 30))):
            done += sent
    return done
