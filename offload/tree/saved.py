"""Trees in folders: the structure in a manifest, each tensor in its own file.

Always true:
- `tree.json` defines the tree: it is replaced in one step, once every file that it names is on the disk. A crash before
  that leaves the old tree, a crash after it the new one
- a tree of one kind (training checkpoints are another) never replaces one of the other
- each save puts its files in a new numbered folder; files of the previous tree that the new one shares, or that its
  tensors are views of, stay where they are, the others are removed
- only two things are removed: tree files in numbered folders that no manifest names, and what a killed process left
- no value is ever in memory as a whole
- a tensor that is in several places has one name; a class is one of those passed in, or registered
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from offload.annotations import Json
from offload.errors import (
    CorruptFileError,
    ForeignFileError,
    MissingFileError,
    OffloadError,
    ReadError,
    UnknownTypeError,
    WriteError,
)
from offload.progress import progress_in_bytes
from offload.storage.file import TensorFile, file_of_ours
from offload.storage.folders import file_name
from offload.storage.handle import Handle
from offload.storage.header import MARK
from offload.storage.layout import dtype_name
from offload.storage.nodes import Way, decode, encode, name_of, place_of
from offload.storage.replacing import made_folder, remove_folder, replacing_folder
from offload.storage.state_file import MOST_NESTED, Kind, read_state, write_state
from offload.storage.subclasses import registered
from offload.system.locks import locked_folder
from offload.system.reasons import short, writing
from offload.system.regular import absolute, is_there
from offload.tensor.arguments import checked_device, refuse_unstorable
from offload.tensor.saved import files_of, identity_of, write_dense, write_file
from offload.tensor.views import handle_of, is_part, view_spec_of
from offload.tensor.wrapper import dressed, is_offloaded, wrap_handle

_log = logging.getLogger("offload.tree")
ROOT = "tensor"  # the name of a tensor that is the whole tree
MANIFEST = "tree.json"
_VERSION = 1
_NOTES = {"tree": _VERSION}  # what the files of a tree note in addition to their values
_NUMBER = re.compile(r"[1-9][0-9]*")
_TOGETHER = "tensors.safetensors"
_FILE = re.compile(r"[1-9][0-9]*/[^/\\]+\.safetensors")
KIND = Kind(
    what="a tree that offload saved",
    stamp={MARK: {"tree": _VERSION}},
    missing="there is no tree here: save_tree writes this file. Is it another folder?",
    foreign=ForeignFileError,
    most=MOST_NESTED,
    indent=1,
)
# What a tensor is apart from its values: whether it requires grad, and whether it is a parameter.
_DRESSES = {"tensor": (False, False), "trained": (True, False), "parameter": (True, True), "frozen": (False, True)}
_KINDS = {dress: kind for kind, dress in _DRESSES.items()}


def save_tree(tree: object, folder: str | os.PathLike[str]) -> Path:
    """Write nested data to a folder: the structure as JSON, each tensor to a safetensors file of its own.

    An existing tree is replaced as a whole: a crash leaves the old one or the new one. A tensor that was loaded
    from it, and has not been written to, keeps its file, and what `tree` has views of stays until a later save. Other
    tensors over the old tree can't be used after.

    Args:
        tree: dicts (with keys of any type allowed here except tensors), lists, tuples, dataclasses, named tuples,
            enums, None, text, bytes, numbers, dtypes, devices and tensors of any kind. A tensor that appears in several
            places is stored once, and is one again when it is loaded; a container is stored each time.
        folder: created if needed.

    Returns:
        The manifest, `tree.json`.

    Raises:
        UnknownTypeError: a value can't be stored in a tree; the message says where it is, and its type.
        UnsupportedOpError: a tensor has no dense value.
        ForeignFileError: there is a `tree.json` of another program, or of a training checkpoint.
        WriteError: the disk is full, the folder is read-only, another process is saving there...

    Example:
        >>> save_tree({"step": 3, "state": [torch.ones(2), None]}, "saved_tree").name
        'tree.json'
    """
    return save_as(KIND, tree, folder)


def save_as(kind: Kind, tree: object, folder: str | os.PathLike[str], *, together: bool = False) -> Path:
    """Like `save_tree`, as a tree of this kind.

    Args:
        together: put all tensors, which are dense, into one file: for many small ones, where a file each costs more
            than the data. None keeps its file at the next save.
    """
    folder = absolute(folder)
    named = Named()
    structure = encode(tree, lambda tensor, way: {_kind_of(tensor, way): named.name_for(tensor, way)}, name_of)
    made_folder(folder)
    with locked_folder(folder, wait=False) as is_alone:  # where folders can be locked
        if not is_alone:
            reason = "a tree is being saved here by another process, or thread: wait for it, or take another folder"
            raise WriteError(errno.EAGAIN, reason, str(folder))
        paths = [path for tensor in named.tensors.values() for path in files_of(tensor)]
        in_use = {f"{path.parent.name}/{path.name}" for path in paths if path.parent.parent == folder}
        old = _files_that_stand(folder, kind)
        with writing(folder):
            _sweep(folder, old | in_use)
            number = 1 + max((int(path.name) for path in folder.iterdir() if _NUMBER.fullmatch(path.name)), default=0)
        reusable = () if together else old
        files = {name: file for name, tensor in named.tensors.items() if (file := _file_in(folder, tensor, reusable))}
        new = {name: tensor for name, tensor in named.tensors.items() if name not in files}
        files |= {name: f"{number}/{_TOGETHER if together else file_name(name)}" for name in new}
        tensors = {
            name: {"file": files[name], "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
            for name, tensor in named.tensors.items()
        }
        _log.debug("%s: %s of %s tensors are written, the others keep their files", folder, len(new), len(files))
        try:
            if new:
                nbytes = sum(tensor.nbytes for tensor in new.values())
                with replacing_folder(folder / str(number)) as place, progress_in_bytes(nbytes, "saving") as advance:
                    if together:
                        write_dense(place / _TOGETHER, new, _NOTES, advance)
                    else:
                        for name, tensor in new.items():
                            write_file(place / file_name(name), name, tensor, _NOTES)
                            advance(tensor.nbytes)
            write_state(folder / MANIFEST, kind, {"tensors": tensors, "structure": structure})
        finally:
            with suppress(OffloadError, OSError):  # what can't be removed now is removed by the next save
                _sweep(folder, _files_that_stand(folder, kind) | in_use)
    return folder / MANIFEST


def load_tree(
    folder: str | os.PathLike[str],
    device: torch.device | str | int = "cpu",
    *,
    types: Iterable[type] = (),
    offload_dir: str | os.PathLike[str] | None = None,
) -> Any:
    """The tree that `save_tree` wrote, with offloaded tensors over the files there: no value is read.

    The files are not written to: a tensor is copied at its first write.

    Args:
        folder: what `save_tree` was given.
        device: where ops on the tensors run.
        types: the dataclasses, named tuples and enums that may be made. Those given to `register_subclass` may
            be, too. No class is imported by a name in a file.
        offload_dir: where copies go; None for a private folder.

    Returns:
        The tree, of the types that were saved.

    Raises:
        MissingFileError: there is no tree, or one of its files is gone.
        ReadError: a file can't be read now.
        UnknownTypeError: the tree holds a class that is not among `types`.
        CorruptFileError: the manifest is of a later version, or does not fit the files.
        ForeignFileError: `tree.json` is another program's.

    Example:
        >>> _ = save_tree({"step": 3, "state": [torch.ones(2), None]}, "saved_tree")
        >>> tree = load_tree("saved_tree")
        >>> tree["step"], tree["state"][0].sum()
        (3, tensor(2.))
    """
    folder = absolute(folder)
    target, types = checked_device(device), tuple(types)
    while True:
        manifest = _manifest(folder)
        try:
            return _tree_of(folder, manifest, types, target, offload_dir)
        except MissingFileError:
            if _manifest(folder) == manifest:  # otherwise another process has just replaced the tree
                raise


def _kind_of(tensor: torch.Tensor, way: Way) -> str:
    """What a tensor is apart from its values."""
    refuse_unstorable(tensor, ".".join(way) or ROOT)
    return _KINDS[tensor.requires_grad, isinstance(tensor, torch.nn.Parameter)]


def _file_in(folder: Path, tensor: torch.Tensor, old: Collection[str]) -> str | None:
    """The file of the tree in `folder` that holds exactly this value; None if there is none."""
    if not is_offloaded(tensor):
        return None
    handle, view_spec = handle_of(tensor), view_spec_of(tensor)
    if handle.owned or handle.composed is not None or is_part(tensor):
        return None
    if handle.path.parent.parent != folder or view_spec.is_conj() or view_spec.is_neg():
        return None
    file = f"{handle.path.parent.name}/{handle.path.name}"
    if file not in old:
        return None
    handle.file.check()
    return file


def _sweep(folder: Path, files: Collection[str]) -> None:
    """Remove what a killed process left, and files of ours in numbered folders that are not among `files`."""
    for place in list(folder.iterdir()):
        if not _NUMBER.fullmatch(place.name) or not place.is_dir() or place.is_symlink():
            continue  # the target of a link is somebody else's
        files_in_place = list(place.iterdir())
        unused = [path for path in files_in_place if f"{place.name}/{path.name}" not in files and _is_ours(path)]
        if unused:
            _log.debug("%s: %s files of earlier trees are removed", place, len(unused))
        if unused and len(unused) == len(files_in_place):
            remove_folder(place)  # an empty one, left by a process killed here, would look like a user's
        else:
            for path in unused:
                path.unlink()


def _is_ours(path: Path) -> bool:
    """Whether `save_tree` wrote it: a folder of values may have a number as its name, too."""
    try:
        file = file_of_ours(path)
    except (MissingFileError, ReadError):
        return False
    return file is not None and "tree" in file.notes


def _manifest(folder: Path) -> dict[str, Json]:
    path = folder / MANIFEST
    found = read_state(path, KIND)
    if not isinstance(found.get("tensors"), dict) or "structure" not in found:
        raise CorruptFileError(f"{path} names no tensors, or no structure: save the tree again")
    return found


def _files_that_stand(folder: Path, kind: Kind) -> set[str]:
    """The files of the current tree in a folder, if there is one.

    Raises `ForeignFileError` if it is not a tree of this kind.
    """
    path = folder / MANIFEST
    if not is_there(path):
        return set()
    manifest = _manifest(folder)
    if manifest[MARK] != kind.stamp[MARK]:
        raise ForeignFileError(f"{path} is not {kind.what}: it is left as it is. Take another folder.")
    return {spec["file"] for spec in manifest["tensors"].values() if _is_spec(spec)}


def _is_spec(spec: Json) -> bool:
    return isinstance(spec, dict) and isinstance(spec.get("file"), str) and _FILE.fullmatch(spec["file"]) is not None


def _tree_of(
    folder: Path,
    manifest: Mapping[str, Json],
    types: Iterable[type],
    target: torch.device,
    offload_dir: str | os.PathLike[str] | None,
) -> Any:
    """The tree of a manifest; tensors that were shared are shared again."""

    @cache
    def handle(name: str) -> Handle:
        spec = manifest["tensors"][name]
        if not _is_spec(spec):
            raise CorruptFileError(f"it names no file of its own for {place_of((name,))}")
        file = TensorFile.open(folder / spec["file"])
        found = Handle.reference(file, str(file.notes.get("name", name)), offload_dir)
        noted = [spec.get("dtype"), spec.get("shape")]
        if noted != [dtype_name(found.layout.dtype), list(found.layout.shape)]:
            raise CorruptFileError(f"it says that {name!r} is {short(noted)}, but {file.path} holds {found.layout}")
        return found

    @cache
    def tensor(kind: str, name: str) -> torch.Tensor:
        requires_grad, is_parameter = _DRESSES[kind]
        return dressed(wrap_handle(handle(name), target), requires_grad=requires_grad, is_parameter=is_parameter)

    try:
        return decode(manifest["structure"], tensor, classes_among(types))
    except UnknownTypeError as error:
        raise UnknownTypeError(f"{folder / MANIFEST}: {error}") from error
    except CorruptFileError as error:
        raise CorruptFileError(f"{folder / MANIFEST} can't be used: {error}. Save the tree again.") from error


# Names for tensors, and the classes that may be made


@dataclass
class Named:
    """The tensors of a nest by name, each once."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _names: dict[Hashable, str] = field(default_factory=dict)

    def name_for(self, tensor: torch.Tensor, way: Way) -> str:
        """The path joined by dots; numbered if another path reads the same, or if it is not a valid name."""
        same = identity_of(tensor)
        if same not in self._names:
            name, number = ".".join(way) or ROOT, 1
            while name in self.tensors or name == "__metadata__":
                number += 1
                name = f"{'.'.join(way) or ROOT}~{number}"
            self._names[same], self.tensors[name] = name, tensor
        return self._names[same]


def classes_among(types: Iterable[type]) -> Callable[[str], type]:
    """What `decode` needs to find these classes, and registered ones, by their full names.

    Or the only one of these with that class name: its module may have been a script before.
    """
    known = tuple(types)

    def class_named(word: str) -> type:
        module, _, name = word.partition(":")
        exact = [cls for cls in known if name_of(cls) == word]
        alike = [cls for cls in known if cls.__name__ == name.rpartition(".")[2]]
        found = exact[0] if exact else alike[0] if len(alike) == 1 else registered(module, name)
        if found is None:
            raise UnknownTypeError(
                f"the tree holds a {name} (of {module}), and no such class was given: "
                f"pass types=[{name.rpartition('.')[2]}], or call offload.register_subclass with it"
            )
        return found

    return class_named
