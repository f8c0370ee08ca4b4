"""A file that somebody else's writer makes: whole, or not there.

Always true:
- what stands at the place is left as it is, unless the writer knows it for its own; nothing is written through a link
- the file has its name once it is on the disk
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from offload.errors import ForeignFileError
from offload.storage.regular import is_there
from offload.storage.write import put_beside, sync_folder


def refuse_replacing(path: Path, what: str = "file") -> None:
    """
    Raises:
        ForeignFileError: something stands there, if only a link that leads nowhere.
        ReadError
    """
    if is_there(path):
        raise ForeignFileError(f"{path} is there already, and is left as it is: name another {what}")


@contextmanager
def written_beside(path: Path, *, refuse: Callable[[Path], object] = refuse_replacing) -> Iterator[Path]:
    """Where to write a file that becomes `path` if the block ends well; `refuse` looks at what stands there.

    Raises:
        ForeignFileError: what stands there is not to be replaced.
        WriteError
    """
    refuse(path)
    with put_beside(path, 0, "folder") as temporary:
        yield temporary
        fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    sync_folder(path.parent)
