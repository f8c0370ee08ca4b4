"""The row stores that are compared: written once or appended to, read by index and from end to end.

Always true:
- each is used through the calls shown in its own documentation, without compression
- a reader returns a new tensor, in the requested order
- a row is a function of its number, so that everything read can be checked
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import offload
from bench.limits import MIB
from bench.peers import OURS

RAW, ANNOUNCED, TORCH_MAPPED = "preadv", "preadv, announced", "torch.load, mapped"
_CHUNK = MIB // 4  # bytes per chunk, if a store has chunks
_NUMBER = 4  # bytes of a float32


def nothing() -> None:
    """What most do at the end."""


@dataclass(frozen=True)
class Writer:
    """Writes rows from the first on: `write(start, values)`; after `close` they are in files, maybe unsynced."""

    write: Callable[[int, torch.Tensor], object]
    close: Callable[[], object] = nothing


@dataclass(frozen=True)
class Reader:
    """Reads rows by number, and ranges of rows."""

    batch: Callable[[torch.Tensor], torch.Tensor]
    part: Callable[[int, int], torch.Tensor]
    close: Callable[[], object] = nothing


@dataclass(frozen=True)
class RowStore:
    """A row store.

    Attributes:
        package: the required package.
        create: a writer for given numbers of rows and columns.
        append: a writer for a given number of columns and an unknown number of rows; None if it can't grow.
        open: a reader for what was created, with the number of columns.
    """

    package: str
    create: Callable[[Path, int, int], Writer]
    append: Callable[[Path, int], Writer] | None
    open: Callable[[Path, int], Reader]


def values_of(rows: torch.Tensor, columns: int) -> torch.Tensor:
    """The contents of rows: (rows, columns), float32; exact for the first 2**24 rows."""
    return rows[:, None].float() + torch.arange(columns)


# offload


def _create_offload(folder: Path, rows: int, columns: int) -> Writer:
    cache = offload.TensorCache.create(folder / "cache", {"x": (torch.float32, (columns,))}, num_rows=rows)

    def write(start: int, values: torch.Tensor) -> None:
        cache[start : start + len(values)] = {"x": values}

    return Writer(write, cache.close)


def _append_offload(folder: Path, columns: int) -> Writer:
    cache = offload.TensorCache.create(folder / "cache", {"x": (torch.float32, (columns,))})
    return Writer(lambda _, values: cache.append({"x": values}), cache.close)


def _open_offload(folder: Path, _columns: int) -> Reader:
    cache = offload.TensorCache.open(folder / "cache")
    return Reader(lambda rows: cache[rows]["x"], lambda start, stop: cache[start:stop]["x"], cache.close)


# System calls


def _create_raw(folder: Path, rows: int, columns: int) -> Writer:
    writer = _append_raw(folder, columns)
    os.truncate(folder / "x.bin", rows * columns * _NUMBER)
    return writer


def _append_raw(folder: Path, columns: int) -> Writer:
    file = (folder / "x.bin").open("wb", buffering=0)

    def write(start: int, values: torch.Tensor) -> None:
        data, offset = memoryview(values.numpy()).cast("B"), start * columns * _NUMBER
        while data:
            written = os.pwrite(file.fileno(), data, offset)
            data, offset = data[written:], offset + written

    return Writer(write, file.close)


def _open_raw(folder: Path, columns: int) -> Reader:
    return _raw_reader(folder / "x.bin", columns, announced=False)


def _open_announced(folder: Path, columns: int) -> Reader:
    return _raw_reader(folder / "x.bin", columns, announced=True)


def _raw_reader(path: Path, columns: int, *, announced: bool) -> Reader:
    """Row by row in file order; optionally all rows are announced to the system first."""
    file, size = path.open("rb", buffering=0), columns * _NUMBER

    def batch(rows: torch.Tensor) -> torch.Tensor:
        found = torch.empty(len(rows), columns)
        memory = memoryview(found.numpy()).cast("B")
        places = sorted((row * size, place * size) for place, row in enumerate(rows.tolist()))
        if announced:
            for offset, _ in places:
                os.posix_fadvise(file.fileno(), offset, size, os.POSIX_FADV_WILLNEED)
        for offset, place in places:
            _fill(file.fileno(), memory[place : place + size], offset)
        return found

    def part(start: int, stop: int) -> torch.Tensor:
        found = torch.empty(stop - start, columns)
        _fill(file.fileno(), memoryview(found.numpy()).cast("B"), start * size)
        return found

    return Reader(batch, part, file.close)


def _fill(descriptor: int, memory: memoryview, offset: int) -> None:
    while memory:
        read = os.preadv(descriptor, [memory], offset)
        memory, offset = memory[read:], offset + read


# Mappings


def _create_tensordict(folder: Path, rows: int, columns: int) -> Writer:
    from tensordict import TensorDict

    like = TensorDict({"x": torch.zeros(1, columns).expand(rows, columns)}, [rows])
    table = like.memmap_like(folder / "table")

    def write(start: int, values: torch.Tensor) -> None:
        table[start : start + len(values)] = TensorDict({"x": values}, [len(values)])

    return Writer(write)


def _open_tensordict(folder: Path, _columns: int) -> Reader:
    from tensordict import TensorDict

    table = TensorDict.load_memmap(folder / "table")
    return Reader(lambda rows: table[rows]["x"], lambda start, stop: table[start:stop]["x"].clone())


def _create_numpy(folder: Path, rows: int, columns: int) -> Writer:
    table = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (rows, columns))

    def write(start: int, values: torch.Tensor) -> None:
        table[start : start + len(values)] = values.numpy()

    return Writer(write, table.flush)


def _open_numpy(folder: Path, _columns: int) -> Reader:
    table = np.load(folder / "x.npy", mmap_mode="r")
    return Reader(
        lambda rows: torch.from_numpy(table[rows.numpy()]),
        lambda start, stop: torch.from_numpy(table[start:stop].copy()),
    )


# torch.load


def _create_torch(folder: Path, rows: int, columns: int) -> Writer:
    table = torch.empty(rows, columns)

    def write(start: int, values: torch.Tensor) -> None:
        table[start : start + len(values)] = values

    return Writer(write, lambda: torch.save({"x": table}, folder / "x.pt"))


def _open_torch(folder: Path, _columns: int) -> Reader:
    """The first batch reads everything."""
    loaded: list[torch.Tensor] = []

    def table() -> torch.Tensor:
        if not loaded:
            loaded.append(torch.load(folder / "x.pt", weights_only=True)["x"])
        return loaded[0]

    return Reader(lambda rows: table()[rows], lambda start, stop: table()[start:stop].clone())


def _open_torch_mapped(folder: Path, _columns: int) -> Reader:
    table = torch.load(folder / "x.pt", weights_only=True, mmap=True)["x"]
    return Reader(lambda rows: table[rows], lambda start, stop: table[start:stop].clone())


# LMDB


def _create_lmdb(folder: Path, _rows: int, _columns: int) -> Writer:
    """All rows in one transaction."""
    import lmdb

    environment = lmdb.open(str(folder / "lmdb"), map_size=_most_bytes(folder), sync=False)
    transaction = environment.begin(write=True)

    def close() -> None:
        transaction.commit()
        environment.close()

    return Writer(lambda start, values: _put(transaction, start, values), close)


def _append_lmdb(folder: Path, _columns: int) -> Writer:
    """One transaction per batch."""
    import lmdb

    environment = lmdb.open(str(folder / "lmdb"), map_size=_most_bytes(folder), sync=False)

    def write(start: int, values: torch.Tensor) -> None:
        with environment.begin(write=True) as transaction:
            _put(transaction, start, values)

    return Writer(write, environment.close)


def _most_bytes(folder: Path) -> int:
    """The size of LMDB's map, a sparse file: the free disk space, in whole pages."""
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize // mmap.PAGESIZE * mmap.PAGESIZE


