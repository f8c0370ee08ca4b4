"""The header of a file that torch.save wrote: what is in it, and where.

Always true:
- pickles of tensors are read only by the unpickler of `torch.load(weights_only=True)`, over tensors without data; in
  other pickles each object becomes a note: nothing in the file is executed, and no value is read
- the memory a pickle takes is proportional to its length, whatever it asks for
- the place of a value comes from the file's own directory, not from guesses; every extent has been checked to lie
  inside the file
- a value in whole, aligned, native elements without gaps is an entry and can be mapped as a tensor; any other is
  loose, or unreadable with a reason
- names that share a storage become separate values

Source of the formats: `torch/serialization.py` (`_save`, `_legacy_save`), and PKWARE's APPNOTE for zip.
"""

from __future__ import annotations

import errno
import io
import pickle
import reprlib
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, TypeAlias

import torch

from offload.errors import CheckpointError, CorruptFileError, OffloadError
from offload.storage.header import MARK, Header, is_unicode
from offload.storage.layout import (
    Entry,
    Loose,
    Record,
    can_be_over,
    contiguous,
    dtype_name,
    dtype_named,
    is_aligned,
    layout_as,
    span_of,
)
from offload.system.modes import no_functions, no_modes
from offload.system.reasons import short
from offload.system.regular import Section
from offload.torch_api import (
    CLASSES_OF_TENSORS,
    Unpickler,
    needed,
    rebuild_from_type,
    storage_id,
    typed,
    unchecked_sparse,
)

NESTS = ("state_dict", "model", "module", "model_state_dict")
_ZIP = b"PK\x03\x04"
_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."  # a pickled number
_BARE = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")  # protocols 2 to 5
_TAR, _TAR_AT = b"ustar", 257
_LOCAL = struct.Struct("<4s22xHH")  # of a zip record: magic, length of its name, length of its extra field
_NUMEL = struct.Struct("<q")
_LONGEST = 1 << 28  # longest pickle, in bytes
_DENSEST = 64  # most unpacked bytes of a pickle per packed byte
_DEFLATED = 1032  # most unpacked bytes that deflate can make of one packed byte
_DEEPEST = 4  # deepest nesting of a state dict under usual keys
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CALLS = (b"R", b"\x81")  # the opcodes REDUCE and NEWOBJ
_ARGUMENTS = {  # opcodes with an argument, and how many reads it takes
    **dict.fromkeys((b"K", b"M", b"J", b"G", b"h", b"j", b"q", b"r", b"\x80"), 1),
    **dict.fromkeys((b"X", b"U", b"\x8a"), 2),
}
NOTES = f"{MARK}.json"  # a record with what `offload` noted in a file of its own
_SAVE_TENSORS = "save the tensors alone, torch.save(model.state_dict(), path), or as .safetensors"

# The unpickled object, its storages by address, their records by key, and metadata as in a safetensors header.
Saved: TypeAlias = "tuple[Any, dict[int, StorageRecord], dict[str, Record], dict[str, str]]"


def recognizes(start: bytes) -> bool:
    """Whether a file that begins like this is meant for torch.load, or pretends to be."""
    if start[8:9] == b"{":  # after the length of a safetensors header, which may be any bytes
        return False
    return start.startswith((_ZIP, _LEGACY, *_BARE)) or start[_TAR_AT:].startswith(_TAR)


def read_header(file: BinaryIO, size: int) -> Header:
    """The checked header of such a file of `size` bytes.

    Raises `CorruptFileError` if it is incomplete or damaged; `CheckpointError` if it contains code, has an old or
    foreign form, or has no named tensors.
    """
    with no_functions(), no_modes():
        saved, pieces, records, metadata = _read(file, size)
        places = {key: _place(key, tensor, pieces, records) for key, tensor in _tensors_in(saved).items()}
    return _header(places, metadata, is_aligned)


