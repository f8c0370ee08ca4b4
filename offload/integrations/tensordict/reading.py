"""Folders written by `TensorDict.memmap`, as offloaded tensors.

Always true:
- files are referenced in place; a modified one is an error. They are written to only with mode="r+"
- no class is imported by a name in a file, and nothing is unpickled
- no value is read
- the result is of one folder, even if `save_memmap` puts another one in its place meanwhile
- a key names a file or folder directly inside that of its TensorDict, whatever characters it has

Source of the format: what tensordict 0.15 writes and reads. A TensorDict is a folder: `<key>.memmap` has the elements
of a leaf in row-major order and nothing else, a folder named by the key is a nested one, `meta.json` has the rest. A
nested tensor's sizes are in `<key>.shape.memmap`. A leaf without elements has no file.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from offload.errors import (
    ArgumentError,
    CheckpointError,
    CorruptFileError,
    MissingFileError,
    MissingKeyError,
    OffloadError,
    UnknownTypeError,
)
from offload.storage.file import TensorFile
from offload.storage.handle import Handle
from offload.storage.header import is_unicode
from offload.storage.layout import Entry, contiguous, contiguous_stride, dtype_named
from offload.storage.owning import open_value
from offload.storage.reasons import reading as as_read
from offload.storage.regular import absolute, is_folder, is_there, open_regular
from offload.storage.state_file import read_json
from offload.tensor.arguments import checked_device
from offload.tensor.wrapper import OffloadedTensor, PathLike, wrap_handle
from offload.torch_api import active_fake_mode, nested_view_from_buffer
from offload.tree.structure import class_among

Way: TypeAlias = tuple[str, ...]  # the keys from the root to an entry

META = "meta.json"
INNER = "_tensordict"  # the folder of a tensorclass's values
_PICKLES = ("other.pickle", "pickle.pkl")
_UNSAFE = frozenset('/<>:"|?*\\ %\x7f') | {chr(code) for code in range(32)}
_OF_CLASS = ("_type", "_class", "_format_version")  # other metadata in the folder of a tensorclass


def load_memmap(
    folder: PathLike,
    device: torch.device | str | int | None = None,
    *,
    mode: str = "r",
    types: Iterable[type] = (),
    without: Iterable[str | Way] = (),
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
        types: the tensorclasses that may be made.
        without: entries to leave out: keys, or tuples of keys for nested ones. Pickled data has to be.
        offload_dir: where copies go; None for a private folder.

    Returns:
        A TensorDict, or the tensorclass that was saved.

    Raises:
        MissingFileError, CorruptFileError: there is no such folder, or it is incomplete.
        UnknownTypeError: it holds a class that is not among `types`.
        CheckpointError: it holds pickled data.
        KeyError: an entry in `without` does not exist.

    Example:
        >>> from tensordict import TensorDict
        >>> _ = TensorDict(x=torch.ones(2, 3), batch_size=[2]).memmap("a_folder")
        >>> load_memmap("a_folder")[0]["x"]
        OffloadedTensor([1., 1., 1.], name='x')
    """
    if mode not in ("r", "r+"):
        raise ArgumentError(f"unknown mode {mode!r}: 'r' protects the files of the folder, 'r+' writes to them")
    place, types = absolute(folder), tuple(types)
    target = None if device is None else checked_device(device)
    left_out = frozenset((name,) if isinstance(name, str) else tuple(name) for name in without)
    with as_read(place):
        while True:
            before, reading = _which(place), _Reading(target, types, set(left_out), offload_dir, writes=mode == "r+")
            try:
                found = reading.folder(place, ())
            except (MissingFileError, CorruptFileError):
                if _which(place) == before:
                    raise
            else:
                if _which(place) == before:
                    break
    if reading.left_out:
        raise MissingKeyError(f"{place} has no entry {min(reading.left_out)!r} to leave out")
    return found


def _which(folder: Path) -> tuple[int, int] | None:
    """Identifies a folder, as opposed to a replacement at the same path."""
    with suppress(OSError):
        status = os.stat(folder)
        return status.st_ino, status.st_ctime_ns
    return None


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


