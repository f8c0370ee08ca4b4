"""Tensors that torch.load and safetensors take from a file: known by where their memory is mapped from.

Always true:
- a tensor that is an entry of the file, in memory that nobody has written to, is referenced there: nothing is copied
- memory that no file is behind is left alone; so is a shared mapping, through which others see what is written
"""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from offload.errors import OffloadError
from offload.offloading.place import Place, log
from offload.storage.file import TensorFile
from offload.storage.handle import Handle
from offload.storage.layout import Layout
from offload.storage.mapping import mapped_alone
from offload.storage.modes import no_functions, no_modes
from offload.storage.regular import absolute
from offload.tensor.guests import CPU
from offload.tensor.wrapper import OffloadedTensor, handle_of, wrap_handle
from offload.torch_api import LOADING, READING_A_RECORD, REBUILDING, storage_id, typed_storage_of, untyped

_MAPS = Path("/proc/self/maps")
_PAGE_MAP = Path("/proc/self/pagemap")


def rebuilt(place: Place, frame: FrameType, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """What an unpickler is about to rebuild in `frame`, over a file, if its storage is large; None if it is not.

    Tensors over one storage are over one value. What is mapped, and is no entry of a file of tensors, is copied.
    """
    known = REBUILDING.variables(frame)
    if known is None:
        return None
    storage = untyped(known["storage"])
    if storage.device != CPU or storage.nbytes() < max(place.min_bytes, 1):
        return None
    with no_functions(), no_modes():
        tensor = torch.empty(0, dtype=kwargs["dtype"], device=CPU)
        tensor.set_(storage, known["storage_offset"], known["size"], known["stride"])
        handle = _STORED.get(storage_id(storage)) or _reference(storage.data_ptr(), storage.nbytes())
        if handle is None and _mapping_at(storage.data_ptr()) is None:
            log.debug("%s bytes that are loaded stay in memory, which no file is behind", storage.nbytes())
            return None
        if handle is None:
            layout = Layout(tensor.dtype, tuple(tensor.shape), tensor.stride())
            is_all = layout.nbytes == storage.nbytes() and layout.is_dense
            whole = tensor if is_all else torch.empty(0, dtype=torch.uint8, device=CPU).set_(storage)
            handle = Handle.create(whole, place.name("load"), place.folder)
            log.debug("%s that is loaded is copied to %s, as it is no entry of its file", layout, handle.path)
        _STORED[storage_id(storage)] = handle
        _STORAGES[handle] = storage  # while it lives, its address is its own
        stored = wrap_handle(handle, CPU)
    return _in_a_row(stored, tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def as_opened(place: Place, tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a large entry of a file, offloaded; any other tensor as it is."""
    if not place.takes(tensor, "asarray") or tensor.device != CPU or not tensor.is_contiguous():
        return tensor
    with no_functions(), no_modes():
        handle = _reference(tensor.data_ptr(), tensor.numel() * tensor.itemsize)
        if handle is None:
            return tensor
        stored = wrap_handle(handle, CPU)
    return _in_a_row(stored, tensor.dtype).view(tensor.shape)


def record_of(place: Place, frame: FrameType, record: torch.Tensor) -> torch.UntypedStorage | None:
    """The bytes that torch.load has just read in `frame`, as `record`, mapped from its file.

    None if they are few, it was given no path, or they do not lie in the file as they are (a deflated archive).
    """
    reader = frame.f_back
    if frame.f_code is not typed_storage_of.__code__ or reader is None:
        return None
    known = READING_A_RECORD.variables(reader)
    path = _path_loaded_in(reader) if known else None
    if known is None or path is None or known["nbytes"] < max(place.min_bytes, 1):
        return None
    with no_functions(), no_modes(), suppress(OffloadError):
        storage = mapped_alone(absolute(path), known["zip_file"].get_record_offset(known["name"]), known["nbytes"])
        mapped = torch.empty(0, dtype=torch.uint8, device=CPU).set_(storage)
        read = torch.empty(0, dtype=torch.uint8, device=CPU).set_(record.untyped_storage())  # it says that it is empty
        return storage if torch.equal(mapped, read) else None
    return None


def _path_loaded_in(frame: FrameType | None) -> str | os.PathLike[str] | None:
    """What torch.load was called with, above `frame`, if that is a path."""
    while frame is not None:
        known = LOADING.variables(frame)
        if known is not None:
            return known["f"] if isinstance(known["f"], (str, os.PathLike)) else None
        frame = frame.f_back
    return None


def _reference(address: int, nbytes: int) -> Handle | None:
    """The entry of a file that these bytes are mapped from, unchanged; None if there is none, or it is not known."""
    mapping = _mapping_at(address)
    if mapping is None or not _is_untouched(address, nbytes):
        return None
    start, offset, inode, path = mapping
    try:
        file = TensorFile.open(path)
    except OffloadError:
        return None
    key = _keys_of(file).get((address - start + offset, nbytes)) if file.identity.inode == inode else None
    if key is None:
        return None
    log.debug("%s is referenced in %s", key, path)
    return Handle.reference(file, key)


def _mapping_at(address: int) -> tuple[int, int, int, str] | None:
    """Where a private mapping begins, in memory and in its file, with its inode and path. See proc_pid_maps(5)."""
    try:
        lines = os.fsdecode(_MAPS.read_bytes()).split("\n")[:-1]  # paths may hold what `splitlines` takes for an end
    except OSError:  # what is not known stays in memory
        return None
    for line in lines:
        addresses, rights, offset, _, inode, *path = line.split(maxsplit=5)
        start, end = (int(edge, 16) for edge in addresses.split("-"))
        if start <= address < end:
            return (start, int(offset, 16), int(inode), path[0]) if int(inode) and rights.endswith("p") else None
    return None


def _is_untouched(address: int, nbytes: int) -> bool:
    """Whether no page of a private mapping has been written to, and so is no longer the file's. See pagemap(5)."""
    first, last = address // mmap.PAGESIZE, (address + max(nbytes, 1) - 1) // mmap.PAGESIZE
    try:
        with _PAGE_MAP.open("rb", buffering=0) as file:
            file.seek(first * 8)
            pages = np.frombuffer(file.read((last - first + 1) * 8), dtype=np.uint64)
    except OSError:
        return False
    present, swapped, of_file = ((pages >> np.uint64(bit)) & np.uint64(1) for bit in (63, 62, 61))
    return len(pages) == last - first + 1 and not (swapped | (present & ~of_file & np.uint64(1))).any()


def _in_a_row(stored: OffloadedTensor, dtype: torch.dtype) -> torch.Tensor:
    """The elements of a dense value as they lie in its file, as `dtype`."""
    flat = stored.permute(handle_of(stored).layout.order).reshape(-1)
    return flat if flat.dtype == dtype else flat.view(torch.uint8).view(dtype)


def _keys_of(file: TensorFile) -> dict[tuple[int, int], str]:
    """The dense entries of a file, by the byte at which they begin, and how many they take."""
    found = _KEYS.get(file)
    if found is None:
        dense = [entry for entry in file.entries.values() if entry.layout.is_dense]
        found = _KEYS[file] = {(entry.start, entry.layout.nbytes): entry.key for entry in reversed(dense)}
    return found


_KEYS: weakref.WeakKeyDictionary[TensorFile, dict[tuple[int, int], str]] = weakref.WeakKeyDictionary()
_STORED: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()
_STORAGES: weakref.WeakKeyDictionary[Handle, torch.UntypedStorage] = weakref.WeakKeyDictionary()