def read_archives(file: BinaryIO, size: int, places: Mapping[str, tuple[int, int]]) -> Header:
    """The checked header of a file that is a sequence of archives with one tensor each.

    `places` is as for `TensorFile.of_archives`. Raises: as `read_header`.
    """
    found: dict[str, Loose | str] = {}
    for key, (begin, nbytes) in places.items():
        if begin + nbytes > size:
            raise CorruptFileError(
                f"it is cut off: its archive of {key!r} ends at byte {begin + nbytes}, it has {size}"
            )
        section = io.BufferedReader(Section(file.fileno(), begin, nbytes))
        with no_functions(), no_modes():
            saved, pieces, records, _ = _read(section, nbytes)
            if not isinstance(saved, torch.Tensor):
                raise CheckpointError(f"holds {_described(saved)} in place of {key!r}: {_SAVE_TENSORS}")
            place = _place(key, saved, pieces, records)
        if not isinstance(place, str):
            place = replace(place, record=replace(place.record, start=place.record.start + begin))
        found[key] = place
    return _header(found, {}, can_be_over)


def _read(file: BinaryIO, size: int) -> Saved:
    start = file.read(_TAR_AT + len(_TAR))
    file.seek(0)
    if start.startswith(_ZIP):
        return _read_zip(file)
    if start.startswith(_LEGACY):
        return _read_legacy(file, size)
    if start[_TAR_AT:].startswith(_TAR):
        raise CheckpointError(
            "is in the tar form of PyTorch before 0.2, which can't be read safely: open it with torch.load if you "
            f"trust it, and {_SAVE_TENSORS}"
        )
    raise CheckpointError(f"is a pickle that torch.save did not write, and is not opened: {_SAVE_TENSORS}")


# The two file forms


def _read_zip(file: BinaryIO) -> Saved:
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, ValueError, struct.error, EOFError, NotImplementedError) as error:
        _leave_to_the_system(error)
        raise CorruptFileError(f"it is cut off or damaged: its zip directory can't be read ({error})") from error
    infos = {info.filename: info for info in archive.infolist()}
    if len(infos) < len(archive.infolist()):
        raise CorruptFileError("its zip directory names a record twice")
    root = _root(infos)
    info = infos.get(f"{root}byteorder")
    order = b"little" if info is None else _content(archive, info)
    if order not in (b"little", b"big"):
        raise CorruptFileError(f"its byte order is {order[:20]!r}, neither little nor big")
    is_swapped = order != sys.byteorder.encode()

    saved, pieces = _unpickle(io.BytesIO(_content(archive, infos[f"{root}data.pkl"])))
    records = {}
    for piece in pieces.values():
        info = infos.get(f"{root}data/{piece.key}")
        if info is None:
            raise CorruptFileError(f"it has no record data/{piece.key}, which its pickle names")
        if piece.key not in records:
            records[piece.key] = _zip_record(file, info, archive.start_dir, is_swapped=is_swapped)
        if records[piece.key].nbytes != piece.whole:
            raise CorruptFileError(
                f"its record data/{piece.key} has {info.file_size} bytes, and {piece.whole} by its pickle"
            )
    noted = infos.get(f"{root}{NOTES}")
    return saved, pieces, records, {} if noted is None else {MARK: _content(archive, noted).decode(errors="replace")}


