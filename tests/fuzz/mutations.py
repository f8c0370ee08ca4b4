"""Format-aware damage: bytes, JSON, safetensors headers, pickles, zip archives.

Always true:
- all randomness comes from the generator passed in: the same seed gives the same bytes
- the result is usually still recognised as its format: it passes a reader's first checks
"""

from __future__ import annotations

import copy
import io
import json
import math
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable
from random import Random
from typing import Any

NUMBERS = (0, 1, -1, 2, 3, 4, 7, 8, 16, 63, 127, 255, 256, 4095, 4096, 65535, 65536, 2**20, 2**31 - 1, 2**31, 2**32)
LARGE = (2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, -(2**31), -(2**63), 10**12, 4 * 10**18)
TEXTS = ("", "a", "w", "..", "../x", "/", "\0", "é", "\ud800", "x" * 300, "__metadata__", "offload", "F32", "int")
ODD = (None, True, False, 0.5, 1e308, float("nan"), float("inf"), [], {}, [[]], [0], {"a": 1}, "1", "1.safetensors")
WORDS = ("BOOL", "U8", "I8", "I16", "U16", "I32", "I64", "U64", "F16", "BF16", "F32", "F64", "C64", "F8_E4M3", "F4")
DTYPES = ("float32", "complex128", "complex64", "bool", "uint8", "qint8", "bfloat16", "float4_e2m1fn_x2", "int64", "no")
_DEEP = 100_000


def number(chance: Random) -> int:
    return chance.choice(NUMBERS if chance.random() < 0.7 else LARGE)


def anything(chance: Random) -> Any:
    """A value to put in a place in JSON where another is expected."""
    made = chance.choice((number(chance), number(chance), chance.choice(TEXTS), copy.deepcopy(chance.choice(ODD))))
    return [made] * chance.choice((1, 2, 3)) if chance.random() < 0.1 else made


# Bytes


def bytes_damaged(data: bytes, chance: Random) -> bytes:
    """Some bits or a stretch of bytes changed, duplicated, or removed."""
    made = bytearray(data)
    at = chance.randrange(len(made) + 1)
    end = min(at + chance.choice((1, 2, 4, 8, 64, 1000)), len(made))
    match chance.randrange(7):
        case 0 if made:
            for _ in range(chance.choice((1, 1, 2, 8))):
                made[chance.randrange(len(made))] ^= 1 << chance.randrange(8)
        case 1:
            del made[at:]
        case 2:
            made += bytes(chance.choice((1, 8, 4096)))
        case 3:
            del made[at:end]
        case 4:
            made[at:end] = bytes(end - at)
        case 5:
            made[at:at] = made[at:end]
        case _:
            made[at:end] = chance.randbytes(end - at)
    return bytes(made)


# JSON


def json_damaged(value: Any, chance: Random) -> Any:
    """One place in it changed."""
    value = copy.deepcopy(value)
    places = list(_places(value))
    if not places:
        return anything(chance)
    holder, key = chance.choice(places)
    old = holder[key]
    match chance.randrange(9):
        case 0 | 1:
            holder[key] = anything(chance)
        case 2:
            del holder[key]
        case 3 if isinstance(old, int | float):
            holder[key] = old + chance.choice((-1, 1, 8, -8, 4096)) if chance.random() < 0.8 else float(old)
        case 4:
            other, name = chance.choice(places)
            holder[key], other[name] = other[name], holder[key]
        case 5 if isinstance(holder, dict):
            holder[chance.choice(TEXTS)] = copy.deepcopy(old)
        case 5:
            holder.insert(chance.randrange(len(holder) + 1), copy.deepcopy(old))
        case 6 if isinstance(holder, dict):
            holder[chance.choice((key + "x", *TEXTS))] = holder.pop(key)
        case 7 if isinstance(old, str):
            holder[key] = text_damaged(old, chance)
        case _:
            holder[key] = {"a": old} if chance.random() < 0.5 else [old]
    return value


def text_damaged(text: str, chance: Random) -> str:
    """JSON inside text, damaged as JSON."""
    try:
        inner = json.loads(text)
    except ValueError:
        inner = None
    if isinstance(inner, dict | list):
        return json.dumps(json_damaged(inner, chance))
    at = chance.randrange(len(text) + 1)
    return chance.choice((text[:at], text[:at] + chance.choice(TEXTS) + text[at:], text * 2, chance.choice(TEXTS)))


