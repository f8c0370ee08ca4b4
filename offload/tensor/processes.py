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
from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from itertools import count
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offload.errors import ChangedFileError, UnsupportedOpError
from offload.storage.file import Identity, TensorFile
from offload.storage.handle import Composition, Handle
from offload.storage.layout import Entry, Layout
from offload.system.locks import fork_safe_lock
from offload.system.modes import no_functions, no_modes
from offload.tensor.recipes import Piece
from offload.tensor.views import handle_of, meta_of_layout, metadata_of, view_spec_of, view_with
from offload.tensor.wrapper import OffloadedTensor, dressed, wrap


class by_reference:
    """Sends a tensor, a model, or anything that contains tensors, to processes that see the same files.

    Any pickler will do, and the receiver gets the tensor or the model itself. For values on disk a reference is sent,
    as with `torch.multiprocessing`, without attributes that were set on them; all else is pickled as usual, by value
    where cloudpickle is installed. Keep the values alive while others use them; a checkpoint that changes is an error.

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
    reductions: dict[object, Any] = {OffloadedTensor: _reduce, Piece: _reduce_piece}
    table = ChainMap(reductions, usual if isinstance(usual, ChainMap) else copyreg.dispatch_table)
    return type("ByReference", (Pickler,), {"dispatch_table": table})


class Reference(NamedTuple):
    """A value that is passed, and its state by then."""

    key: Hashable  # the same in every process, and another for another value
    path: Path | None  # of its file; None if it is computed
    name: str
    folder: Path | None
    layout: Layout
    opened: Callable[[str, Path | None], Handle]  # gives a handle of this name and folder, in another process


def _opened(
    path: Path, entry: Entry | None, part: Entry | None, identity: Identity | None, name: str, folder: Path | None
) -> Handle:
    """A handle for a value in a file.

    Args:
        entry: where it lies in a file without a header; otherwise None.
        part: see `Stored.part`.
        identity: of a file that is not ours and must not change; None for a file of ours.
    """
    file = TensorFile.open(path) if entry is None else TensorFile.raw(path, entry)
    if identity is None:
        return Handle.shared(file, name, folder)
    if file.identity != identity:
        raise ChangedFileError(
            f"tensor {name!r}: {path} has changed since it was passed "
            "(size, modification time or inode): load the checkpoint again"
        )
    return Handle.reference(file, name, folder) if part is None else Handle.reference_part(file, part, folder)


def _reduce(tensor: OffloadedTensor) -> tuple[Any, ...]:
    if tensor.requires_grad and not tensor.is_leaf:
        raise UnsupportedOpError(
            f"{tensor.name!r} is not a leaf and requires grad: it can't be passed to a process. detach() it first."
        )
    piece = Piece(handle_of(tensor), view_spec_of(tensor))
    return _rebuild, (piece, tensor._target, tensor.requires_grad, isinstance(tensor, torch.nn.Parameter))


def _rebuild(piece: Piece, target: torch.device, requires_grad: bool, is_parameter: bool) -> OffloadedTensor:
    wrapper = wrap(piece.handle, piece.view_spec, target)
    return dressed(wrapper, requires_grad=requires_grad, is_parameter=is_parameter)


def _reference(handle: Handle) -> Reference:
    source = handle.source
    path: Path | None = None
    if isinstance(source, Composition):
        with _LOCK:
            key = _NUMBERS.setdefault(handle, (os.getpid(), next(_COUNT)))
        opened: Callable[[str, Path | None], Handle] = partial(Handle.compose, source)
    else:
        path, identity = source.file.path, None if source.owned else source.file.identity
        key = path, handle.name, source.part
        opened = partial(_opened, path, source.entry if source.file.is_raw else None, source.part, identity)
    with _LOCK:
        _PASSED[key] = handle
    return Reference(key, path, handle.name, handle.folder, source.layout, opened)


def _reduce_piece(piece: Piece) -> tuple[Any, ...]:
    return _rebuild_piece, (_reference(piece.handle), metadata_of(piece.view_spec))


def _rebuild_piece(reference: Reference, cut: Any) -> Piece:
    handle = _handle(reference)
    if handle.layout != reference.layout:
        raise ChangedFileError(
            f"tensor {reference.name!r}: {handle.path} now holds {handle.layout}, not {reference.layout}, "
            "which was passed: pass it again"
        )
    with no_functions(), no_modes():
        return Piece(handle, view_with(meta_of_layout(handle.layout), cut))


def _handle(reference: Reference) -> Handle:
    """The value's handle in this process, shared by all tensors over it."""
    key, path = reference.key, reference.path
    with _LOCK:
        known = _PASSED.get(key)
        if known is None or (path is not None and known.path != path):
            known = _PASSED[key] = reference.opened(reference.name, reference.folder)
            if path is None:
                _NUMBERS[known] = key
        return known


_LOCK = fork_safe_lock()
_PASSED: weakref.WeakValueDictionary[Hashable, Handle] = weakref.WeakValueDictionary()
_NUMBERS: weakref.WeakKeyDictionary[Handle, Hashable] = weakref.WeakKeyDictionary()
_COUNT = count()
ForkingPickler.register(OffloadedTensor, _reduce)
ForkingPickler.register(Piece, _reduce_piece)