def _root(infos: Mapping[str, object]) -> str:
    """The folder in the archive that contains everything, with a trailing slash."""
    roots = [name.removesuffix("data.pkl") for name in infos if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(roots) != 1:
        raise CheckpointError(f"is a zip archive, but torch.save did not write it: {_SAVE_TENSORS}")
    if f"{roots[0]}constants.pkl" in infos:
        raise CheckpointError(
            "is a TorchScript archive, a program with its weights: load it with torch.jit.load if you trust it, and "
            "save its state_dict()"
        )
    return roots[0]


def _content(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    if info.file_size > min(_LONGEST, _DENSEST * info.compress_size):
        raise CorruptFileError(
            f"its {info.filename} claims to be {info.file_size} bytes, from {info.compress_size}, more than any "
            "pickle of tensors"
        )
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise _unknown_packing(info)
    try:
        with archive.open(info) as record:
            return record.read(info.file_size)  # `archive.read` would unpack everything before cutting it
    except Exception as error:  # a bad checksum, an unknown method, encryption, bytes that are not deflated
        _leave_to_the_system(error)
        raise CorruptFileError(f"its {info.filename} can't be read ({error})") from error


def _zip_record(file: BinaryIO, info: zipfile.ZipInfo, end: int, *, is_swapped: bool) -> Record:
    name = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
    file.seek(max(info.header_offset, 0))
    local = file.read(_LOCAL.size + len(name))
    mark, length, extra = _LOCAL.unpack(local[: _LOCAL.size]) if len(local) > _LOCAL.size else (b"", 0, 0)
    start = info.header_offset + _LOCAL.size + length + extra
    is_there = mark == _ZIP and length == len(name) and local.endswith(name) and start + info.compress_size <= end
    if not is_there or info.flag_bits & 1:
        raise CorruptFileError(f"its record {info.filename} is not where its zip directory says")
    if info.compress_type == zipfile.ZIP_DEFLATED:
        if info.file_size > _DEFLATED * info.compress_size:
            raise CorruptFileError(
                f"its record {info.filename} claims to be {info.file_size} bytes, from {info.compress_size}, more "
                "than any compression reaches"
            )
        return Record(start, info.file_size, packed=info.compress_size, is_swapped=is_swapped)
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise _unknown_packing(info)
    return Record(start, info.file_size, is_swapped=is_swapped)


def _unknown_packing(info: zipfile.ZipInfo) -> CorruptFileError:
    return CorruptFileError(f"its record {info.filename} is packed in a way that torch does not read")


def _read_legacy(file: BinaryIO, size: int) -> Saved:
    """Several pickles in a row, then the storages in key order, each as an element count and its bytes."""
    for _ in range(3):  # the magic number, the protocol, and the system it was written on
        _unpickle(file)
    saved, pieces = _unpickle(file)
    keys, _ = _unpickle(file)
    known = {piece.key: piece for piece in pieces.values()}
    if not isinstance(keys, list) or not all(isinstance(key, str) and key in known for key in keys):
        raise CorruptFileError("its list of storages is malformed")
    is_swapped, records, at = sys.byteorder == "big", {}, file.tell()
    for key in keys:
        file.seek(at)
        count = file.read(_NUMEL.size)
        at += _NUMEL.size
        nbytes = known[key].whole
        if at + nbytes > size:
            raise CorruptFileError(f"it is cut off: its storage {key} ends at byte {at + nbytes}, it has {size}")
        if _NUMEL.unpack(count)[0] * known[key].itemsize != nbytes:
            raise CorruptFileError(f"its storage {key} has another size than its pickle says")
        records[key] = Record(at, nbytes, is_swapped=is_swapped)
        at += nbytes
    if records.keys() != known.keys():
        raise CorruptFileError("its pickle names storages that its list does not contain")
    return saved, pieces, records, {}


# Pickles


@dataclass(frozen=True, slots=True)
class StorageRecord:
    """A storage without data, as named in a pickle, which keeps its address unique.

    Attributes:
        begin, nbytes: its part of the record, in bytes; old pickles may name parts.
        whole: size of the record in bytes.
    """

    key: str
    begin: int
    nbytes: int
    whole: int
    itemsize: int
    storage: torch.UntypedStorage


def _unpickle(file: BinaryIO) -> tuple[Any, dict[int, StorageRecord]]:
    """The next object in a file, with the storages it names, by address."""
    pieces: dict[int, StorageRecord] = {}
    known: dict[str, tuple[torch.dtype, int]] = {}

    def storage_for(saved_id: Any) -> torch.TypedStorage:
        _, kind, key, _, numel, *view = saved_id
        if not isinstance(key, str):
            raise CorruptFileError(f"its pickle names a storage by a {type(key).__name__}, not by text")
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        if dtype_named(dtype_name(dtype)) is None:
            raise CheckpointError(f"holds a quantized tensor ({dtype}): dequantize() it, or save its parts")
        if known.setdefault(key, (dtype, numel)) != (dtype, numel):
            raise CorruptFileError(f"its pickle names storage {key} twice, as different ones")
        begin, count = (0, numel) if not view or view[0] is None else view[0][1:]
        if not 0 <= begin <= begin + count <= numel:
            raise CorruptFileError(f"its pickle names a part of storage {key} that is not in it")
        storage = torch.UntypedStorage(count * dtype.itemsize, device="meta")
        pieces[storage_id(storage)] = StorageRecord(
            key, begin * dtype.itemsize, count * dtype.itemsize, numel * dtype.itemsize, dtype.itemsize, storage
        )
        return typed(storage, dtype)

    unpickler = _Sparing(file)
    unpickler.persistent_load = storage_for  # type: ignore[method-assign]
    waiting = unchecked_sparse()  # for a check in the next torch.load; what is sparse here has no data
    before = len(waiting)
    try:
        with _explained():
            return unpickler.load(), pieces  # type: ignore[no-untyped-call]
    finally:
        del waiting[before:]


class _Sparing(Unpickler):
    """torch's unpickler, which also refuses pickles that could take any amount of memory with a few bytes.

    The original calls only what is allowed, but with any arguments; and it prints what it refuses to call, which is
    endless for nested references to one list. So every call is checked when its opcode is read, before it runs.
    """

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, encoding="utf-8")
        self._source = file.read
        self._due = 0  # reads left that belong to the last opcode's argument
        self.read = self._watched

    def _watched(self, count: int) -> bytes:
        data = self._source(count)
        if self._due:
            self._due -= 1
            return data
        self._due = _ARGUMENTS.get(data, 0)
        if data in _CALLS and len(self.stack) > 1:
            _refuse_call(*self.stack[-2:])
        return data


def _refuse_call(function: Any, arguments: object) -> None:
    """Raises `CheckpointError` for a call that no state dict contains."""
    if not callable(function):
        raise CheckpointError(f"is a pickle that calls a {type(function).__name__}, and is not opened: {_SAVE_TENSORS}")
    takes_a_size = function is bytearray or function is torch.Tensor or function in CLASSES_OF_TENSORS
    # None give something empty, and text something no larger than itself.
    is_harmless = isinstance(arguments, tuple) and (not arguments or isinstance(arguments[0], str | bytes))
    if takes_a_size and not is_harmless:
        raise CheckpointError(
            f"is a pickle that asks for a {function.__name__} of any size, and is not opened: {_SAVE_TENSORS}"
        )
    if function is needed(rebuild_from_type) and isinstance(arguments, tuple) and len(arguments) == 4:
        _refuse_call(arguments[0], arguments[2])


@contextmanager
def _explained() -> Iterator[None]:
    """Turn errors into ones that say what is wrong with a pickle."""
    try:
        yield
    except OffloadError:
        raise
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0].partition(" Please use")[0]
        raise CheckpointError(
            f"is a pickle with more than tensors, and is not opened, since it could run code ({reason}): "
            f"{_SAVE_TENSORS}"
        ) from error
    except Exception as error:  # malformed bytes can make the unpickler, or torch, raise anything
        _leave_to_the_system(error)
        raise CorruptFileError(f"its pickle is cut off or damaged ({type(error).__name__}: {short(error)})") from error


