"""What a power cut could take: the calls of an act that change files, against what it has synced.

Always true:
- data are safe once their file is synced; the name of a file or folder is, once the folder it is in is synced
- a file that is renamed takes its place whole only if its data are safe by then; a folder, if all in it is
- what happens in a folder of a temporary name does not count until the folder is renamed: nobody looks there after a
  power cut; nor does what was removed
- what was there before an act has begun is safe; what is stored into mappings can't be seen; what others write for the
  package, such as torch, is safe once the package has synced it
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offload.storage.replacing import TEMPORARY
from tests import faults
from tests.crashes import Act

_WRITE = {"pwrite", "pwritev", "write", "ftruncate", "truncate", "posix_fallocate", "sendfile"}


class Disk:
    """The files below a folder, and what of them a power cut could take.

    Attributes:
        unsynced: files whose data may be lost.
        unnamed: files and folders whose names may be lost.
        faults: what was put in place before it was safe.
    """

    def __init__(self, root: Path) -> None:
        self.unsynced: set[str] = set()
        self.unnamed: set[str] = set()
        self.faults: list[str] = []
        self._root = str(root)
        self._synced = {os.stat(path).st_ino for path in _files(self._root)}

    def see(self, call: faults.Call, _: object, args: tuple[Any, ...]) -> None:
        """Follow a call that is about to be made."""
        what = call.name.rpartition(".")[2]
        if what in _WRITE:
            self.unsynced.add(_path(args[0]))
        elif what == "copy_file_range":
            self.unsynced.add(_path(args[1]))
        elif what in ("fsync", "fdatasync"):
            path = _path(args[0])
            self.unsynced.discard(path)
            self.unnamed = {name for name in self.unnamed if os.path.dirname(name) != path}
            self._synced.add(os.stat(path).st_ino)
        elif what in ("open", "mkdir", "link", "symlink") and call.changes:
            path = _path(args[what in ("link", "symlink")])
            self.unnamed.update([] if os.path.lexists(path) else [path])
        elif call.name in faults.REMOVES:
            self._gone(_path(args[0]))
        elif what in ("replace", "rename"):
            self._rename(_path(args[0]), _path(args[1]))

    def end(self) -> None:
        """What is there now counts, and what is outside of the folder does not."""
        self.unsynced |= self._not_synced(self._root)
        self.unsynced = _within(self.unsynced, self._root)
        self.unnamed = _within(self.unnamed, self._root) - {self._root}

    def _not_synced(self, place: str) -> set[str]:
        files = {path: os.stat(path) for path in _files(place)}
        return {path for path, stat in files.items() if stat.st_size and stat.st_ino not in self._synced}

    def _rename(self, old: str, new: str) -> None:
        if TEMPORARY not in new and _within({new}, self._root):
            for lost in sorted(_within(self.unsynced, old) | self._not_synced(old)):
                self.faults.append(f"{new} was put in place while the data of {lost} were not synced")
            for lost in sorted(_within(self.unnamed, old) - {old}):
                self.faults.append(f"{new} was put in place while the folder around {lost} was not synced")
        self._gone(new)
        for paths in (self.unsynced, self.unnamed):
            moved = _within(paths, old)
            paths -= moved
            paths |= {new + path[len(old) :] for path in moved}
        self.unnamed.add(new)

    def _gone(self, path: str) -> None:
        stats = map(os.stat, _files(path))
        self._synced -= {stat.st_ino for stat in stats if stat.st_nlink == 1}  # others may get its number
        for paths in (self.unsynced, self.unnamed):
            paths -= _within(paths, path)


def written_by(tried: Act, place: Path) -> Disk:
    """The disk after an act, which is given a folder that is not there yet, in one that is not there either."""
    place.mkdir()
    given = tried.begin(place / "deep" / "er")
    disk = Disk(place)
    with faults.seen(disk.see):
        tried.act(given)
    disk.end()
    return disk


def _path(where: Any) -> str:
    """Of a path, a descriptor, or an open file."""
    where = where.fileno() if hasattr(where, "fileno") else where
    return os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else os.path.abspath(os.fspath(where))


def _files(place: str) -> Iterator[str]:
    if os.path.isfile(place):
        yield place
    for at, _, names in os.walk(place):
        yield from (path for name in names if os.path.isfile(path := os.path.join(at, name)))


def _within(paths: set[str], place: str) -> set[str]:
    return {path for path in paths if path == place or path.startswith(f"{place}/")}
