"""Files of our own: how a value gets one, and how it is replaced there.

Always true:
- a value is replaced as a whole, or stays as it is
- a path is claimed before anything is written there, and released if that fails
- the first write to a value that is not in a file of ours copies it to one, from file to file; a composed value is
  computed block by block
- from the moment a file is at its path, its handle refers to it: no later error removes it
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import torch

from offload.annotations import Json
from offload.errors import ForeignFileError, MissingFileError, UnsupportedOpError
from offload.storage import log
from offload.storage.file import TensorFile, file_of_ours
from offload.storage.folders import claim, claim_among_ranks, file_name, named_folder, release
from offload.storage.handle import MADE_OF, Composition, Handle, InBlocks, Stored
from offload.storage.layout import Layout
from offload.storage.subclasses import flatten, is_subclass_value
from offload.storage.write import (
    Fill,
    Take,
    fill_holes,
    from_blocks,
    from_file,
    from_values,
    layout_of,
    of_zeros,
    put_values,
    refuse_earlier,
    write_tensor,
)
from offload.system.modes import no_functions, no_modes
from offload.system.reasons import naming, writing

Folder: TypeAlias = "str | os.PathLike[str] | None"
Notes: TypeAlias = "Mapping[str, Json] | None"


def make(
    handle: Handle,
    layouts: Mapping[str, Layout],
    fill: Fill,
    notes: Notes = None,
    *,
    root: Path | None = None,
    exist_ok: bool = True,
    take: Take | None = None,
) -> Handle:
    """Put a new file with values of these layouts, which `fill` writes, at the path of a value; returns the handle.

    Args:
        notes: go into the file's header, with the value's name.
        root: where the private folder is, if the user named none; None for `TMPDIR`.
        exist_ok: whether to replace a file that an earlier tensor left under that name.
        take: called with the file once it is in place; by default, `handle.own`.

    Raises `NameInUseError`, `ForeignFileError`, `WriteError`.
    """
    noted, is_named = {**(notes or {}), "name": handle.name}, handle.folder is not None
    with (
        _claimed(handle, root, exist_ok=exist_ok, alike=MADE_OF in noted) as path,
        naming(handle.name),
        no_functions(),
        no_modes(),
    ):
        put_values(path, layouts, fill, noted, durable=is_named, take=take or handle.own)
    return handle


def _make_of(
    handle: Handle, tensor: torch.Tensor, notes: Notes = None, *, root: Path | None = None, exist_ok: bool = True
) -> Handle:
    """`make` with a plain tensor or a wrapper subclass; if shape and dtype stay the same, so do the strides."""
    name, old = handle.name, handle.source.layout if hasattr(handle, "source") else None
    with naming(name), no_functions(), no_modes():
        if is_subclass_value(tensor):
            values, spec = flatten(tensor, name)
            layouts = {key: layout_of(value) for key, value in values.items()}
            notes = {**(notes or {}), "subclass": spec}
        else:
            values, layout = {name: tensor}, layout_of(tensor)
            if old is not None and (layout.shape, layout.dtype) == (old.shape, old.dtype) and old.is_dense:
                layout = old
            layouts = {name: layout}
    return make(handle, layouts, from_values(values, layouts), notes, root=root, exist_ok=exist_ok)


@contextmanager
def _claimed(handle: Handle, root: Path | None = None, *, exist_ok: bool = True, alike: bool = False) -> Iterator[Path]:
    """The path to write to, in a private folder below `root` unless the user named one; released on failure.

    `alike` means that all ranks write the same contents there.
    """
    source = getattr(handle, "source", None)  # a new handle has none before it has a file
    if source is not None and source.owned:
        yield source.file.path
        return
    file_name(handle.name)  # refuses an invalid name before anything is done with it
    with naming(handle.name):
        folder = None if handle.folder is None else named_folder(handle.folder)
    path = claim(handle.name, folder, handle, root)
    try:
        if handle.folder is not None and not alike:
            claim_among_ranks(path, handle)
        if not exist_ok:
            refuse_earlier(path, handle.name)
        yield path
    except BaseException:
        if not (hasattr(handle, "source") and handle.owned):
            release(path, handle)
        raise


def create_value(
    tensor: torch.Tensor, name: str, offload_dir: Folder, notes: Notes = None, *, exist_ok: bool = True
) -> Handle:
    """A new file that holds a plain tensor or a wrapper subclass; `notes` and `exist_ok` are as for `make`.

    Raises: as `make`, and `UnknownSubclassError`.
    """
    return _make_of(Handle(name, offload_dir), tensor, notes, exist_ok=exist_ok)


def create_temporary(tensor: torch.Tensor, name: str, root: Path | None) -> Handle:
    """Like `create_value`, in a private folder below `root`: the file goes with the handle in any case."""
    return _make_of(Handle(name, None), tensor, root=None if root is None else named_folder(root))


def allocate_value(layout: Layout, name: str, offload_dir: Folder, *, exist_ok: bool = True) -> Handle:
    """A new file that reads as zeros; takes disk space, but no memory and no time. See `make`."""
    return make(Handle(name, offload_dir), {name: layout}, of_zeros, exist_ok=exist_ok)


def open_owned(file: TensorFile, name: str) -> Handle:
    """The value of a file of ours in a user's folder, opened for writing.

    Raises `NameInUseError` if a live tensor is stored there; `ForeignFileError` if `offload` did not write that file,
    or the path is a symlink.
    """
    if file.path.is_symlink():
        raise ForeignFileError(
            f"{file.path} is a link: {name!r} can be referenced there (without this offload_dir), not written"
        )
    if not file.is_ours:
        raise ForeignFileError(f"{file.path} was not written by offload: {name!r} can be referenced there, not written")
    handle = Handle(name, file.path.parent, Stored.of_ours(file, name))
    claim_among_ranks(claim(name, handle.folder, handle), handle)
    return handle


def switch_to(handle: Handle, file: TensorFile) -> None:
    """Continue with a file of ours that is where the first write would put one.

    Raises `NameInUseError` if a live tensor is stored there.
    """
    with handle.lock, _claimed(handle):
        handle.own(file)


def open_stored(handle: Handle, mark: str) -> bool:
    """Switch to the file in the named folder in which a composed value with this mark was stored, if there is one.

    Raises `ReadError` if it can't be read at the moment.
    """
    assert handle.folder is not None
    try:
        file = file_of_ours(handle.folder / file_name(handle.name))
    except MissingFileError:
        return False
    if file is None or file.notes.get(MADE_OF) != mark:
        return False
    with handle.lock:
        handle.set_source(Stored.of_others(file, handle.name))
    return True


def store_recipe(handle: Handle, mark: str) -> None:
    """Compute a composed value once, store it in its file in the named folder, and refer to that from then on.

    That file is never written to: a first write replaces it and drops the mark. Raises `WriteError`, `NameInUseError`,
    `ForeignFileError`, and as `Handle.base`.
    """
    composed, other = handle.composed, Handle(handle.name, handle.folder)
    assert isinstance(composed, InBlocks)
    make(other, {handle.name: handle.layout}, from_blocks({handle.name: composed.blocks()}), {MADE_OF: mark})
    with handle.lock:
        handle.set_source(Stored.of_others(TensorFile.open(other.path), handle.name))


def writable_base(handle: Handle) -> torch.Tensor:
    """Like `Handle.base`, but stores into it go to the file; the first write makes a file of ours.

    Raises:
        WriteError, NameInUseError, ForeignFileError, and as `Handle.base`.
    """
    make_writable(handle)
    return handle.base()


def make_writable(handle: Handle) -> None:
    """See `writable_base`."""
    source = handle.source
    if source.owned:
        if source.has_holes:
            _fill_holes(handle)
        return
    with handle.lock:
        if not handle.owned:
            before = handle.path
            _copy(handle, handle)
            log.debug("%r is copied from %s to %s for its first write", handle.name, before, handle.path)


def _fill_holes(handle: Handle) -> None:
    """Reserve missing blocks: a store into a hole on a full disk would kill the process."""
    with handle.lock, naming(handle.name):
        source = handle.source
        assert isinstance(source, Stored)
        file = source.file
        with writing(file.path, file.identity.size, "offload_dir"), file.descriptor(os.O_RDWR, settled=False) as opened:
            fill_holes(opened.fileno(), file.identity.size)
        handle.source = dataclasses.replace(source, has_holes=False)


def duplicate(handle: Handle) -> Handle:
    """An independent copy, made from file to file in a private folder; for a composed value, another composed one.

    Raises:
        WriteError, and as `Handle.base`.
    """
    if handle.composed is not None:  # its sources are never written to
        return handle.elsewhere(None)
    copy = Handle(handle.name, None)
    _copy(handle, copy)
    return copy


def _copy(handle: Handle, other: Handle) -> None:
    """Give `other` the value of `handle`, from file to file."""
    source, name = handle.source, other.name
    if isinstance(source, InBlocks):
        make(other, {name: source.layout}, from_blocks({name: source.blocks()}))
        return
    if isinstance(source, Composition):
        replace_whole(other, source.value())
        return
    with handle.lock:
        handle.base()  # switches to the current file
        source = handle.source
        assert isinstance(source, Stored)
        notes = None if source.subclass is None else {"subclass": source.subclass}
        with naming(name), from_file(source.file, source.entries, settled=not source.owned) as fill:
            make(other, {entry.key: entry.layout for entry in source.entries}, fill, notes)


def replace_whole(handle: Handle, tensor: torch.Tensor, notes: Notes = None) -> None:
    """Make `tensor` (of any shape and dtype) the whole value, atomically; `notes` go into the file's header.

    Raises `WriteError`, `ForeignFileError`, `NameInUseError`, and the old value is kept; `UnsupportedOpError` if the
    file may only be written in place.
    """
    source = getattr(handle, "source", None)
    if source is not None and source.in_place:
        raise UnsupportedOpError(
            f"{handle.name!r} is in a file that is written in place by others ({handle.path}: a column of a cache, "
            "or a leaf of a memmap folder): write rows of the cache, or copy_ to the tensor"
        )
    with handle.lock:
        _make_of(handle, tensor, notes)


def replace_by_zeros(handle: Handle, layout: Layout, parts: Iterable[tuple[int, torch.Tensor]] = ()) -> None:
    """Make the value zeros with `layout`, as `allocate_value` does. Existing views become stale in any case.

    `parts` are the non-zero parts: plain tensors, each with its byte offset in the value.

    Raises `WriteError`, and the old value is kept.
    """

    def take(file: TensorFile) -> None:
        handle.own(file)
        handle.generation += 1

    def fill(fd: int, key: str, start: int) -> None:
        of_zeros(fd, key, start)
        for begin, part in parts:
            write_tensor(fd, start + begin, part)

    with handle.lock:
        make(handle, {handle.name: layout}, fill, take=take)