def _leave_to_the_system(error: Exception) -> None:
    """Re-raise a system error behind this one, if there is one: it says nothing about the bytes."""
    for each in (error, error.__context__):
        if isinstance(each, OSError) and each.errno not in (None, errno.EINVAL):  # EINVAL: an invalid offset
            raise each


# Pickles of objects other than tensors


class NotedObject:
    """An object in a pickle as plain data: how it would be built, with nothing that could run.

    Attributes:
        args: of the call that would build it.
        state: that would be set on it.
    """

    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: object) -> None:
        self.state = state


def read_notes(data: bytes, classes: Mapping[str, Iterable[str]]) -> Any:
    """The content of a pickle, with objects of the listed classes (names per module) as notes of classes of that name.

    Raises `CheckpointError` if it names anything else except a dtype; `CorruptFileError` if it is cut off or damaged.
    """
    known = {(module, name): type(name, (NotedObject,), {}) for module, names in classes.items() for name in names}

    def find(module: str, name: str) -> Any:
        found = (dtype_named(name) if module == "torch" else None) or known.get((module, name))
        if found is None:
            raise CheckpointError(
                f"names {short(f'{module}.{name}')}, which does not belong there, and is not opened: it could run code"
            )
        return found

    # The C version allocates as many objects as a pickle claims to have, and its name lookup can't be replaced.
    reader = pickle._Unpickler(io.BytesIO(data))
    reader.find_class = find  # type: ignore[method-assign]
    try:
        return reader.load()
    except CheckpointError:
        raise
    except Exception as error:  # malformed bytes can raise anything
        raise CorruptFileError(
            f"is cut off or damaged ({type(error).__name__}: {short(error)}): download or copy it again"
        ) from error


