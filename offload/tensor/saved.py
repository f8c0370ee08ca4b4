"""Writing tensors of any kind into other files than their own.

Always true:
- a value on disk is copied from file to file, or read through its mapping: it is never in memory as a whole
- nothing here changes a tensor, or which of its pages stay in memory
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path

import torch

from offload.errors import ForeignFileError
from offload.prefetch.loads import start_of
from offload.storage.file import TensorFile
from offload.storage.handle import InBlocks
from offload.storage.replacing import replacing_all
from offload.storage.subclasses import is_subclass_value
from offload.storage.write import copy_range, layout_of, write_beside, write_blocks, write_tensor
from offload.system.modes import no_functions, no_modes
from offload.tensor.guests import mapped_value
from offload.tensor.recipes import files_in
from offload.tensor.views import handle_of, is_part, metadata_of, view_spec_of
from offload.tensor.wrapper import OffloadedTensor


def write_value(fd: int, at: int, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Write the elements of a dense tensor to a file in row-major order, converted to `dtype`."""
    with no_functions(), no_modes():
        if type(tensor) is not OffloadedTensor:
            write_tensor(fd, at, tensor, dtype)
            return
        composed = handle_of(tensor).composed
        if isinstance(composed, InBlocks) and not is_part(tensor) and tensor.is_contiguous():
            write_blocks(fd, at, (block.to(dtype) for block in composed.blocks()))
            return
        value = mapped_value(tensor)
        if value.dtype != dtype or not _copied(fd, at, tensor):
            write_tensor(fd, at, value, dtype)


def write_dense(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    notes: Mapping[str, object],
    advance: Callable[[int], object] = lambda _: None,
) -> None:
    """Put a file of dense values, with `notes`, in place; `advance` is told the bytes that were written.

    Raises `WriteError`.
    """
    layouts = {key: layout_of(part) for key, part in tensors.items()}

    def fill(fd: int, key: str, start: int) -> None:
        write_value(fd, start, tensors[key].detach().permute(layouts[key].order), layouts[key].dtype)
        advance(tensors[key].nbytes)

    with replacing_all([path], sum(tensor.nbytes for tensor in tensors.values())) as new:
        write_beside(new[path], path, layouts, {}, fill, notes)


def identity_of(tensor: torch.Tensor) -> Hashable:
    """Equal for two tensors that are the same view of the same memory or file: tied weights."""
    if type(tensor) is OffloadedTensor:
        return tensor._handle, metadata_of(view_spec_of(tensor))
    if is_subclass_value(tensor):
        attributes, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return type(tensor), tuple(identity_of(getattr(tensor, attribute)) for attribute in attributes)
    if tensor.layout != torch.strided or tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    shape, stride, _, *rest = metadata_of(tensor)  # two storages may share memory
    return tensor.device, tensor.data_ptr(), shape, stride, *rest


def files_of(tensor: torch.Tensor) -> list[Path]:
    """The files behind an offloaded tensor: several for a recipe over several; none for other tensors."""
    return [file.path for file in files_in(handle_of(tensor))] if type(tensor) is OffloadedTensor else []


def refuse_referenced(replaced: Iterable[Path]) -> None:
    """Raises `ForeignFileError` if a live tensor refers to a file that is to be replaced."""
    for path in replaced:
        if TensorFile.is_open(path) and gc.collect() >= 0 and TensorFile.is_open(path):
            raise ForeignFileError(
                f"tensors of this process refer to {path}, which saving here would replace: save to another folder, "
                "or delete them first"
            )


def subclass_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """The wrapper subclass, such as a quantized weight, that this is or stores, over its mapped file; None if none."""
    if type(tensor) is not OffloadedTensor:
        return tensor if is_subclass_value(tensor) else None
    if not handle_of(tensor).is_subclass:
        return None
    with no_functions(), no_modes():
        return mapped_value(tensor)


def _copied(fd: int, at: int, tensor: OffloadedTensor) -> bool:
    """Copy it from file to file if possible; returns whether it was."""
    handle, view_spec = handle_of(tensor), view_spec_of(tensor)
    is_stored = handle.subclass is None and handle.composed is None
    if not is_stored or not view_spec.is_contiguous() or view_spec.is_conj() or view_spec.is_neg():
        return False
    start, nbytes = start_of(handle, view_spec), view_spec.numel() * view_spec.itemsize
    with handle.file.descriptor(settled=not handle.owned) as source:
        copy_range(source.fileno(), start, fd, at, nbytes, handle.file.path)
    return True
