"""Columns in a file that `torch.load` can open.

Always true:
- torch.load(path, weights_only=True) returns a dict of the columns, plain tensors on the CPU
- at most one block of a column is in memory
- the file is complete or does not exist; only files of ours are replaced, which contain a record that says so

Source of the format: `torch/serialization.py` (`_save`), and `Tensor._reduce_ex_internal` in `torch/_tensor.py`.
"""

from __future__ import annotations

import io
import json
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.errors import CorruptFileError, ForeignFileError, MissingFileError, OffloadError, ReadError
from offload.storage.file import TensorFile
from offload.storage.layout import Layout
from offload.storage.reasons import reading
from offload.storage.regular import as_file
from offload.storage.replacing import replacing
from offload.storage.state_file import MOST_JSON, parse_json
from offload.storage.write import bytes_of
from offload.torch_api import needed, new_dtypes, rebuild_tensor, rebuild_tensor_of_new_dtype, storage_names

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_ROOT = "archive"
_NOTE = f"{_ROOT}/offload.json"
_ALIGNED = 64  # alignment of a column's data in bytes, as in torch.save
_LOCAL, _ZIP64, _PADDING = 30, 20, 4  # bytes of a record's header, of its zip64 field, and of a padding header


def write_archive(
    path: Path,
    layouts: Mapping[str, Layout],
    values: Mapping[str, torch.Tensor | Iterable[torch.Tensor]],
    notes: Mapping[str, Any],
) -> None:
    """Put a file at `path`, atomically; a value may be contiguous CPU tensors that make it up.

    Raises:
        ForeignFileError: there is a file that this function did not write.
        WriteError
    """
    _refuse_foreign(path)
    with replacing(path) as new, zipfile.ZipFile(new.path, "w") as archive:
        _put(archive, f"{_ROOT}/data.pkl", [_pickled(layouts)])
        _put(archive, f"{_ROOT}/byteorder", [sys.byteorder.encode()])
        for number, name in enumerate(layouts):
            value = values[name]
            blocks = [value.contiguous()] if isinstance(value, torch.Tensor) else value
            _put(archive, f"{_ROOT}/data/{number}", map(bytes_of, blocks))
        _put(archive, f"{_ROOT}/version", [b"3\n"])
        _put(archive, _NOTE, [json.dumps(notes).encode()])


def notes_in(file: TensorFile) -> Mapping[str, Any] | None:
    """The notes that `write_archive` left in a file; None in any other file.

    Raises:
        MissingFileError, ChangedFileError, CorruptFileError, ReadError
    """
    with reading(file.path), as_file(file.descriptor()) as opened:
        if not zipfile.is_zipfile(opened):
            return None
        try:
            with zipfile.ZipFile(opened) as archive, archive.open(_NOTE) as record:
                found = parse_json(record.read(MOST_JSON))
        except KeyError:  # there is no such record
            return None
        except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, RecursionError) as error:
            raise CorruptFileError(f"{file.path}: its description of the rows can't be read ({error})") from error
    return found if isinstance(found, dict) else None


def _refuse_foreign(path: Path) -> None:
    try:
        file = TensorFile.open(path)
        is_ours = not path.is_symlink() and (file.is_ours or notes_in(file) is not None)
    except MissingFileError:
        is_ours = not path.is_symlink()
    except ReadError:
        raise
    except OffloadError:
        is_ours = False
    if not is_ours:
        raise ForeignFileError(
            f"{path} exists and was not written by offload: it is left as it is. Take another name, or move it away."
        )


def _put(archive: zipfile.ZipFile, name: str, blocks: Iterable[bytes | memoryview]) -> None:
    """An uncompressed record of any size, with aligned data."""
    info = zipfile.ZipInfo(name)
    start = archive.fp.tell() + _LOCAL + len(name) + _ZIP64 + _PADDING  # type: ignore[union-attr]
    filling = -start % _ALIGNED
    info.extra = b"FB" + filling.to_bytes(2, "little") + b"Z" * filling
    with archive.open(info, "w", force_zip64=True) as record:
        for block in blocks:
            record.write(block)


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    layout: Layout


class _Column(_Storage):
    """A tensor that covers its whole storage."""


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> Any:
        if type(value) is not _Storage:
            return None
        kinds = storage_names()
        kind, dtype = torch.UntypedStorage, value.layout.dtype
        if dtype in kinds and dtype not in new_dtypes():
            kind = getattr(torch, kinds[dtype])
        count = value.layout.nbytes // (1 if kind is torch.UntypedStorage else dtype.itemsize)
        return "storage", kind, value.key, "cpu", count

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not _Column:
            return NotImplemented
        layout, storage = value.layout, _Storage(value.key, value.layout)
        parts: tuple[Any, ...] = (storage, 0, tuple(layout.shape), tuple(layout.stride), False, OrderedDict())
        if layout.dtype in new_dtypes():
            return needed(rebuild_tensor_of_new_dtype), (*parts, layout.dtype)
        return needed(rebuild_tensor), parts


def _pickled(layouts: Mapping[str, Layout]) -> bytes:
    data = io.BytesIO()
    columns = {name: _Column(str(number), layout) for number, (name, layout) in enumerate(layouts.items())}
    _Pickler(data, protocol=2).dump(columns)
    return data.getvalue()
