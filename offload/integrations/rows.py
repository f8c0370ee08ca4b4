"""Reading files and tables of others into a cache.

Always true:
- a file is recognised by its content, and opened read-only
- at most one batch is in memory; nothing in a file is executed or unpickled
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload.cache.incoming import Batch, Field, Incoming, read_in_batches
from offload.cache.table import TensorCache, cache_of
from offload.errors import CacheError, CorruptFileError, MissingFileError, OffloadError
from offload.importing import imported
from offload.integrations import arrow, hdf5
from offload.integrations import numpy as arrays
from offload.integrations.tensordict import rows as tensordicts
from offload.models.loader import load_file
from offload.storage.reasons import explained, reading
from offload.storage.regular import absolute, as_file, is_folder, is_there, open_regular
from offload.tensor.arguments import as_names, refuse_unstorable
from offload.tensor.materialize import materialize


def cache_from(
    source: object,
    folder: str | os.PathLike[str] | None = None,
    *,
    columns: Collection[str] | None = None,
    metadata: Mapping[str, object] | None = None,
    device: torch.device | str | int = "cpu",
) -> TensorCache:
    """A cache with the rows of a file or table of another kind, which are streamed into it.

    | source | columns |
    | --- | --- |
    | `.npy` (structured too), `numpy.ndarray` | its fields; `values` for an array without |
    | HDF5, an open `h5py.File` or `h5py.Group` | its arrays, of one length, also through links; the rest is skipped |
    | Parquet, a folder of it, Arrow, Feather, `pyarrow.Table` | its columns |
    | what `Dataset.save_to_disk` wrote, `datasets.Dataset` | its columns |
    | `.safetensors`, a dict of tensors from `torch.save`, a dict of tensors | its tensors, of one length |
    | `tensordict.TensorDict`, a tensorclass, a folder of `TensorDict.memmap` | its leaves, nested ones `outer.inner` |

    The kind of a file is recognised by its content. Text, structs and objects become JSON columns. A null is missing,
    as in `TensorCache.from_records`: `<column>.present` is False there.

    Args:
        source: see above.
        folder: where the cache goes, as for `TensorCache.create`; None for a temporary one.
        columns: those to take; all if None.
        metadata, device: as for `TensorCache.create`.

    Returns:
        The cache, with one filled row per row of the source.

    Raises:
        MissingFileError, CorruptFileError, ReadError
        UnknownSubclassError: a tensor is of a subclass that can't be stored.
        CacheError: a file that is not whole, columns of several lengths, or one that can't be kept, as pickled objects.
        CheckpointError: a pickle with code in it.

    Example:
        >>> rows = np.array([(1, 0.5), (2, 1.5)], dtype=[("id", "i8"), ("score", "f4")])
        >>> cache_from(rows)[:]
        {'id': tensor([1, 2]), 'score': tensor([0.5000, 1.5000])}
    """
    return cache_of(rows_of(source, columns), folder, metadata=metadata, device=device)


def rows_of(source: object, columns: Collection[str] | None = None) -> Incoming:
    """The rows of a file, a folder, an array, a table, a dataset, or a dict of tensors.

    Raises:
        MissingFileError, CacheError, CorruptFileError, ReadError, CheckpointError
    """
    columns = as_names(columns)
    if isinstance(source, str | os.PathLike):
        return _rows_of_path(absolute(source), columns)
    if isinstance(source, np.ndarray):
        return arrays.rows_of_array(source, columns)
    if _is_tensordict(source):
        return tensordicts.rows_of_tensordict(source, columns)
    if isinstance(source, Mapping) and not _is_one(source, "h5py", "Group"):
        return _rows_of_tensors(source, columns, "the dict")
    for package, kind, rows in _KINDS:
        if _is_one(source, package, kind):
            return rows(source, columns)
    raise CacheError(
        f"no rows can be read from {type(source).__name__}: give a path, an array, a dict of tensors, a TensorDict, a "
        "pyarrow.Table, a datasets.Dataset or an h5py.Group; TensorCache.from_records takes records one by one"
    )


def _is_tensordict(source: object) -> bool:
    """Whether it is a TensorDict or tensorclass; does not import tensordict."""
    is_collection = imported("tensordict", "is_tensor_collection")
    return is_collection is not None and bool(is_collection(source))


def _is_one(source: object, package: str, kind: str) -> bool:
    """Whether it is an instance of a library's class; does not import the library."""
    return any(base.__module__.split(".")[0] == package and base.__name__ == kind for base in type(source).__mro__)


