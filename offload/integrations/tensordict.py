"""tensordict: opening folders written by `TensorDict.memmap` in place, and writing folders that it can open.

Always true:
- tensordict reads the structure, past every value, and lays out what is written; a leaf is over its file
- files are referenced in place; a modified one is an error. They are written to only with mode="r+"
- no class is imported by a name in a file, nothing is unpickled, and nothing that had to be pickled is kept
- what is written appears complete, in one step, and was seen to open; it replaces nothing

A TensorDict is a folder: `<key>.memmap` has the elements of a leaf in row-major order and nothing else, a folder named
by the key is a nested one, `meta.json` has the rest. A leaf without elements has no file.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from offload.errors import (
    ArgumentError,
    ArgumentTypeError,
    CorruptFileError,
    MissingFileError,
    OffloadError,
    ShapeMismatchError,
    UnknownTypeError,
    UnsupportedOpError,
)
from offload.storage.file import TensorFile
from offload.storage.handle import Handle
from offload.storage.header import is_unicode
from offload.storage.layout import Entry, contiguous, dtype_named
from offload.storage.replacing import replacing_folder, sync_whole
from offload.storage.state_file import read_json
from offload.system.reasons import reading
from offload.system.regular import absolute, is_there, open_regular
from offload.tensor.arguments import checked_device, refuse_unstorable
from offload.tensor.guests import CPU
from offload.tensor.saved import subclass_value
from offload.tensor.wrapper import PathLike, wrap_handle
from offload.torch_api import FakeTensorMode

__all__ = ["load_memmap", "load_memmap_", "memmap_like", "save_memmap"]

META = "meta.json"
_UNSAFE = frozenset('/<>:"|?*\\ %\x7f') | {chr(code) for code in range(32)}


def load_memmap(
    folder: PathLike,
    device: torch.device | str | int | None = None,
    *,
    mode: str = "r",
    offload_dir: PathLike | None = None,
) -> Any:
    """The same as `TensorDict.load_memmap` for a folder, but with offloaded tensors as leaves, over its files.

    Nothing is read, and the folder is not written to: a leaf is copied at its first write. A leaf without elements is
    a plain one. Once another process has written, leaves are errors: open the folder again, or use `load_memmap_`.

    With `mode="r+"` in-place ops write the folder's own files, as with the result of `TensorDict.load_memmap`, and
    what other processes write there is seen. The first write to a leaf reserves the disk space of all of it.

    Args:
        folder: what `TensorDict.memmap`, or `save_memmap`, was given.
        mode: "r" protects the files of the folder, "r+" writes through to them.
        device: where ops on the leaves run; None for the device that was saved. "meta" gives meta tensors.
        offload_dir: where copies go; None for a private folder.

    Returns:
        A TensorDict, or the tensorclass that was saved.

    Raises:
        MissingFileError, CorruptFileError: there is no such folder, or it is incomplete, or it holds pickled data, or a
            class that has not been imported.
        UnknownTypeError, UnsupportedOpError: it holds a view of a TensorDict, or a nested tensor.

    Example:
        >>> from tensordict import TensorDict
        >>> _ = TensorDict(x=torch.ones(2, 3), batch_size=[2]).memmap("a_folder")
        >>> load_memmap("a_folder")[0]["x"]
        OffloadedTensor([1., 1., 1.], name='x')
    """
    if mode not in ("r", "r+"):
        raise ArgumentError(f"unknown mode {mode!r}: 'r' protects the files of the folder, 'r+' writes to them")
    device, place = None if device is None else checked_device(device), absolute(folder)
    with reading(place):
        td = _opened(place, offload_dir, writes=mode == "r+")
    return td if device is None else td.to(device)


def _opened(folder: Path, offload_dir: PathLike | None, *, writes: bool) -> Any:
    from tensordict import TensorDict

    if not is_there(folder / META):
        reason = "this is not a folder that TensorDict.memmap wrote, or a part of one is gone"
        raise MissingFileError(errno.ENOENT, reason, str(folder / META))

    def over(path: Path, spec: dict[str, Any]) -> torch.Tensor:
        shape, dtype = tuple(spec["shape"]), dtype_named(spec["dtype"].removeprefix("torch."))
        assert dtype is not None  # else tensordict does not know it
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
        file = TensorFile.raw(path, Entry(name, contiguous(dtype, shape), 0))
        if writes:
            open_regular(path, os.O_RDWR).close()  # symlinks are not written through
            return wrap_handle(Handle.shared(file, name, path.parent), CPU)
        return wrap_handle(Handle.reference(file, name, offload_dir), CPU)

    try:
        with FakeTensorMode():  # tensordict would extend a file that is too short, or could not map one beyond memory
            td = TensorDict.load_memmap(folder, allow_pickle=False)
        _fill(td, folder, over)
    except (OffloadError, OSError):
        raise
    except Exception as error:  # tensordict can raise anything for a folder that it did not write
        raise CorruptFileError(f"{folder} can't be opened ({type(error).__name__}: {error}): is it whole?") from error
    return td


def _fill(td: Any, folder: Path, over: Callable[[Path, dict[str, Any]], torch.Tensor]) -> None:
    """Replace the leaves by tensors over the files of a folder, and see that all entries are there."""
    from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, is_tensorclass

    if isinstance(td, NonTensorData | NonTensorStack):
        return
    if is_tensorclass(td):
        _fill(td._tensordict, folder / "_tensordict", over)
    elif isinstance(td, LazyStackedTensorDict):
        for index, layer in enumerate(td.tensordicts):
            _fill(layer, folder / str(index), over)
    elif type(td) is not TensorDict:
        raise UnknownTypeError(f"{folder} holds a {type(td).__name__}: save it as a TensorDict, with to_tensordict()")
    else:
        there = set(os.listdir(folder))
        for key, spec in read_json(folder / META, "what a folder of TensorDict.memmap says of itself").items():
            if not isinstance(spec, dict):
                continue
            names = [name + ("" if "type" in spec else ".memmap") for name in (_file_name(key), key)]
            path = folder / next(filter(there.__contains__, names), names[0])  # an older tensordict did not escape
            if "type" in spec and key in td.keys():  # noqa: SIM118  a TensorDict goes over its rows
                _fill(td.get(key), path, over)
            elif "type" in spec:  # tensordict leaves it out
                reason = "a part of a TensorDict is missing: copy the folder again"
                raise MissingFileError(errno.ENOENT, reason, str(path))
            elif spec.get("is_nested"):
                raise UnsupportedOpError(f"{key!r} in {folder} is a nested tensor: open it by TensorDict.load_memmap")
            elif "dtype" in spec and "shape" in spec:
                td.set(key, over(path, spec))


def _file_name(key: str) -> str:
    """As tensordict escapes a key."""
    if key in ("", ".", ".."):
        return "%2E" * len(key) or "%"
    return "".join(f"%{ord(char):02X}" if char in _UNSAFE else char for char in key)


def load_memmap_(td: Any, folder: PathLike, **options: Any) -> Any:
    """Update `td` to what is in a folder now.

    Its entries are replaced by those of the folder, with offloaded leaves. This is how to see what another process has
    written since. To write the values of the folder into the tensors of `td`, use `td.update_(load_memmap(folder))`.

    Args:
        td: a TensorDict; one of another batch size than the folder is a `ShapeMismatchError`, and stays as it is.
        folder, options: as for `load_memmap`.

    Returns:
        `td`.

    Example:
        >>> from tensordict import TensorDict
        >>> _ = TensorDict(x=torch.ones(2), batch_size=[2]).memmap("changing")
        >>> td = load_memmap("changing")
        >>> _ = TensorDict(x=torch.zeros(2), batch_size=[2]).memmap("changing")  # as another process would
        >>> load_memmap_(td, "changing")["x"].sum()
        tensor(0.)
    """
    stored = load_memmap(folder, **{"device": td.device, **options})
    if td.batch_size != stored.batch_size:
        raise ShapeMismatchError(f"{folder} has batch size {stored.batch_size}, not {td.batch_size}: use load_memmap")
    td.unlock_()
    for key in list(td.keys()):
        td.del_(key)
    return td.update(stored)


def save_memmap(td: Any, folder: PathLike) -> Any:
    """Write a folder that `TensorDict.load_memmap` opens, in bounded memory: what is on disk goes from file to file.

    Args:
        td: a TensorDict, a lazy stack, a tensorclass, or a dict of tensors and dicts; leaves plain or offloaded.
            Non-tensor data has to be text, numbers, lists and dicts.
        folder: is made, with the folders around it, and appears whole; one that is there has to be empty.

    Returns:
        The TensorDict over the new files, as `load_memmap` returns it.

    Raises:
        ForeignFileError: there is something in the folder.
        UnsupportedOpError: a leaf, its key or non-tensor data has no form in such a folder.
        ArgumentTypeError, WriteError: `td` is no dict of tensors by name; the disk is full...

    Example:
        >>> from tensordict import TensorDict
        >>> _ = save_memmap({"x": torch.ones(3), "deep": {"y": torch.zeros(2)}}, "written")
        >>> TensorDict.load_memmap("written")["deep", "y"]
        MemoryMappedTensor([0., 0.])
    """
    folder = absolute(folder)
    _publish(_collection(td), folder)
    return load_memmap(folder)


def memmap_like(td: Any, folder: PathLike) -> Any:
    """A folder for values like those of `td`, all zeros, to be filled; no value is read, or written.

    It takes disk space as it is filled, whatever the sizes. As tensordict maps the files, a disk that is full then ends
    the process; `load_memmap(folder, mode="r+")` reserves the space of a leaf first, and says so in an error.

    Args:
        td, folder: as for `save_memmap`; leaves may be on the meta device.

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
    _publish(_collection(td), folder, of_zeros=True)
    return TensorDict.load_memmap(folder)


