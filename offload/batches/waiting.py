"""The tensors of a batch that waits: how much they take, and how they go to disk.

Always true:
- a storage goes once, whichever tensors share it; the tensors stay what they are, and find their values again
- only what a module of the model has given goes: nobody else knows it yet
- what numpy shares, or somebody mapped, stays: it can't be moved
- a file has no name, and is gone with its batch
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO, Any

import torch

from offload.errors import ReadError, WriteError
from offload.storage.folders import private_folder
from offload.storage.mapping import view_memory
from offload.storage.modes import no_functions, no_modes
from offload.torch_api import storage_id

_LEAST = 64 << 10  # bytes that are worth a file
_DEPTH = 4  # of objects in objects that tensors are looked for in
_DEPTH_OF_CACHES = 6  # with the layers of KV caches


def tensors_in(given: Any, *, caches: bool = False, own: bool = False) -> list[torch.Tensor]:
    """The plain tensors in what a module takes or gives: in lists, dictionaries, and objects.

    Args:
        given: to look in.
        caches: whether in the layers of KV caches too.
        own: whether parameters count.
    """
    kinds = (torch.Tensor, torch.nn.Parameter) if own else (torch.Tensor,)
    return list(_tensors(given, _DEPTH_OF_CACHES if caches else _DEPTH, kinds))


def _tensors(given: Any, depth: int, kinds: tuple[type, ...]) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        if type(given) in kinds and given.device.type != "meta" and given.layout == torch.strided:
            yield given
    elif depth and not isinstance(given, str | bytes | int | float | torch.nn.Module | None):
        if isinstance(given, dict):
            parts: Iterable[Any] = given.values()
        elif isinstance(given, list | tuple | set):
            parts = given
        else:
            parts = getattr(given, "__dict__", {}).values()
        for part in list(parts):
            yield from _tensors(part, depth - 1, kinds)


class Parcel:
    """Storages on disk, in a file without a name."""

    def __init__(self, file: IO[bytes], storages: list[tuple[torch.UntypedStorage, int]]) -> None:
        self._file = file
        self._storages = storages  # and their sizes, as they follow one another in the file

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor], made: Iterable[torch.Tensor]) -> Parcel | None:
        """Put on disk what of these tensors was just made, and is not small; None if that is nothing.

        Raises:
            WriteError: the disk did not take it; all is as it was.
        """
        given = storages_of(made)
        found = [storage for key, storage in storages_of(tensors).items() if key in given and storage.resizable()]
        large = [(storage, storage.nbytes()) for storage in found if storage.nbytes() >= _LEAST]
        if not large:
            return None
        folder = private_folder()
        try:
            file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  it is closed with the parcel
            for storage, _ in large:
                _write(file, storage)
        except OSError as error:
            message = f"what waits can't be put on disk ({error.strerror}): call map_batches with spill=False"
            raise WriteError(error.errno, message, str(folder)) from error
        for storage, _ in large:
            storage.resize_(0)
        return cls(file, large)

    def announce(self) -> None:
        """Have the system read it ahead."""
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def bring_back(self) -> None:
        """Have the storages in memory again.

        Raises:
            ReadError: the disk did not give them.
        """
        with self._file as file:
            file.seek(0)
            for storage, size in self._storages:
                storage.resize_(size)
                _read(file, storage)


def waiting_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """How much memory tensors take, where several share some."""
    return sum(storage.nbytes() for storage in storages_of(tensors).values())


def storages_of(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Those in main memory, by their identity."""
    with no_functions(), no_modes():
        storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return {storage_id(storage): storage for storage in storages}


def _write(file: IO[bytes], storage: torch.UntypedStorage) -> None:
    left = view_memory(storage.data_ptr(), storage.nbytes())
    while left:
        left = left[file.write(left) :]


def _read(file: IO[bytes], storage: torch.UntypedStorage) -> None:
    left = view_memory(storage.data_ptr(), storage.nbytes())
    while left:
        count = file.readinto(left)  # type: ignore[attr-defined]
        if not count:
            raise ReadError(f"what a batch has put on disk is not there any more, in {file.name!r}")
        left = left[count:]
