"""Writing a cache in the formats of others.

Always true:
- at most one batch is in memory
- every file is complete or does not exist; existing files are not replaced, except a safetensors file of ours
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload.cache.incoming import Batch, Field, rows_in_batch
from offload.cache.schema import TENSOR, Column
from offload.cache.table import TensorCache
from offload.errors import CacheError
from offload.integrations.parquet import write_parquet
from offload.progress import progress
from offload.storage.folders import SUFFIX, file_name
from offload.storage.regular import absolute
from offload.storage.replacing import made_folder, refuse_there, replacing, sync_folder

_GUESS = 1024  # assumed size in bytes of a varying-size value


def export(cache: TensorCache, target: Path, form: str, columns: Sequence[str] | None = None) -> None:
    """Write the rows of a cache as a safetensors or Parquet file, or as a folder of `.npy` files, one per column.

    Everything but plain letters and digits in a column's name becomes `%xx` in that of its `.npy` file, as in a cache.

    In Parquet, values that are missing are null, and JSON is text.

    Raises:
        ColumnError, MissingRowsError: there is no such column, or rows are not filled.
        CacheError: a column that the format has no form for.
        ForeignFileError: there is a file already.
        WriteError
    """
    names = list(cache.schema if columns is None else columns)
    cache.require_complete(names)
    target = absolute(target)
    if form == "safetensors":
        cache.to_disk(target, names)
        return
    made_folder(target.parent)
    if form == "parquet":
        fields = {name: Field.of(cache.schema[name]) for name in names}
        write_parquet(target, fields, _batches(cache, names))
    else:
        _write_arrays(cache, target, names)


def _batches(cache: TensorCache, names: Sequence[str]) -> Iterator[Batch]:
    columns = [cache.schema[name] for name in names]
    step = rows_in_batch(column.row_bytes if column.kind == TENSOR else _GUESS for column in columns)
    batches = cache.batches(step, columns=names, device="cpu")
    yield from progress(batches, "rows", total=-(-len(cache) // step))


def _write_arrays(cache: TensorCache, folder: Path, names: Sequence[str]) -> None:
    dtypes = {name: _numpy_dtype(cache.schema[name]) for name in names}
    paths = {name: folder / (file_name(name).removesuffix(SUFFIX) + ".npy") for name in names}
    made_folder(folder)
    sync_folder(folder.parent)
    for path in paths.values():
        refuse_there(path, "folder")
    for name, dtype in dtypes.items():
        with replacing(paths[name]) as new:
            _write_array(new.path, dtype, (len(cache), *cache.schema[name].row_shape), _batches(cache, [name]))


def _write_array(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], batches: Iterator[Batch]) -> None:
    with path.open("wb") as file:
        head = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, head)
        for batch in batches:
            [values] = batch.values()
            file.write(values.contiguous().numpy().data)


def _numpy_dtype(column: Column) -> np.dtype[Any]:
    if column.kind != TENSOR:
        raise CacheError(f"column {column.name!r} has no rows of one size, and .npy no others: export to parquet")
    try:
        found: np.dtype[Any] = torch.empty(0, dtype=column.dtype).numpy().dtype
    except TypeError as error:
        raise CacheError(
            f"column {column.name!r} is of {column.dtype}, which NumPy does not have: export to safetensors"
        ) from error
    return found
