"""A new folder of rows.

Always true:
- of several who make a cache in one folder one does
- the manifest is written last: what a creator that was killed leaves is no cache, and is replaced by the next one
- what somebody else put there is left as it is; nothing is written through a link
"""

from __future__ import annotations

import os
from pathlib import Path

from offload.cache.columns import FixedColumn
from offload.cache.heap import HeapColumn
from offload.cache.lock import FILE as LOCK
from offload.cache.lock import lock
from offload.cache.manifest import FILE as MANIFEST
from offload.cache.manifest import Manifest
from offload.cache.schema import TENSOR
from offload.cache.states import States
from offload.errors import CacheError
from offload.storage.regular import is_there, open_regular
from offload.storage.write import explained, sweep


def make(folder: Path, manifest: Manifest) -> None:
    """Make a folder a cache, of empty rows.

    Raises:
        CacheError: it is one, or somebody is making it one.
        ForeignFileError: a file that offload did not write is in the way.
        WriteError, ReadError
    """
    with explained(folder, 0, "folder"):
        folder.mkdir(parents=True, exist_ok=True)
        fd = open_regular(folder / LOCK, os.O_RDWR | os.O_CREAT)
        try:
            if not lock(fd, folder / LOCK, wait=False) or is_there(folder / MANIFEST):
                raise CacheError(
                    f"{folder} is a cache already, or another process is making one there: open it with "
                    "TensorCache.open, or take another folder"
                )
            sweep(folder)
            for column in manifest.columns.values():
                kind = FixedColumn if column.kind == TENSOR else HeapColumn
                kind.create(folder, column, manifest.num_rows)
            States.create(folder, len(manifest.columns), manifest.num_rows)
            manifest.write(folder)
        finally:
            os.close(fd)
