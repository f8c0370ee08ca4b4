"""What a power cut could take: the system calls of a program, as strace sees them, against what it has synced.

`python -m tests.power_cut FOLDER` is that program: all acts that meet a power cut, and some that would not survive it.

Always true:
- data are safe once their file is synced; the name of a file or folder is, once the folder it is in is synced
- a file that is renamed takes its place whole only if its data are safe by then; a folder, if all in it is
- what happens in a folder of a temporary name does not count until the folder is renamed: nobody looks there after a
  power cut; nor do calls that failed, and what was removed
- what was there before an act has begun is safe; what is stored into mappings can't be seen
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from offload.storage.replacing import TEMPORARY, sync_folder
from tests.acts import ACTS, meeting
from tests.crashes import POWER_CUT

CALLS = (
    "open,openat,creat,write,writev,pwrite64,pwritev,pwritev2,sendfile,copy_file_range,splice,ftruncate,truncate,"
    "fallocate,fsync,fdatasync,sync,syncfs,rename,renameat,renameat2,link,linkat,unlink,unlinkat,rmdir,"
    "mkdir,mkdirat"
)
_CALL = re.compile(r"^(\d+) +(\w+)\((.*)\) += (-?\w+)")
_PAUSED = re.compile(r"^(\d+) +(.*) <unfinished \.\.\.>$")
_ENDED = re.compile(r"^(\d+) +<\.\.\. \w+ resumed>(.*)$")
_OPENED = re.compile(r"\d+<(/[^>]*)>")
_NAMED = re.compile(r'"(/[^"]*)"')
BEGUN = "/begun"  # a file that is opened as an act begins
_INTO_THE_FIRST = {"write", "writev", "pwrite64", "pwritev", "pwritev2", "sendfile", "ftruncate", "fallocate"}


def has_strace() -> bool:
    """Whether this system has strace, and lets it trace."""
    program = shutil.which("strace")
    return (
        program is not None and subprocess.run([program, "-f", "-o", "/dev/null", "true"], check=False).returncode == 0
    )


def traced(command: Sequence[str], log: Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command, with its calls that change files in `log`."""
    words = ["strace", "-f", "--seccomp-bpf", "-y", "-s", "0", "-e", f"trace={CALLS}", "-o", str(log), *command]
    return subprocess.run(words, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]


class Disk:
    """The files below a folder that was empty at first, and what of them a power cut could take.

    Attributes:
        unsynced: files whose data may be lost.
        unnamed: files and folders whose names may be lost.
        faults: what was put in place before it was safe.
        seen: the calls.
    """

    def __init__(self, root: Path) -> None:
        self.unsynced: set[str] = set()
        self.unnamed: set[str] = set()
        self.faults: list[str] = []
        self.seen: list[str] = []
        self._root = str(root)
        self._known: set[str] = set()

    def follow(self, lines: Iterable[str]) -> Disk:
        """Carry out the calls of a log."""
        paused: dict[str, str] = {}
        for line in lines:
            if begun := _PAUSED.match(line):
                paused[begun[1]] = begun[2]
                continue
            if ended := _ENDED.match(line):
                line = f"{ended[1]} {paused.pop(ended[1], '')}{ended[2]}"
            call = _CALL.match(line)
            if call and self._root in line and not call[4].startswith("-"):
                self._see(call[2], call[3])
        return self

    def forget(self) -> None:
        """All that is there is safe."""
        for seen in (self.unsynced, self.unnamed, self.faults, self.seen):
            seen.clear()

    def _see(self, name: str, arguments: str) -> None:
        self.seen.append(name)
        opened = [path for path in _OPENED.findall(arguments) if self._is_here(path)]
        named = [path for path in _NAMED.findall(arguments) if self._is_here(path)]
        if name in _INTO_THE_FIRST:
            target = _OPENED.match(arguments)
            self.unsynced.update({target[1]} & {*opened} if target else ())
        elif name in ("copy_file_range", "splice") and opened:
            self.unsynced.add(opened[-1])
        elif named and named[-1].endswith(BEGUN):
            self.forget()
        elif name in ("open", "openat", "creat") and named and ("O_CREAT" in arguments or name == "creat"):
            self._appear(named[-1])
        elif name in ("fsync", "fdatasync") and opened:
            self.unsynced.discard(opened[0])
            self.unnamed = {path for path in self.unnamed if str(Path(path).parent) != opened[0]}
        elif name in ("mkdir", "mkdirat", "link", "linkat") and named:
            self._appear(named[-1])
        elif name in ("unlink", "unlinkat", "rmdir") and named:
            self._gone(named[-1])
        elif name.startswith("rename") and len(named) == 2:
            self._rename(*named)

    def _rename(self, old: str, new: str) -> None:
        if TEMPORARY not in new:
            for lost in sorted(self._within(self.unsynced, old)):
                self.faults.append(f"{new} was put in place while the data of {lost} were not synced")
            for lost in sorted(self._within(self.unnamed, old) - {old}):
                self.faults.append(f"{new} was put in place while the folder around {lost} was not synced")
        self._gone(new)
        self._move(old, new)
        self._appear(new, is_new=True)

    def _appear(self, path: str, *, is_new: bool = False) -> None:
        if path != self._root and (is_new or path not in self._known):
            self.unnamed.add(path)
        self._known.add(path)

    def _gone(self, path: str) -> None:
        for paths in (self.unsynced, self.unnamed, self._known):
            paths -= self._within(paths, path)

    def _move(self, old: str, new: str) -> None:
        for paths in (self.unsynced, self.unnamed, self._known):
            moved = self._within(paths, old)
            paths -= moved
            paths |= {new + path[len(old) :] for path in moved}

    def _is_here(self, path: str) -> bool:
        return path == self._root or path.startswith(f"{self._root}/")

    @staticmethod
    def _within(paths: set[str], place: str) -> set[str]:
        return {path for path in paths if path == place or path.startswith(f"{place}/")}


# The program


def _file_before_its_data(place: Path) -> None:
    place.mkdir(parents=True)
    (place / "new").write_text("data")
    os.rename(place / "new", place / "made")


def _folder_before_its_files(place: Path) -> None:
    (place / "new").mkdir(parents=True)
    with open(place / "new" / "file", "w") as file:
        file.write("data")
        file.flush()
        os.fsync(file.fileno())
    os.rename(place / "new", place / "made")


def _without_the_folder_around_it(place: Path) -> None:
    place.mkdir(parents=True)
    sync_folder(place)


BAD: dict[str, Callable[[Path], None]] = {
    "a file before its data": _file_before_its_data,
    "a folder before its files": _folder_before_its_files,
    "a new parent folder": _without_the_folder_around_it,
}


def main(root: Path) -> None:
    """Each has a folder of its own, and is given one in it that is not there yet."""
    for name in meeting(POWER_CUT):
        print(f"-- {name}", flush=True)
        (root / name).mkdir(parents=True)
        given = ACTS[name].begin(root / name / "deep" / "er")
        (root / f"{name}{BEGUN}").touch()
        ACTS[name].act(given)
    for name, write in BAD.items():
        (root / name).mkdir()
        write(root / name / "deep" / "er")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
