"""Fault injection: system calls that fail, and processes that die at one.

Always true:
- only calls made by `offload`, directly or through the standard library, in the thread that asked, count; calls in
  all threads only if requested
- a failed call is not made; a write at which a process dies is half done
- nothing is patched outside the blocks

The campaign `faults` tries every call, not only the first and the last one from each line.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import fcntl
import functools
import gc
import inspect
import io
import mmap
import os
import pickle
import signal
import sys
import sysconfig
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeAlias, TypeVar
from unittest import mock

import offload
from offload.storage.folders import _PRIVATE
from offload.storage.mapping import libc
from offload.storage.replacing import sweep
from offload.system.regular import owned
from tests.campaigns import campaign
from tests.processes import ended, forked

T = TypeVar("T")
Before: TypeAlias = "Callable[[Call, Callable[[], object], tuple[Any, ...]], None]"
CODES = (errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EACCES, errno.EINTR, errno.ENOMEM)


@dataclass(frozen=True, slots=True)
class Call:
    """A system call: its name, and the line of `offload` from which it comes."""

    name: str
    where: str
    changes: bool

    def __str__(self) -> str:
        return f"{self.name} at {self.where}"


@dataclass(slots=True)
class Fault:
    """What `failing` should do, and the call that it failed; None if there was none."""

    index: int
    code: int
    call: Call | None = None


@dataclass(frozen=True, slots=True)
class Failure(Generic[T]):
    """The outcome of one fault."""

    call: Call
    code: int
    given: T  # what `begin` returned
    error: BaseException | None  # from `act`
    result: Any  # what it returned if it succeeded in spite of the fault
    leaked: list[str]  # descriptors left open, and their files

    def __str__(self) -> str:
        return f"{errno.errorcode[self.code]} of {self.call}: {self.error!r}"


@contextmanager
def watched(*, all_threads: bool = False) -> Iterator[list[Call]]:
    """The calls made in the block, in order."""
    calls: list[Call] = []
    with _patched(lambda call, *_: calls.append(call), all_threads=all_threads):
        yield calls


def seen(before: Before) -> AbstractContextManager[None]:
    """In the block, `before` is called with each call, of any thread."""
    return _patched(before, all_threads=True)


@contextmanager
def failing(
    index: int, code: int, *, lasting: bool = False, only: Callable[[Call], bool] = bool, all_threads: bool = False
) -> Iterator[Fault]:
    """In the block, call number `index` of those that count (`only`) fails with errno `code`.

    If it is `lasting`, so do all later ones, except those that remove something.
    """
    fault, seen = Fault(index, code), 0

    def before(call: Call, *_: object) -> None:
        nonlocal seen
        if not only(call):
            return
        seen += 1
        if seen - 1 == index or (lasting and seen > index and call.name not in REMOVES):
            fault.call = fault.call or call
            raise OSError(code, os.strerror(code))

    with _patched(before, all_threads=all_threads):
        yield fault


@contextmanager
def killed(index: int) -> Iterator[None]:
    """In the block, this process dies at its file-changing call number `index`; in the middle of it if it writes."""
    seen = 0

    def before(call: Call, half: Callable[[], object], _: object) -> None:
        nonlocal seen
        seen += call.changes
        if call.changes and seen - 1 == index:
            half()
            os.kill(os.getpid(), signal.SIGKILL)

    with _patched(before):
        yield


def each_failure(
    begin: Callable[[], T],
    act: Callable[[T], object],
    codes: Iterable[int] = CODES,
    *,
    lasting: bool = False,
    all_threads: bool = False,
) -> Iterator[Failure[T]]:
    """Make `act` fail at each of its calls, with each of the `codes` possible for it, and yield the outcomes.

    `begin` is called before each run, and its result passed to `act`; there is one run without a fault, too.
    """
    act(begin())  # things done once per process
    given = begin()
    with watched(all_threads=all_threads) as calls:
        act(given)
    del given
    gc.freeze()  # existing objects need not be scanned each time
    try:
        for code in codes:
            only = functools.partial(may_fail, code=code)
            for index in sampled(list(filter(only, calls))):
                given, error, result = begin(), None, None
                before = descriptors()
                with failing(index, code, lasting=lasting, only=only, all_threads=all_threads) as fault:
                    try:
                        result = act(given)
                    except Exception as caught:
                        error = caught
                if fault.call is not None:
                    forget_frames(error)
                    yield Failure(fault.call, code, given, error, result, left_open(before))
                del given, error, result
    finally:
        gc.unfreeze()


def killed_at_each(
    begin: Callable[[], T], act: Callable[[T], object], check: Callable[[T, Call], object]
) -> list[Call]:
    """Kill a forked child at each call of `act` that changes files, and `check` here what it leaves; these calls.

    `begin` is called here before each run; its result is passed to `act` and `check`. If values get private folders,
    these should be created in a folder of the test's own (`private_place`): children sweep what dead processes left.
    """
    calls = [call for call in _calls_in_child(act, _begun(begin)) if call.changes]
    chosen = sampled(calls)
    for index in chosen:
        given = _begun(begin)
        status = ended(forked(functools.partial(_act_killed, act, given, index)))
        assert status == -signal.SIGKILL, f"{calls[index]}: it ended with {status}"
        try:
            check(given, calls[index])
        except BaseException as error:
            raise AssertionError(f"killed at call {index} that changes files: {calls[index]}") from error
    return [calls[index] for index in chosen]


def may_fail(call: Call, code: int) -> bool:
    """Whether such a call can fail like this."""
    name = call.name.rpartition(".")[2]
    if code == errno.ENOMEM or name == "anonymous":
        return code == errno.ENOMEM and name in ("mmap", "anonymous")
    if code in (errno.ENOSPC, errno.EDQUOT):
        return call.changes and call.name not in REMOVES
    if code in (errno.EMFILE, errno.ENFILE):
        return name in ("open", "scandir", "listdir", "mmap") and call.name != "libc.mmap"
    if code in (errno.EACCES, errno.EPERM):
        return call.name in _OF_PATHS
    if code == errno.ENODEV:
        return name == "mmap"
    if code == errno.EINTR:  # Python retries the call
        return call.name.startswith("libc.")
    return True


def sampled(calls: Sequence[Call]) -> list[int]:
    """Indexes of the first and last call of each kind from each line; of all calls in the campaign."""
    if campaign("faults"):
        return list(range(len(calls)))
    last = {call: index for index, call in enumerate(calls)}
    first = {call: index for index, call in reversed(list(enumerate(calls)))}
    return sorted({*first.values(), *last.values()})


def forget_frames(error: BaseException | None) -> None:
    """Drop the local variables kept alive by an error and its causes."""
    while error is not None:
        if error.__traceback__ is not None:
            traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


# Patching

REMOVES = {"os.unlink", "os.remove", "os.rmdir"}
_CHANGES = {
    *REMOVES,
    *(f"os.{name}" for name in ("mkdir", "posix_fallocate", "ftruncate", "truncate", "pwrite", "pwritev", "write")),
    *(f"os.{name}" for name in ("sendfile", "copy_file_range", "fsync", "fdatasync", "replace", "rename", "link")),
    *(f"os.{name}" for name in ("symlink", "chmod", "fchmod", "chown", "fchown", "utime")),
    *("file.write", "file.truncate"),
}
_OF_PATHS = {
    *REMOVES,
    *(f"os.{name}" for name in ("open", "stat", "lstat", "scandir", "listdir", "mkdir", "replace", "rename", "link")),
    *("open", "os.symlink", "os.chmod", "os.chown", "os.utime", "os.readlink", "os.truncate"),
}
_READS = {f"os.{name}" for name in ("fstat", "read", "pread", "preadv", "lseek", "posix_fadvise")}
_OS = {name.removeprefix("os.") for name in _CHANGES | _OF_PATHS | _READS if name.startswith("os.")}
_HALVED = {"os.write": 1, "os.pwrite": 1, "os.sendfile": 3, "file.write": 1}  # which argument is the size to write
_OPEN = inspect.signature(io.open)
_OURS = str(Path(offload.__file__).parent) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep


@contextmanager
def _patched(before: Before, *, all_threads: bool = False) -> Iterator[None]:
    """In the block, `before` is called with each call that counts, a function that does half of it, and arguments."""
    own, inside = threading.get_ident(), set()

    def count(name: str, half: Callable[[], object], *args: Any, creates: bool = False) -> None:
        thread = threading.get_ident()
        where = None if thread in inside or not (all_threads or thread == own) else _place(sys._getframe(2))
        if where is None:
            return
        inside.add(thread)
        try:
            before(Call(name, where, creates or name in _CHANGES), half, args)
        finally:
            inside.discard(thread)

    with ExitStack() as patches:
        for patch in _patches(count):
            patches.enter_context(patch)
        yield


def _patches(count: Callable[..., None]) -> Iterator[Any]:
    for name in sorted(_OS):
        yield mock.patch.object(os, name, _counting(getattr(os, name), f"os.{name}", count))
    opening = _opening(io.open, count)
    for module in (builtins, io):
        yield mock.patch.object(module, "open", opening)
    yield mock.patch.object(mmap, "mmap", _mapping(count))
    yield mock.patch.object(fcntl, "flock", _counting(fcntl.flock, "fcntl.flock", count))
    for name, failed in (("mmap", ctypes.c_void_p(-1).value), ("madvise", -1), ("sync_file_range", -1)):
        yield mock.patch.object(libc, name, _libc_call(getattr(libc, name), name, failed, count))


def _counting(real: Callable[..., Any], name: str, count: Callable[..., None]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        creates = name == "os.open" and bool((args[1] if len(args) > 1 else kwargs["flags"]) & os.O_CREAT)
        count(name, lambda: _half(real, args, _HALVED.get(name)), *args, creates=creates)
        return real(*args, **kwargs)

    return counted


def _half(real: Callable[..., Any], args: Sequence[Any], place: int | None) -> None:
    if place is not None:
        much = args[place]
        half = much // 2 if isinstance(much, int) else memoryview(much).cast("B")[: memoryview(much).nbytes // 2]
        real(*args[:place], half, *args[place + 1 :])


def _opening(real: Callable[..., Any], count: Callable[..., None]) -> Callable[..., Any]:
    class Counted(io.FileIO):
        readinto = _counting(io.FileIO.readinto, "file.read", count)
        readall = _counting(io.FileIO.readall, "file.read", count)
        truncate = _counting(io.FileIO.truncate, "file.truncate", count)
        write = _counting(io.FileIO.write, "file.write", count)

    def opened(*args: Any, **kwargs: Any) -> Any:
        if _place(sys._getframe(1)) is None:
            return real(*args, **kwargs)
        given = _OPEN.bind(*args, **kwargs)
        given.apply_defaults()
        file, mode, buffering, *text, closefd, opener = given.arguments.values()
        count("open", lambda: None, file, creates=any(letter in mode for letter in "wxa"))
        raw = Counted(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        kind = io.BufferedRandom if "+" in mode else io.BufferedReader if "r" in mode else io.BufferedWriter
        return kind(raw) if "b" in mode else io.TextIOWrapper(kind(raw), *text)

    return opened


def _mapping(count: Callable[..., None]) -> type[mmap.mmap]:
    class Counted(mmap.mmap):
        def __new__(cls, fileno: int, *args: Any, **kwargs: Any) -> Any:
            count("mmap.mmap" if fileno >= 0 else "mmap.anonymous", lambda: None)
            return super().__new__(cls, fileno, *args, **kwargs)

        def flush(self, *args: Any) -> None:
            count("mmap.flush", lambda: None)
            super().flush(*args)

    return Counted


def _libc_call(real: Any, name: str, failed: int | None, count: Callable[..., None]) -> Callable[..., Any]:
    """A libc function whose return value reports failure."""

    def counted(*args: Any) -> Any:
        try:
            count(f"libc.{name}", lambda: None)
        except OSError as error:
            ctypes.set_errno(error.errno or 0)
            return failed
        return real(*args)

    return counted


def _place(frame: FrameType | None) -> str | None:
    """The line of `offload` that makes a call, directly or through the standard library; None for other calls."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OURS) and frame.f_code is not owned.__code__:  # that opens for all: what counts is for whom
            return f"{file.removeprefix(_OURS)}:{frame.f_lineno} {frame.f_code.co_name}"
        is_between = file.startswith((__file__, _OURS, "<frozen ", _STDLIB))
        if not is_between or "site-packages" in file:
            return None
        frame = frame.f_back
    return None


