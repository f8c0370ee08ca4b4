"""The header of a file that torch.save wrote: what is in it, and where.

Always true:
- pickles of tensors are read only by the unpickler of `torch.load(weights_only=True)`, over tensors without data; in
  other pickles each object becomes a note: nothing in the file is executed, and no value is read
- the memory a pickle takes is proportional to its length, whatever it asks for
- the place of a value comes from the file's own directory, or list, of storages; every extent has been checked to lie
  inside the file
- a value that can be mapped as a tensor where it lies is an entry; any other is unreadable, with the way out
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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import torch

from offload.errors import CheckpointError, CorruptFileError, OffloadError
from offload.storage.header import MARK, Header, is_unicode
from offload.storage.layout import (
    MISALIGNED,
    Entry,
    can_be_over,
    contiguous,
    dtype_name,
    dtype_named,
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
_LOCAL = struct.Struct("<4s22xHH")  # of a zip record: magic, length of its name, length of its extra field
_COUNT = struct.Struct("<q")
_LONGEST = 1 << 28  # longest pickle, in bytes
_DEEPEST = 4  # deepest nesting of a state dict under usual keys
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CALLS = (b"R", b"\x81")  # the opcodes REDUCE and NEWOBJ
_ARGUMENTS = {  # opcodes with an argument, and how many reads it takes
    **dict.fromkeys((b"K", b"M", b"J", b"G", b"h", b"j", b"q", b"r", b"\x80"), 1),
    **dict.fromkeys((b"X", b"U", b"\x8a"), 2),
}
NOTES = f"{MARK}.json"  # a record with what `offload` noted in a file of its own
_SAVE_TENSORS = "save the tensors alone, torch.save(model.state_dict(), path), or as .safetensors"
_CONVERT = "convert it once, torch.save(torch.load(path, weights_only=True), another_path)"


@dataclass(frozen=True, slots=True)
class _Storage:
    """A storage that a pickle names, by what the pickle says: a tensor may enlarge the object, which has no data."""

    storage: torch.UntypedStorage  # keeps its id unique
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Unpickled:
    """What a file, or an archive in it, holds.

    Attributes:
        content: the unpickled object, whose tensors have no data.
        storages: theirs, by key.
        places: the first byte and the size of each in the file, by `storage_id`.
        metadata: as in a safetensors header.
    """

    content: object
    storages: Mapping[str, _Storage]
    places: Mapping[int, tuple[int, int]]
    metadata: Mapping[str, str]


def recognizes(start: bytes) -> bool:
    """Whether a file that begins like this is meant for torch.load, or pretends to be."""
    if start[8:9] == b"{":  # after the length of a safetensors header, which may be any bytes
        return False
    return start.startswith((_ZIP, *_BARE))


def read_header(file: BinaryIO, size: int) -> Header:
    """The checked header of such a file of `size` bytes.

    Raises `CorruptFileError` if it is incomplete or damaged; `CheckpointError` if it contains code, has an old or
    foreign form, or has no named tensors.
    """
    with no_functions(), no_modes():
        saved = _read_legacy(file, size) if _is_legacy(file) else _read_archive(file)
        found = {key: _entry(key, tensor, saved) for key, tensor in _tensors_in(saved.content).items()}
    return _header(found, saved.metadata)


def read_archives(file: BinaryIO, size: int, places: Mapping[str, tuple[int, int]]) -> Header:
    """The checked header of a file of `size` bytes that is a sequence of archives with one tensor each.

    `places` is as for `TensorFile.of_archives`. Raises: as `read_header`.
    """
    found: dict[str, Entry | str] = {}
    for key, (begin, nbytes) in places.items():
        if begin + nbytes > size:
            raise CorruptFileError(
                f"it is cut off: its archive of {key!r} ends at byte {begin + nbytes}, it has {size}"
            )
        with no_functions(), no_modes():
            saved = _read_archive(io.BufferedReader(Section(file.fileno(), begin, nbytes)), begin)
            if not isinstance(saved.content, torch.Tensor):
                raise CheckpointError(f"holds {_described(saved.content)} in place of {key!r}: {_SAVE_TENSORS}")
            found[key] = _entry(key, saved.content, saved)
    return _header(found, {})


def _header(found: Mapping[str, Entry | str], metadata: Mapping[str, str]) -> Header:
    """Values by their entries; instead of an entry there may be a reason why it can't be read."""
    return Header(
        metadata,
        {key: entry for key, entry in found.items() if not isinstance(entry, str)},
        {key: reason for key, reason in found.items() if isinstance(reason, str)},
    )


