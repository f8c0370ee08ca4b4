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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import torch

from offload.annotations import Json
from offload.errors import (
    CorruptFileError,
    ForeignFileError,
    MissingFileError,
    UnsupportedOpError,
)
from offload.storage import log
from offload.storage.file import TensorFile, file_of_ours, value_of
from offload.storage.folders import claim, claim_among_ranks, file_name, named_folder, release
from offload.storage.handle import Handle
from offload.storage.header import Head
from offload.storage.layout import Layout, Loose
from offload.storage.modes import no_functions, no_modes
from offload.storage.reasons import naming, writing
from offload.storage.source import MADE_OF, Composed, InBlocks, Owned, Referenced
from offload.storage.subclasses import flatten, is_subclass_value
from offload.storage.write import (
    Take,
    copy_entries,
    fill_holes,
    layout_of,
    new_values,
    refuse_earlier,
    write_blocks,
    write_tensor,
    write_values,
    write_zeros,
)

Folder: TypeAlias = "str | os.PathLike[str] | None"
Notes: TypeAlias = "Mapping[str, Json] | None"


# New values


def create_value(
    tensor: torch.Tensor, name: str, offload_dir: Folder, notes: Notes = None, *, exist_ok: bool = True
) -> Handle:
    """A new file that holds a plain tensor or a wrapper subclass; `notes` go into its header.

    Args:
        exist_ok: whether to replace a file that an earlier tensor left under that name.

    Raises:
        NameInUseError, ForeignFileError, WriteError, UnknownSubclassError
    """
    handle = Handle(name, _folder_for(name, offload_dir))
    with _claimed(handle, exist_ok=exist_ok) as path:
        _write(handle, path, tensor, notes)
    return handle


def create_temporary(tensor: torch.Tensor, name: str, root: Path | None) -> Handle:
    """Like `create_value`, in a private folder below `root`: the file goes with the handle in any case.

    Raises:
        WriteError, UnknownSubclassError
    """
    handle = Handle(name, None)
    with _claimed(handle, None if root is None else named_folder(root)) as path:
        _write(handle, path, tensor, None)
    return handle


def create_from_blocks(layout: Layout, blocks: Iterable[torch.Tensor], name: str, offload_dir: Folder) -> Handle:
    """A new file from contiguous plain CPU tensors that make up the value in the order of `layout`.

    Raises:
        NameInUseError, ForeignFileError, WriteError
    """
    handle = Handle(name, _folder_for(name, offload_dir))
    with _new_file(handle, {name: layout}) as (fd, head):
        write_blocks(fd, head.start(name), blocks)
    return handle


def allocate_value(layout: Layout, name: str, offload_dir: Folder, *, exist_ok: bool = True) -> Handle:
    """A new file that reads as zeros; takes disk space, but no memory and no time. `exist_ok`: as for `create_value`.

    Raises:
        NameInUseError, ForeignFileError, WriteError
    """
    handle = Handle(name, _folder_for(name, offload_dir))
    with _new_file(handle, {name: layout}, exist_ok=exist_ok) as (fd, head):
        write_zeros(fd, head)
    return handle


# Values of files that are there


def open_value(file: TensorFile, key: str, offload_dir: Folder = None) -> Handle:
    """Like `Handle.reference`; a value that can't be mapped as a tensor where it lies is copied to `offload_dir`."""
    if (loose := file.header.loose.get(key)) is None:
        return Handle.reference(file, key, offload_dir)
    try:
        file_name(key)
    except ValueError as error:
        raise CorruptFileError(f"{file.path} holds a value that can't be copied out: {error}") from error
    with naming(key):
        file.check()  # it may be mapped already, and have changed since
    handle = Handle(key, _folder_for(key, offload_dir))
    with no_functions(), no_modes(), _new_file(handle, {key: loose.layout}) as (fd, head):
        _write_loose(file, loose, fd, head)
    return handle


