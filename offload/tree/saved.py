"""Trees in folders: the structure in a manifest, the tensors in a file.

Always true:
- `tree.json` defines the tree: it is replaced in one step, once the file that it names is on the disk. A crash before
  that leaves the old tree, a crash after it the new one
- each save writes a new numbered file; earlier ones are removed, except those that the saved tensors refer to
- only two things are removed: numbered files of ours that no manifest names, and what a killed process left
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
    ArgumentError,
    CorruptFileError,
    ForeignFileError,
    MissingFileError,
    OffloadError,
    ReadError,
    UnknownTypeError,
    UnsupportedOpError,
    WriteError,
)
from offload.progress import progress_in_bytes
from offload.storage.file import TensorFile, file_of_ours
from offload.storage.handle import Handle
from offload.storage.header import MARK, is_unicode
from offload.storage.nodes import Way, decode, encode, name_of, place_of
from offload.storage.replacing import made_folder
from offload.storage.state_file import MOST_NESTED, Kind, read_state, write_state
from offload.storage.subclasses import registered
from offload.system.locks import locked_folder
from offload.system.reasons import writing
from offload.system.regular import absolute, is_there
from offload.tensor.arguments import checked_device, refuse_unstorable
from offload.tensor.saved import files_of, identity_of, subclass_value, write_dense
from offload.tensor.wrapper import dressed, wrap_handle

_log = logging.getLogger("offload.tree")
ROOT = "tensor"  # the name of a tensor that is the whole tree
MANIFEST = "tree.json"
_FILE = re.compile(r"tensors-([1-9][0-9]*)\.safetensors")
_NOTES = {"tree": 1}  # of the manifest and of the file of tensors: the version of the format
_KIND = Kind(
    what="a tree that offload saved",
    stamp={MARK: _NOTES},
    missing="there is no tree here: save_tree writes this file. Is it another folder?",
    foreign=ForeignFileError,
    most=MOST_NESTED,
    indent=1,
)
# What a tensor is apart from its values: whether it requires grad, and whether it is a parameter.
_DRESSES = {"tensor": (False, False), "trained": (True, False), "parameter": (True, True), "frozen": (False, True)}
_KINDS = {dress: kind for kind, dress in _DRESSES.items()}


def save_tree(tree: object, folder: str | os.PathLike[str]) -> Path:
    """Write nested data to a folder: the structure as JSON, the tensors to a safetensors file.

    An existing tree is replaced as a whole: a crash leaves the old one or the new one. A file that tensors in `tree`
    refer to stays until a later save. Other tensors over the old tree can't be used after.

    Args:
        tree: dicts (with keys of any type allowed here except tensors), lists, tuples, dataclasses, named tuples,
            enums, None, text, bytes, numbers, dtypes, devices and tensors. A tensor that appears in several places is
            stored once, and is one again when it is loaded; a container is stored each time.
        folder: created if needed.

    Returns:
        The manifest, `tree.json`.

    Raises:
        UnknownTypeError: a value can't be stored in a tree; the message says where it is, and its type.
        UnsupportedOpError: a tensor has no dense value, or is of a subclass, as a quantized weight.
        ForeignFileError: there is a `tree.json` of another program.
        WriteError: the disk is full, the folder is read-only, another process is saving there...

    Example:
        >>> save_tree({"step": 3, "state": [torch.ones(2), None]}, "saved_tree").name
        'tree.json'
    """
    folder = absolute(folder)
    named = Named()
    structure = encode(tree, lambda tensor, way: {_kind_of(tensor, way): named.name_for(tensor, way)}, name_of)
    made_folder(folder)
    with locked_folder(folder, wait=False) as is_alone:  # where folders can be locked
        if not is_alone:
            reason = "a tree is being saved here by another process, or thread: wait for it, or take another folder"
            raise WriteError(errno.EAGAIN, reason, str(folder))
        in_use = {path.name for tensor in named.tensors.values() for path in files_of(tensor) if path.parent == folder}
        with writing(folder):
            _sweep(folder, in_use | _file_that_stands(folder))
            numbers = [int(match[1]) for path in folder.iterdir() if (match := _FILE.fullmatch(path.name))]
        file = f"tensors-{1 + max(numbers, default=0)}.safetensors" if named.tensors else None
        try:
            if file is not None:
                nbytes = sum(tensor.nbytes for tensor in named.tensors.values())
                with progress_in_bytes(nbytes, "saving") as advance:
                    write_dense(folder / file, named.tensors, _NOTES, advance)
            write_state(folder / MANIFEST, _KIND, {"file": file, "structure": structure})
        finally:
            with suppress(OffloadError, OSError):  # what can't be removed now is removed by the next save
                _sweep(folder, in_use | _file_that_stands(folder))
    return folder / MANIFEST


def load_tree(
    folder: str | os.PathLike[str],
    device: torch.device | str | int = "cpu",
    *,
    types: Iterable[type] = (),
    offload_dir: str | os.PathLike[str] | None = None,
) -> Any:
    """The tree that `save_tree` wrote, with offloaded tensors over the file there: no value is read.

    The file is not written to: a tensor is copied at its first write.

    Args:
        folder: what `save_tree` was given.
        device: where ops on the tensors run.
        types: the dataclasses, named tuples and enums that may be made. Those given to `register_subclass` may
            be, too. No class is imported by a name in a file.
        offload_dir: where copies go; None for a private folder.

    Returns:
        The tree, of the types that were saved.

    Raises:
        MissingFileError: there is no tree, or its file of tensors is gone.
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
    name = ".".join(way) or ROOT
    refuse_unstorable(tensor, name)
    if subclass_value(tensor) is not None:
        raise UnsupportedOpError(
            f"{name!r} is a tensor subclass, such as a quantized weight, which a tree can't hold: dequantize it, or "
            "save the model with save_checkpoint"
        )
    return _KINDS[tensor.requires_grad, isinstance(tensor, torch.nn.Parameter)]