def _collection(td: Any) -> Any:
    from tensordict import TensorDict, is_tensor_collection

    try:
        return td if is_tensor_collection(td) else TensorDict({**td})
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ArgumentTypeError(f"this {type(td).__name__} is no dict of tensors by name ({error})") from error


def _publish(td: Any, folder: Path, *, of_zeros: bool = False) -> None:
    if not is_unicode(str(folder)):
        raise ArgumentError(f"{str(folder)!r} is not a path that tensordict can map files under: it is not UTF-8")
    with replacing_folder(folder) as temporary:
        target = _laid_out(td, temporary)
        if not of_zeros:
            td.named_apply(_copied, target, nested_keys=True, filter_empty=True)
        sync_whole(temporary)


def _copied(way: Any, tensor: torch.Tensor, place: torch.Tensor) -> None:
    refuse_unstorable(tensor, way)
    if subclass_value(tensor) is not None:
        raise UnsupportedOpError(f"{way!r} is a tensor subclass: dequantize() it")
    place.copy_(tensor.detach())


def _laid_out(td: Any, folder: Path) -> Any:
    """Let tensordict lay out a folder with zeros, and open it: a write to a leaf reserves its disk space first."""
    try:
        td.memmap_like(folder)
        target = load_memmap(folder, mode="r+")
        lost = set(td.keys(include_nested=True)) - set(target.keys(include_nested=True))
    except OSError:
        raise
    except Exception as error:  # tensordict can raise anything for what it can't write, or can't read again
        raise UnsupportedOpError(
            f"tensordict can't write this so that it opens it again ({type(error).__name__}: {error}): change the type "
            "of the entry, leave it out with td.exclude, or use save_tree"
        ) from error
    if lost:
        raise UnsupportedOpError(f"{min(lost, key=repr)!r}: tensordict's format reserves this key: rename it")
    return target
