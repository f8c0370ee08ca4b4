"""The header of a safetensors file: what is in it, and where.

Always true:
- a parsed header has been fully checked: known lengths, no holes, no overlap, nothing missing, nothing after the end,
  dense strides; any input gives either a header or a `CorruptFileError`
- an entry can be mapped as a tensor where it lies, at whatever byte it starts: complex128 only if it is aligned, as it
  is in a built file
- a built header ends at a multiple of `ALIGNMENT`, padded with spaces
- what safetensors has no word for is in the metadata under `offload`, as JSON: dtypes, strides, subclasses

Source of the format: https://huggingface.co/docs/safetensors (8 bytes of length, JSON, data).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath, PureWindowsPath
from typing import BinaryIO

import torch

from offload.annotations import Json
from offload.errors import ArgumentError, CorruptFileError, UnsupportedOpError
from offload.storage.layout import (
    MISALIGNED,
    TORCH_DTYPES,
    WORDS,
    Entry,
    Layout,
    are_counts,
    can_be_over,
    contiguous,
    contiguous_stride,
    dtype_name,
    dtype_named,
    is_countable,
    is_storable,
)
from offload.storage.state_file import parse_json
from offload.system.reasons import short

ALIGNMENT = 4096
MARK = "offload"
VERSION = 1
_LENGTH = struct.Struct("<Q")
_LONGEST = 100_000_000  # the limit of the safetensors library
_FLOAT4: torch.dtype | None = getattr(torch, "float4_e2m1fn_x2", None)


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says about itself.

    Attributes:
        entries: values that can be mapped as tensors where they lie.
        unreadable: values that torch can't read, with the reason.
        kinds: for entries of packed blocks, their GGUF type.
    """

    metadata: Mapping[str, str]
    entries: Mapping[str, Entry]
    unreadable: Mapping[str, str]
    kinds: Mapping[str, str] = field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of all values."""
        return (*self.entries, *self.unreadable)

    @property
    def notes(self) -> Mapping[str, Json] | None:
        """What `offload` noted in a file of its own; None for other files."""
        return _notes(self.metadata)


def read_header(file: BinaryIO, size: int) -> Header:
    """The checked header of such a file of `size` bytes.

    Raises `CorruptFileError` if it is incomplete or damaged, or another kind of file.
    """
    length = header_length(file.read(_LENGTH.size), size)
    return parse(file.read(length), size)


def header_length(prefix: bytes, size: int) -> int:
    """The length of the JSON in bytes, from the first 8 bytes of a file of `size` bytes.

    Raises `CorruptFileError` if this is not the start of a safetensors file.
    """
    if not size:
        raise CorruptFileError("it is empty")
    if len(prefix) < _LENGTH.size:
        raise CorruptFileError(f"it has {size} bytes, fewer than the 8 that a safetensors file starts with")
    (length,) = _LENGTH.unpack(prefix)
    if length > _LONGEST and prefix.isascii() and "".join(prefix.decode().split()).isprintable():
        raise CorruptFileError(f"it is text ({prefix.decode()!r}...), not a file of tensors")
    if length > _LONGEST:
        raise CorruptFileError(
            f"its first 8 bytes claim a header of {length} bytes: not a safetensors file, nor one of torch.save"
        )
    if _LENGTH.size + length > size:
        raise CorruptFileError(f"its header of {length} bytes is cut off: the file has only {size} bytes")
    return int(length)


@dataclass(frozen=True, slots=True)
class Head:
    """The first bytes of a new file, the header in them, and the size of the whole file."""

    data: bytes
    header: Header
    size: int


def parse(text: bytes, size: int) -> Header:
    """The checked header of a file of `size` bytes whose JSON is `text`.

    Raises `CorruptFileError` if the JSON is not a header, or does not match the file's size.
    """
    raw = _json_object(text)
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptFileError("its header's __metadata__ does not map text to text")
    notes = _notes(metadata) or {}
    noted = notes.get("values", {})
    if not isinstance(noted, dict) or not all(isinstance(note, dict) for note in noted.values()):
        raise CorruptFileError("its `offload` metadata is malformed")
    data_start = _LENGTH.size + len(text)
    entries: dict[str, Entry] = {}
    unreadable: dict[str, str] = {}
    for key, (word, shape, begin, end) in _in_order(raw, size - data_start):
        layout = _layout(word, shape, noted.get(key, {}))
        if layout is None:
            unreadable[key] = f"is stored as {word}: no torch dtype fits"
            continue
        if layout.nbytes != end - begin:
            raise CorruptFileError(
                f"its header gives {key!r} {end - begin} bytes, but {word} {short(shape)} takes {layout.nbytes}"
            )
        entry = Entry(key, layout, data_start + begin)
        if can_be_over(entry):
            entries[key] = entry
        else:
            unreadable[key] = MISALIGNED
    if "name" in notes:
        name = notes["name"]  # the value that the file must contain, under its name, or as the parts of a subclass
        is_named = isinstance(name, str) and is_unicode(name)
        if not is_named or (name not in raw and not isinstance(notes.get("subclass"), dict)):
            raise CorruptFileError(f"its `offload` metadata says that it holds {short(name)!r}, and it does not")
    return Header(metadata, entries, unreadable)


def build(layouts: Mapping[str, Layout], notes: Mapping[str, Json], metadata: Mapping[str, str] | None = None) -> Head:
    """The head of a file that holds values of these layouts, one after the other.

    `notes` go into the `offload` metadata, `metadata` beside it.

    Raises `UnsupportedOpError` if a dtype can't be stored; `ValueError` if no tensor can have such a shape.
    """
    values: dict[str, dict[str, Json]] = {}
    specs: dict[str, Json] = {}
    end, begins = 0, {}
    for key, layout in sorted(layouts.items(), key=lambda item: item[1].dtype != torch.complex128):  # keeps it aligned
        if not is_storable(layout.dtype):
            raise UnsupportedOpError(
                f"{key!r} is of {layout.dtype}, which is meaningless without its scale: dequantize() it"
            )
        if not are_counts(list(layout.shape)) or not is_countable(layout.shape, layout.dtype.itemsize):
            raise ArgumentError(f"{key!r} can't have the shape {short(layout.shape)}: not the shape of a tensor")
        word, shape, note = _spec(layout)
        begins[key], end = end, end + layout.nbytes
        specs[key] = {"dtype": word, "shape": shape, "data_offsets": [begins[key], end]}
        if note:
            values[key] = note
    own = {"version": VERSION, **({"values": values} if values else {}), **notes}
    noted = {**(metadata or {}), "format": "pt", MARK: json.dumps(own)}
    text = json.dumps({"__metadata__": noted, **specs}, ensure_ascii=False).encode()
    length = -(-(_LENGTH.size + len(text)) // ALIGNMENT) * ALIGNMENT - _LENGTH.size
    data = _LENGTH.pack(length) + text.ljust(length)
    entries = {key: Entry(key, layouts[key], len(data) + begin) for key, begin in begins.items()}
    return Head(data, Header(noted, entries, {}), len(data) + end)


def is_standard(layout: Layout) -> bool:
    """Whether safetensors has a word for such values, so that any reader returns them as they are."""
    return not _spec(layout)[2]


def _json_object(text: bytes) -> dict[str, Json]:
    try:
        raw = parse_json(text)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number of 5,000 digits, a name twice
        raise CorruptFileError(f"its header is not valid JSON ({short(error)})") from error
    if not isinstance(raw, dict):
        raise CorruptFileError("its header is not a JSON object")
    if not is_unicode(json.dumps(raw, ensure_ascii=False) if b"\\u" in text else ""):
        raise CorruptFileError("its header contains a lone surrogate, which is not valid text")
    return raw


def is_unicode(text: str) -> bool:
    """False for text with a lone surrogate, which JSON and pickles can contain but no file name can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_file_name(text: str) -> bool:
    """Whether this is a bare file name on any system, without a path to another folder."""
    is_plain = PurePosixPath(text).name == PureWindowsPath(text).name == text
    return is_plain and text not in ("", ".", "..") and "\0" not in text and is_unicode(text)


