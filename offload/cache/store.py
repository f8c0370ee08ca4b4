"""The folder of a cache: created, opened, read, written and closed; and the order of writes.

Always true:
- if several processes create a cache in one folder, one succeeds; the manifest is written last: what a killed creator
  leaves is not a cache, and the next one replaces it. Files of others are left alone
- data is on the disk before a row counts as filled; a rewritten row counts as empty before its data changes
- the contents of a row are written by one writer at a time: of two, the last one wins as a whole
- all columns have room for new rows before their number is raised: a crash leaves some to spare, which the next writer
  cuts off
- readers need no column header: one torn by a crash is repaired by the next writer
- what `taken` returns is what `read` would return
- rows that were written and not flushed are visible to this process only: others see them as missing
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import util
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from offload.cache.columns import FixedColumn, HeapColumn
from offload.cache.indexing import Numbers, Rows, last_of_each, plain_of, rows_of
from offload.cache.rowfile import Watch, opened
from offload.cache.schema import MANIFEST, TENSOR, Column, Manifest, columns_named
from offload.cache.states import Bytes, States, all_filled, cells_filled
from offload.errors import (
    CacheError,
    ChangedFileError,
    ColumnError,
    CorruptFileError,
    MissingFileError,
    MissingRowsError,
    ShapeMismatchError,
    UnsupportedOpError,
    WriteError,
)
from offload.memory import available_bytes
from offload.storage.file import TensorFile
from offload.storage.handle import Handle
from offload.storage.replacing import create_folder, sweep
from offload.system.locks import FolderLock, flock, fork_safe_lock
from offload.system.modes import is_plain_world
from offload.system.reasons import some, writing
from offload.system.regular import is_there, open_regular
from offload.tensor.guests import CPU
from offload.tensor.wrapper import OffloadedTensor, wrap_handle

log = logging.getLogger("offload.cache")
LOCK = "rows.lock"
_MOST_BYTES = 256 << 20  # most unflushed bytes; less under a memory cap, as dirty pages can't be dropped
_LEAST_FLUSHED = 4 << 20
_ROW = 256  # overhead per row, in the count of unflushed bytes
_MOST_SECONDS = 10.0
_LOOKS = 1000  # retries if rows are being written while they are read


class Store:
    """An open folder."""

    # Creating and opening

    @classmethod
    def create(cls, folder: Path, manifest: Manifest, *, exist_ok: bool) -> Store:
        """A new folder with empty rows; or with `exist_ok` an existing one that matches."""
        with writing(folder):
            create_folder(folder)
            with open_regular(folder / LOCK, os.O_RDWR | os.O_CREAT) as file:
                is_new = flock(file.fileno(), folder / LOCK, wait=exist_ok) and not is_there(folder / MANIFEST)
                if is_new:
                    sweep(folder)
                    for column in manifest.columns.values():
                        kind = FixedColumn if column.kind == TENSOR else HeapColumn
                        kind.create(folder, column, manifest.num_rows)
                    States.create(folder, len(manifest.columns), manifest.num_rows)
                    manifest.write(folder)
                    log.info("%s: created with %d rows of %s", folder, manifest.num_rows, ", ".join(manifest.columns))
        if is_new:
            return cls(folder, manifest, writes=True)
        if not exist_ok:
            raise CacheError(
                f"{folder} already has a cache, or another process is creating one: open it with TensorCache.open, "
                "or TensorCache.create(..., exist_ok=True), or choose another folder"
            )
        store = cls.open(folder, None, writes=True)
        try:
            store.manifest.with_rows(store.num_rows).refuse_other(manifest, folder)
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def open(cls, folder: Path, expect: Mapping[str, object] | None, *, writes: bool) -> Store:
        manifest = Manifest.read(folder)
        manifest.check(expect, folder)
        if writes and not os.access(folder, os.W_OK):
            raise WriteError(30, "the folder is read-only: open the cache with mode='r'", str(folder))
        return cls(folder, manifest, writes=writes)

    def __init__(self, folder: Path, manifest: Manifest, *, writes: bool) -> None:
        self.folder = folder
        self.manifest = manifest
        self.writes = writes
        self.is_closed = False
        self.schema = manifest.columns
        self._names = list(manifest.columns)
        self._places = {name: place for place, name in enumerate(self._names)}
        self._lock = FolderLock(folder / LOCK, opened)
        self._flushing = fork_safe_lock()
        self._written: list[tuple[Rows, list[int], Bytes]] = []  # cells that were not flushed, for `states.fill`
        self._written_bytes = 0
        self._most_bytes = 0
        self._written_since = 0.0
        self._pid = os.getpid()
        self._tensors: dict[str, OffloadedTensor] = {}
        self._files: dict[str, FixedColumn | HeapColumn] = {}
        self._opened = ExitStack()
        self._opened.callback(self._lock.close)
        try:
            with self._lock.held(shared=True):
                self._states = States(folder, len(self._names), manifest.num_rows, writes=writes)
                self._opened.callback(self._states.close)
                for name, column in self.schema.items():
                    self._files[name] = self._open_file(column)
                    self._opened.callback(self._files[name].close)
                    self._files[name].index.refuse_another(self._states.filled(self._places[name]))
                    self._rows_in(self._files[name])
            self._rowfiles = {name: file.rowfile for name, file in self._files.items() if isinstance(file, FixedColumn)}
            files = [{self._states.path: self._states.fd}, *(file.descriptors for file in self._files.values())]
            self._watch = Watch(files, self._states.refuse_cut)
            if writes:
                self._settle()
        except BaseException:
            self._close_files()
            raise

    @contextmanager
    def _held(self, *, shared: bool = False) -> Iterator[None]:
        """The lock of the folder. Raises: MissingFileError, ChangedFileError (it is not the one that was opened)."""
        with self._lock.held(shared=shared):
            self._watch.refuse_replaced()
            yield

    def _settle(self) -> None:
        """Register this writer; if it is the only one, repair what killed writers left. Raises: CorruptFileError."""
        is_only = flock(self._states.fd, self._states.path, wait=False)
        if is_only:
            with self._held():
                self._forget_unfilled()
                for name, file in self._files.items():
                    if isinstance(file, HeapColumn):
                        file.settle(self._states.filled(self._places[name]))
                    file.index.fit(self.num_rows, self._rows_in(file))
        flock(self._states.fd, self._states.path, shared=True)
        log.debug(
            "%s: opened for writing, %s", self.folder, "as the only writer" if is_only else "beside other writers"
        )
        if not is_only:
            with self._held():
                self._refuse_cut(self._files)

    def _open_file(self, column: Column) -> FixedColumn | HeapColumn:
        if column.kind == TENSOR:
            return FixedColumn(self.folder, column, writes=self.writes)
        number = sum(isinstance(file, HeapColumn) for file in self._files.values())
        return HeapColumn(self.folder, column, self._states, number, writes=self.writes)

    def _rows_in(self, file: FixedColumn | HeapColumn) -> int:
        """How many rows a file has, at least.

        It may lack some that were added just before a power cut: none of them was filled. Raises: CorruptFileError.
        """
        if file.index.has(self.num_rows):
            return self.num_rows
        used = self._states.used()
        file.index.check(used)
        log.debug("%s: a crash left it with fewer rows than recorded, and with all that are filled", file.path)
        return used

    def _refuse_cut(self, names: Iterable[str]) -> None:
        """Raises: CorruptFileError: a file was cut; a write would fill it with zeros. Under the lock."""
        for name in names:
            self._files[name].check(self.num_rows)

    # Properties

    @property
    def num_rows(self) -> int:
        return self._states.num_rows

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes(self.num_rows) for file in self._files.values())

    def places(self, columns: Iterable[str] | None) -> list[int]:
        """Raises: ColumnError (there is no such column)."""
        return [self._places[name] for name in columns_named(columns, self.schema, self.folder)]

    def missing(self, columns: Iterable[str] | None) -> Numbers:
        self._watch.look(time.monotonic())
        self.flush_own()
        return self._states.missing(self.places(columns))

    def are_missing(self, columns: Iterable[str] | None, rows: Numbers) -> npt.NDArray[np.bool_]:
        """Which of these rows are not filled; rows written here and not flushed count as missing."""
        self._watch.look(time.monotonic())
        cells = self._states.of(rows_of(rows, self.num_rows), self.places(columns))
        filled: npt.NDArray[np.bool_] = np.logical_and.reduce(cells_filled(cells), axis=1)
        return ~filled

    def count(self, columns: Iterable[str] | None) -> int:
        self._watch.look(time.monotonic())
        self.flush_own()
        return self._states.count(self.places(columns))

    def tensor(self, name: str, device: torch.device) -> OffloadedTensor:
        """A column as a tensor over its file."""
        column = self._fixed(name)
        if not self.writes:
            return self._referenced(column, device)
        tensor = self._tensors.get(name)
        if tensor is None or len(tensor) != self.num_rows:
            with self._held():
                column.fit(self.num_rows, self.num_rows)  # a previous writer may have been killed
                handle = Handle.shared(TensorFile.open(column.path), name, self.folder, in_place=True)
            tensor = self._tensors[name] = wrap_handle(handle, CPU)
        return tensor if tensor.device == device else tensor.to(device)  # type: ignore[return-value]

    def _fixed(self, name: str) -> FixedColumn:
        self.places([name])
        column = self._files[name]
        if not isinstance(column, FixedColumn) or self.schema[name].top:
            raise UnsupportedOpError(
                f"column {name!r} of {self.folder} has rows of different lengths, or packed ones, which do not form "
                "one tensor: read it by rows"
            )
        return column

    def _referenced(self, column: FixedColumn, device: torch.device) -> OffloadedTensor:
        with self._held(shared=True):
            self._rows_in(column)
            if not column.has(self.num_rows):
                raise CorruptFileError(
                    f"{column.path} ends before the last rows, which are missing, as after a power cut: "
                    "the others can be read by index, and opening the cache with mode='r+' repairs the column"
                )
            return wrap_handle(Handle.reference(column.with_rows(self.num_rows), column.column.name), device)

    # Reading

    def taken(self, index: object, columns: Iterable[str] | None) -> dict[str, torch.Tensor] | None:
        """What `read` returns, in half the time, where all rows are filled and in memory; None if in doubt."""
        now = time.monotonic()
        self._watch.look(now)  # before the first byte of the states is touched
        changes = self._states.changes
        count = self._states.known_filled(changes)
        rows = plain_of(index, count) if count == self._states.counts[2] and is_plain_world() else None
        if rows is None or not isinstance(columns, list | tuple | None):  # an iterator would be used up
            return None
        try:
            files = [(name, self._rowfiles[name]) for name in (self._names if columns is None else columns)]
            if not all(file.mapped is not None for _, file in files):
                return None
            values = {name: file.taken(rows, count, now) for name, file in files}
        except (KeyError, IndexError, OSError):  # of varying size; negative numbers, or out of range; not in memory
            return None
        return values if self._states.changes == changes and self._states.counts[2] == count else None

    def read(self, rows: Rows, columns: Iterable[str] | None) -> dict[str, Any]:
        """Rows of some columns, consistent: a concurrent write is seen completely or not at all."""
        places = self.places(columns)
        self._watch.look(time.monotonic())
        for _ in range(_LOOKS):
            changes = self._states.changes
            before = None if rows.last < self._states.known_filled(changes) else self._states.of(rows, places)
            if before is not None and not all_filled(before.tobytes()) and self.flush_own():
                before = self._states.of(rows, places)
            if before is not None and not all_filled(before.tobytes()):
                self._refuse_missing(rows.numbers[~cells_filled(before).all(axis=1)])
            try:
                values = {self._names[place]: self._files[self._names[place]].read(rows) for place in places}
            except CorruptFileError:  # or a concurrent write was read halfway
                if self._are_still(rows, places, before, changes):
                    raise
                continue
            if self._are_still(rows, places, before, changes):
                return values
        raise CacheError(f"rows of {self.folder} are rewritten faster than they can be read: try again")

    def _are_still(self, rows: Rows, places: list[int], before: Bytes | None, changes: int) -> bool:
        """Whether none of these filled rows has begun to be rewritten."""
        if self._states.changes == changes:
            return True
        return before is not None and self._states.of(rows, places).tobytes() == before.tobytes()

    def _refuse_missing(self, rows: Numbers) -> None:
        if not len(rows):
            return
        raise MissingRowsError(
            f"{len(rows)} of the requested rows are not filled in {self.folder}: {some(rows)}. "
            "Write them first; missing_rows() lists all."
        )

    # Writing

    def write(self, rows: Rows, values: Mapping[str, object]) -> None:
        """Raises: ColumnError, ShapeMismatchError, DtypeMismatchError: nothing is written; WriteError."""
        self._may_write()
        places = self.places(values)
        numbers = rows.numbers
        given = {name: _one(value) if rows.is_one else value for name, value in values.items()}
        positions = last_of_each(numbers)
        prepared = {name: self._files[name].prepare(value, len(numbers), positions) for name, value in given.items()}
        if len(numbers):
            with self._held():
                self._refuse_cut(prepared)
                self._put(rows if positions is None else Rows(numbers[positions]), places, prepared)
            self._flush_if_due()

    def append(self, values: Mapping[str, object]) -> range:
        """Write after the last row; returns the new row numbers. Raises: as `write`."""
        self._may_write()
        places = self.places(values)
        lacking = [name for name in self._names if name not in values]
        if lacking:
            raise ColumnError(f"append() needs all columns of the cache in {self.folder}: {', '.join(lacking)} missing")
        counts = {name: self._count(name, value) for name, value in values.items()}
        if len(set(counts.values())) > 1:
            raise ShapeMismatchError(f"columns of different lengths were given to the cache in {self.folder}: {counts}")
        count = next(iter(counts.values()))
        prepared = {name: self._files[name].prepare(value, count, None) for name, value in values.items()}
        with self._held():
            first = self.num_rows
            end = first + count
            if count:
                self._refuse_cut(self._names)
                self._put(Rows.run(first, end), places, prepared)
        self._flush_if_due()
        return range(first, end)

    def _count(self, name: str, value: Any) -> int:
        with suppress(TypeError):
            return len(value)
        where = f"column {name!r} of the cache in {self.folder}"
        raise ShapeMismatchError(f"{where}: a single value, not rows: give a list, or a tensor with a first dimension")

    def _put(self, rows: Rows, places: list[int], prepared: Mapping[str, Any]) -> None:
        """Write rows in ascending order. Those after the last one are rows once they are written. Under the lock."""
        are_new = rows.last >= self.num_rows
        with self._explained(rows):
            begun = None if are_new else self._states.begin(rows, places)
            nbytes = sum(self._files[name].write(rows, values) for name, values in prepared.items())
            if begun is None:
                for name in prepared:
                    self._files[name].index.write_head(rows.last + 1)
                self._states.grow(rows.last + 1)
                begun = self._states.begin(rows, places)
        if not self._written:
            self._written_since = time.monotonic()
            self._most_bytes = min(_MOST_BYTES, max(available_bytes() // 8, _LEAST_FLUSHED))
        self._written.append((rows.copied(), places, begun))
        self._written_bytes += nbytes + len(rows) * _ROW

    def _flush_if_due(self) -> None:
        if self._written_bytes > self._most_bytes or (
            self._written and time.monotonic() - self._written_since > _MOST_SECONDS
        ):
            self.flush_own()

    def flush(self) -> None:
        """Put everything written, also through tensors, on the disk, and mark the rows as filled."""
        self._may_write()
        with self._flushing:
            self._flush(self._names)

    def flush_own(self) -> bool:
        """Flush the rows written by this process; False if it can't have written any."""
        if not self.writes or self._pid != os.getpid():
            return False
        with self._flushing:  # another thread may be flushing
            if self._written:
                self._flush(None)
        return True

    def _flush(self, names: list[str] | None) -> None:
        """Flush written rows, with these columns, or only with the columns that were written."""
        with self._lock.held():
            written, self._written, self._written_bytes = self._written, [], 0
        touched = {self._names[place] for _, places, _ in written for place in places} if names is None else names
        with writing(self.folder):
            for name in touched:
                self._files[name].sync()
        with self._held():
            self._refuse_cut(touched)
            for part in written:
                self._states.fill(*part)
        self._states.sync()
        if written:
            log.debug("%s: %d rows are on the disk", self.folder, sum(len(rows) for rows, *_ in written))

    def close(self) -> None:
        """Flush, release the files and, if no other process writes, record how many rows there are."""
        if self.is_closed:
            return
        self.is_closed = True
        try:
            if self.writes and self._pid == os.getpid():
                self.flush_own()
                if flock(self._states.fd, self._states.path, wait=False):
                    with suppress(MissingFileError, ChangedFileError), self._held():  # nothing was lost
                        self._record_rows()
        finally:
            self._close_files()

    def _may_write(self) -> None:
        if self.is_closed or not self.writes:
            only = "open for reading only: TensorCache.open(folder, mode='r+') can write"
            raise CacheError(f"the cache in {self.folder} is {'closed' if self.is_closed else only}")
        if self._pid != os.getpid():  # the parent flushes its own rows
            self._written, self._written_bytes, self._pid = [], 0, os.getpid()
            self._states.count_in()
            util.Finalize(None, self.flush_own, exitpriority=10)  # at the end of a worker process

    @contextmanager
    def _explained(self, rows: Rows) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or ""
            left = "they count as missing" if rows.last < self.num_rows else "they were not added"
            raise WriteError(
                error.errno,
                f"{len(rows)} rows from row {rows.numbers[0]} on could not be written "
                f"({reason.partition('; nothing')[0]}): {left}. "
                "Free some space or take another folder, and write them again",
                str(self.folder),
            ) from error

    # Rows that were added

    def _forget_unfilled(self) -> None:
        """Drop appended rows after the last one that was ever filled. Under the lock, by the only writer."""
        rows = max(self.manifest.num_rows, self._states.used(ever=True))
        if rows < self.num_rows:
            log.info("%s: %d rows from row %d on were never filled: cut off", self.folder, self.num_rows - rows, rows)
            self._states.forget(rows)

    def _record_rows(self) -> None:
        """In the manifest, so that states of another time are noticed. Under the lock, by the only writer."""
        self._forget_unfilled()
        self._refuse_cut(self._files)
        for file in self._files.values():
            file.index.fit(self.num_rows, self.num_rows)
        if self.num_rows > self.manifest.num_rows:
            self.manifest = self.manifest.with_rows(self.num_rows)
            self.manifest.write(self.folder)

    def _close_files(self) -> None:
        self._tensors.clear()
        self._opened.close()


def _one(value: object) -> Any:
    """The values of one row, as a batch of one."""
    return value[None] if isinstance(value, torch.Tensor | np.ndarray) else [value]
