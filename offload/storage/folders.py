"""The folders that tensors live in, the user's and private temporary ones, and how their files are named.

Always true:
- in a folder named by the user, files stay until the user removes them
- a private folder is removed when its process ends; that of a killed process is swept by a later one
- two live values of one process never share a path, nor do values of two ranks
- `file_name` is injective, even where the file system folds case: it uses only `a-z 0-9 . _ - % ~`, at most 200
  bytes; a longer name is cut and gets a hash, and the true name is in the file's header
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import shutil
import string
import tempfile
import weakref
from contextlib import suppress
from multiprocessing import util
from pathlib import Path

from offload.errors import ArgumentError, ArgumentTypeError, NameInUseError, WriteError
from offload.importing import imported
from offload.storage import log
from offload.storage.replacing import made_folder, sweep, temporary_name
from offload.system.locks import fork_safe_lock, lock_range, unlock_range
from offload.system.reasons import naming, writing
from offload.system.regular import Descriptor, absolute, is_folder, owned

SUFFIX = ".safetensors"
_PLAIN = frozenset(string.ascii_lowercase + string.digits + "._-")
_LONGEST = 188
_TAKEN = "__metadata__"

_PRIVATE = "offload-"
_RANKS = ".offload-ranks"  # in a named folder: one lockable byte per name in use by a rank
_LOCK = fork_safe_lock()
_CLAIMS: weakref.WeakValueDictionary[Path, object] = weakref.WeakValueDictionary()
_PREPARED: set[tuple[int, Path]] = set()
_RANK_CLAIMS: dict[tuple[int, Path], Descriptor] = {}
_PRIVATE_FOLDERS: dict[tuple[int, Path | None], Path] = {}
_NUMBERS = itertools.count(1)


def named_folder(offload_dir: str | os.PathLike[str]) -> Path:
    """The user's folder, created if missing, with what killed processes left in it removed.

    Raises `WriteError` if it can't be made, or is not a folder; `ReadError` if the system does not tell.
    """
    folder = absolute(offload_dir)
    with _LOCK:
        if (os.getpid(), folder) not in _PREPARED or not is_folder(folder):
            made_folder(folder, place="offload_dir")
        _PREPARED.add((os.getpid(), folder))
    return folder


def private_folder(root: Path | None = None) -> Path:
    """This process's own temporary folder below `root` (None: `TMPDIR`); removed when the process ends.

    Raises `WriteError` if it can't be made; `ReadError` if it can't be read at the moment.
    """
    with _LOCK:
        folder = _PRIVATE_FOLDERS.get((os.getpid(), root))
        if folder is None or not is_folder(folder):
            folder = _PRIVATE_FOLDERS[os.getpid(), root] = _new_private_folder(root)
            # Runs at the end of a `multiprocessing` child too, unlike `atexit`; does nothing in another process.
            util.Finalize(None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=0)
        return folder


def _new_private_folder(root: Path | None) -> Path:
    try:
        root = root or Path(tempfile.gettempdir())
        with suppress(OSError):
            sweep(root, _PRIVATE)
        folder = Path(os.path.realpath(root), temporary_name(_PRIVATE))
        folder.mkdir(mode=0o700)
        log.debug("values without a folder go to %s", folder)
        return folder
    except OSError as error:
        message = f"no temporary folder can be made ({error.strerror}): set TMPDIR, or give an offload_dir"
        raise WriteError(error.errno, message, str(root or "TMPDIR")) from error


def claim(name: str, folder: Path | None, owner: object, root: Path | None = None) -> Path:
    """The path for the value `name` of `owner`, in `folder` or in a private folder below `root`.

    Raises `NameInUseError` if a live value of this process already has that path.
    """
    file = file_name(name)
    with _LOCK:
        with naming(name):
            path = _free_private_path(file, private_folder(root)) if folder is None else folder / file
        place = path if folder is None else _true(path)
        if _CLAIMS.setdefault(place, owner) is not owner:
            gc.collect()  # a dropped model may still be waiting in a reference cycle
        if _CLAIMS.setdefault(place, owner) is not owner:
            raise NameInUseError(
                f"the name {name!r} is in use in {path.parent}: a live tensor is stored there. "
                "Take another name or folder, use update_values on that tensor, or drop it first."
            )
        return path


def claim_among_ranks(path: Path, owner: object) -> None:
    """If several ranks run, reserve a path in a named folder for this one, as long as `owner` lives.

    Raises `NameInUseError` if another rank holds it; `WriteError`, `ReadError` if its folder can't be used.
    """
    if not _is_rank():
        return
    claims, place = path.parent / _RANKS, int.from_bytes(hashlib.sha256(path.name.encode()).digest()[:7])
    with _LOCK:
        opened = _RANK_CLAIMS.get((os.getpid(), claims))
        if opened is None:
            with writing(claims, place="offload_dir"):
                opened = owned(os.open, claims, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            _RANK_CLAIMS[os.getpid(), claims] = opened
        fd = opened.fileno()
    if not lock_range(fd, claims, place, 1):
        raise NameInUseError(
            f"{path} is written by another rank: give each rank an offload_dir of its own, or pass it the tensor "
            "(torch.multiprocessing, offload.by_reference), so that both write to one value"
        )
    weakref.finalize(owner, unlock_range, fd, claims, place, 1).atexit = False


def _is_rank() -> bool:
    """Whether this process is one of several, according to torchrun or torch.distributed."""
    world_size = os.environ.get("WORLD_SIZE", "")
    is_initialized = imported("torch.distributed", "is_initialized")
    if is_initialized is not None and is_initialized():
        return bool(imported("torch.distributed", "get_world_size")() > 1)
    return world_size.isdecimal() and int(world_size) > 1


def release(path: Path, owner: object) -> None:
    """Take back a claim that was not used."""
    with _LOCK:
        if _CLAIMS.get(_true(path)) is owner:
            del _CLAIMS[_true(path)]


def discard(path: Path) -> None:
    """Remove a file from a private folder: the last tensor on it is gone."""
    with suppress(OSError):
        path.unlink()


def _true(path: Path) -> Path:
    """The path with symlinked folders resolved: two routes to one folder count as one."""
    return Path(os.path.realpath(path.parent), path.name)


def _free_private_path(file: str, root: Path) -> Path:
    """A path in a private folder; numbered if the name is taken there."""
    path = root / file
    while path in _CLAIMS or os.path.lexists(path):  # an interrupt may have left a file
        path = root / f"{next(_NUMBERS)}~{file}"
    return path


def file_name(name: str) -> str:
    """The name of the file that stores the tensor called `name`.

    Raises `ArgumentTypeError` if `name` is not text; `ArgumentError` if it is empty, not valid unicode, or reserved by
    the file format.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(f"a tensor's name must be text, not {name!r}: it is the name of its file")
    if not name:
        raise ArgumentError("a tensor's name must not be empty: it is the name of its file")
    if name == _TAKEN:
        raise ArgumentError(f"a tensor can't be called {_TAKEN!r}, which safetensors files use for themselves")
    try:
        stem = "".join(char if char in _PLAIN else "".join(f"%{byte:02x}" for byte in char.encode()) for char in name)
    except UnicodeEncodeError as error:
        raise ArgumentError(f"a tensor's name must be valid unicode, not {error.object!r}") from error
    if stem[0] == ".":
        stem = f"%2e{stem[1:]}"
    if len(stem) > _LONGEST:
        stem = f"{stem[: _LONGEST - 34]}%~{hashlib.sha256(name.encode()).hexdigest()[:32]}"
    return stem + SUFFIX