def _notes(metadata: Mapping[str, str]) -> Mapping[str, Json] | None:
    try:
        notes = json.loads(metadata.get(MARK, "null"))
    except (ValueError, RecursionError):
        return None
    return notes if isinstance(notes, dict) and "version" in notes else None


def _in_order(raw: dict[str, Json], nbytes: int) -> Iterator[tuple[str, tuple[str, tuple[int, ...], int, int]]]:
    """The entries in file order; checks that they fill `nbytes` without holes or overlaps."""
    specs = {key: _checked_spec(key, spec) for key, spec in raw.items()}
    at = 0
    for key, spec in sorted(specs.items(), key=lambda item: item[1][2:]):
        if spec[2] != at:
            raise CorruptFileError(
                f"its header has a hole or an overlap before {short(key)!r} (byte {spec[2]}, expected {at})"
            )
        at = spec[3]
        yield key, spec
    if at > nbytes:
        raise CorruptFileError(f"it is cut off: its header promises {at} bytes of data, {nbytes} are there")
    if at < nbytes:
        raise CorruptFileError(f"it is longer than its header says: {at} bytes of data promised, {nbytes} are there")


def _checked_spec(key: str, spec: Json) -> tuple[str, tuple[int, ...], int, int]:
    try:
        word, shape, (begin, end) = spec["dtype"], spec["shape"], spec["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(f"its header says of {short(key)!r} no dtype, shape and data_offsets") from error
    if not isinstance(word, str) or not are_counts(shape) or not are_counts([begin, end]) or begin > end:
        raise CorruptFileError(f"its header has a malformed entry {short(key)!r}: {short(spec)}")
    return word, tuple(shape), begin, end


def _layout(word: str, shape: tuple[int, ...], note: Mapping[str, Json]) -> Layout | None:
    """The layout of an entry; None where this torch has no dtype for it."""
    dtype = TORCH_DTYPES.get(word)
    if "dtype" in note:
        dtype, shape = _noted_dtype(word, shape, note["dtype"]), shape[:-1]
    elif word == "F4" and shape and shape[-1] % 2 == 0:
        dtype, shape = _FLOAT4, (*shape[:-1], shape[-1] // 2)
    if dtype is None:
        return None
    if not is_countable(shape, dtype.itemsize):
        raise CorruptFileError(f"its header has a value of shape {short(shape)}, larger than any file")
    if "stride" in note:
        return _strided(dtype, shape, note["stride"])
    return contiguous(dtype, shape)


def _noted_dtype(word: str, shape: tuple[int, ...], name: Json) -> torch.dtype | None:
    """The dtype of a value stored as bytes; the last dimension is the bytes of one element."""
    if not isinstance(name, str) or word != "U8" or not shape:
        raise CorruptFileError("its `offload` metadata gives a value a malformed dtype")
    dtype = dtype_named(name)
    if dtype is not None and dtype.itemsize != shape[-1]:
        raise CorruptFileError(f"its `offload` metadata makes {name} of {shape[-1]} bytes per element")
    return dtype


def _strided(dtype: torch.dtype, shape: tuple[int, ...], stride: Json) -> Layout:
    """The layout of a value stored with its dimensions in memory order, which is the order of `shape`."""
    if not are_counts(stride) or len(stride) != len(shape):
        raise CorruptFileError("its `offload` metadata gives a value malformed strides")
    order = Layout(dtype, shape, tuple(stride)).order
    logical = dict(zip(order, shape, strict=True))
    layout = Layout(dtype, tuple(logical[dim] for dim in range(len(shape))), tuple(stride))
    if not layout.is_dense:
        raise CorruptFileError("its `offload` metadata gives a value strides with gaps or overlaps")
    return layout


def _spec(layout: Layout) -> tuple[str, list[int], dict[str, Json]]:
    """The safetensors word, the shape in memory order, and what has to be added in the metadata."""
    note: dict[str, Json] = {}
    shape = list(layout.shape)
    if layout.stride != contiguous_stride(layout.shape):
        note["stride"] = list(layout.stride)
        shape = [layout.shape[dim] for dim in layout.order]
    if layout.dtype == _FLOAT4 and shape:
        return "F4", [*shape[:-1], shape[-1] * 2], note
    if layout.dtype in WORDS:
        return WORDS[layout.dtype], shape, note
    note["dtype"] = dtype_name(layout.dtype)
    return "U8", [*shape, layout.dtype.itemsize], note