def _places(value: Any) -> Any:
    """Each place in nested lists and dicts, as container and key."""
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


def json_text(value: Any, chance: Random) -> bytes:
    """JSON as text; sometimes in an unusual way."""
    text = json.dumps(value, ensure_ascii=chance.random() < 0.5).encode(errors="surrogatepass")
    if chance.random() < 0.85:
        return text
    return chance.choice(
        (
            text.replace(b"{", b'{"a": 1, "a": 2, ', 1),
            text.replace(b"1", b"1" * chance.choice((2, 5000))),
            text.replace(b"0", chance.choice((b"0.0", b"-0", b"1e400", b"NaN", b"00"))),
            text.replace(b": ", chance.choice((b":" + b" " * 5000, b":\t\n", b":\0"))),
            b"\xef\xbb\xbf" + text,
            text[:-1] + b', "deep": ' + b"[" * _DEEP + b"]" * _DEEP + b"}",
            text.decode(errors="replace").encode("utf-16"),
            bytes_damaged(text, chance),
        )
    )


def json_file_damaged(data: bytes, chance: Random, key: str | None = None) -> bytes:
    """Damaged as JSON, mostly; if it has this key, there alone."""
    if chance.random() < 0.2 and key is None:
        return bytes_damaged(data, chance)
    try:
        value = json.loads(data)
    except ValueError:
        return bytes_damaged(data, chance)
    if isinstance(value, dict) and key in value:
        value[key] = json_damaged(value[key], chance)
        return json.dumps(value).encode(errors="surrogatepass")
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        if isinstance(value, dict | list):
            value = json_damaged(value, chance)
    return json_text(value, chance)


# safetensors