def _rows_of_path(path: Path, columns: Collection[str] | None) -> Incoming:
    if not is_there(path):
        raise MissingFileError(f"{path} is not there: name a file or folder of rows")
    with _as_read(path):
        rows = _rows_of_folder(path, columns) if is_folder(path) else _rows_of_file(path, columns)

    def batches() -> Iterator[Batch]:
        with _as_read(path):
            yield from rows.batches

    return Incoming(rows.fields, batches())


def _rows_of_file(path: Path, columns: Collection[str] | None) -> Incoming:
    with reading(path), as_file(open_regular(path)) as file:
        start = file.read(8)
    for mark, rows in _MARKS.items():
        if start.startswith(mark):
            return rows(path, columns)
    return _rows_of_tensors(load_file(path), columns, str(path))


@contextmanager
def _as_read(path: Path) -> Iterator[None]:
    """Third-party readers can raise anything for a damaged file: blame the file.

    Raises:
        CorruptFileError, ReadError
    """
    try:
        yield
    except (OffloadError, ImportError, MemoryError):
        raise
    except OSError as error:
        if error.errno is None:  # libraries raise such errors about a file's content
            raise CorruptFileError(
                f"{path} can't be read ({error}): is it complete? Download or copy it again."
            ) from error
        raise explained(path, error) from error
    except Exception as error:
        raise CorruptFileError(f"{path} can't be read ({error}): is it complete? Download or copy it again.") from error


def _rows_of_folder(path: Path, columns: Collection[str] | None) -> Incoming:
    if is_there(path / "dataset_info.json") and is_there(path / "state.json"):
        import datasets

        return arrow.rows_of_dataset(datasets.load_from_disk(str(path)), columns)
    if tensordicts.is_folder(path):
        return tensordicts.rows_of_folder(path, columns)
    shards = sorted(path.glob("*.parquet"))
    if not shards:
        raise CacheError(f"{path} has no saved dataset, TensorDict or .parquet files: name a file in it")
    return arrow.rows_of_parquet(shards, columns)


def _rows_of_tensors(tensors: Mapping[str, object], columns: Collection[str] | None, place: str) -> Incoming:
    parts: dict[str, torch.Tensor] = arrays.chosen(tensors, columns, place)
    for name, part in parts.items():
        if not isinstance(part, torch.Tensor):
            raise CacheError(
                f"{name!r} in {place} is a {type(part).__name__}, not a tensor: leave it out with columns=; "
                "TensorCache.from_records takes records one by one"
            )
        refuse_unstorable(part, name)
    lengths = {name: tuple(tensor.shape[:1]) for name, tensor in parts.items()}
    if len(set(lengths.values())) != 1 or () in lengths.values():
        each = ", ".join(f"{name!r}: {length[0] if length else 'a single value'}" for name, length in lengths.items())
        raise CacheError(f"the tensors in {place} differ in length ({each or 'there are none'}): choose with columns=")
    [(num_rows,)] = set(lengths.values())
    fields = {name: Field(tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in parts.items()}
    return read_in_batches(fields, num_rows, lambda name, rows: materialize(parts[name][rows]))


_MARKS: Mapping[bytes, Callable[[Path, Collection[str] | None], Incoming]] = {
    b"\x89HDF\r\n\x1a\n": hdf5.rows_of_file,
    np.lib.format.MAGIC_PREFIX: arrays.rows_of_file,
    b"PAR1": lambda path, columns: arrow.rows_of_parquet([path], columns),
    b"ARROW1": arrow.rows_of_ipc,
    b"\xff\xff\xff\xff": arrow.rows_of_ipc,  # a stream
}
_KINDS: tuple[tuple[str, str, Callable[[Any, Collection[str] | None], Incoming]], ...] = (
    ("h5py", "Group", hdf5.rows_of_group),
    ("pyarrow", "Table", arrow.rows_of_table),
    ("datasets", "Dataset", arrow.rows_of_dataset),
)