# The two forms: an archive, since PyTorch 1.6, and before that pickles and storages in a row


def _is_legacy(file: BinaryIO) -> bool:
    """Raises `CheckpointError` if it is another pickle."""
    start = file.read(len(_LEGACY))
    file.seek(0)
    if not start.startswith((_ZIP, _LEGACY)):
        raise CheckpointError(f"is a pickle that torch.save did not write, and is not opened: {_SAVE_TENSORS}")
    return start == _LEGACY


def _read_legacy(file: BinaryIO, size: int) -> _Unpickled:
    """What five pickles hold, the last of which lists the storages; each follows as a count of elements, and bytes."""
    for _ in range(3):  # the magic number, the protocol, and the system it was written on
        _unpickle(file)
    content, storages = _unpickle(file)
    keys, _ = _unpickle(file)
    if not isinstance(keys, list) or [key for key in keys if not isinstance(key, str)] or {*keys} != {*storages}:
        raise CorruptFileError("its list of storages is not that of its pickle")
    places, at = {}, file.tell()
    for named in map(storages.__getitem__, keys):
        file.seek(at)
        count, at = file.read(_COUNT.size), at + _COUNT.size
        if not at <= at + named.nbytes <= size:
            raise CorruptFileError(f"it is cut off: a storage ends at byte {at + named.nbytes}, it has {size}")
        if _COUNT.unpack(count) != (named.numel,):
            raise CorruptFileError("one of its storages has another size than its pickle says")
        places[storage_id(named.storage)] = at, named.nbytes
        at += named.nbytes
    return _Unpickled(content, storages, places, {})


def _read_archive(file: BinaryIO, begin: int = 0) -> _Unpickled:
    """What an archive holds that begins at byte `begin` of the file with the values; `file` begins with it."""
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, ValueError, struct.error, EOFError, NotImplementedError) as error:
        _leave_to_the_system(error)
        raise CorruptFileError(f"it is cut off or damaged: its zip directory can't be read ({error})") from error
    infos = {info.filename: info for info in archive.infolist()}
    if len(infos) < len(archive.infolist()):
        raise CorruptFileError("its zip directory names a record twice")
    root = _root(infos)
    order = infos.get(f"{root}byteorder")
    if order is not None and _content(archive, order) != sys.byteorder.encode():
        raise CheckpointError(f"is in the byte order of another machine: {_CONVERT}")

    content, storages = _unpickle(io.BytesIO(_content(archive, infos[f"{root}data.pkl"])))
    places = {}
    for key, named in storages.items():
        info = infos.get(f"{root}data/{key}")
        if info is None:
            raise CorruptFileError(f"it has no record data/{key}, which its pickle names")
        if info.file_size != named.nbytes:
            raise CorruptFileError(
                f"its record data/{key} has {info.file_size} bytes, and {named.nbytes} by its pickle"
            )
        places[storage_id(named.storage)] = begin + _start(file, info, archive.start_dir), named.nbytes
    noted = infos.get(f"{root}{NOTES}")
    metadata = {} if noted is None else {MARK: _content(archive, noted).decode(errors="replace")}
    return _Unpickled(content, storages, places, metadata)


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
    _refuse_packed(info)
    if info.file_size > _LONGEST:
        raise CorruptFileError(f"its {info.filename} has {info.file_size} bytes, more than any pickle of tensors")
    try:
        return archive.read(info)
    except Exception as error:  # a bad checksum, other names, an end that is too early
        _leave_to_the_system(error)
        raise CorruptFileError(f"its {info.filename} can't be read ({error})") from error


def _start(file: BinaryIO, info: zipfile.ZipInfo, end: int) -> int:
    """The first byte of a record's content, all of which is before `end`."""
    _refuse_packed(info)
    name = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
    file.seek(max(info.header_offset, 0))
    local = file.read(_LOCAL.size + len(name))
    mark, length, extra = _LOCAL.unpack(local[: _LOCAL.size]) if len(local) > _LOCAL.size else (b"", 0, 0)
    start = info.header_offset + _LOCAL.size + length + extra
    is_named = mark == _ZIP and length == len(name) and local.endswith(name)
    if not is_named or start + info.file_size > end:
        raise CorruptFileError(f"its record {info.filename} is not where its zip directory says")
    return int(start)


def _refuse_packed(info: zipfile.ZipInfo) -> None:
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
        raise CheckpointError(f"has a record {info.filename} that is compressed or encrypted: {_CONVERT}")


# Pickles


