"""A header is valid as a whole, or it is a `CorruptFileError`."""

from __future__ import annotations

import contextlib
import json
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from offload.errors import CorruptFileError, UnsupportedOpError
from offload.storage.header import ALIGNMENT, MARK, build, header_length, parse
from offload.storage.layout import MISALIGNED, Layout
from offload.storage.write import layout_of
from tests.storage.test_write import DTYPES

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

NUMBERS = st.one_of(
    st.integers(-2, 40), st.integers(0, 2**70), st.none(), st.booleans(), st.floats(), st.text(max_size=2)
)
SPECS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "F4", "BOOL", "C64", "XX", "", 3]),
        "shape": st.one_of(st.lists(NUMBERS, max_size=4), NUMBERS),
        "data_offsets": st.one_of(st.lists(NUMBERS, max_size=3), NUMBERS),
    }
)
NOTES = st.dictionaries(
    st.sampled_from(["dtype", "stride", "shape", "x"]),
    st.one_of(NUMBERS, st.lists(NUMBERS, max_size=4), st.sampled_from(["int4", "qint8", "_dynamo", "complex128"])),
)


def bytes_of(header: object, *, room: int = 0) -> tuple[bytes, int]:
    text = json.dumps(header).encode()
    return text, 8 + len(text) + room


def noted(values: object, **said: object) -> dict[str, str]:
    return {MARK: json.dumps({"version": 1, "values": values, **said})}


