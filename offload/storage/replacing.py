"""How a file or a folder is put in place: whole, or not at all.

Always true:
- a file is only ever replaced by a complete one, in one step; nothing is written through a symlink
- after a failure or an interrupt, the old file is intact and nothing temporary is left; what a killed process left is
  swept later
- a file that replaces another gets its mode, and its owner where possible, before any data
- durable files are on the disk before they get their name
- only files with our temporary names are removed: this process's own, and those of dead processes of this machine
- a tag identifies one process of one machine (and one pid namespace), even after its pid is reused
- only processes of this machine can be declared dead, and only on the system's word: a hidden one counts as alive
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from offload.errors import ForeignFileError, WriteError
from offload.storage import log
from offload.system.reasons import reading, writing
from offload.system.regular import is_there, owned

TEMPORARY = ".offload-tmp-"


class New(NamedTuple):
    """A file that is to be put in place: its descriptor, and its temporary path."""

    fd: int
    path: Path


@contextmanager
def replacing(
    path: Path,
    size: int = 0,
    *,
    place: str = "folder",
    durable: bool = True,
    placed: Callable[[], object] | None = None,
) -> Iterator[New]:
    """A new file beside `path` that replaces it if the block succeeds, and is removed if not.

    Whatever is there is replaced, even a symlink: check first. `size` bytes are reserved, so that a full disk is an
    error before anything is written. For other arguments and errors see `replacing_all`.
    """
    with (
        replacing_all([path], size, place=place, durable=durable, placed=placed) as new,
        new_file(new[path], size, like=path, durable=durable) as fd,
    ):
        yield New(fd, new[path])


@contextmanager
def replacing_all(
    paths: Sequence[Path],
    size: int,
    *,
    place: str = "folder",
    durable: bool = True,
    placed: Callable[[], object] | None = None,
) -> Iterator[dict[Path, Path]]:
    """Temporary names beside `paths`: what is made there is put in place if the block succeeds, and removed if not.

    The last path is the one that counts (an index, say): it is put in place once all others, whose places must be free,
    are safely there. `size` and `place` are as for `writing`.

    Args:
        durable: whether all of it survives a power cut once the block has ended.
        placed: called as soon as all is in place: from then on no error removes it.

    Raises `WriteError` if the disk is full, the folder is read-only...
    """
    *others, last = paths
    with writing(last.parent if others else last, size, place):
        temporaries = {path: path.with_name(temporary_name()) for path in paths}
        try:
            yield temporaries
            for path in others:
                os.replace(temporaries[path], path)
            if others:
                sync_folder(last.parent)
            os.replace(temporaries[last], last)
        except BaseException:
            if os.path.lexists(temporaries[last]):
                for path in others:
                    remove(path)
            for temporary in temporaries.values():
                remove(temporary)
            raise
    if placed is not None:
        placed()
    if durable:
        sync_folder(last.parent)


def is_filled(path: Path) -> bool:
    """Whether something other than an empty folder is there. Raises `ReadError`."""
    with reading(path):
        return is_there(path) and (path.is_symlink() or not path.is_dir() or any(path.iterdir()))


def refuse_filled(path: Path) -> None:
    """Raises `ForeignFileError` if something other than an empty folder is there; `ReadError`."""
    if is_filled(path):
        raise ForeignFileError(f"{path} exists, and is not an empty folder: take another one, or remove it first")


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A new folder that is put at `path` if the block succeeds, and is removed if not.

    Raises `ForeignFileError` if something other than an empty folder is there, before or after; `WriteError`.
    """
    refuse_filled(path)
    made_folder(path.parent)
    with replacing_all([path], 0) as new:
        new[path].mkdir()
        yield new[path]
        sync_folder(new[path])
        refuse_filled(path)


def put_file(path: Path, data: bytes, size: int = 0, *, durable: bool = True) -> None:
    """Put a small file of ours in place, extended to `size` with zeros that take no disk space.

    Without `durable`, a power cut may leave it torn until it is synced.

    Raises `WriteError` if the disk is full, the folder is read-only...
    """
    with replacing(path, len(data), durable=durable) as (fd, _):
        write_all(fd, memoryview(data), 0)
        os.ftruncate(fd, max(size, len(data)))


@contextmanager
def new_file(path: Path, size: int, *, like: Path | None = None, durable: bool = True) -> Iterator[int]:
    """A descriptor of a new file of `size` bytes with disk space reserved; the caller removes what is left on failure.

    It gets the mode and owner of the file at `like`, if given. Raises `OSError` from the system; see `writing`.
    """
    with owned(os.open, path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666) as file:
        fd = file.fileno()
        if like is not None:
            _take_access(fd, like)
        _reserve(fd, size)
        yield fd
        if durable:
            os.fsync(fd)


def _take_access(fd: int, path: Path) -> None:
    """Give a new file the mode of the one at `path`, if there is one, and its owner and group where permitted."""
    try:
        old = os.stat(path, follow_symlinks=False)
    except OSError:
        return
    for owner in (old.st_uid, -1):
        with suppress(OSError):
            os.fchown(fd, owner, old.st_gid)
            break
    with suppress(OSError):  # file systems without modes
        os.fchmod(fd, stat.S_IMODE(old.st_mode))


