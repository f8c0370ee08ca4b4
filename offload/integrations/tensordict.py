"""tensordict: opening folders written by `TensorDict.memmap` in place, and writing folders that it can open.

Always true:
- tensordict reads the structure, past every value, and lays out what is written, with files of zeros; a leaf is over
  its file, and values are written here, from file to file: none is in memory as a whole
- files are referenced in place; a modified one is an error. They are written to only with mode="r+"
- no class is imported by a name in a file, nothing is unpickled, and nothing that had to be pickled is kept
- what is written appears complete, in one step, and was seen to open; it replaces nothing
- a key names a file or folder directly inside that of its TensorDict, whatever characters it has

Source of the format: what tensordict 0.15 writes and reads. A TensorDict is a folder: `<key>.memmap` has the elements
of a leaf in row-major order and nothing else, a folder named by the key is a nested one, `meta.json` has the rest. A
nested tensor's sizes are in `<key>.shape.memmap`. A leaf without elements has no file.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from offload.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    CorruptFileError,
    MissingFileError,
    OffloadError,
    UnknownTypeError,
    UnsupportedOpError,
)
from offload.progress import progress_in_bytes
from offload.storage.file import TensorFile
from offload.storage.handle import Handle
from offload.storage.header import is_unicode
from offload.storage.layout import Entry, contiguous, dtype_named
from offload.storage.replacing import new_file, refuse_filled, replacing_folder, sync_whole
from offload.storage.state_file import read_json
from offload.system.reasons import reading
from offload.system.regular import absolute, is_file, is_there, open_regular
from offload.tensor.arguments import checked_device, refuse_unstorable
from offload.tensor.saved import subclass_value, write_value
from offload.tensor.wrapper import OffloadedTensor, PathLike, wrap_handle
from offload.torch_api import FakeTensorMode, active_fake_mode

__all__ = ["load_memmap", "load_memmap_", "memmap_like", "save_memmap"]

Way: TypeAlias = tuple[str, ...]  # the keys from the root to an entry

META = "meta.json"
INNER = "_tensordict"  # the folder of a tensorclass's values
_PICKLES = ("other.pickle", "pickle.pkl")
_UNSAFE = frozenset('/<>:"|?*\\ %\x7f') | {chr(code) for code in range(32)}


def load_memmap(
    folder: PathLike,
    device: torch.device | str | int | None = None,
    *,
    mode: str = "r",
    offload_dir: PathLike | None = None,
) -> Any:
    """The same as `TensorDict.load_memmap` for a folder, but with offloaded tensors as leaves, over its files.

    Nothing is read, and the folder is not written to: a leaf is copied at its first write. A leaf without elements, and
    a nested tensor (which is over its mapped file), are plain ones. Open the folder again, or `load_memmap_`, after
    another process has written to it: until then its leaves are errors.

    With `mode="r+"` in-place ops write the folder's own files, as with the result of `TensorDict.load_memmap`, and
    what other processes write there is seen. The first write to a leaf reserves the disk space of all of it.

    Args:
        folder: what `TensorDict.memmap`, or `save_memmap`, was given.
        mode: "r" protects the files of the folder, "r+" writes through to them.
        device: where ops on the leaves run; None for the device that was saved. "meta" gives meta tensors. Under a
            `FakeTensorMode` the leaves are fake.
        offload_dir: where copies go; None for a private folder.

    Returns:
        A TensorDict, or the tensorclass that was saved.

    Raises:
        MissingFileError, CorruptFileError: there is no such folder, or it is incomplete.
        UnknownTypeError: it holds a class that has not been imported.
        CheckpointError: it holds pickled data.

    Example:
        >>> from tensordict import TensorDict
        >>> _ = TensorDict(x=torch.ones(2, 3), batch_size=[2]).memmap("a_folder")
        >>> load_memmap("a_folder")[0]["x"]
        OffloadedTensor([1., 1., 1.], name='x')
    """
    if mode not in ("r", "r+"):
        raise ArgumentError(f"unknown mode {mode!r}: 'r' protects the files of the folder, 'r+' writes to them")
    place = absolute(folder)
    leaves = _Leaves(None if device is None else checked_device(device), offload_dir, writes=mode == "r+")
    with reading(place):
        return _opened(place, leaves)


def _opened(folder: Path, leaves: _Leaves) -> Any:
    if is_file(folder):
        raise CorruptFileError(f"{folder} is a file: unpack an archive first (tensordict.unpack_memmap)")
    if not is_there(folder / META):
        reason = "this is not a folder that TensorDict.memmap wrote, or a part of one is gone"
        raise MissingFileError(errno.ENOENT, reason, str(folder / META))
    try:
        td = structure_of(folder, leaves.device)
        leaves.put(td, folder, ())
    except (OffloadError, OSError):
        raise
    except Exception as error:  # tensordict can raise anything for a folder that it did not write
        raise _refused(folder, error) from error
    return td


def structure_of(folder: Path, device: torch.device | None = None) -> Any:
    """What tensordict makes of a folder, or raises, with fake leaves: mapping a file of values could extend it."""
    from tensordict import TensorDict

    with nullcontext() if active_fake_mode() else FakeTensorMode():
        return TensorDict.load_memmap(folder, device, allow_pickle=False)


def load_memmap_(td: Any, folder: PathLike, **options: Any) -> Any:
    """Update `td` to what is in a folder now.

    Its leaves are replaced by offloaded ones over the files, entries that the folder does not have are removed, nested
    TensorDicts are kept. This is how to see what another process has written since. To write the values of the folder
    into the tensors of `td`, use `td.update_(load_memmap(folder))`.

    Args:
        td: a TensorDict, or a tensorclass that has tensors only.
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
    options = {"device": td.device, **options}
    _take_over(td, load_memmap(folder, **options))
    return td


