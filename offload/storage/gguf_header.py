"""The header of a GGUF file (llama.cpp): what is in it, and where.

Always true:
- the `gguf` package's reader parses it, but builds no objects for vocabularies; no value is read
- every kind is one the package knows; every extent lies in the file, after the header, and no two overlap
- plain numbers are entries of their dtype; packed blocks are entries of bytes, row by row, with their kind in the
  header

Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable
from typing import Any, BinaryIO

import torch

from offload.errors import CheckpointError, CorruptFileError
from offload.storage.header import Header, is_unicode
from offload.storage.layout import TORCH_DTYPES, Entry, Layout, can_be_over, contiguous, is_countable
from offload.system.reasons import short

MAGIC = b"GGUF"
ARCHITECTURE, PARTS, PART = "general.architecture", "split.count", "split.no"
_METADATA = (ARCHITECTURE, "general.name", PARTS, PART)  # metadata that is kept, with what has one of the next words
ROPE = (".rope.scaling.", ".rope.scale_")
_DTYPES = {word: TORCH_DTYPES[word] for word in ("F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64")}
_MOST_ELEMENTS, _MOST_TENSORS = 1 << 25, 1 << 17  # more means a damaged header
_LONGEST_ARRAY = 1024  # longest array, in elements, that slow readers get
_TOKENS = "tokenizer.ggml.tokens"
_VERSION = 3
_UINT32, _TEXT, _ARRAY = 4, 8, 9  # type codes of the metadata
_HEAD = struct.Struct("<IQ")  # of an array: element type and count
_LENGTH = struct.Struct("<Q")
_TYPE = struct.Struct("<I")


def read_header(file: BinaryIO, size: int) -> Header:
    """The checked header of such a file of `size` bytes.

    Raises `CorruptFileError` if it is incomplete; `CheckpointError` if the `gguf` package is not installed.
    """
    reader, metadata = _opened(file)
    entries: dict[str, Entry] = {}
    kinds: dict[str, str] = {}
    for tensor in reader.tensors:
        name, kind = tensor.name, tensor.tensor_type.name
        layout = _layout(name, kind, [int(count) for count in reversed(tensor.shape)])
        entries[name] = Entry(name, layout, tensor.data_offset)
        if not can_be_over(entries[name]) or not is_unicode(name):
            raise CorruptFileError(f"its header has a malformed entry {short(name)!r}")
        if kind not in _DTYPES:
            kinds[name] = kind
    _check_extents(entries, reader.data_offset, size)
    return Header(metadata, entries, {}, kinds=kinds)


def without_vocabulary(file: BinaryIO, names: Iterable[str]) -> tuple[bytes, int | None]:
    """The bare header without long arrays, for slow readers, and the number of tokens.

    It says that tensors of these names are there: those of all parts. Raises: as `read_header`.
    """
    reader, _ = _opened(file)
    data = reader.data
    fields = [(name, field.offset) for name, field in reader.fields.items() if not name.startswith("GGUF.")]
    ends = [*(offset for _, offset in fields[1:]), reader.fields_end]
    copied, tokens = [], None
    for (name, start), end in zip(fields, ends, strict=True):
        at = start + _LENGTH.size + len(name.encode())
        is_array = _TYPE.unpack_from(data, at)[0] == _ARRAY
        count = _HEAD.unpack_from(data, at + _TYPE.size)[1] if is_array else 0
        tokens = count if name == _TOKENS else tokens
        if count <= _LONGEST_ARRAY:
            copied.append(bytes(data[start:end]))
    architecture = reader.get_field(ARCHITECTURE)
    named = f"{architecture.contents()}.vocab_size" if architecture is not None else ""
    if tokens is not None and reader.get_field(named) is None:
        copied.append(_text(named) + _TYPE.pack(_UINT32) + _TYPE.pack(tokens))
    infos = [_text(name) + struct.pack("<IQIQ", 1, 0, 0, 0) for name in names]
    head = MAGIC + struct.pack("<IQQ", _VERSION, len(infos), len(copied))
    return b"".join((head, *copied, *infos)), tokens


def _text(text: str) -> bytes:
    return _LENGTH.pack(len(text.encode())) + text.encode()


def dense_shape(kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the values in packed rows of bytes of this shape."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    elements, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return (*shape[:-1], shape[-1] // nbytes * elements)


def _opened(file: BinaryIO) -> tuple[Any, dict[str, str]]:
    """A reader that has parsed the header, and the metadata that is kept."""
    try:
        reader_class = _sparing()
    except ImportError as error:
        raise CheckpointError("is a GGUF file, which the gguf package reads: pip install gguf") from error
    try:
        reader = reader_class(file)
        kept = [key for key in reader.fields if any(word in key for word in ROPE)]
        fields = {key: reader.get_field(key) for key in (*_METADATA, *kept)}
        metadata = {key: str(field.contents()) for key, field in fields.items() if field is not None}
    except Exception as error:  # malformed bytes can raise anything, here or in numpy
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise CorruptFileError(f"it is cut off or damaged ({type(error).__name__}: {short(error)})") from error
    if reader.byte_order != "I":
        raise CorruptFileError("its numbers are in the byte order of another machine")
    return reader, metadata


def _sparing() -> Any:
    """The package's reader, without vocabularies.

    It creates an object per token, 20 us each, which nothing here needs (gguf 0.19).
    """
    from gguf import GGUFReader
    from gguf.constants import GGUFValueType

    class Sparing(GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != _ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            memory = self.data.data
            element, count = _HEAD.unpack_from(memory, orig_offs)
            end = orig_offs + _HEAD.size
            if count > _MOST_ELEMENTS:
                raise ValueError(f"an array of its metadata claims {count} elements")
            if element == _TEXT:
                for _ in range(count):
                    end += _LENGTH.size + _LENGTH.unpack_from(memory, end)[0]
            else:
                itemsize = self.gguf_scalar_to_np[GGUFValueType(element)]().itemsize
                end += count * itemsize
            if end > len(self.data):
                raise ValueError("an array of its metadata is longer than the file")
            return end - orig_offs, [], [], [GGUFValueType.ARRAY]

        def _build_fields(self, offs: int, count: int) -> Any:
            self.fields_end = super()._build_fields(offs, count)
            return self.fields_end

        def _build_tensor_info(self, offs: int, count: int) -> Any:
            if count > _MOST_TENSORS:
                raise ValueError(f"it claims {count} tensors")
            return super()._build_tensor_info(offs, count)

    return Sparing


def _layout(name: str, kind: str, shape: list[int]) -> Layout:
    """The layout of a value's bytes."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    if not is_countable(shape, 8):
        raise CorruptFileError(f"its header gives {short(name)!r} the shape {short(shape)}: not the shape of a tensor")
    if kind in _DTYPES:
        return contiguous(_DTYPES[kind], tuple(shape))
    if 0 in shape:
        raise CorruptFileError(f"its header gives {short(name)!r} the shape {short(shape)}, of no blocks of {kind}")
    elements, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return contiguous(torch.uint8, (*shape[:-1], shape[-1] // elements * nbytes))


def _check_extents(entries: dict[str, Entry], start: int, size: int) -> None:
    at, before = start, ""
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.layout.nbytes)):
        if entry.start < at:
            raise CorruptFileError(f"its header places {short(entry.key)!r} over {short(before) or 'itself'!r}")
        at, before = entry.start + entry.layout.nbytes, entry.key
        if at > size:
            raise CorruptFileError(f"it is cut off: {short(entry.key)!r} ends at byte {at}, and {size} are there")