def _write_loose(file: TensorFile, loose: Loose, fd: int, head: Head) -> None:
    if loose.entry is not None:
        copy_entries(file, [loose.entry], fd, head, settled=True)
        return
    value = value_of(loose, file)
    in_order = value if loose.layout.overlaps else value.permute(loose.layout.order)
    write_tensor(fd, head.start(loose.key), in_order)


def open_owned(file: TensorFile, name: str) -> Handle:
    """The value of a file of ours in a user's folder, opened for writing.

    Raises:
        NameInUseError: a live tensor is stored there.
        ForeignFileError: `offload` did not write that file, or the path is a symlink.
    """
    if file.path.is_symlink():
        raise ForeignFileError(
            f"{file.path} is a link: {name!r} can be referenced there (without this offload_dir), not written"
        )
    if not file.is_ours:
        raise ForeignFileError(f"{file.path} was not written by offload: {name!r} can be referenced there, not written")
    handle = Handle(name, file.path.parent, Owned.of(file, name))
    claim_among_ranks(claim(name, handle.folder, handle), handle)
    return handle


def switch_to(handle: Handle, file: TensorFile) -> None:
    """Continue with a file of ours that is where the first write would put one.

    Raises:
        NameInUseError: a live tensor is stored there.
    """
    with handle.lock, _claimed(handle):
        handle.own(file)


# Composed values that are stored


def open_stored(handle: Handle, mark: str) -> bool:
    """Switch to the file in the named folder in which a composed value with this mark was stored, if there is one.

    Raises:
        ReadError: it can't be read at the moment.
    """
    file = _stored(handle)
    if file is None or file.notes.get(MADE_OF) != mark:
        return False
    with handle.lock:
        handle.set_source(Referenced.of(file, handle.name))
    return True


def _stored(handle: Handle) -> TensorFile | None:
    assert handle.folder is not None
    with suppress(MissingFileError):
        return file_of_ours(handle.folder / file_name(handle.name))
    return None


def store_recipe(handle: Handle, mark: str) -> None:
    """Compute a composed value once, store it in its file in the named folder, and refer to that from then on.

    That file is never written to: a first write replaces it and drops the mark.

    Raises:
        WriteError, NameInUseError, ForeignFileError, and as `Handle.base`.
    """
    composed, other = handle.composed, Handle(handle.name, handle.folder)
    assert isinstance(composed, InBlocks)
    new = _new_file(other, {handle.name: handle.layout}, {MADE_OF: mark})
    with new as (fd, head), no_functions(), no_modes():
        write_blocks(fd, head.start(handle.name), composed.blocks())
    with handle.lock:
        handle.set_source(Referenced.of(TensorFile.open(other.path), handle.name))


# Writing in place


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
    if not isinstance(source, Owned):
        _make_own(handle)
    elif source.has_holes:
        _fill_holes(handle)


def _make_own(handle: Handle) -> None:
    with handle.lock:
        if handle.owned:
            return
        before = handle.path
        _copy(handle, handle)
        log.debug("%r is copied from %s to %s for its first write", handle.name, before, handle.path)


def _fill_holes(handle: Handle) -> None:
    """Reserve missing blocks: a store into a hole on a full disk would kill the process."""
    with handle.lock, naming(handle.name):
        source = handle.source
        assert isinstance(source, Owned)
        file = source.file
        with (
            writing(file.path, file.identity.size, "offload_dir"),
            file.descriptor(os.O_RDWR, settled=False) as opened,
        ):
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
    if isinstance(source, Composed):
        composed = source.composed
        if not isinstance(composed, InBlocks):
            replace_whole(other, composed.value())
            return
        with _new_file(other, {name: source.layout}) as (fd, head), no_functions(), no_modes():
            write_blocks(fd, head.start(name), composed.blocks())
        return
    with handle.lock:
        handle.base()  # switches to the current file
        source = handle.source
        assert not isinstance(source, Composed)
        with naming(name):
            entries = source.entries
        more = None if source.subclass is None else {"subclass": source.subclass}
        with _new_file(other, {entry.key: entry.layout for entry in entries}, more) as (fd, head):
            copy_entries(source.file, entries, fd, head, settled=not source.owned)