def _take_over(td: Any, found: Any) -> None:
    from tensordict import TensorDict

    td.unlock_()
    for key in set(td.keys()) - set(found.keys()):
        td.del_(key)
    for key in found.keys():  # noqa: SIM118  a TensorDict goes over its rows
        new, old = found.get(key), td.get(key, None)
        if type(new) is type(old) is TensorDict and new.batch_size == old.batch_size:
            _take_over(old, new)
        else:
            td.set(key, new)


def _refused(folder: Path, error: Exception) -> OffloadError:
    if isinstance(error, RuntimeError) and "allow_pickle" in str(error):
        return CheckpointError(
            f"{folder}: {pickled_in(folder)!r} is pickled, and is not opened, as it could run code: save the folder "
            "without it (td.exclude), or make it text, numbers, lists and dicts"
        )
    if isinstance(error, RuntimeError) and "Could not find the class" in str(error):
        return UnknownTypeError(f"{error} Or save it as a TensorDict, with to_tensordict().")
    return CorruptFileError(
        f"{folder} can't be read as a folder of TensorDict.memmap ({type(error).__name__}: {error}): is it whole? "
        "Copy it again."
    )


def pickled_in(folder: Path) -> str | None:
    """The first entry of a folder that tensordict pickled."""
    files = (path for path in folder.rglob("*") if path.name in _PICKLES and path.is_file())
    return min((str(path.parent.relative_to(folder)) for path in files), default=None)


