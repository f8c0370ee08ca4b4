"""The tensors of a waiting batch: how much memory they take, and spilling them to disk.

Always true:
- a storage is written once, whichever tensors share it; its memory is then mapped from the file, so that all see it
- only what a module of the model has just created is spilled, and only memory that torch allocated
- a file has no name, and disappears with its batch
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO

import torch

from offload.errors import ReadError, WriteError
from offload.prefetch.pages import PAGE, bring_in
from offload.storage.folders import private_folder
from offload.storage.mapping import swapped_in, swapped_out, view_memory
from offload.storage.modes import no_functions, no_modes
from offload.torch_api import storage_id

_LEAST = 64 << 10  # smallest size in bytes that is worth spilling
_DEPTH = 4  # nesting depth of objects that are searched for tensors
_DEPTH_OF_CACHES = 6  # including the layers of KV caches


def tensors_in(given: object, *, caches: bool = False, own: bool = False) -> list[torch.Tensor]:
    """The plain tensors in a module's arguments or results: in lists, dictionaries, and objects.

    Args:
        given: what to search.
        caches: whether to search the layers of KV caches, too.
        own: whether to include parameters.
    """
    kinds = (torch.Tensor, torch.nn.Parameter) if own else (torch.Tensor,)
    return list(_tensors(given, _DEPTH_OF_CACHES if caches else _DEPTH, kinds))


def _tensors(given: object, depth: int, kinds: tuple[type, ...]) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        if type(given) in kinds and given.device.type != "meta" and given.layout == torch.strided:
            yield given
    elif depth and not isinstance(given, str | bytes | int | float | torch.nn.Module | None):
        if isinstance(given, dict):
            parts: Iterable[object] = given.values()
        elif isinstance(given, list | tuple | set):
            parts = given
        else:
            parts = getattr(given, "__dict__", {}).values()
        for part in list(parts):
            yield from _tensors(part, depth - 1, kinds)


class Spilled:
    """Storages on disk, in an unnamed file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._storages: list[torch.UntypedStorage] = []  # those in the file

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor], made: Iterable[torch.Tensor]) -> Spilled | None:
        """Write to disk those of these tensors that were just created and are not small; None if there are none.

        Raises:
            WriteError: the disk failed; the data is still in memory.
        """
        given = storages_of(made)
        found = [storage for key, storage in storages_of(tensors).items() if key in given and storage.resizable()]
        large = [storage for storage in found if storage.nbytes() >= _LEAST and not storage.is_pinned()]
        if not large:
            return None
        folder = private_folder()
        try:
            spilled = cls(tempfile.TemporaryFile(dir=folder, buffering=0))  # noqa: SIM115  it is closed with the spilled
            try:
                for storage in large:
                    spilled._put(storage)
            except OSError:
                spilled.bring_back()
                raise
        except OSError as error:
            message = f"waiting states can't be written to disk ({error.strerror}): call map_batches with spill=False"
            raise WriteError(error.errno, message, str(folder)) from error
        return spilled

    def _put(self, storage: torch.UntypedStorage) -> None:
        address, size = _pages(storage)
        start = self._file.tell()
        left = view_memory(address, size)
        while left:
            left = left[self._file.write(left) :]
        swapped_out(address, size, self._file.fileno(), start)
        self._storages.append(storage)

    def announce(self) -> None:
        """Start reading it in the background."""
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def bring_back(self) -> None:
        """Bring the storages back into memory, if they are not.

        Raises:
            ReadError: the disk failed.
        """
        if self._file.closed:
            return
        with self._file:
            while self._storages:
                address, size = _pages(self._storages[-1])
                try:
                    bring_in(address, size)
                    swapped_in(address, size)
                except OSError as error:
                    message = f"the spilled states of a batch can't be read ({error.strerror})"
                    raise ReadError(error.errno, message) from error
                self._storages.pop()


def _pages(storage: torch.UntypedStorage) -> tuple[int, int]:
    """The pages that lie entirely in this storage: address and length."""
    first = -(-storage.data_ptr() // PAGE) * PAGE
    return first, (storage.data_ptr() + storage.nbytes()) // PAGE * PAGE - first


def waiting_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """How much memory tensors take, counting shared memory once."""
    return sum(storage.nbytes() for storage in storages_of(tensors).values())


def storages_of(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """The storages in main memory, by id."""
    with no_functions(), no_modes():
        storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return {storage_id(storage): storage for storage in storages}