def _sweep(folder: Path, names: Collection[str]) -> None:
    """Remove the files of earlier trees, and of killed processes, that are not among `names`."""
    for path in [path for path in folder.iterdir() if _FILE.fullmatch(path.name) and path.name not in names]:
        if _is_ours(path):
            _log.debug("%s, of an earlier tree, is removed", path)
            path.unlink()


def _is_ours(path: Path) -> bool:
    """Whether `save_tree` wrote it."""
    try:
        file = file_of_ours(path)
    except (MissingFileError, ReadError):
        return False
    return file is not None and "tree" in file.notes


def _manifest(folder: Path) -> dict[str, Json]:
    path = folder / MANIFEST
    manifest = read_state(path, _KIND)
    file = manifest.get("file", "")
    is_named = file is None or (isinstance(file, str) and _FILE.fullmatch(file))
    if not is_named or "structure" not in manifest:
        raise CorruptFileError(f"{path} names no file of tensors, or no structure: save the tree again")
    return manifest


def _file_that_stands(folder: Path) -> set[str]:
    """The file of the current tree in a folder, if there is one. Raises `ForeignFileError` if that is no tree."""
    file = _manifest(folder)["file"] if is_there(folder / MANIFEST) else None
    return set() if file is None else {file}


def _tree_of(
    folder: Path,
    manifest: Mapping[str, Json],
    types: Iterable[type],
    target: torch.device,
    offload_dir: str | os.PathLike[str] | None,
) -> Any:
    """The tree of a manifest; tensors that were shared are shared again."""
    file = None if manifest["file"] is None else TensorFile.open(folder / manifest["file"])

    @cache
    def handle(name: str) -> Handle:
        if file is None or name not in file.entries:
            raise CorruptFileError(f"there is no tensor {place_of((name,))} in {manifest['file']}")
        return Handle.reference(file, name, offload_dir)

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
            if not is_unicode(name):
                raise ArgumentError(f"a tensor's name must be valid unicode, and {name!r} is not: rename it")
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
        kind = exact[0] if exact else alike[0] if len(alike) == 1 else registered(module, name)
        if kind is None:
            raise UnknownTypeError(
                f"the tree holds a {name} (of {module}), and no such class was given: "
                f"pass types=[{name.rpartition('.')[2]}], or call offload.register_subclass with it"
            )
        return kind

    return class_named