@dataclass
class _Reading:
    """Turns a folder into a TensorDict.

    Attributes:
        left_out: the entries to leave out that have not been found yet.
    """

    device: torch.device | None
    types: tuple[type, ...]
    left_out: set[Way]
    offload_dir: PathLike | None
    writes: bool

    def folder(self, folder: Path, way: Way) -> Any:
        """The content of a folder, at path `way` from the root."""
        import tensordict

        meta = _meta_of(folder)
        match _class_name(meta):
            case "tensordict:TensorDict":
                return self._tensordict(folder, meta, way)
            case "tensordict:LazyStackedTensorDict":
                return self._lazy_stack(folder, meta, way)
            case "tensordict:NonTensorData":
                _refuse_pickles(folder, way)
                return tensordict.NonTensorData(data=meta.get("data"))
            case "tensordict:NonTensorStack":
                _refuse_pickles(folder, way)
                if not isinstance(meta.get("data"), list):
                    return self._lazy_stack(folder, meta, way)
                with _as_written(folder):
                    return tensordict.NonTensorStack.from_list(meta["data"])
            case name:
                cls: Any = self._class_called(name, folder)
                _refuse_pickles(folder, way)
                values = self.folder(folder / INNER, way)
                with _as_written(folder):
                    others = {key: value for key, value in meta.items() if key not in _OF_CLASS}
                    return cls.from_tensordict(values, others)

    def _tensordict(self, folder: Path, meta: dict[str, Any], way: Way) -> Any:
        from tensordict import TensorDict

        device = self.device or _saved_device(folder, meta)
        entries = {}
        for key, spec in meta.items():
            if not isinstance(spec, dict):
                continue
            if (*way, key) in self.left_out:
                self.left_out.discard((*way, key))
            elif "type" in spec:
                entries[key] = self.folder(_place(folder, key, ""), (*way, key))
            elif "dtype" in spec:
                entries[key] = self._leaf(folder, key, spec, way, device or torch.device("cpu"))
        names = meta.get("_names")
        with _as_written(folder):
            names = names if isinstance(names, list) else None
            return TensorDict(entries, batch_size=torch.Size(meta.get("shape", ())), device=device, names=names)

    def _leaf(self, folder: Path, key: str, spec: dict[str, Any], way: Way, device: torch.device) -> torch.Tensor:
        shape, dtype = _layout_of(folder, key, spec)
        name, path = ".".join((*way, key)), _place(folder, key, ".memmap")
        has_file = spec.get("is_nested") or 0 not in shape
        if device.type == "meta" or active_fake_mode() is not None or not has_file:
            return torch.empty(shape, dtype=dtype, device=device)
        open_leaf = self._nested if spec.get("is_nested") else self._over
        return open_leaf(path, name, shape, dtype, device)

    def _over(
        self, path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> OffloadedTensor:
        file = TensorFile.raw(path, Entry(name, contiguous(dtype, shape), 0))
        if self.writes:
            open_regular(path, os.O_RDWR).close()  # symlinks are not written through
            return wrap_handle(Handle.shared(file, name, path.parent), device)
        return wrap_handle(open_value(file, name, self.offload_dir), device)

    def _nested(
        self, path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A nested tensor, whose sizes are in a separate file, one row each."""
        cpu = torch.device("cpu")
        sizes = self._over(path.with_suffix(".shape.memmap"), f"{name}.shape", shape, torch.int64, cpu).tolist()
        flat = self._over(path, name, (sum(math.prod(size) for size in sizes),), dtype, cpu)._on_cpu()
        starts = [0, *itertools.accumulate(math.prod(size) for size in sizes)][:-1]
        strides = torch.tensor([contiguous_stride(tuple(size)) for size in sizes]).reshape(shape)
        args = (flat, torch.tensor(sizes).reshape(shape), strides, torch.tensor(starts))
        return nested_view_from_buffer(*args).to(device)

    def _lazy_stack(self, folder: Path, meta: dict[str, Any], way: Way) -> Any:
        from tensordict import LazyStackedTensorDict

        layers: list[Any] = []
        while is_folder(folder / str(len(layers))):
            layers.append(self.folder(folder / str(len(layers)), (*way, str(len(layers)))))
        if not layers:
            raise CorruptFileError(f"{folder} is an empty stack of TensorDicts. Copy the folder again.")
        with _as_written(folder):
            dim, name = meta["stack_dim"], meta.get("stack_dim_name")
            return LazyStackedTensorDict(*layers, stack_dim=dim, stack_dim_name=name)

    def _class_called(self, name: str, folder: Path) -> type:
        found = class_among(self.types, name)
        if found is not None:
            return found
        module, _, short = name.replace(":", ".").rpartition(".")
        way_out = "save it as a TensorDict, with to_tensordict()" if ":" in name else f"pass types=[{short}]"
        raise UnknownTypeError(f"{folder} holds a {short} (of {module}), and no such class was given: {way_out}")


@contextmanager
def _as_written(folder: Path) -> Iterator[None]:
    """tensordict can raise anything for a folder that it did not write: blame the folder."""
    try:
        yield
    except OffloadError:
        raise
    except Exception as error:
        raise CorruptFileError(f"{folder / META} contradicts the files that it names: {error}") from error


def _meta_of(folder: Path) -> dict[str, Any]:
    path = folder / META
    try:
        meta = read_json(path, "what a folder of TensorDict.memmap says of itself")
    except MissingFileError as error:
        if folder.is_file():
            raise CorruptFileError(f"{folder} is a file: unpack an archive first (tensordict.unpack_memmap)") from error
        reason = "this is not a folder that TensorDict.memmap wrote, or a part of one is gone"
        raise MissingFileError(error.errno, reason, str(path)) from error
    if not isinstance(meta, dict) or not isinstance(meta.get("_type"), str):
        raise CorruptFileError(f"{path} does not say what the folder holds. Copy the folder again.")
    return meta


def _saved_device(folder: Path, meta: Mapping[str, Any]) -> torch.device | None:
    saved = meta.get("device", "None")
    try:
        return None if saved == "None" else checked_device(saved)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:  # torch can raise anything
        raise CorruptFileError(
            f"{folder / META} says that the values were on {str(saved)[:100]!r}, which is not "
            f"available here ({error}): pass device='cpu'"
        ) from error


def _class_name(meta: Mapping[str, object]) -> str:
    """`tensordict:TensorDict` for tensordict's own classes, wherever they are defined; else the full name."""
    name = str(meta["_type"]).removeprefix("<class '").removesuffix("'>")
    return f"tensordict:{name.rpartition('.')[2]}" if name.startswith("tensordict.") else name


def _layout_of(folder: Path, key: str, spec: Mapping[str, object]) -> tuple[tuple[int, ...], torch.dtype]:
    shape, name = spec.get("shape"), spec["dtype"]
    dtype = dtype_named(str(name).removeprefix("torch."))
    if dtype is None:
        raise CorruptFileError(f"{folder / META} says that {key!r} is of {name}, which can't be read")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise CorruptFileError(f"{folder / META} gives {key!r} the shape {str(shape)[:100]}")
    return tuple(shape), dtype


def escaped(key: str) -> str:
    """A key as a file or folder name."""
    if key in ("", ".", ".."):
        return "%2E" * len(key) or "%"
    return "".join(f"%{ord(char):02X}" if char in _UNSAFE else char for char in key)


def _place(folder: Path, key: str, suffix: str) -> Path:
    """The file or folder of a key; under its unescaped name if an older tensordict wrote it.

    Raises:
        CorruptFileError: it is not valid as a file name.
    """
    if not is_unicode(key):
        raise CorruptFileError(
            f"{folder / META} names an entry {key!r}, and no file can be called that: download or copy it again"
        )
    path = folder / f"{escaped(key)}{suffix}"
    plain = folder / f"{key}{suffix}"
    if plain != path and plain.parent == folder and key not in (".", "..") and not is_there(path) and is_there(plain):
        return plain
    return path


def _refuse_pickles(folder: Path, way: Way) -> None:
    for name in _PICKLES:
        if is_there(folder / name):
            raise CheckpointError(
                f"{folder / name} is a pickle, and is not opened, as it could run code: leave the entry out "
                f"(without=[{way!r}]), or save it as text, numbers, lists and dicts"
            )
