"""Updates that are put into their place later, together.

Always true:
- a value that waits is a whole file beside its place: all that reads the value reads that file, and no memory is held
- of a value that is updated again only the last one waits
- whatever ends the block, what waits is put into its place, or the error names it
- a process that is killed leaves the values as they were before the block; what waited is swept
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from offload.errors import OffloadError, WriteError
from offload.memory import as_bytes, available_bytes
from offload.storage.locks import fork_safe_lock

if TYPE_CHECKING:
    from offload.storage.file import TensorFile
    from offload.storage.handle import Handle


@dataclass(frozen=True, slots=True)
class Waiting:
    """Where what waits beside its place is to be put, by which process, and what it is to replace."""

    path: Path
    pid: int
    before: TensorFile
    was_owned: bool


class Buffer:
    """The values that wait, the one that was updated longest ago first."""

    def __init__(self, max_bytes: int) -> None:
        self._most = max_bytes
        self._pid = os.getpid()
        self._lock = fork_safe_lock()
        self._waiting: dict[int, Handle] = {}
        self._is_open = True

    @property
    def is_open(self) -> bool:
        """Whether updates may wait here: in the block, and in the process that began it."""
        return self._is_open and self._pid == os.getpid()

    def add(self, handle: Handle) -> None:
        """One more waits; if that makes too many bytes, the oldest go to their places now.

        Raises:
            WriteError: one of those can't, and has its old value.
        """
        with self._lock:
            self._waiting.pop(id(handle), None)
            self._waiting[id(handle)] = handle
        while (oldest := self._one_too_many()) is not None:
            oldest.settle()

    def close(self, outer: Buffer | None) -> None:
        """No more wait here: they go to their places, or wait in `outer`.

        Raises:
            WriteError: some can't, and have their old values.
        """
        with self._lock:
            is_ours, self._is_open = self.is_open, False
            if not is_ours:
                return
            handles = list(self._waiting.values())
            self._waiting.clear()
        failed: list[tuple[str, BaseException]] = []
        for handle in handles:
            try:
                handle.settle() if outer is None else outer.add(handle)
            except BaseException as error:  # the others are whole, and go on
                failed.append((handle.name, error))
        if failed:
            _raise(failed, len(handles))

    def _one_too_many(self) -> Handle | None:
        """The oldest, if too many wait; of those that came when the block was left already, any is one too many."""
        with self._lock:
            total = sum(handle.waiting_bytes for handle in self._waiting.values())
            is_one = total > self._most if self._is_open else bool(self._waiting)
            return self._waiting.pop(next(iter(self._waiting))) if is_one else None


def current_buffer() -> Buffer | None:
    """The one that updates of this thread wait in; None if they don't."""
    buffer = _CURRENT.get()
    return buffer if buffer is not None and buffer.is_open else None


@contextmanager
def write_buffer(max_bytes: int | float | str = "1GiB") -> Iterator[None]:
    """In the block, repeated updates of a value are put into its file once, when the block is left.

    `update_values` waits for the disk each time. Here the new value is written beside the old one and not waited for; a
    later one takes its place. In this process all tensors over the value read the newest; the file, and whoever opens
    it, has the old value until the block is left. Values in private folders are not waited for in any case, and don't
    wait.

    It is left with an exception in the same way: what was updated goes to its place. If that fails the value is the old
    one again, and the error names it. The values of a block within another one wait until the outer one is left. It is
    for the thread that enters it.

    Args:
        max_bytes: how many bytes may wait: a number, "8GiB", or a fraction of the memory that is free. Beyond that,
            what was updated longest ago goes to its place.

    Raises:
        WriteError: some values could not be put into their places.

    Example:
        >>> import tempfile, torch
        >>> from offload import OffloadedTensor, write_buffer
        >>> w = OffloadedTensor.full((2,), 1.0, name="w", offload_dir=tempfile.mkdtemp())
        >>> with write_buffer():
        ...     for _ in range(3):
        ...         w.update_values(w * 2)
        >>> w.tolist()
        [8.0, 8.0]
    """
    outer = current_buffer()
    buffer = Buffer(as_bytes(max_bytes, available_bytes()))
    before = _CURRENT.get()
    try:
        _CURRENT.set(buffer)
        yield
    finally:
        _CURRENT.set(before)
        buffer.close(outer)


def _raise(failed: list[tuple[str, BaseException]], count: int) -> None:
    _, first = failed[0]
    other = next((error for _, error in failed if not isinstance(error, OffloadError)), None)
    if other is not None:
        raise other
    names = ", ".join(repr(name) for name, _ in failed)
    reason = f"{len(failed)} of {count} values that were updated could not be written ({names}): {first}"
    raise WriteError(getattr(first, "errno", None), reason) from first


_CURRENT: ContextVar[Buffer | None] = ContextVar("offload_write_buffer", default=None)
