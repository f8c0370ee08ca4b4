"""The header of a file that torch.save wrote: what is in it, and where.

Always true:
- pickles of tensors are read only by the unpickler of `torch.load(weights_only=True)`, over tensors without data; in
  other pickles each object becomes a note: nothing in the file is executed, and no value is read
- the memory a pickle takes is proportional to its length, whatever it asks for
- the place of a value comes from the archive's own directory; every extent has been checked to lie inside its record
- a value that can be mapped as a tensor where it lies is an entry; any other is unreadable, with the way out
- names that share a storage become separate values

Source of the formats: `torch/serialization.py` (`_save`), and PKWARE's APPNOTE for zip.
"""

from __future__ import annotations

import errno
import io
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from offload.errors import CheckpointError, CorruptFileError, OffloadError
from offload.storage.header import Header, is_unicode
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
_BARE = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")  # protocols 2 to 5
_LOCAL = struct.Struct("<4s22xHH")  # of a zip record: magic, length of its name, length of its extra field
_LONGEST = 1 << 28  # longest pickle, in bytes
_DEEPEST = 4  # deepest nesting of a state dict under usual keys
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CALLS = (b"R", b"\x81")  # the opcodes REDUCE and NEWOBJ
_ARGUMENTS = {  # opcodes with an argument, and how many reads it takes
    **dict.fromkeys((b"K", b"M", b"J", b"G", b"h", b"j", b"q", b"r", b"\x80"), 1),
    **dict.fromkeys((b"X", b"U", b"\x8a"), 2),
}
_SAVE_TENSORS = "save the tensors alone, torch.save(model.state_dict(), path), or as .safetensors"
_CONVERT = "load it once, torch.load(path, weights_only=True), and save it again with torch.save, or as .safetensors"
_NOT_AS_IT_LIES = (
    "can't be read where it lies (it is sparse, a view with gaps or overlaps, a conjugate or negative, without data, "
    "or of a class of its own): load it with torch.load, and save it as a plain, contiguous tensor"
)
_NOWHERE = (None, -1, 0)


@dataclass(frozen=True, slots=True)
class _Unpickled:
    """What an archive holds.

    Attributes:
        content: the unpickled object, whose tensors have no data.
        storages: their storages by `storage_id`, with the first byte and the size of each in the file: what the
            records say, since a tensor may enlarge a storage without data.
    """

    content: object
    storages: Mapping[int, tuple[torch.UntypedStorage, int, int]]


def recognizes(start: bytes) -> bool:
    """Whether a file that begins like this is meant for torch.load, or pretends to be."""
    if start[8:9] == b"{":  # after the length of a safetensors header, which may be any bytes
        return False
    return start.startswith((_ZIP, *_BARE))


def read_header(file: BinaryIO) -> Header:
    """The checked header of such a file.

    Raises `CorruptFileError` if it is incomplete or damaged; `CheckpointError` if it contains code, has an old or
    foreign form, or has no named tensors.
    """
    if file.read(len(_ZIP)) != _ZIP:
        raise CheckpointError(f"is a pickle, not the zip archive that torch.save writes since PyTorch 1.6: {_CONVERT}")
    with no_functions(), no_modes():
        saved = _read_archive(file)
        entries = {key: _entry(key, tensor, saved) for key, tensor in _tensors_in(saved.content).items()}
    return _header(entries)


def read_archives(file: BinaryIO, size: int, places: Mapping[str, tuple[int, int]]) -> Header:
    """The checked header of a file of `size` bytes that is a sequence of archives with one tensor each.

    `places` is as for `TensorFile.of_archives`. Raises: as `read_header`.
    """
    entries: dict[str, Entry | str] = {}
    for key, (begin, nbytes) in places.items():
        if begin + nbytes > size:
            raise CorruptFileError(
                f"it is cut off: its archive of {key!r} ends at byte {begin + nbytes}, it has {size}"
            )
        with no_functions(), no_modes():
            saved = _read_archive(io.BufferedReader(Section(file.fileno(), begin, nbytes)), begin)
            if not isinstance(saved.content, torch.Tensor):
                kind = type(saved.content).__name__
                raise CheckpointError(f"holds a {kind} in place of the tensor {key!r}: {_SAVE_TENSORS}")
            entries[key] = _entry(key, saved.content, saved)
    return _header(entries)


def _header(entries: Mapping[str, Entry | str]) -> Header:
    """Values by their entries; instead of an entry there may be a reason why it can't be read."""
    return Header(
        {},
        {key: entry for key, entry in entries.items() if not isinstance(entry, str)},
        {key: reason for key, reason in entries.items() if isinstance(reason, str)},
    )


# Archives