def descriptors() -> dict[str, str]:
    folder = "/proc/self/fd"
    found = {}
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        try:
            found[name] = os.readlink(f"{folder}/{name}")
        except OSError:
            continue  # the listing's own
    return found


def left_open(before: dict[str, str]) -> list[str]:
    if set(descriptors()) - set(before):
        gc.collect()
    return [f"{name}: {of}" for name, of in descriptors().items() if name not in before]


def _begun(begin: Callable[[], T]) -> T:
    """The result of `begin`, without private folders of earlier children: each child makes the same calls."""
    given = begin()
    sweep(Path(tempfile.gettempdir()), _PRIVATE)
    return given


def _calls_in_child(act: Callable[[T], object], given: T) -> list[Call]:
    into, out = os.pipe()

    def tell() -> None:
        with watched() as calls:
            act(given)
        with open(out, "wb") as pipe:
            pickle.dump(calls, pipe)

    pid = forked(tell)
    os.close(out)
    with open(into, "rb") as pipe:
        told = pipe.read()
    status = ended(pid)
    assert status == 0, f"without a fault it ended with {status}"
    calls: list[Call] = pickle.loads(told)
    return calls


def _act_killed(act: Callable[[T], object], given: T, index: int) -> None:
    with killed(index):
        act(given)
