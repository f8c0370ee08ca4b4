"""Shards that are cut from a checkpoint once, and stored in one folder per rank.

Always true:
- a file appears whole, and says what it was cut from: after a kill only the missing ones are cut
- ranks of a host with the same shard share its file: one of them cuts it
- a file cut from something else, or for another mesh, is an error: never another rank's numbers
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from offload.distributed.placing import folder_of_rank
from offload.errors import CheckpointError
from offload.storage.folders import file_name, named_folder
from offload.storage.handle import Handle
from offload.storage.locks import locked_folder
from offload.storage.owning import has_stored, open_stored, store_recipe
from offload.storage.regular import absolute, is_folder, is_there
from offload.tensor.wrapper import PathLike

_RANK = re.compile(r"rank-[\d.]+-of-([\d.]+)")


def refuse_other_meshes(outers: Iterable[Any], offload_dir: PathLike | None) -> None:
    """Raises `CheckpointError` if a folder has shards for a different mesh from that of the tensors."""
    shapes = {found[1] for outer in outers if (found := _RANK.fullmatch(folder_of_rank(outer, "").name))}  # type: ignore[union-attr]
    if offload_dir is None or not shapes or not is_folder(absolute(offload_dir)):
        return
    for name in sorted(os.listdir(offload_dir)):
        found = _RANK.fullmatch(name)
        if found is not None and found[1] not in shapes:
            raise CheckpointError(
                f"{offload_dir} has shares for a mesh of {found[1]} ({name}), and this model is on one of "
                f"{', '.join(sorted(shapes))}: give another offload_dir, or remove these folders"
            )


def taken_up(handle: Handle, mark: str) -> bool:
    """Use a shard that an earlier run has cut, if there is one; returns whether there was.

    Raises:
        CheckpointError: its file was cut from something else.
    """
    if open_stored(handle, mark):
        return True
    if has_stored(handle):
        raise CheckpointError(
            f"{handle.folder} has a share of {handle.name!r} that was cut from another checkpoint, or from an "
            "earlier version of this one: remove that folder, or give another offload_dir"
        )
    return False


def cut_once(handle: Handle, mark: str, outer: Any) -> None:
    """Cut a shard into its file, or use the file of a rank with the same one.

    Raises:
        WriteError, NameInUseError, ForeignFileError, and as `Handle.base`.
    """
    assert handle.folder is not None
    owner = folder_of_rank(outer, handle.folder.parent, of_owner=True)
    assert owner is not None
    with locked_folder(named_folder(owner)):
        path = owner / file_name(handle.name)
        if owner == handle.folder:
            if not open_stored(handle, mark):  # another rank may have cut it here meanwhile
                store_recipe(handle, mark)
            return
        first = handle.elsewhere(owner)
        if not open_stored(first, mark) and not is_there(path):
            store_recipe(first, mark)
        if first.composed is None:  # otherwise the owner has another value there by now
            _link(path, named_folder(handle.folder) / path.name)
    if not open_stored(handle, mark):
        store_recipe(handle, mark)


def _link(path: Path, to: Path) -> None:
    """A hard link to a file, if the file system has them."""
    with suppress(OSError):
        to.unlink(missing_ok=True)
        os.link(path, to)