def _read_archive(file: BinaryIO, begin: int = 0) -> _Unpickled:
    """What an archive holds that begins at byte `begin` of the file with the values; `file` begins with it.

    The places of records are not those that torch.load notes (`_checkpoint_offset`): it calculates them from their
    order, which is wrong in an archive that other code wrote, and it checks no sizes (torch 2.13).
    """
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, ValueError, struct.error, EOFError, NotImplementedError) as error:
        _leave_to_the_system(error)
        raise CorruptFileError(f"it is cut off or damaged: its zip directory can't be read ({error})") from error
    infos = {info.filename: info for info in archive.infolist()}
    if len(infos) < len(archive.infolist()):
        raise CorruptFileError("its zip directory names a record twice")
    roots = [name.removesuffix("data.pkl") for name in infos if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(roots) != 1:
        raise CheckpointError(f"is a zip archive, but torch.save did not write it: {_SAVE_TENSORS}")
    (root,) = roots
    order = infos.get(f"{root}byteorder")
    if order is not None and _content(archive, order) != sys.byteorder.encode():
        raise CheckpointError(f"is in the byte order of another machine: {_CONVERT}")
    storages: dict[int, tuple[torch.UntypedStorage, int, int]] = {}

    def storage_for(saved_id: Any) -> torch.TypedStorage:
        _, kind, key, _, numel = saved_id
        if not isinstance(key, str):
            raise CorruptFileError(f"its pickle names a storage by a {type(key).__name__}, not by text")
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        if dtype_named(dtype_name(dtype)) is None:
            raise CheckpointError(f"holds a quantized tensor ({dtype}): dequantize() it, or save its parts")
        info = infos.get(f"{root}data/{key}")
        if info is None or info.file_size != numel * dtype.itemsize:
            raise CorruptFileError(f"it has no record data/{key} of the size that its pickle says")
        storage = torch.UntypedStorage(info.file_size, device="meta")
        storages[storage_id(storage)] = storage, begin + _start(file, info, archive.start_dir), info.file_size
        return typed(storage, dtype)

    content = _unpickle(_content(archive, infos[f"{root}data.pkl"]), storage_for)
    return _Unpickled(content, storages)


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


def _unpickle(data: bytes, storage_for: Callable[[Any], torch.TypedStorage]) -> Any:
    """The object in a pickle; `storage_for` gives the storages that it names."""
    unpickler = _Sparing(data)
    unpickler.persistent_load = storage_for  # type: ignore[method-assign]
    waiting = unchecked_sparse()  # for a check in the next torch.load; what is sparse here has no data
    before = len(waiting)
    try:
        with _explained():
            return unpickler.load()  # type: ignore[no-untyped-call]
    finally:
        del waiting[before:]


class _Sparing(Unpickler):
    """torch's unpickler, which also refuses pickles that could take any amount of memory with a few bytes.

    The original calls only what is allowed, but with any arguments; and it prints what it refuses to call, which is
    endless for nested references to one list. So every call is checked when its opcode is read, before it runs.
    """

    def __init__(self, data: bytes) -> None:
        source = io.BytesIO(data)  # gives no more than it has, whatever length a pickle asks for
        super().__init__(source, encoding="utf-8")
        self._source = source.read
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
        args: the arguments of the call that would build it.
        state: what would be set on it.
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
        allowed = (dtype_named(name) if module == "torch" else None) or known.get((module, name))
        if allowed is None:
            raise CheckpointError(
                f"names {short(f'{module}.{name}')}, which does not belong there, and is not opened: it could run code"
            )
        return allowed

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
        raise CheckpointError(f"holds no tensors by name, but a {type(saved).__name__}: {_SAVE_TENSORS}")
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


def _entry(key: str, tensor: torch.Tensor, saved: _Unpickled) -> Entry | str:
    """The entry of a value, or why it can't be read."""
    is_strided = type(tensor) in _PLAIN and tensor.layout == torch.strided
    _, start, nbytes = saved.storages.get(storage_id(tensor.untyped_storage()), _NOWHERE) if is_strided else _NOWHERE
    if start < 0 or tensor.is_conj() or tensor.is_neg():
        return _NOT_AS_IT_LIES
    shape, stride, offset = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
    layout = layout_as(tensor.dtype, shape, stride)
    if layout is None or offset < 0:
        raise CorruptFileError(f"its pickle gives {short(key)!r} the shape {short(shape)}: not the shape of a tensor")
    begin = offset * tensor.dtype.itemsize
    if begin + span_of(tensor.dtype, shape, stride) > nbytes:
        raise CorruptFileError(f"its pickle places {short(key)!r} outside of its record")
    if tensor.is_contiguous():  # the stride of a one-element dimension is arbitrary
        layout = contiguous(tensor.dtype, shape)
    if not layout.is_dense:
        return _NOT_AS_IT_LIES
    entry = Entry(key, layout, start + begin)
    return entry if can_be_over(entry) else MISALIGNED