def _put(transaction: Any, start: int, values: torch.Tensor) -> None:
    for place, row in enumerate(values.numpy()):
        transaction.put(_key(start + place), memoryview(row), append=True)


def _key(row: int) -> bytes:
    return row.to_bytes(8, "big")


def _open_lmdb(folder: Path, columns: int) -> Reader:
    """Without read-ahead, as its documentation advises for data larger than memory; with it for a scan."""
    import lmdb

    environments: dict[bool, Any] = {}

    def close() -> None:
        while environments:
            environments.popitem()[1].close()

    def rows_of(numbers: Sequence[int], *, in_order: bool) -> torch.Tensor:
        if in_order not in environments:
            close()  # a process may open it only once
            environments[in_order] = lmdb.open(str(folder / "lmdb"), readonly=True, lock=False, readahead=in_order)
        found = torch.empty(len(numbers), columns)
        target = found.numpy()
        with environments[in_order].begin(buffers=True) as transaction:
            for place, row in enumerate(numbers):
                target[place] = np.frombuffer(transaction.get(_key(row)), np.float32)
        return found

    return Reader(
        lambda rows: rows_of(rows.tolist(), in_order=False),
        lambda start, stop: rows_of(range(start, stop), in_order=True),
        close,
    )


# Chunked arrays


