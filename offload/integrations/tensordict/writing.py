"""Writing a folder that `TensorDict.load_memmap` opens.

Always true:
- it appears complete, in one step; it replaces another one only if that was written here, and no file was added to it
- no value is in memory as a whole: what is on disk is copied from file to file
- nothing is pickled
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from offload.errors import (
    ArgumentError,
    ArgumentTypeError,
    ForeignFileError,
    UnknownTypeError,
    UnsupportedOpError,
)
from offload.integrations.tensordict.reading import INNER, META, Way, escaped, load_memmap
from offload.progress import progress_in_bytes
from offload.storage.header import MARK, is_unicode
from offload.storage.reasons import reading
from offload.storage.regular import absolute
from offload.storage.replacing import is_filled, new_file, replacing_folder, sync_folder, write_all
from offload.storage.state_file import Kind, state_if_ours
from offload.tensor.arguments import refuse_unstorable
from offload.tensor.saved import subclass_value, write_value
from offload.tensor.wrapper import PathLike

_FORMAT = 1
_TAKEN = ("shape", "device", "_type")  # keys of meta.json that an entry would collide with
_MARKER = "offload.json"
_KIND = Kind(what="the list of files of a folder of offload", stamp={MARK: {"memmap": _FORMAT}})


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
    folder, plan = absolute(folder), _planned(td)
    _refuse_replacing(folder, existsok)

    def save() -> Any:
        _publish(folder, plan, num_threads, existsok)
        return load_memmap(folder, types=plan.types)

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

    folder, plan = absolute(folder), _planned(td, of_zeros=True)
    if not is_unicode(str(folder)):
        raise ArgumentError(f"{str(folder)!r} is not a path that tensordict can map files under: it is not UTF-8")
    _publish(folder, plan, 0, existsok)
    return TensorDict.load_memmap(folder)


@dataclass
class _Plan:
    """The contents of a folder.

    Attributes:
        files: the tensors, by relative path.
        texts: the contents of `meta.json` files, by path.
        types: the tensorclasses used.
        of_zeros: whether all values are zero.
    """

    of_zeros: bool
    files: dict[str, torch.Tensor] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    types: set[type] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.files.values())


def _planned(td: Any, *, of_zeros: bool = False) -> _Plan:
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
    plan = _Plan(of_zeros)
    _plan(td, "", (), plan)
    return plan


def _plan(td: Any, at: str, way: Way, plan: _Plan) -> None:
    """Add a collection to a plan, in folder `at`."""
    from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, is_tensorclass

    meta: dict[str, Any]
    kind = type(td)
    if isinstance(td, NonTensorStack):
        meta = {**_format("NonTensorStack"), "stack_dim": 0, "device": None, "data": _json_able(td.tolist(), way)}
    elif isinstance(td, NonTensorData):
        meta = {"data": _json_able(td.data, way), "_metadata": None, "_is_non_tensor": True}
    elif is_tensorclass(td):
        plan.types.add(kind)
        meta = _json_able(dict(td._non_tensordict), way)
        _plan(td._tensordict, f"{at}{INNER}/", way, plan)
    elif isinstance(td, LazyStackedTensorDict):
        kind, dim, names = LazyStackedTensorDict, td.stack_dim, td.names
        name = names[dim] if names else None
        meta = {**_format("LazyStackedTensorDict"), "stack_dim": dim, "stack_dim_name": name}
        for index, layer in enumerate(td.tensordicts):
            _plan(layer, f"{at}{index}/", (*way, str(index)), plan)
    else:
        kind, names = TensorDict, {"_names": list(td.names)} if any(td.names) else {}
        entries = _plan_entries(td, at, way, plan)
        meta = {**_format("TensorDict"), **names, **entries, "shape": list(td.batch_size), "device": "cpu"}
    plan.texts[f"{at}{META}"] = json.dumps({**meta, "_type": str(kind)})


def _plan_entries(td: Any, at: str, way: Way, plan: _Plan) -> dict[str, Any]:
    """Add the entries of a TensorDict to a plan; returns their entries in `meta.json`."""
    from tensordict import is_tensor_collection

    meta: dict[str, Any] = {}
    for key in td.keys():  # noqa: SIM118  a TensorDict goes over its rows
        label = repr((*way, key)) if way else repr(key)
        if key in _TAKEN:
            raise UnsupportedOpError(f"{label}: tensordict's format reserves this key: rename it")
        if not is_unicode(key):
            raise UnsupportedOpError(f"{label!r}: a lone surrogate can't be in the name of a file, rename this key")
        value = td.get(key)
        if is_tensor_collection(value):
            meta[key] = {"type": type(value).__name__}
            _plan(value, f"{at}{escaped(key)}/", (*way, key), plan)
        else:
            meta[key] = _plan_leaf(value, f"{at}{escaped(key)}", label, plan)
    return meta


def _plan_leaf(tensor: Any, path: str, name: str, plan: _Plan) -> dict[str, Any]:
    """Add a leaf to a plan; returns its entry in `meta.json`."""
    if tensor.is_nested and tensor.layout == torch.strided:
        sizes = torch.tensor([list(part.shape) for part in tensor.unbind()], dtype=torch.int64)
        plan.files[f"{path}.shape.memmap"] = sizes
        whole, flat = tensor.detach().contiguous(), torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        plan.files[f"{path}.memmap"] = flat.set_(whole.untyped_storage(), 0, (int(sizes.prod(-1).sum()),), (1,))
        return _spec(sizes.shape, tensor.dtype, is_nested=True)
    if tensor.is_nested:
        raise UnsupportedOpError(
            f"{name} is a nested tensor of the jagged layout, which tensordict's format can't hold: "
            "store its values() and offsets(), or torch.nested.nested_tensor(list(it.unbind()), layout=torch.strided)"
        )
    if not plan.of_zeros:
        refuse_unstorable(tensor, name)
        if subclass_value(tensor) is not None:
            raise UnsupportedOpError(
                f"{name} is a tensor subclass: dequantize() it, or use save_tree, which keeps such"
            )
    if tensor.numel():  # an empty leaf has no file
        plan.files[f"{path}.memmap"] = tensor.detach()
    return _spec(tensor.shape, tensor.dtype, is_nested=False)


def _spec(shape: Iterable[int], dtype: torch.dtype, *, is_nested: bool) -> dict[str, Any]:
    return {"device": "cpu", "shape": list(shape), "dtype": str(dtype), "is_nested": is_nested}


def _format(name: str) -> dict[str, Any]:
    return {"_format_version": _FORMAT, "_class": f"tensordict:{name}"}


def _json_able(value: object, way: Way) -> Any:
    if _is_json_able(value):
        return value
    raise UnknownTypeError(
        f"{way!r} holds a {type(value).__name__} that JSON can't represent (tensordict would pickle it): "
        "make it text, numbers, lists and dicts, or leave it out with td.exclude"
    )


def _is_json_able(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_json_able, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_json_able, value))
    return value is None or isinstance(value, str | int | float | bool)


# Files


def _publish(folder: Path, plan: _Plan, threads: int, existsok: bool) -> None:
    """Write a folder beside its place, and put it there in one step."""
    size = 0 if plan.of_zeros else plan.nbytes
    paths = [*plan.files, *plan.texts]
    marker = {**_KIND.stamp, "files": sorted(paths)}
    with replacing_folder(folder, size, refuse=lambda target: _refuse_replacing(target, existsok)) as temporary:
        places = {temporary / path for path in map(os.path.dirname, paths)} - {temporary}
        for place in places:
            place.mkdir(parents=True, exist_ok=True)
        with progress_in_bytes(plan.nbytes, "saving") as advance:
            for nbytes in _written(temporary, plan, threads):
                advance(nbytes)
        for path, text in {**plan.texts, _MARKER: json.dumps(marker) + "\n"}.items():
            with new_file(temporary / path, len(text)) as fd:
                write_all(fd, memoryview(text.encode()), 0)
        for place in places:
            sync_folder(place)


def _written(folder: Path, plan: _Plan, threads: int) -> Iterator[int]:
    """The size in bytes of each tensor file, as it is written."""

    def write(path: str) -> int:
        tensor = plan.files[path]
        with new_file(folder / path, 0 if plan.of_zeros else tensor.nbytes) as fd:
            if plan.of_zeros:
                os.ftruncate(fd, tensor.nbytes)
            else:
                write_value(fd, 0, tensor, tensor.dtype)
        return tensor.nbytes

    if threads <= 1:
        yield from map(write, plan.files)
        return
    with ThreadPoolExecutor(threads, "offload-save") as pool:
        try:
            yield from pool.map(write, plan.files)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _refuse_replacing(folder: Path, existsok: bool) -> None:
    """Refuse to replace what `save_memmap` did not write; an empty folder may be filled."""
    if not is_filled(folder):
        return
    if not existsok:
        raise ForeignFileError(f"{folder} exists: take another folder, or pass existsok=True to replace it")
    with reading(folder):
        known = _files_of(folder)
        found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}
    if not known:
        raise ForeignFileError(f"{folder} was not written by offload: it is left as it is. Take another folder.")
    if found - known:
        raise ForeignFileError(f"{folder / min(found - known)} was not written by offload: move it away first")


def _files_of(folder: Path) -> set[str]:
    """The files that `save_memmap` wrote in a folder."""
    if folder.is_symlink():
        return set()
    files = (state_if_ours(folder / _MARKER, _KIND) or {}).get("files")
    return {_MARKER, *map(str, files)} if isinstance(files, list) else set()