# From the unpickled object to a header


def _tensors_in(saved: object, deepest: int = _DEEPEST) -> dict[str, torch.Tensor]:
    """The tensors of a state dict by name; it may be nested under one of the usual keys."""
    if isinstance(saved, dict):
        nests = [nest for nest in NESTS if _has_tensors(saved.get(nest), deepest)]
        if len(nests) > 1:
            raise CheckpointError(f"holds several models ({', '.join(nests)}): {_SAVE_TENSORS}")
        if nests:
            return _tensors_in(saved[nests[0]], deepest - 1)
        tensors = {key: value for key, value in saved.items() if isinstance(key, str) and _is_tensor(value)}
        if not is_unicode("".join(tensors)):
            raise CheckpointError(f"names a tensor with a lone surrogate, which is not valid text: {_SAVE_TENSORS}")
        if tensors:
            return tensors
    raise CheckpointError(f"holds no tensors by name, but {_described(saved)}: {_SAVE_TENSORS}")


def _has_tensors(saved: object, deepest: int) -> bool:
    """Whether this is a state dict, or has one under the usual keys."""
    if not isinstance(saved, dict) or not deepest:
        return False
    return any(map(_is_tensor, saved.values())) or any(_has_tensors(saved.get(nest), deepest - 1) for nest in NESTS)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _described(saved: object) -> str:
    if not isinstance(saved, dict):
        return f"a {type(saved).__name__}"
    items = ", ".join(
        f"{short(reprlib.repr(key), 40)}: {type(value).__name__}" for key, value in list(saved.items())[:8]
    )
    return f"a dictionary of {len(saved)} ({items})" if saved else "an empty dictionary"


def _header(places: Mapping[str, Loose | str], metadata: Mapping[str, str], can_be: Callable[[Entry], bool]) -> Header:
    """Values by their places: those that can be mapped are entries; instead of a place there may be a reason."""
    found = {key: place for key, place in places.items() if not isinstance(place, str)}
    entries = {key: place.entry for key, place in found.items() if place.entry is not None and can_be(place.entry)}
    return Header(
        metadata,
        entries,
        {key: place for key, place in places.items() if isinstance(place, str)},
        {key: place for key, place in found.items() if key not in entries},
    )


def _place(
    key: str, tensor: torch.Tensor, pieces: Mapping[int, StorageRecord], records: Mapping[str, Record]
) -> Loose | str:
    """The place of a value, or why it can't be read."""
    if type(tensor) not in _PLAIN:
        return f"is a {type(tensor).__name__}: save its parts as plain tensors"
    if tensor.layout != torch.strided:
        return f"is a {str(tensor.layout).removeprefix('torch.')} tensor: save its to_dense(), or its parts"
    piece = pieces.get(storage_id(tensor.untyped_storage()))
    if piece is None:
        return "has no data: it was on the meta device when it was saved"
    shape, stride, offset = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
    layout = layout_as(tensor.dtype, shape, stride)
    if layout is None or offset < 0:
        raise CorruptFileError(f"its pickle gives {short(key)!r} the shape {short(shape)}: not the shape of a tensor")
    begin = offset * tensor.dtype.itemsize
    record = records[piece.key]
    end = piece.begin + begin + span_of(tensor.dtype, shape, stride)
    if end > min(piece.begin + piece.nbytes, record.nbytes):
        raise CorruptFileError(f"its pickle places {short(key)!r} outside of its record {piece.key}")
    if not (layout.is_dense or layout.overlaps) or tensor.is_contiguous():
        layout = contiguous(tensor.dtype, shape)
    if tensor.is_contiguous():  # the stride of a one-element dimension is arbitrary
        stride = layout.stride
    return Loose(key, layout, record, piece.begin + begin, stride, tensor.is_conj(), tensor.is_neg())