# Replacing


def replace_whole(handle: Handle, tensor: torch.Tensor, notes: Notes = None) -> None:
    """Make `tensor` (of any shape and dtype) the whole value, atomically; `notes` go into the file's header.

    Raises:
        WriteError, ForeignFileError, NameInUseError: the old value is kept.
        UnsupportedOpError: the file may only be written in place.
    """
    source = getattr(handle, "source", None)
    if isinstance(source, Owned) and source.in_place:
        raise UnsupportedOpError(
            f"{handle.name!r} is in a file that is written in place by others ({handle.path}: a column of a cache, "
            "or a leaf of a memmap folder): write rows of the cache, or copy_ to the tensor"
        )
    with handle.lock, _claimed(handle) as path:
        _write(handle, path, tensor, notes)


def replace_by_zeros(handle: Handle, layout: Layout, parts: Iterable[tuple[int, torch.Tensor]] = ()) -> None:
    """Make the value zeros with `layout`, as `allocate_value` does. Existing views become stale in any case.

    `parts` are the non-zero parts: plain tensors, each with its byte offset in the value.

    Raises:
        WriteError: the old value is kept.
    """

    def take(file: TensorFile) -> None:
        handle.own(file)
        handle.generation += 1

    with handle.lock, _new_file(handle, {handle.name: layout}, take=take) as (fd, head):
        write_zeros(fd, head)
        for begin, part in parts:
            write_tensor(fd, head.start(handle.name) + begin, part)


# The file at the path of a value


def _folder_for(name: str, offload_dir: Folder) -> Path | None:
    file_name(name)  # refuses an invalid name before anything is done with it
    with naming(name):
        return None if offload_dir is None else named_folder(offload_dir)


@contextmanager
def _claimed(handle: Handle, root: Path | None = None, *, exist_ok: bool = True, alike: bool = False) -> Iterator[Path]:
    """The path to write to, in a private folder below `root` unless the user named one; released on failure.

    `alike` means that all ranks write the same contents there.
    """
    source = getattr(handle, "source", None)  # a new handle has none before it has a file
    if source is not None and source.owned:
        yield source.file.path
        return
    path = claim(handle.name, _folder_for(handle.name, handle.folder), handle, root)
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


@contextmanager
def _new_file(
    handle: Handle,
    layouts: Mapping[str, Layout],
    more: Notes = None,
    *,
    exist_ok: bool = True,
    take: Take | None = None,
) -> Iterator[tuple[int, Head]]:
    """Like `new_values`, for the path of this value; `more` are notes in addition to its name."""
    notes, durable = {"name": handle.name, **(more or {})}, handle.folder is not None
    with (
        _claimed(handle, exist_ok=exist_ok, alike=MADE_OF in notes) as path,
        naming(handle.name),
        new_values(path, layouts, notes, durable=durable, take=take or handle.own) as new,
    ):
        yield new


def _write(handle: Handle, path: Path, tensor: torch.Tensor, notes: Notes) -> None:
    """Write the whole value; if shape and dtype stay the same, the old strides are kept."""
    name = handle.name
    with naming(name), no_functions(), no_modes():
        noted = {**(notes or {}), "name": name}
        if is_subclass_value(tensor):
            values, noted["subclass"] = flatten(tensor, name)
            layouts = {key: layout_of(value) for key, value in values.items()}
        else:
            layout, old = layout_of(tensor), handle.source.layout if hasattr(handle, "source") else None
            if old is not None and (layout.shape, layout.dtype) == (old.shape, old.dtype) and not old.overlaps:
                layout = old
            values, layouts = {name: tensor}, {name: layout}
        write_values(path, values, layouts, noted, durable=handle.folder is not None, take=handle.own)