def _reserve(fd: int, size: int) -> None:
    """Give the file its full size, with blocks, so that a full disk is an error here and not a SIGBUS later."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(fd, size)


def write_all(fd: int, data: memoryview, at: int) -> int:
    """Write bytes at an offset; the system may take fewer per call than it is given."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done : done + (1 << 30)], at + done)
    return done


def made_folder(folder: Path, size: int = 0, place: str = "folder") -> None:
    """Prepare a folder for writing: created if missing, with what killed processes left in it removed.

    `size` and `place` are as for `writing`.

    Raises `WriteError`.
    """
    with writing(folder, size, place):
        create_folder(folder)
        sweep(folder)


def create_folder(folder: Path) -> None:
    """Create a folder, with those around it, unless it is there; it survives a power cut.

    Raises:
        OSError: from the system; see `writing`.
    """
    missing = [*takewhile(lambda path: not os.path.isdir(path), (folder, *folder.parents))]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


# Temporary names


def temporary_for(path: Path) -> Path:
    """An unused temporary name beside `path`; what a killed process leaves under it is swept.

    Raises `WriteError` if the system does not tell which process this is.
    """
    with writing(path):
        return path.with_name(temporary_name())


def temporary_name(prefix: str = TEMPORARY) -> str:
    """Raises `OSError` if the system does not tell which process this is."""
    return f"{prefix}{process_tag()}-{secrets.token_hex(4)}"


def sweep(folder: Path, prefix: str = TEMPORARY) -> None:
    """Remove the temporary files and folders that killed processes left in a folder.

    Raises `OSError` if it can't be listed.
    """
    with os.scandir(folder) as items:
        leftovers = [Path(item.path) for item in items if item.name.startswith(prefix)]
    for path in leftovers:
        if is_dead(path.name.removeprefix(prefix).rpartition("-")[0]):
            log.info("%s was left by a process that has ended, and is removed", path)
            remove(path)


def remove(path: Path) -> None:
    """Remove a temporary file or folder if it exists and the system allows it; what stays is swept later.

    An interrupt of `shutil.rmtree` could leave a folder open, or close its descriptor twice (Python 3.11).
    """
    with suppress(OSError):
        path.unlink()
        return
    for place, folders, files in os.walk(path, topdown=False):
        for name in files:
            with suppress(OSError):
                os.unlink(Path(place, name))
        for name in folders:
            with suppress(OSError):
                (os.unlink if os.path.islink(Path(place, name)) else os.rmdir)(Path(place, name))
    with suppress(OSError):
        os.rmdir(path)


def remove_folder(path: Path) -> None:
    """Remove a folder of ours; its name disappears first, so that no half-removed folder is ever seen there.

    Raises `OSError` if it could not be removed.
    """
    aside = temporary_for(path)
    try:
        os.rename(path, aside)
        remove(aside)
    except BaseException:
        remove(aside)
        raise


def sync_whole(folder: Path) -> None:
    """Make a folder with all that is in it survive a power cut, whoever wrote it: other packages do not sync files.

    Raises `WriteError` if the disk failed.
    """
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            path = Path(place, name)
            with writing(path), owned(os.open, path, os.O_RDONLY | os.O_CLOEXEC) as opened:
                os.fsync(opened)
        sync_folder(Path(place))


def sync_folder(folder: Path) -> None:
    """Make what was put in a folder survive a power cut, on file systems that can sync folders.

    Raises:
        WriteError: the disk failed. What was put there is in place, but may not survive a power cut.
    """
    try:
        with owned(os.open, folder, os.O_RDONLY | os.O_CLOEXEC) as opened:
            os.fsync(opened)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP):
            reason = f"what was written may be lost in a power cut ({error.strerror}): write it again, elsewhere"
            raise WriteError(error.errno, reason, str(folder)) from error


# Which process left a file, and whether it is still alive


def process_tag() -> str:
    """`machine-pid-start` of the running process, in letters and digits.

    Raises `OSError` if the system does not tell, because too many files are open, for example.
    """
    return _tag(os.getpid())


def is_dead(tag: str) -> bool:
    """True if the process of this tag ran on this machine and has ended; False if that can't be determined."""
    machine, _, rest = tag.partition("-")
    pid, _, start = rest.partition("-")
    try:
        if machine != _machine() or not pid.isdecimal() or not start:
            return False
        now = _start(int(pid))
        return now != start if now else not _is_hidden(int(pid))
    except OSError:
        return False


@lru_cache(maxsize=4)
def _tag(pid: int) -> str:
    return f"{_machine()}-{pid}-{_start(pid)}"


def _start(pid: int) -> str:
    """When a process began, in clock ticks since boot, which clock adjustments don't affect.

    Empty if there is no such process, if it is a zombie, or if it is hidden.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _is_hidden(pid: int) -> bool:
    """True for a living process of another user that can't be looked up (`/proc` mounted with `hidepid`)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return False


@lru_cache(maxsize=1)
def _machine() -> str:
    """Host name, machine id and pid namespace: containers and machines that share a folder differ in at least one."""
    marks = [socket.gethostname()]
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        marks.append(Path("/etc/machine-id").read_text(encoding="utf-8", errors="replace").strip())
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        marks.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256(" ".join(marks).encode()).hexdigest()[:8]