def entry(word: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": word, "shape": shape, "data_offsets": [begin, end]}


def read_back(head: bytes, size: int):
    length = header_length(head[:8], size)
    return parse(head[8 : 8 + length], size)


@given(st.binary(max_size=60), st.integers(0, 100))
def test_any_bytes_are_a_header_or_a_corrupt_file(text, more):
    with contextlib.suppress(CorruptFileError):
        parse(text, 8 + len(text) + more)


@given(st.binary(max_size=8), st.integers(0, 2**64))
def test_any_first_bytes_give_a_length_within_the_file_or_a_corrupt_file(prefix, size):
    with contextlib.suppress(CorruptFileError):
        assert 8 + header_length(prefix, size) <= size


@given(
    st.dictionaries(st.text(max_size=2), SPECS, max_size=3),
    st.dictionaries(st.text(max_size=2), NOTES),
    st.integers(0, 64),
)
def test_any_entries_are_a_header_or_a_corrupt_file(specs, notes, room):
    with contextlib.suppress(CorruptFileError):
        header = parse(*bytes_of({**specs, "__metadata__": noted(notes)}, room=room))

        for item in header.entries.values():
            torch.empty_strided(item.layout.shape, item.layout.stride, dtype=item.layout.dtype, device="meta")


@given(NOTES)
def test_any_notes_on_a_value_give_one_that_fills_its_bytes_or_a_corrupt_file(note):
    header = {"w": entry("U8", [2, 3, 1], 0, 6), "__metadata__": noted({"w": note})}

    with contextlib.suppress(CorruptFileError):
        for item in parse(*bytes_of(header, room=6)).entries.values():
            assert 6 == item.layout.nbytes
            assert item.layout.is_dense


@given(st.permutations(range(4)), st.lists(st.integers(0, 3), min_size=4, max_size=4), st.sampled_from(DTYPES))
def test_strides_in_any_order_come_back(order, sizes, dtype):
    layout = layout_of(torch.empty(sizes, device="meta", dtype=dtype).permute(order))

    head = build({"w": layout}, {})

    assert head.header == read_back(head.data, head.size)
    assert layout == head.header.entries["w"].layout


def test_a_dtype_that_means_nothing_without_a_scale_has_no_header():
    for dtype in (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4):
        with pytest.raises(UnsupportedOpError, match=f"'w' is of {dtype}.*dequantize"):
            build({"w": Layout(dtype, (3,), (1,))}, {})


@pytest.mark.parametrize("shape", [(-3,), (2**40, 2**40), (3.0,), (True,), (2**63,)], ids=str)
def test_a_shape_that_no_tensor_has_has_no_header(shape):
    with pytest.raises(ValueError, match=r"'w' can't have the shape"):
        build({"w": Layout(torch.float32, shape, (1,) * len(shape))}, {})


def test_values_follow_each_other_without_a_hole():
    layouts = {key: Layout(torch.uint8, (size,), (1,)) for key, size in (("a", 3), ("b", 0), ("c", 5))}

    head = build(layouts, {})
    header = read_back(head.data, head.size)

    first = len(head.data)
    assert first + 8 == head.size
    assert [first, first + 3, first + 3] == [head.header.entries[key].start for key in "abc"]
    assert layouts == {key: item.layout for key, item in header.entries.items()}


def test_a_header_is_padded_with_spaces_up_to_the_data():
    head = build({"w": Layout(torch.float32, (4,), (1,))}, {})

    assert ALIGNMENT == len(head.data)
    assert struct.pack("<Q", ALIGNMENT - 8) == head.data[:8]
    assert head.data.endswith(b" " * 100)
    assert head.data.rstrip(b" ").endswith(b"}")


def test_an_unknown_dtype_is_listed_and_hides_no_other_value():
    header = parse(*bytes_of({"a": entry("F6_E2M3", [4], 0, 3), "b": entry("U8", [2], 3, 5)}, room=5))

    assert {"a": "is stored as F6_E2M3: no torch dtype fits"} == header.unreadable
    assert ["b"] == list(header.entries)


@pytest.mark.parametrize(
    ("header", "room", "why"),
    [
        ({"w": entry("F32", [2], 0, 8)}, 7, "cut off"),
        ({"w": entry("F32", [2], 0, 8)}, 9, "longer than its header says"),
        ({}, 1, "longer than its header says"),
        ({"w": entry("F32", [2], 4, 12)}, 12, "hole or an overlap"),
        ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 3, 5)}, 5, "hole or an overlap"),
        ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, 3, "hole or an overlap"),
        ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 0, 2)}, 2, "hole or an overlap"),
        ({"w": entry("F32", [3], 0, 8)}, 8, "takes 12"),
        ({"w": entry("F4", [3], 0, 1)}, 1, None),
        ({"w": entry("F32", [-1], 0, 0)}, 0, "malformed"),
        ({"w": entry("F32", [2.0], 0, 8)}, 8, "malformed"),
        ({"w": entry("F32", [True], 0, 4)}, 4, "malformed"),
        ({"w": entry("F32", [2], 8, 0)}, 8, "malformed"),
        ({"w": {"dtype": "F32", "shape": "", "data_offsets": [0, 4]}}, 4, "malformed"),
        ({"w": {"dtype": 3, "shape": [1], "data_offsets": [0, 4]}}, 4, "malformed"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2, 4]}}, 4, "no dtype, shape and data_offsets"),
        ({"w": {"dtype": "F32", "shape": [1]}}, 4, "no dtype, shape and data_offsets"),
        ({"w": None}, 0, "no dtype, shape and data_offsets"),
        ({"w": entry("F32", [2**62, 2**62, 0], 0, 0)}, 0, "larger than any file"),
        ({"w": entry("U8", [2] * 5000, 0, 4)}, 4, "larger than any file"),
        ({"__metadata__": {"a": 1}}, 0, "text to text"),
        ({"__metadata__": []}, 0, "text to text"),
        ({"__metadata__": noted([])}, 0, "malformed"),
        (
            {"__metadata__": noted({}, name="w"), "v": entry("U8", [1], 0, 1)},
            1,
            "says that it holds 'w', and it does not",
        ),
        ({"__metadata__": noted({}, name=["w"]), "w": entry("U8", [1], 0, 1)}, 1, "says that it holds"),
        ({"__metadata__": noted({"w": "dtype"}), "w": entry("U8", [1], 0, 1)}, 1, "malformed"),
        ({"__metadata__": noted({"w": {"stride": [1]}}), "w": entry("U8", [1, 1], 0, 1)}, 1, "malformed strides"),
        ({"__metadata__": noted({"w": {"stride": [-1]}}), "w": entry("U8", [2], 0, 2)}, 2, "malformed strides"),
        ({"__metadata__": noted({"w": {"stride": [5]}}), "w": entry("U8", [2], 0, 2)}, 2, "gaps or overlaps"),
        ({"__metadata__": noted({"w": {"stride": [0]}}), "w": entry("U8", [2], 0, 2)}, 2, "gaps or overlaps"),
        ({"__metadata__": noted({"w": {"dtype": "int4"}}), "w": entry("F32", [1], 0, 4)}, 4, "malformed dtype"),
        ({"__metadata__": noted({"w": {"dtype": "int4"}}), "w": entry("U8", [2, 2], 0, 4)}, 4, "2 bytes per element"),
        ([], 0, "not a JSON object"),
        ("text", 0, "not a JSON object"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_inconsistent_header_is_refused_with_the_reason(header, room, why):
    if why is None:
        assert parse(*bytes_of(header, room=room)).unreadable
        return
    with pytest.raises(CorruptFileError, match=why):
        parse(*bytes_of(header, room=room))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"w": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"w": {}, "w": {}}', "names 'w' twice"),
    ],
    ids=["empty", "deep", "long-number", "twice"],
)
def test_a_header_that_is_not_a_json_object_is_refused(text, why):
    with pytest.raises(CorruptFileError, match=why):
        parse(text, 8 + len(text))


