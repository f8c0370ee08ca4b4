"""Writing a cache as Parquet.

Always true:
- at most one batch is in memory; the file is complete or does not exist
- what was null in the source is null again: the rows where `<column>.present` is False
- JSON values are written as JSON, including text
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload.cache.incoming import PRESENT, Batch, Field
from offload.errors import CacheError
from offload.integrations.arrow import IS_JSON
from offload.storage.replacing import refuse_there, replacing


def write_parquet(path: Path, fields: Mapping[str, Field], batches: Iterator[Batch]) -> None:
    """Put a Parquet file at `path`, which must be free.

    Raises:
        ForeignFileError: there is a file already.
        CacheError: Arrow lacks the dtype of a column.
        WriteError
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = [name for name in fields if name.removesuffix(PRESENT) == name or name.removesuffix(PRESENT) not in fields]
    schema = pa.schema([_field(name, fields[name]) for name in names])
    refuse_there(path)
    with replacing(path) as new, pq.ParquetWriter(new.path, schema) as writer:
        for batch in batches:
            columns = [_array(schema.field(name).type, fields[name], name, batch) for name in names]
            writer.write_batch(pa.record_batch(columns, schema=schema))


def _field(name: str, field: Field) -> Any:
    import pyarrow as pa

    if not field.is_tensor:
        return pa.field(name, pa.binary()) if field.is_bytes else pa.field(name, pa.string(), metadata=IS_JSON)
    try:
        kind = pa.from_numpy_dtype(torch.empty(0, dtype=field.dtype).numpy().dtype)
    except (TypeError, NotImplementedError, pa.ArrowException) as error:
        raise CacheError(
            f"column {name!r} is of {field.dtype}, which Arrow does not have: export to safetensors, or leave it out"
        ) from error
    for size in reversed(field.row_shape):
        kind = pa.list_(kind) if size is None else pa.list_(kind, size)
    return pa.field(name, kind)


def _array(kind: Any, field: Field, name: str, batch: Batch) -> Any:
    import pyarrow as pa

    values, there = batch[name], batch.get(name + PRESENT)
    nulls = None if there is None else ~there.numpy()
    if field.is_bytes:
        return pa.array(values, kind, mask=nulls)
    if not field.is_tensor:
        return pa.array([None if value is None else json.dumps(value, ensure_ascii=False) for value in values], kind)
    if field.is_ragged:
        offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
        return pa.ListArray.from_arrays(offsets, _dense(torch.cat(values), None), mask=nulls, type=kind)
    return _dense(values, nulls)


def _dense(values: torch.Tensor, nulls: Any) -> Any:
    """(rows, *row_shape) as an Arrow array of rows."""
    import pyarrow as pa

    if values.dim() == 1:
        return pa.array(values.numpy(), mask=nulls)
    array = pa.array(values.reshape(-1).numpy())
    for size in reversed(values.shape[2:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return pa.FixedSizeListArray.from_arrays(array, values.shape[1], mask=nulls)
