"""Tensors that torch.load and safetensors read from a file: recognised by the mapping that their memory belongs to.

Always true:
- a tensor that is an entry of the file, in unmodified memory, is referenced there: nothing is copied
- memory without a file is left alone; so is a shared mapping, where others see each write
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
from offload.storage.owning import create_value
from offload.storage.regular import absolute
from offload.tensor.guests import CPU
from offload.tensor.views import handle_of
from offload.tensor.wrapper import OffloadedTensor, wrap_handle
from offload.torch_api import LOADING, READING_A_RECORD, REBUILDING, storage_id, typed_storage_of, untyped

_MAPS = Path("/proc/self/maps")
_PAGE_MAP = Path("/proc/self/pagemap")


def rebuilt(place: Place, frame: FrameType, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The tensor an unpickler is about to rebuild in `frame`, over a file, if its storage is large; else None.

    Tensors that share a storage share a value. Mapped memory that is not an entry of a tensor file is copied.
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
            log.debug("%s loaded bytes stay in memory: they are not mapped from a file", storage.nbytes())
            return None
        if handle is None:
            layout = Layout(tensor.dtype, tuple(tensor.shape), tensor.stride())
            is_all = layout.nbytes == storage.nbytes() and layout.is_dense
            whole = tensor if is_all else torch.empty(0, dtype=torch.uint8, device=CPU).set_(storage)
            handle = create_value(whole, place.name("load"), place.folder)
            log.debug("%s is loaded by a copy to %s: it is not an entry of its file", layout, handle.path)
        _STORED[storage_id(storage)] = handle
        _STORAGES[handle] = storage  # while it lives, its address stays unique
        stored = wrap_handle(handle, CPU)
    return _in_a_row(stored, tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def as_opened(place: Place, tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a large file entry, offloaded; any other tensor as it is."""
    if not place.takes(tensor, "asarray") or tensor.device != CPU or not tensor.is_contiguous():
        return tensor
    with no_functions(), no_modes():
        handle = _reference(tensor.data_ptr(), tensor.numel() * tensor.itemsize)
        if handle is None:
            return tensor
        stored = wrap_handle(handle, CPU)
    return _in_a_row(stored, tensor.dtype).view(tensor.shape)


def record_of(place: Place, frame: FrameType, record: torch.Tensor) -> torch.UntypedStorage | None:
    """The bytes that torch.load has just read in `frame` as `record`, mapped from its file.

    None if they are few, if it was not given a path, or if the file has them in another form (a deflated archive).
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
        read = torch.empty(0, dtype=torch.uint8, device=CPU).set_(record.untyped_storage())  # its own looks empty
        return storage if torch.equal(mapped, read) else None
    return None


def _path_loaded_in(frame: FrameType | None) -> str | os.PathLike[str] | None:
    """What torch.load was called with, in a frame above, if that is a path."""
    while frame is not None:
        known = LOADING.variables(frame)
        if known is not None:
            return known["f"] if isinstance(known["f"], (str, os.PathLike)) else None
        frame = frame.f_back
    return None


def _reference(address: int, nbytes: int) -> Handle | None:
    """The file entry that these bytes are mapped from, unchanged; None if there is none, or if unknown."""
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
    """The private mapping at an address: its start in memory and in the file, inode and path. See proc_pid_maps(5)."""
    try:
        lines = os.fsdecode(_MAPS.read_bytes()).split("\n")[:-1]  # paths may contain line ends of `splitlines`
    except OSError:  # in doubt it stays in memory
        return None
    for line in lines:
        addresses, rights, offset, _, inode, *path = line.split(maxsplit=5)
        start, end = (int(edge, 16) for edge in addresses.split("-"))
        if start <= address < end:
            return (start, int(offset, 16), int(inode), path[0]) if int(inode) and rights.endswith("p") else None
    return None


def _is_untouched(address: int, nbytes: int) -> bool:
    """Whether no page of a private mapping was written to, which would detach it from the file. See pagemap(5)."""
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
    """The elements of a dense value in file order, as `dtype`."""
    flat = stored.permute(handle_of(stored).layout.order).reshape(-1)
    return flat if flat.dtype == dtype else flat.view(torch.uint8).view(dtype)


def _keys_of(file: TensorFile) -> dict[tuple[int, int], str]:
    """The dense entries of a file, by first byte and size."""
    found = _KEYS.get(file)
    if found is None:
        dense = [entry for entry in file.entries.values() if entry.layout.is_dense]
        found = _KEYS[file] = {(entry.start, entry.layout.nbytes): entry.key for entry in reversed(dense)}
    return found


_KEYS: weakref.WeakKeyDictionary[TensorFile, dict[tuple[int, int], str]] = weakref.WeakKeyDictionary()
_STORED: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()
_STORAGES: weakref.WeakKeyDictionary[Handle, torch.UntypedStorage] = weakref.WeakKeyDictionary()
