"""Writing a folder that `TensorDict.load_memmap` opens.

Always true:
- it appears complete, in one step; it replaces another one only if that was written here, and no file was added to it
- tensordict lays it out, with files of zeros, and is seen to open it before it is put in place; values are written here
- no value is in memory as a whole: what is on disk is copied from file to file
- nothing that had to be pickled is kept
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from offload.errors import (
    ArgumentError,
    ArgumentTypeError,
    ForeignFileError,
    OffloadError,
    UnknownTypeError,
    UnsupportedOpError,
)
from offload.integrations.tensordict.reading import Way, load_memmap, pickled_in, structure_of
from offload.progress import progress_in_bytes
from offload.storage.header import MARK, is_unicode
from offload.storage.replacing import is_filled, new_file, replacing_folder, sync_whole, write_all
from offload.storage.state_file import Kind, state_if_ours
from offload.system.reasons import reading
from offload.system.regular import absolute
from offload.tensor.arguments import refuse_unstorable
from offload.tensor.saved import subclass_value, write_value
from offload.tensor.wrapper import PathLike

_MARKER = "offload.json"
_KIND = Kind(what="the list of files of a folder of offload", stamp={MARK: {"memmap": 1}})


def save_memmap(
    td: Any,
    folder: PathLike,
    *,
    num_threads: int = 0,
    return_early: bool = False,
    existsok: bool = True,
) -> Any:
    """Write a folder that `TensorDict.load_memmap` opens, in bounded memory: what is on disk goes from file to file.

    Args:
        td: a TensorDict, a lazy stack, a tensorclass, or a dict of tensors and dicts; leaves plain or offloaded.
            Non-tensor data has to be text, numbers, lists and dicts.
        folder: is made, with the folders around it, and appears whole. One that this function wrote is replaced.
        num_threads: how many files are written at a time.
        return_early: give a `concurrent.futures.Future` of the result, and write in the background. The leaves are not
            to be changed until it is done.
        existsok: False refuses to replace a folder.

    Returns:
        The TensorDict over the new files, as `load_memmap` returns it.

    Raises:
        ForeignFileError: there is something that `save_memmap` did not write, or files were added to it.
        UnsupportedOpError: a leaf, or its key, has no form in such a folder.
        UnknownTypeError: non-tensor data that JSON has no form for.
        WriteError: the disk is full, the folder is read-only...

    Example:
        >>> from tensordict import TensorDict
        >>> _ = save_memmap({"x": torch.ones(3), "deep": {"y": torch.zeros(2)}}, "written")
        >>> TensorDict.load_memmap("written")["deep", "y"]
        MemoryMappedTensor([0., 0.])
    """
    td, folder = _collection(td), absolute(folder)
    _refuse_replacing(folder, existsok)

    def save() -> Any:
        _publish(td, folder, existsok, threads=num_threads)
        return load_memmap(folder)

    if not return_early:
        return save()
    background = ThreadPoolExecutor(1, "offload-save")
    future: Future[Any] = background.submit(save)
    background.shutdown(wait=False)
    return future


def memmap_like(td: Any, folder: PathLike, *, existsok: bool = True) -> Any:
    """A folder for values like those of `td`, all zeros, to be filled; no value is read, or written.

    It takes disk space as it is filled, whatever the sizes. As tensordict maps the files, a disk that is full then ends
    the process; `load_memmap(folder, mode="r+")` reserves the space of a leaf first, and says so in an error.

    Args:
        td, folder, existsok: as for `save_memmap`; leaves may be on the meta device.

    Returns:
        The same as `TensorDict.load_memmap`: its leaves are mapped, and writing to one writes its file.

    Raises: as `save_memmap`.

    Example:
        >>> from tensordict import TensorDict
        >>> memmap_like(TensorDict(x=torch.empty(4, 3, device="meta"), batch_size=[4]), "to_fill")["x"].sum()
        tensor(0.)
    """
    from tensordict import TensorDict

    folder = absolute(folder)
    _publish(_collection(td), folder, existsok, of_zeros=True)
    return TensorDict.load_memmap(folder)


def _collection(td: Any) -> Any:
    from tensordict import TensorDict, is_tensor_collection

    if isinstance(td, dict):
        try:
            td = TensorDict(td)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ArgumentTypeError(
                f"no TensorDict can be made of this dict ({error}): give tensors by name"
            ) from error
    if not is_tensor_collection(td):
        raise ArgumentTypeError(f"a TensorDict, a tensorclass or a dict can be saved, not a {type(td).__name__}")
    return td


def _publish(td: Any, folder: Path, existsok: bool, *, threads: int = 0, of_zeros: bool = False) -> None:
    if not is_unicode(str(folder)):
        raise ArgumentError(f"{str(folder)!r} is not a path that tensordict can map files under: it is not UTF-8")
    leaves: list[tuple[str | Way, torch.Tensor]] = []
    td.named_apply(lambda *leaf: leaves.append(leaf), nested_keys=True, filter_empty=True)
    for way, tensor in leaves:
        _refuse_leaf(way, tensor, of_zeros=of_zeros)
    size = 0 if of_zeros else sum(tensor.nbytes for _, tensor in leaves)
    with replacing_folder(folder, size, refuse=lambda target: _refuse_replacing(target, existsok)) as temporary:
        files = _laid_out(td, temporary)
        if not of_zeros:
            _fill(files, threads)
        marker = {**_KIND.stamp, "files": sorted(_files_in(temporary))}
        with new_file(temporary / _MARKER, 0) as fd:
            write_all(fd, memoryview((json.dumps(marker) + "\n").encode()), 0)
        sync_whole(temporary)


def _refuse_leaf(way: str | Way, tensor: torch.Tensor, *, of_zeros: bool) -> None:
    if tensor.is_nested:
        if tensor.layout != torch.strided:
            raise UnsupportedOpError(
                f"{way!r} is a nested tensor of the jagged layout, which tensordict's format can't hold: store its "
                "values() and offsets(), or torch.nested.nested_tensor(list(it.unbind()), layout=torch.strided)"
            )
    elif not of_zeros:
        refuse_unstorable(tensor, repr(way))
        if subclass_value(tensor) is not None:
            raise UnsupportedOpError(
                f"{way!r} is a tensor subclass: dequantize() it, or use save_tree, which keeps such"
            )


def _laid_out(td: Any, folder: Path) -> list[tuple[torch.Tensor, str]]:
    """Let tensordict write a folder with values of zeros; returns each leaf with its file.

    Raises `UnknownTypeError` if it pickled something, and `UnsupportedOpError` if it would not open the folder, or
    lose some of it.
    """
    files: list[tuple[torch.Tensor, str]] = []
    try:
        zeros = td.memmap_like(folder)
        if pickled := pickled_in(folder):
            raise UnknownTypeError(
                f"{pickled!r} holds data that JSON can't represent (tensordict would pickle it): make it text, "
                "numbers, lists and dicts, or leave it out with td.exclude"
            )
        td.named_apply(lambda _, tensor, file: files.append((tensor, file.filename)), zeros, filter_empty=True)
        lost = set(td.keys(include_nested=True)) - set(structure_of(folder).keys(include_nested=True))
    except (OffloadError, OSError):
        raise
    except Exception as error:  # tensordict can raise anything for what it can't write, or can't read again
        raise UnsupportedOpError(
            f"tensordict can't write this so that it opens it again ({type(error).__name__}: {error}): change the type "
            "of the entry, or use save_tree"
        ) from error
    if lost:
        raise UnsupportedOpError(f"{min(lost, key=repr)!r}: tensordict's format reserves this key: rename it")
    return files


def _fill(files: Sequence[tuple[torch.Tensor, str]], threads: int) -> None:
    with progress_in_bytes(sum(tensor.nbytes for tensor, _ in files), "saving") as advance:
        if threads <= 1:
            for tensor, path in files:
                advance(_write(tensor, path))
            return
        with ThreadPoolExecutor(threads, "offload-save") as pool:
            try:
                for nbytes in pool.map(_write, *zip(*files, strict=True)):
                    advance(nbytes)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _write(tensor: torch.Tensor, path: str) -> int:
    """Put a value in a file anew, with its disk space reserved: a full disk is an error. Returns its size in bytes."""
    flat = _elements(tensor.detach())
    if flat.numel():  # an empty leaf has no file
        os.unlink(path)
        with new_file(Path(path), flat.nbytes, durable=False) as fd:
            write_value(fd, 0, flat, flat.dtype)
    return flat.nbytes


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor; those of a nested one in one row."""
    if not tensor.is_nested:
        return tensor
    whole, count = tensor.contiguous(), sum(part.numel() for part in tensor.unbind())
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(whole.untyped_storage(), 0, (count,), (1,))


def _refuse_replacing(folder: Path, existsok: bool) -> None:
    """Refuse to replace what `save_memmap` did not write; an empty folder may be filled."""
    if not is_filled(folder):
        return
    if not existsok:
        raise ForeignFileError(f"{folder} exists: take another folder, or pass existsok=True to replace it")
    with reading(folder):
        known = _files_of(folder)
        found = _files_in(folder)
    if not known:
        raise ForeignFileError(f"{folder} was not written by offload: it is left as it is. Take another folder.")
    if found - known:
        raise ForeignFileError(f"{folder / min(found - known)} was not written by offload: move it away first")


def _files_in(folder: Path) -> set[str]:
    """The files below a folder, and links; one that can't be looked into is an error, as it may hold others' files."""
    found: set[str] = set()
    with os.scandir(folder) as items:
        for item in items:
            if item.is_dir(follow_symlinks=False):
                found |= {f"{item.name}/{name}" for name in _files_in(Path(item.path))}
            else:
                found.add(item.name)
    return found


def _files_of(folder: Path) -> set[str]:
    if folder.is_symlink():
        return set()
    files = (state_if_ours(folder / _MARKER, _KIND) or {}).get("files")
    return {_MARKER, *map(str, files)} if isinstance(files, list) else set()
