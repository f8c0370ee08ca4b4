"""Passing tensors to other processes: a reference is sent, not the data.

Always true:
- a few hundred bytes are sent, whatever the tensor's size
- tensors over one value are over one value in the other process, too, and on their way back
- a write to a file of ours is visible to all; a checkpoint is copied at the first write, by each process that writes
- only the process that created a temporary file removes it: it has to keep the tensor while others use it
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import weakref
from collections import ChainMap
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

from offload.errors import ChangedFileError, UnsupportedOpError
from offload.storage.file import Identity, TensorFile
from offload.storage.handle import Composition, Handle
from offload.storage.layout import Entry, Layout
from offload.system.locks import fork_safe_lock
from offload.system.modes import no_functions, no_modes
from offload.tensor.recipes import Piece
from offload.tensor.views import handle_of, meta_of_layout, metadata_of, view_spec_of, view_with
from offload.tensor.wrapper import OffloadedTensor, dressed, set_by_others, wrap


class by_reference:
    """Sends a tensor, a model, or anything that contains tensors, to processes that see the same files.

    Any pickler will do, and the receiver gets the tensor or the model itself. For values on disk a reference is sent,
    as with `torch.multiprocessing`; everything else is pickled as usual, by value where cloudpickle is installed.
    Keep the values alive while others use them; a checkpoint that has changed since is an error in the receiver.

    Example:
        >>> import pickle, torch
        >>> from offload import OffloadedTensor, is_offloaded
        >>> w = OffloadedTensor.from_original_tensor(torch.ones(1 << 20), "w")
        >>> data = pickle.dumps(by_reference(w))
        >>> len(data) < 4096, is_offloaded(pickle.loads(data)), is_offloaded(pickle.loads(pickle.dumps(w)))
        (True, True, False)
    """

    def __init__(self, carried: object) -> None:
        self._carried = carried

    def __reduce__(self) -> tuple[object, ...]:
        data = io.BytesIO()
        _pickler()(data, pickle.HIGHEST_PROTOCOL).dump(self._carried)
        return pickle.loads, (data.getvalue(),)


@lru_cache
def _pickler() -> Any:
    """cloudpickle's pickler, which includes functions and classes of a script, or Python's; with our reductions."""
    try:
        from cloudpickle import Pickler
    except ImportError:
        from pickle import Pickler
    usual = vars(Pickler).get("dispatch_table")
    reductions: dict[object, Any] = {OffloadedTensor: _reduce_with_attributes, Piece: _reduce_piece}
    table = ChainMap(reductions, usual if isinstance(usual, ChainMap) else copyreg.dispatch_table)
    return type("ByReference", (Pickler,), {"dispatch_table": table})


@dataclass(frozen=True)
class Reference:
    """Where a value is, and its state when it was passed.

    Attributes:
        identity: of a file that is not ours and must not change; None for a file of ours.
        entry: where the value lies in a file without a header; otherwise None.
        part: see `Stored.part`.
    """

    path: Path
    name: str
    folder: Path | None
    layout: Layout
    identity: Identity | None
    entry: Entry | None
    part: Entry | None

    @property
    def key(self) -> Hashable:
        return self.path, self.name, self.part

    def opened(self) -> Handle:
        """A handle for the file in this process."""
        file = TensorFile.open(self.path) if self.entry is None else TensorFile.raw(self.path, self.entry)
        if self.identity is None:
            return Handle.shared(file, self.name, self.folder)
        if file.identity != self.identity:
            raise ChangedFileError(
                f"tensor {self.name!r}: {self.path} has changed since it was passed "
                "(size, modification time or inode): load the checkpoint again"
            )
        if self.part is not None:
            return Handle.reference_part(file, self.part, self.folder)
        return Handle.reference(file, self.name, self.folder)


@dataclass(frozen=True)
class ComposedReference:
    """How to compute a value that has no file; `key` distinguishes it from others."""

    composed: Composition
    name: str
    folder: Path | None
    key: Hashable

    @property
    def layout(self) -> Layout:
        return self.composed.layout

    def opened(self) -> Handle:
        handle = Handle.compose(self.composed, self.name, self.folder)
        _NUMBERS[handle] = self.key
        return handle


def _reduce(tensor: OffloadedTensor) -> tuple[Any, ...]:
    if tensor.requires_grad and not tensor.is_leaf:
        raise UnsupportedOpError(
            f"{tensor.name!r} is not a leaf and requires grad: it can't be passed to a process. detach() it first."
        )
    handle = handle_of(tensor)
    cut = metadata_of(view_spec_of(tensor))
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return _rebuild, (_reference(handle), cut, tensor._target, tensor.requires_grad, is_parameter)


def _reduce_with_attributes(tensor: OffloadedTensor) -> tuple[Any, ...]:
    """As pickles of plain tensors have them; `torch.multiprocessing` passes none."""
    noted = set_by_others(tensor)
    return (*_reduce(tensor), noted, None, None, _set_attributes) if noted else _reduce(tensor)


def _set_attributes(tensor: OffloadedTensor, noted: dict[str, Any]) -> None:
    vars(tensor).update(noted)


def _reference(handle: Handle) -> Reference | ComposedReference:
    source = handle.source
    if isinstance(source, Composition):
        with _LOCK:
            key = _NUMBERS.setdefault(handle, (os.getpid(), next(_COUNT)))
        reference: Reference | ComposedReference = ComposedReference(source, handle.name, handle.folder, key)
    else:
        identity = None if source.owned else source.file.identity
        entry, path = source.entry if source.file.is_raw else None, source.file.path
        reference = Reference(path, handle.name, handle.folder, source.layout, identity, entry, source.part)
    with _LOCK:
        _PASSED[reference.key] = handle
    return reference


def _reduce_piece(piece: Piece) -> tuple[Any, ...]:
    return _rebuild_piece, (_reference(piece.handle), metadata_of(piece.view_spec))


def _rebuild_piece(reference: Reference | ComposedReference, cut: Any) -> Piece:
    handle = _handle(reference)
    with no_functions(), no_modes():
        return Piece(handle, view_with(meta_of_layout(handle.layout), cut))


def _handle(reference: Reference | ComposedReference) -> Handle:
    """The value's handle in this process, shared by all tensors over it."""
    with _LOCK:
        known = _PASSED.get(reference.key)
        if known is None or (isinstance(reference, Reference) and known.path != reference.path):
            known = _PASSED[reference.key] = reference.opened()
        return known


def _rebuild(
    reference: Reference | ComposedReference, cut: Any, target: torch.device, requires_grad: bool, is_parameter: bool
) -> OffloadedTensor:
    handle = _handle(reference)
    if handle.layout != reference.layout:
        raise ChangedFileError(
            f"tensor {reference.name!r}: {handle.path} now holds {handle.layout}, not {reference.layout}, "
            "which was passed: pass it again"
        )
    with no_functions(), no_modes():
        view_spec = view_with(meta_of_layout(handle.layout), cut)
    return dressed(wrap(handle, view_spec, target), requires_grad=requires_grad, is_parameter=is_parameter)


_LOCK = fork_safe_lock()
_PASSED: weakref.WeakValueDictionary[Hashable, Handle] = weakref.WeakValueDictionary()
_NUMBERS: weakref.WeakKeyDictionary[Handle, Hashable] = weakref.WeakKeyDictionary()
_COUNT = count()
ForkingPickler.register(OffloadedTensor, _reduce)
ForkingPickler.register(Piece, _reduce_piece)
