"""Values that no tensor can be over where they lie in a file: they are copied out, one by one.

Always true:
- what is copied out is what torch gives for the value: packed bytes are unpacked, foreign byte order is turned
- memory is taken for one value at a time, and for its record where that is packed; it goes back to the system
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import torch

from offload.errors import CorruptFileError
from offload.storage.file import TensorFile
from offload.storage.layout import Loose, Record, contiguous
from offload.storage.mapping import scratch, scratch_bytes
from offload.storage.reasons import reading
from offload.torch_api import as_negated

_STEP = 1 << 20  # bytes that are read at a time


def value_of(loose: Loose, file: TensorFile) -> torch.Tensor:
    """The value as a plain tensor of its own, of the layout in which it is copied out; if that overlaps, all in a row.

    Raises:
        CorruptFileError
        ReadError, and as `TensorFile.descriptor`.
    """
    storage = _bytes_of(loose, file)
    layout, stride = loose.layout, loose.stride
    if layout.overlaps:
        layout = contiguous(layout.dtype, (layout.nbytes // layout.dtype.itemsize,))
        stride = layout.stride
    value = torch.empty(0, dtype=layout.dtype, device="cpu").set_(storage, 0, layout.shape, stride)
    if loose.is_conjugated:
        value = value.conj()
    return scratch(layout).copy_(as_negated(value) if loose.is_negated else value)


def _bytes_of(loose: Loose, file: TensorFile) -> torch.UntypedStorage:
    """From its first element to its last, in the byte order of this machine."""
    record, dtype = loose.record, loose.layout.dtype
    if record.packed is not None:
        storage = _in_memory(_unpacked(record, file)[loose.begin : loose.begin + loose.span])
        if loose.begin % dtype.itemsize:
            storage = storage.clone()
    elif record.is_swapped or loose.start % dtype.itemsize:
        storage = _in_memory(_read(file, loose.start, loose.span))
    else:
        storage = file.mapped(shared=False)[loose.start : loose.start + loose.span]
    if record.is_swapped:
        storage.byteswap(dtype)
    return storage


def _in_memory(data: memoryview) -> torch.UntypedStorage:
    if not data:
        return torch.UntypedStorage(0, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8).untyped_storage()


def _read(file: TensorFile, start: int, count: int) -> memoryview:
    fd = file.descriptor()
    try:
        data, done = memoryview(scratch_bytes(count))[:count], 0
        while done < count:
            with reading(file.path):
                block = os.pread(fd, min(count - done, _STEP), start + done)
            if not block:
                raise CorruptFileError(f"{file.path} ended early: get the file again")
            data[done : done + len(block)] = block
            done += len(block)
        return data
    finally:
        os.close(fd)


def _unpacked(record: Record, file: TensorFile) -> memoryview:
    """A deflated record, unpacked; what is packed is read a block at a time."""
    data, done = memoryview(scratch_bytes(record.nbytes))[: record.nbytes], 0
    try:
        for part in _inflated(record, file):
            if done + len(part) > record.nbytes:
                raise zlib.error(f"more than the {record.nbytes} bytes that were promised")
            data[done : done + len(part)] = part
            done += len(part)
    except zlib.error as error:
        raise CorruptFileError(f"{file.path} can't be unpacked ({error}): get the file again") from error
    if done < record.nbytes:
        raise CorruptFileError(f"{file.path} gives {done} bytes of {record.nbytes}: get the file again")
    return data


def _inflated(record: Record, file: TensorFile) -> Iterator[bytes]:
    inflate = zlib.decompressobj(-zlib.MAX_WBITS)
    end = record.start + (record.packed or 0)
    for at in range(record.start, end, _STEP):
        block = bytes(_read(file, at, min(end - at, _STEP)))
        while block:
            yield inflate.decompress(block, _STEP)
            block = inflate.unconsumed_tail
    yield inflate.flush()