def _create_h5py(folder: Path, rows: int, columns: int) -> Writer:
    import h5py

    file = h5py.File(folder / "x.h5", "w")
    table = file.create_dataset("x", (rows, columns), np.float32)

    def write(start: int, values: torch.Tensor) -> None:
        table[start : start + len(values)] = values.numpy()

    return Writer(write, file.close)


def _append_h5py(folder: Path, columns: int) -> Writer:
    import h5py

    file = h5py.File(folder / "x.h5", "w")
    chunks = (_rows_of_chunk(columns), columns)
    table = file.create_dataset("x", (0, columns), np.float32, maxshape=(None, columns), chunks=chunks)

    def write(start: int, values: torch.Tensor) -> None:
        table.resize(start + len(values), axis=0)
        table[start:] = values.numpy()

    return Writer(write, file.close)


def _open_h5py(folder: Path, _columns: int) -> Reader:
    import h5py

    file = h5py.File(folder / "x.h5", "r")
    table = file["x"]

    def batch(rows: torch.Tensor) -> torch.Tensor:
        """h5py takes only ascending, distinct numbers."""
        distinct, places = np.unique(rows.numpy(), return_inverse=True)
        return torch.from_numpy(table[distinct][places])

    return Reader(batch, lambda start, stop: torch.from_numpy(table[start:stop]), file.close)


def _create_zarr(folder: Path, rows: int, columns: int) -> Writer:
    table = _zarr_array(folder, rows, columns)

    def write(start: int, values: torch.Tensor) -> None:
        table[start : start + len(values)] = values.numpy()

    return Writer(write)


def _append_zarr(folder: Path, columns: int) -> Writer:
    table = _zarr_array(folder, 0, columns)
    return Writer(lambda _, values: table.append(values.numpy()))


def _zarr_array(folder: Path, rows: int, columns: int) -> Any:
    import zarr

    chunks = (_rows_of_chunk(columns), columns)
    return zarr.create_array(
        str(folder / "x.zarr"), shape=(rows, columns), chunks=chunks, dtype="float32", compressors=None
    )


def _open_zarr(folder: Path, _columns: int) -> Reader:
    import zarr

    table = zarr.open_array(str(folder / "x.zarr"), mode="r")
    return Reader(
        lambda rows: torch.from_numpy(table.oindex[rows.numpy()]),
        lambda start, stop: torch.from_numpy(table[start:stop]),
    )


def _rows_of_chunk(columns: int) -> int:
    return max(1, _CHUNK // (columns * _NUMBER))


# Hugging Face datasets


def _create_datasets(folder: Path, _rows: int, columns: int) -> Writer:
    return _append_datasets(folder, columns)


def _append_datasets(folder: Path, columns: int) -> Writer:
    import pyarrow
    from datasets import Features, List, Value
    from datasets.arrow_writer import ArrowWriter

    features = Features({"x": List(Value("float32"), length=columns)})
    writer = ArrowWriter(path=str(folder / "x.arrow"), features=features)

    def write(_start: int, values: torch.Tensor) -> None:
        numbers = pyarrow.array(values.numpy().reshape(-1))
        writer.write_table(pyarrow.table({"x": pyarrow.FixedSizeListArray.from_arrays(numbers, columns)}))

    def close() -> None:
        writer.finalize()
        writer.close()

    return Writer(write, close)


def _open_datasets(folder: Path, _columns: int) -> Reader:
    from datasets import Dataset

    table = Dataset.from_file(str(folder / "x.arrow")).with_format("torch")
    return Reader(lambda rows: table[rows.tolist()]["x"], lambda start, stop: table[start:stop]["x"])


STORES = {
    RAW: RowStore("torch", _create_raw, _append_raw, _open_raw),
    ANNOUNCED: RowStore("torch", _create_raw, None, _open_announced),
    OURS: RowStore("offload", _create_offload, _append_offload, _open_offload),
    "tensordict": RowStore("tensordict", _create_tensordict, None, _open_tensordict),
    "numpy": RowStore("numpy", _create_numpy, None, _open_numpy),
    "LMDB": RowStore("lmdb", _create_lmdb, _append_lmdb, _open_lmdb),
    "h5py": RowStore("h5py", _create_h5py, _append_h5py, _open_h5py),
    "zarr": RowStore("zarr", _create_zarr, _append_zarr, _open_zarr),
    "torch.load": RowStore("torch", _create_torch, None, _open_torch),
    TORCH_MAPPED: RowStore("torch", _create_torch, None, _open_torch_mapped),
    "datasets": RowStore("datasets", _create_datasets, _append_datasets, _open_datasets),
}
PACKAGES = {name: store.package for name, store in STORES.items()}