@pytest.mark.parametrize(
    "text",
    [
        b'{"\\ud800": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}}',
        b'{"__metadata__": {"a": "\\uDC00"}}',
        b'{"__metadata__": {"\\uDC00": "a"}}',
    ],
)
def test_a_lone_surrogate_is_refused_as_safetensors_does(text):
    with pytest.raises(CorruptFileError, match="lone surrogate"):
        parse(text, 9 + len(text))
    with pytest.raises(SafetensorError):
        deserialize(struct.pack("<Q", len(text)) + text + b"\0")


def test_an_escaped_name_is_read():
    name = "\U0001f600"

    assert (name,) == parse(*bytes_of({name: entry("U8", [1], 0, 1)}, room=1)).keys


@pytest.mark.parametrize("notes", ["[" * 100_000, "9" * 5000, "nonsense", "7", '{"no": "version"}'])
def test_foreign_metadata_under_our_key_does_not_make_a_file_ours(notes):
    header = parse(*bytes_of({"__metadata__": {MARK: notes}}))

    assert header.notes is None


@pytest.mark.parametrize(
    ("first", "size", "why"),
    [
        *((struct.pack("<Q", n), 2**64, "not a safetensors file") for n in (100_000_001, 2**63, 2**64 - 1)),
        *((text, 2**64, "it is text") for text in (b'{"archit', b'{\n  "mod', b"<!DOCTYP")),
        (struct.pack("<Q", 100), 107, "cut off"),
        (b"\0" * 7, 7, "fewer than the 8"),
    ],
)
def test_first_bytes_without_a_length_within_the_file_are_refused_with_the_reason(first, size, why):
    with pytest.raises(CorruptFileError, match=why):
        header_length(first, size)


def with_complex_numbers_between() -> tuple[bytes, int]:
    """A header, and its file's size, with a complex128 and a float32 value at odd bytes."""
    notes = {"version": 1, "values": {"b": {"dtype": "complex128"}}}
    specs = {"a": entry("U8", [1], 0, 1), "b": entry("U8", [2, 16], 1, 33), "c": entry("F32", [2], 33, 41)}
    text = json.dumps({"__metadata__": {MARK: json.dumps(notes)}, **specs}).encode().ljust(400)
    return text, 8 + len(text) + 41


def test_complex128_in_the_middle_of_its_elements_can_not_be_read():
    """Kernels crash there. Other dtypes are referenced anywhere: files without padding have no aligned values."""
    header = parse(*with_complex_numbers_between())

    assert {"a", "c"} == set(header.entries)
    assert {"b": MISALIGNED} == header.unreadable


def test_complex128_of_our_files_is_aligned_to_its_elements():
    """Beside values of any size."""
    layouts = {"odd": layout_of(torch.empty(3, dtype=torch.int8)), "c": layout_of(torch.empty(2, dtype=torch.cdouble))}

    head = build(layouts, {})

    assert 0 == head.header.entries["c"].start % 16
    assert layouts == {key: item.layout for key, item in read_back(head.data, head.size).entries.items()}


def test_a_name_given_twice_among_many_is_found_in_time():
    """A comparison of each with each would take hours."""
    pairs = ", ".join(f'"{number}": 0' for number in [*range(300_000), 299_999])

    with pytest.raises(CorruptFileError, match="names '299999' twice"):
        parse(f"{{{pairs}}}".encode(), 2**40)