def _unpickle(file: BinaryIO) -> tuple[Any, dict[str, _Storage]]:
    """The next object in a file, and the storages that it names, by key."""
    storages: dict[str, _Storage] = {}

    def storage_for(saved_id: Any) -> torch.TypedStorage:
        _, kind, key, _, numel, *view = saved_id
        if not isinstance(key, str):
            raise CorruptFileError(f"its pickle names a storage by a {type(key).__name__}, not by text")
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        if dtype_named(dtype_name(dtype)) is None:
            raise CheckpointError(f"holds a quantized tensor ({dtype}): dequantize() it, or save its parts")
        if view not in ([], [None]):
            raise CheckpointError(f"names a part of a storage, as PyTorch before 0.4 did: {_CONVERT}")
        if key not in storages:
            storages[key] = _Storage(torch.UntypedStorage(numel * dtype.itemsize, device="meta"), dtype, numel)
        if (storages[key].dtype, storages[key].numel) != (dtype, numel):
            raise CorruptFileError(f"its pickle names storage {key} twice, as different ones")
        return typed(storages[key].storage, dtype)

    unpickler = _Sparing(file)
    unpickler.persistent_load = storage_for  # type: ignore[method-assign]
    waiting = unchecked_sparse()  # for a check in the next torch.load; what is sparse here has no data
    before = len(waiting)
    try:
        with _explained():
            return unpickler.load(), storages  # type: ignore[no-untyped-call]
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
        self.readline = partial(file.readline, _LONGEST)
        self._due = 0  # reads left that belong to the last opcode's argument
        self.read = self._watched

    def _watched(self, count: int) -> bytes:
        if count > _LONGEST:
            raise CorruptFileError(f"its pickle asks for {count} bytes at once, more than any pickle of tensors")
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


def _tensors_in(saved: object) -> dict[str, torch.Tensor]:
    """The tensors of a state dict by name; it may be nested under one of the usual keys."""
    tensors = _tensors_below(saved, _DEEPEST)
    if not tensors:
        raise CheckpointError(f"holds no tensors by name, but {_described(saved)}: {_SAVE_TENSORS}")
    if not is_unicode("".join(tensors)):
        raise CheckpointError(f"names a tensor with a lone surrogate, which is not valid text: {_SAVE_TENSORS}")
    return tensors


def _tensors_below(saved: object, deepest: int) -> dict[str, torch.Tensor]:
    if not isinstance(saved, dict):
        return {}
    nests = {nest: below for nest in NESTS if deepest and (below := _tensors_below(saved.get(nest), deepest - 1))}
    if len(nests) > 1:
        raise CheckpointError(f"holds several models ({', '.join(nests)}): {_SAVE_TENSORS}")
    of_itself = {key: value for key, value in saved.items() if isinstance(key, str) and isinstance(value, torch.Tensor)}
    return next(iter(nests.values()), of_itself)


def _described(saved: object) -> str:
    if not isinstance(saved, dict):
        return f"a {type(saved).__name__}"
    items = ", ".join(
        f"{short(reprlib.repr(key), 40)}: {type(value).__name__}" for key, value in list(saved.items())[:8]
    )
    return f"a dictionary of {len(saved)} ({items})" if saved else "an empty dictionary"


def _entry(key: str, tensor: torch.Tensor, saved: _Unpickled) -> Entry | str:
    """The entry of a value, or why it can't be read."""
    if type(tensor) not in _PLAIN:
        return f"is a {type(tensor).__name__}: save its parts as plain tensors"
    if tensor.layout != torch.strided:
        return f"is a {str(tensor.layout).removeprefix('torch.')} tensor: save its to_dense(), or its parts"
    place = saved.places.get(storage_id(tensor.untyped_storage()))
    if place is None:
        return "has no data: it was on the meta device when it was saved"
    shape, stride, offset = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
    layout = layout_as(tensor.dtype, shape, stride)
    if layout is None or offset < 0:
        raise CorruptFileError(f"its pickle gives {short(key)!r} the shape {short(shape)}: not the shape of a tensor")
    begin = offset * tensor.dtype.itemsize
    if begin + span_of(tensor.dtype, shape, stride) > place[1]:
        raise CorruptFileError(f"its pickle places {short(key)!r} outside of its record")
    if tensor.is_conj() or tensor.is_neg():
        return "is stored as its conjugate or its negative: load it with torch.load, and save its clone()"
    if tensor.is_contiguous():  # the stride of a one-element dimension is arbitrary
        layout = contiguous(tensor.dtype, shape)
    if not layout.is_dense:
        return "is a view with gaps, or whose elements share bytes: load it with torch.load, and save its contiguous()"
    entry = Entry(key, layout, place[0] + begin)
    return entry if can_be_over(entry) else MISALIGNED