@dataclass(frozen=True)
class _Leaves:
    device: torch.device | None
    offload_dir: PathLike | None
    writes: bool

    def put(self, td: Any, folder: Path, way: Way) -> None:
        from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, is_tensorclass

        if isinstance(td, NonTensorData | NonTensorStack):
            return
        if is_tensorclass(td):
            self.put(td._tensordict, folder / INNER, way)
        elif isinstance(td, LazyStackedTensorDict):
            for index, layer in enumerate(td.tensordicts):
                self.put(layer, folder / str(index), (*way, str(index)))
        elif type(td) is TensorDict:
            self._put_entries(td, folder, way)
        else:
            name = type(td).__name__
            raise UnknownTypeError(f"{folder} holds a {name}: save it as a TensorDict, with to_tensordict()")

    def _put_entries(self, td: Any, folder: Path, way: Way) -> None:
        for key, spec in read_json(folder / META, "what a folder of TensorDict.memmap says of itself").items():
            if not isinstance(spec, dict):
                continue
            if not is_unicode(key):
                raise CorruptFileError(f"{folder / META} names an entry {key!r}, and no file can be called that")
            if "type" in spec:
                if key not in td.keys():  # noqa: SIM118  as it left out what is not there
                    gone = _place(folder, key, "") / META
                    reason = "a part of a TensorDict is missing: copy the folder again"
                    raise MissingFileError(errno.ENOENT, reason, str(gone))
                self.put(td.get(key), _place(folder, key, ""), (*way, key))
            elif "dtype" in spec and "shape" in spec:
                td.set(key, self._leaf(folder, key, spec, way, td.device or torch.device("cpu")))

    def _leaf(self, folder: Path, key: str, spec: dict[str, Any], way: Way, device: torch.device) -> torch.Tensor:
        from tensordict import TensorDict

        shape, dtype = tuple(spec["shape"]), dtype_named(spec["dtype"].removeprefix("torch."))
        assert dtype is not None  # else tensordict does not know it
        name, path = ".".join((*way, key)), _place(folder, key, ".memmap")
        has_file = spec.get("is_nested") or 0 not in shape
        if device.type == "meta" or active_fake_mode() is not None or not has_file:
            return torch.empty(shape, dtype=dtype, device=device)
        if spec.get("is_nested"):
            around = TensorDict.load_memmap(folder, allow_pickle=False, mode="r")  # which extends no file
            return around.get(key).as_subclass(torch.Tensor).to(device)  # type: ignore[no-any-return]
        return self._over(path, name, shape, dtype, device)

    def _over(
        self, path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> OffloadedTensor:
        file = TensorFile.raw(path, Entry(name, contiguous(dtype, shape), 0))
        if self.writes:
            open_regular(path, os.O_RDWR).close()  # symlinks are not written through
            return wrap_handle(Handle.shared(file, name, path.parent), device)
        return wrap_handle(Handle.reference(file, name, self.offload_dir), device)


def _place(folder: Path, key: str, suffix: str) -> Path:
    """The file or folder of a key; under its unescaped name if an older tensordict wrote it."""
    if key in ("", ".", ".."):
        escaped = "%2E" * len(key) or "%"
    else:
        escaped = "".join(f"%{ord(char):02X}" if char in _UNSAFE else char for char in key)
    path, plain = folder / f"{escaped}{suffix}", folder / f"{key}{suffix}"
    if plain != path and plain.parent == folder and key not in (".", "..") and not is_there(path) and is_there(plain):
        return plain
    return path


def save_memmap(td: Any, folder: PathLike, *, num_threads: int = 0, return_early: bool = False) -> Any:
    """Write a folder that `TensorDict.load_memmap` opens, in bounded memory: what is on disk goes from file to file.

    Args:
        td: a TensorDict, a lazy stack, a tensorclass, or a dict of tensors and dicts; leaves plain or offloaded.
            Non-tensor data has to be text, numbers, lists and dicts.
        folder: is made, with the folders around it, and appears whole; one that is there has to be empty.
        num_threads: how many files are written at a time.
        return_early: give a `concurrent.futures.Future` of the result, and write in the background. The leaves are not
            to be changed until it is done.

    Returns:
        The TensorDict over the new files, as `load_memmap` returns it.

    Raises:
        ForeignFileError: there is something in the folder.
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
    refuse_filled(folder)

    def save() -> Any:
        _publish(td, folder, threads=num_threads)
        return load_memmap(folder)

    if not return_early:
        return save()
    background = ThreadPoolExecutor(1, "offload-save")
    future: Future[Any] = background.submit(save)
    background.shutdown(wait=False)
    return future


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

    if isinstance(td, dict):
        try:
            td = TensorDict(td)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ArgumentTypeError(f"no TensorDict is made of it ({error}): give tensors by name") from error
    if not is_tensor_collection(td):
        raise ArgumentTypeError(f"a TensorDict, a tensorclass or a dict can be saved, not a {type(td).__name__}")
    return td


def _publish(td: Any, folder: Path, *, threads: int = 0, of_zeros: bool = False) -> None:
    if not is_unicode(str(folder)):
        raise ArgumentError(f"{str(folder)!r} is not a path that tensordict can map files under: it is not UTF-8")
    leaves: list[tuple[str | Way, torch.Tensor]] = []
    td.named_apply(lambda *leaf: leaves.append(leaf), nested_keys=True, filter_empty=True)
    for way, tensor in leaves:
        _refuse_leaf(way, tensor, of_zeros=of_zeros)
    size = 0 if of_zeros else sum(tensor.nbytes for _, tensor in leaves)
    with replacing_folder(folder, size) as temporary:
        files = _laid_out(td, temporary)
        if not of_zeros:
            _fill(files, threads)
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
    """Let tensordict lay out a folder with zeros, and see that it opens whole; returns each leaf with its file."""
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
    with (
        progress_in_bytes(sum(tensor.nbytes for tensor, _ in files), "saving") as advance,
        ThreadPoolExecutor(max(threads, 1), "offload-save") as pool,
        closing(pool.map(lambda file: _write(*file), files)) as written,  # type: ignore[type-var]
    ):
        for nbytes in written:
            advance(nbytes)


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