def safetensors_made(chance: Random) -> bytes:
    """A valid file with a few values, at any alignment."""
    specs: dict[str, Any] = {}
    at = 0
    for number in range(chance.randrange(5)):
        word = chance.choice(WORDS[:-1])
        shape = [chance.choice((0, 1, 1, 2, 3, 5)) for _ in range(chance.randrange(4))]
        size = _WIDTHS.get(word, 1) * math.prod(shape)
        name = chance.choice((f"w{number}", f"layer.{number}.weight", f"ü{number}"))
        specs[name] = {"dtype": word, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    if chance.random() < 0.3:
        specs["__metadata__"] = {"format": "pt", "w9": "w0"}
    items = list(specs.items())
    chance.shuffle(items)
    text = json.dumps(dict(items)).encode() + b" " * chance.choice((0, 0, 1, 3, 64))
    return struct.pack("<Q", len(text)) + text + chance.randbytes(at)


_WIDTHS = {"I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8}


def safetensors_damaged(data: bytes, chance: Random) -> bytes:
    """Damaged in its header's JSON, length, text, or in its bytes."""
    (length,) = struct.unpack("<Q", data[:8])
    text, values = data[8 : 8 + length], data[8 + length :]
    match chance.randrange(8):
        case 0:
            return bytes_damaged(data, chance)
        case 1:
            text = bytes_damaged(text, chance)
        case 2:
            wrong = length + chance.choice((1, -1, 8, -8)) if chance.random() < 0.5 else number(chance)
            return struct.pack("<Q", wrong % 2**64) + text + values
        case 3:
            values = bytes_damaged(values, chance)
        case 4:
            text = text.rstrip() + b" " * chance.randrange(20)
        case _:
            header = json.loads(text)
            for _ in range(chance.choice((1, 1, 2, 3))):
                if isinstance(header, dict):
                    header = _header_damaged(header, chance)
            text = json_text(header, chance)
    return struct.pack("<Q", len(text)) + text + values


def _header_damaged(header: dict[str, Any], chance: Random) -> Any:
    header = copy.deepcopy(header)
    specs = [spec for key, spec in header.items() if key != "__metadata__" and isinstance(spec, dict)]
    notes = header.get("__metadata__")
    match chance.randrange(7):
        case 0 if specs:
            chance.choice(specs)["dtype"] = chance.choice(WORDS)
        case 1 if specs:
            spec = chance.choice(specs)
            if isinstance(spec.get("shape"), list):
                chance.shuffle(spec["shape"])
        case 2 if specs:
            spec = chance.choice(specs)
            spec["shape"] = [number(chance) for _ in range(chance.choice((0, 1, 2, 3, 70)))]
        case 3 if specs:
            spec = chance.choice(specs)
            spec["data_offsets"] = [number(chance), number(chance)]
        case 4 if isinstance(notes, dict) and isinstance(notes.get("offload"), str):
            notes["offload"] = text_damaged(notes["offload"], chance)
        case 5:
            name = chance.choice([key for key in header if key != "__metadata__"] or ["w"])
            note = chance.choice(
                (
                    {"dtype": chance.choice(DTYPES)},
                    {"stride": [number(chance) for _ in range(chance.randrange(4))]},
                    {"shape": [number(chance)], "stride": [0]},
                    {"shape": [2, 3], "stride": [1, 1]},
                    anything(chance),
                )
            )
            metadata = {"version": 1, "values": {name: note}}
            header["__metadata__"] = {"offload": json.dumps(metadata, ensure_ascii=chance.random() < 0.5)}
        case _:
            return json_damaged(header, chance)
    return header


# Pickles and zip archives

_OPCODES = b"()]}.0125NRQbaeslutod\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94"
_GLOBALS = (
    *(f"torch._utils {name}" for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")),
    *(f"torch._utils {name}" for name in ("_rebuild_parameter", "_rebuild_parameter_with_state", "_rebuild_qtensor")),
    *(f"torch._utils {name}" for name in ("_rebuild_sparse_tensor", "_rebuild_meta_tensor_no_storage")),
    *(f"torch._utils {name}" for name in ("_rebuild_nested_tensor", "_rebuild_wrapper_subclass")),
    *(
        f"torch {name}"
        for name in ("FloatStorage", "HalfStorage", "ByteStorage", "BoolStorage", "ComplexDoubleStorage")
    ),
    *(f"torch {name}" for name in ("QInt8Storage", "Tensor", "Size", "device", "float32", "complex128", "FloatTensor")),
    *(f"torch.storage {name}" for name in ("UntypedStorage", "TypedStorage", "_LegacyStorage")),
    *(f"collections {name}" for name in ("OrderedDict", "Counter", "defaultdict")),
    *("torch._tensor _rebuild_from_type_v2", "torch.nn.parameter Parameter", "torch.serialization _get_layout"),
    *("__builtin__ bytearray", "builtins set", "builtins eval", "os system", "_codecs encode", "torch.nn Linear"),
)


def pickle_damaged(data: bytes, chance: Random) -> bytes:
    """One or several opcodes replaced; or an argument by another of its type."""
    if chance.random() < 0.1:
        return bytes_damaged(data, chance)
    chunks = _opcodes(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        at = chance.randrange(len(chunks))
        match chance.randrange(8):
            case 0:
                del chunks[at]
            case 1:
                chunks.insert(at, chance.choice(chunks))
            case 2:
                other = chance.randrange(len(chunks))
                chunks[at], chunks[other] = chunks[other], chunks[at]
            case 3:
                chunks.insert(at, _opcode(chance))
            case 4:
                chunks[at] = _opcode(chance)
            case _:
                chunks[at] = _other_argument(chunks, chance)
        chunks = chunks or [b"."]
    return b"".join(chunks)


def _opcodes(data: bytes) -> list[bytes]:
    starts = [at for _, _, at in pickletools.genops(data)]
    return [data[start:end] for start, end in zip(starts, [*starts[1:], len(data)], strict=True)]


def _opcode(chance: Random) -> bytes:
    return chance.choice(
        (
            lambda: bytes([chance.choice(_OPCODES)]),
            lambda: _integer(number(chance)),
            lambda: _text(chance.choice(TEXTS)),
            lambda: b"c" + chance.choice(_GLOBALS).replace(" ", "\n").encode() + b"\n",
            lambda: b"h" + chance.randbytes(1),
            lambda: b"q" + chance.randbytes(1),
            lambda: b"r" + struct.pack("<I", number(chance) % 2**32),
            lambda: b"j" + struct.pack("<I", number(chance) % 2**32),
        )
    )()


def _other_argument(chunks: list[bytes], chance: Random) -> bytes:
    """An existing opcode with another argument."""
    chunk = chance.choice([chunk for chunk in chunks if chunk[:1] in b"KMJ\x8aXUcqhrj\x88\x89"] or [b"N"])
    match chunk[:1]:
        case b"K" | b"M" | b"J" | b"\x8a":
            old = pickletools.genops(chunk + b".")
            value = next(iter(old))[1]
            return _integer(value + chance.choice((1, -1, 4)) if chance.random() < 0.4 else number(chance))
        case b"X" | b"U":
            return _text(chance.choice((*TEXTS, "0", "1", "2", "cpu", "cuda:0", "little")))
        case b"c":
            return b"c" + chance.choice(_GLOBALS).replace(" ", "\n").encode() + b"\n"
        case b"\x88" | b"\x89":
            return chance.choice((b"\x88", b"\x89"))
    return chunk[:1] + chance.randbytes(len(chunk) - 1)


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def _text(text: str) -> bytes:
    data = text.encode(errors="surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def zip_damaged(data: bytes, chance: Random) -> bytes:
    """Damaged in its pickle, other records, directory, or bytes."""
    match chance.randrange(8):
        case 0:
            return bytes_damaged(data, chance)
        case 1:
            return _directory_damaged(data, chance)
        case 2:
            return _records_damaged(data, chance, _one_record_damaged)
        case 3:
            return _records_damaged(data, chance, _a_record_more_or_less)
    return _records_damaged(data, chance, _pickle_record_damaged)


Records = list[tuple[str, bytes]]


def _records_damaged(data: bytes, chance: Random, damage: Callable[[Records, Random], None]) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    damage(records, chance)
    made = io.BytesIO()
    packing = zipfile.ZIP_STORED if chance.random() < 0.7 else zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(made, "w", packing) as archive:
        for name, content in records:
            archive.writestr(zipfile.ZipInfo(name), content, packing)
    return made.getvalue()


def _pickle_record_damaged(records: Records, chance: Random) -> None:
    for at, (name, content) in enumerate(records):
        if name.endswith("/data.pkl"):
            records[at] = (name, pickle_damaged(content, chance))


def _one_record_damaged(records: Records, chance: Random) -> None:
    at = chance.randrange(len(records))
    name, content = records[at]
    records[at] = (name, chance.choice((bytes_damaged(content, chance), b"", b"big", b"little", content * 2)))


def _a_record_more_or_less(records: Records, chance: Random) -> None:
    at = chance.randrange(len(records))
    name, content = records[at]
    match chance.randrange(4):
        case 0:
            del records[at]
        case 1:
            records[at] = (text_damaged(name, chance).encode(errors="replace").decode(), content)
        case 2:
            records.append((name.rpartition("/")[0] + chance.choice(("/data.pkl", "/constants.pkl", "/x")), content))
        case _:
            chance.shuffle(records)


def _directory_damaged(data: bytes, chance: Random) -> bytes:
    """A field of a local header, a directory entry, or the end record, changed."""
    marks = (b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06")
    places = [found.start() for mark in marks for found in re.finditer(re.escape(mark), data)]
    if not places:
        return bytes_damaged(data, chance)
    made = bytearray(data)
    at = chance.choice(places) + 4 + 2 * chance.randrange(20)
    width = chance.choice((2, 4))
    made[at : at + width] = (number(chance) % 256**width).to_bytes(width, "little")
    return bytes(made)


# Pieces of packed weights


def pieces_damaged(data: bytes, chance: Random) -> bytes:
    """A valid safetensors file in which some pieces are missing, or have another shape, dtype, name, or other bits."""
    (length,) = struct.unpack("<Q", data[:8])
    header, values = json.loads(data[8 : 8 + length]), data[8 + length :]
    notes = header.pop("__metadata__", None)
    pieces = {
        name: (spec["dtype"], spec["shape"], values[slice(*spec["data_offsets"])]) for name, spec in header.items()
    }
    for _ in range(chance.choice((1, 1, 1, 2))):
        name = chance.choice(sorted(pieces))
        match chance.randrange(12):
            case 0:
                del pieces[name]
            case 1:
                other = chance.choice(sorted(pieces))
                pieces[name], pieces[other] = pieces[other], pieces[name]
            case 2:
                pieces[name.replace("weight", "w") if chance.random() < 0.5 else f"{name}.x"] = pieces.pop(name)
            case _:
                pieces[name] = _piece_damaged(*pieces[name], chance)
    at, made = 0, {} if notes is None else {"__metadata__": notes}
    for name, (word, shape, content) in pieces.items():
        made[name] = {"dtype": word, "shape": shape, "data_offsets": [at, at + len(content)]}
        at += len(content)
    text = json.dumps(made).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(content for _, _, content in pieces.values())


Piece = tuple[str, list[int], bytes]


def _piece_damaged(word: str, shape: list[int], content: bytes, chance: Random) -> Piece:
    width = _BYTES_OF[word]
    row = len(content) // shape[0] if shape and shape[0] else 0
    match chance.randrange(9):
        case 0:  # as many bytes an element, of another kind
            return chance.choice([one for one, size in _BYTES_OF.items() if size == width]), shape, content
        case 1:  # the same bytes as elements of another size
            other = chance.choice(sorted(_BYTES_OF))
            count, left = divmod(len(content), _BYTES_OF[other])
            if not left:
                side = chance.choice((1, *(shape or [1])))
                same = [side, count // side] if side and count % side == 0 else [count]
                return other, same, content
        case 2:  # elements of another size
            other = chance.choice(sorted(_BYTES_OF))
            return other, shape, (content * 8)[: len(content) // width * _BYTES_OF[other]]
        case 3 if row:  # fewer rows
            rows = chance.choice((0, 1, shape[0] - 1, shape[0] // 2))
            return word, [rows, *shape[1:]], content[: rows * row]
        case 4 if row:  # more
            more = chance.choice((1, shape[0]))
            return word, [shape[0] + more, *shape[1:]], content + content[: more * row]
        case 5 if len(shape) > 1 and shape[-1] > 1:  # other columns
            columns = chance.choice((1, shape[-1] - 1, shape[-1] // 2, shape[-1] * 2))
            count = columns * (len(content) // width // shape[-1])
            return word, [*shape[:-1], columns], (content * 2)[: count * width]
        case 6:
            turned = chance.choice((shape[::-1], [1, *shape], [*shape, 1], [len(content) // width]))
            return word, turned, content
        case 7:  # the whole of it: numbers out of range, NaN, zeros
            size = len(content)
            return word, shape, chance.choice((chance.randbytes(size), bytes(size), b"\xff" * size))
    made = bytearray(content)
    for _ in range(chance.choice((1, 4)) if made else 0):
        made[chance.randrange(len(made))] = chance.randrange(256)
    return word, shape, bytes(made)


_BYTES_OF = {word: _WIDTHS.get(word, 1) for word in ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", *_WIDTHS)}


# GGUF


def gguf_damaged(data: bytes, chance: Random) -> bytes:
    """Damaged in the sizes, kinds and metadata of its header, or in its bytes."""
    head = data.find(b"output_norm.weight") + 100
    if chance.random() < 0.15:
        return bytes_damaged(data, chance)
    made = bytearray(data)
    if chance.random() < 0.5:  # after the name of a tensor: how many sides, these, the kind, and where it begins
        at = chance.choice([found.end() for found in re.finditer(rb"[a-z_]+\.weight", data)])
        sides = min(struct.unpack_from("<I", data, at)[0], 4)
        kind = at + 4 + 8 * sides
        places = [(at, "<I"), *((at + 4 + 8 * side, "<Q") for side in range(sides)), *[(kind, "<I")] * 3]
        at, form = chance.choice([*places, (kind + 4, "<Q")])
        old = struct.unpack_from(form, data, at)[0]
        new = chance.choice((chance.randrange(45), old + chance.choice((1, -1, 32, 256)), old * 2, number(chance)))
        struct.pack_into(form, made, at, new % 256 ** struct.calcsize(form))
        return bytes(made)
    at = chance.randrange(head)
    width = chance.choice((1, 2, 4, 8))
    made[at : at + width] = (number(chance) % 256**width).to_bytes(width, "little")
    return bytes(made)
