"""Rows are read as they were written, whatever they contain and however they are indexed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from offload import TensorCache, is_offloaded
from offload.errors import (
    CacheError,
    ColumnError,
    DtypeMismatchError,
    MissingRowsError,
    RowIndexError,
    ShapeMismatchError,
    UnsupportedOpError,
)
from offload.storage.layout import _NAMED
from tests.equal import assert_equal
from tests.page_cache import needs_page_cache

SIZE = 10
DTYPES = sorted(set(_NAMED.values()), key=str)


def cache_of(folder, columns, num_rows=0, **options):
    return TensorCache.create(folder / "cache", columns, num_rows, **options)


def random_of(dtype, shape):
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


@pytest.fixture
def filled(tmp_path):
    """A cache of 10 rows, and the plain tensors it holds."""
    values = torch.randn(SIZE, 3)
    with cache_of(tmp_path, {"x": (torch.float32, (3,))}, SIZE) as cache:
        cache[:] = {"x": values}
        yield cache, values


@pytest.mark.parametrize("make", [torch.arange, np.arange])
def test_a_tensor_of_row_numbers_may_be_used_again_before_the_flush(tmp_path, make):
    with TensorCache.create(tmp_path / "cache", {"x": (torch.int64, ())}, 9) as cache:
        rows = make(3)
        for start in (0, 3):
            cache[rows] = {"x": torch.arange(3) + start}
            rows += 3
        cache.flush()

        assert [6, 7, 8] == cache.missing_rows().tolist()
        assert list(range(6)) == cache[:6]["x"].tolist()


def test_the_last_of_several_values_for_one_row_stays(filled):
    cache, _ = filled

    cache[[4, 2, 4]] = {"x": torch.arange(9.0).reshape(3, 3)}

    assert [[6.0, 7.0, 8.0], [3.0, 4.0, 5.0]] == cache[[4, 2]]["x"].tolist()


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (10, "row 10 is out of range for a cache of 10 rows: its rows go from 0 to 9, or from -10 to -1"),
        ([1, -11], "row -11 is out of range for a cache of 10 rows"),
        (torch.tensor([3, 99]), "row 99 is out of range"),
        (range(5, 12), "row 11 is out of range"),
        (range(1 << 62), "row 4611686018427387903 is out of range"),
        (1 << 70, "row 1180591620717411303424 is out of range"),
        ([(1 << 64) - 1], "row 18446744073709551615 is out of range"),
        (np.array([(1 << 64) - 1], dtype=np.uint64), "row 18446744073709551615 is out of range"),
        (torch.ones(9, dtype=torch.bool), "the mask has 9 elements, and the cache 10 rows"),
        (True, r"True \(bool\) is not an index of rows: give an int, a slice"),
        ([[True, False], [False, True]], r"shape \(2, 2\), bool\) is not an index of rows"),
        (torch.tensor([200], dtype=torch.uint8), "row 200 is out of range for a cache of 10 rows"),
    ],
)
def test_an_invalid_index_is_an_error_with_index_and_size(filled, index, said):
    cache, _ = filled

    with pytest.raises(RowIndexError, match=said):
        cache[index]
    with pytest.raises(IndexError):
        cache[index] = {"x": torch.zeros(1, 3)}


def test_rows_are_written_by_an_index_of_one_dimension(filled):
    cache, values = filled

    with pytest.raises(RowIndexError, match=r"shape \(1, 2\), int64\) is not an index of rows: give .* one dimension"):
        cache[[[1, 2]]] = {"x": torch.zeros(1, 2, 3)}

    assert torch.equal(values, cache[:]["x"])


def test_a_cache_names_its_columns_and_moves_where_batches_land(filled):
    cache, _ = filled

    moved = cache.to("cpu")

    assert ["x"] == list(cache.keys())
    assert moved is cache
    assert torch.device("cpu") == cache.device == cache[[1]]["x"].device


def test_a_cache_without_rows_says_so(tmp_path):
    cache = cache_of(tmp_path, {"x": (torch.float32, ())})

    with pytest.raises(RowIndexError, match="row 0 is out of range for a cache of 0 rows: it has no rows"):
        cache[0]
    assert (0, 0, 0, []) == (len(cache), cache.nbytes, cache.num_filled, cache.missing_rows().tolist())
    assert (0,) == tuple(cache[:]["x"].shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path, dtype):
    shapes = {str(shape): shape for shape in [(), (5,), (2, 3), (0,), (1, 0, 2)]}
    values = {name: random_of(dtype, (6, *shape)) for name, shape in shapes.items()}
    cache = cache_of(tmp_path, {name: (dtype, shape) for name, shape in shapes.items()}, 4)

    cache[[3, 0]] = {name: torch.stack([value[3], value[0]]) for name, value in values.items()}
    cache[1:3] = {name: value[1:3] for name, value in values.items()}
    cache.append({name: value[4:5] for name, value in values.items()})
    cache.append({name: value[5:] for name, value in values.items()})
    cache.append({name: value[:0] for name, value in values.items()})
    cache.close()

    found = TensorCache.open(cache.folder)
    assert_equal(
        {name: torch.stack([value[row] for row in (5, 0, 3)]) for name, value in values.items()}, found[[5, 0, 3]]
    )
    assert_equal(values, found[:])
    assert_equal({name: value[2] for name, value in values.items()}, found[2])
    assert all(((6, *shape), dtype) == (tuple(found[name].shape), found[name].dtype) for name, shape in shapes.items())


def test_a_column_is_an_offloaded_tensor_and_a_safetensors_file(filled):
    cache, values = filled

    column = cache["x"]
    column[4] = 7

    assert is_offloaded(column)
    assert [7.0] * 3 == cache[4]["x"].tolist()
    assert torch.equal(values[:4] @ torch.ones(3), column[:4] @ torch.ones(3))
    cache.close()
    assert torch.equal(column, load_file(cache.folder / "x.safetensors")["x"])


def test_a_column_is_not_replaced_under_the_cache(filled):
    with pytest.raises(
        UnsupportedOpError, match=r"'x' is in a file that is written in place by others .*: a column of a cache"
    ):
        filled[0]["x"].update_values(torch.zeros(SIZE, 3))


def test_writes_to_a_column_of_a_read_only_cache_do_not_reach_the_cache(filled):
    cache, values = filled
    cache.flush()
    column = TensorCache.open(cache.folder)["x"]

    column.zero_()

    assert torch.equal(values, cache[:]["x"])


def test_a_column_grows_with_the_cache_and_an_old_one_says_that_it_is_old(tmp_path):
    cache = cache_of(tmp_path, {"x": (torch.int64, (2,))}, 1)
    cache[0] = {"x": torch.zeros(2, dtype=torch.int64)}
    old = cache["x"]

    for number in range(3000):
        cache.append({"x": torch.full((1, 2), number)})

    assert (3001, 2) == tuple(cache["x"].shape)
    assert torch.equal(torch.arange(3000), cache["x"][1:, 1].materialize())
    with pytest.raises(RuntimeError, match="open it again"):
        old.sum()
    cache.close()
    assert (3001, 2) == tuple(load_file(cache.folder / "x.safetensors")["x"].shape)


@needs_page_cache
def test_a_thousand_million_rows_are_allocated_at_once_and_take_no_disk(tmp_path):
    with cache_of(tmp_path, {"x": (torch.float32, (1000,))}, 10**9) as cache:
        cache[-1] = {"x": torch.ones(1000)}
        cache.flush()

        assert 1000.0 == cache[10**9 - 1]["x"].sum()
        assert 4 * 10**12 == cache.nbytes
        assert sum(path.stat().st_blocks * 512 for path in cache.folder.iterdir()) < 1 << 20


def test_columns_are_given_in_the_order_that_was_asked_for(tmp_path):
    cache = cache_of(tmp_path, {"a": (torch.int64, ()), "b": (torch.int64, ())}, 3)
    cache[1] = {"a": torch.tensor(1)}
    cache[[0, 2]] = {"b": [4, 6], "a": [3, 5]}

    assert ["b", "a"] == list(cache.get([0], columns=["b", "a"]))
    assert [4, 6] == cache.get([0, 2], columns="b")["b"].tolist()
    assert ([1], [], [1]) == tuple(cache.missing_rows(names).tolist() for names in (None, ["a"], ["b", "a"]))
    with pytest.raises(MissingRowsError, match=r"1 of the requested rows are not filled in .*cache: 1\. "):
        cache.get([0, 1], columns=["b", "a"])


def test_rows_that_are_not_filled_are_named(tmp_path):
    cache = cache_of(tmp_path, {"x": (torch.int64, ())}, 9)
    cache[4] = {"x": 44}

    with pytest.raises(MissingRowsError, match=r"8 of 9 rows of .*cache are not filled: 0, 1, 2, 3, 5 and 3 more"):
        cache.require_complete()
    with pytest.raises(LookupError, match=r"2 of the requested rows .*: 8, 3\. Write them first"):
        cache[[4, 8, 3]]
    for rows in ([-1, 4], range(4, 2, -1), torch.arange(9) > 3):
        with pytest.raises(MissingRowsError):
            cache[rows]
    assert [0, 1, 2, 3, 5, 6, 7, 8] == cache.missing_rows().tolist()
    cache[:] = {"x": torch.arange(9)}
    cache.require_complete()


@pytest.mark.parametrize(
    ("values", "error", "said"),
    [
        (
            {"x": torch.zeros(2, 4)},
            ShapeMismatchError,
            r"column 'x' .*x.safetensors\): 2 rows have the shape \(2, 3\), the values \(2, 4\)",
        ),
        ({"x": torch.zeros(3)}, ShapeMismatchError, r"\(2, 3\), the values \(3,\)"),
        (
            {"x": torch.zeros(2, 3).double()},
            DtypeMismatchError,
            "column 'x' .* holds torch.float32, the values are torch.float64",
        ),
        ({"x": np.zeros((2, 3))}, DtypeMismatchError, "float64: cast them with .to"),
        ({"y": torch.zeros(2, 3)}, ColumnError, "the cache in .* has no column 'y': it has x"),
        ({"x": None}, DtypeMismatchError, r"'x' .* holds \(3,\) torch.float32, and the NoneType can't be converted"),
        ({"x": [[1, 2, 3], [4]]}, DtypeMismatchError, "and the list can't be converted to that"),
        ({"x": [torch.zeros(3), torch.zeros(2)]}, DtypeMismatchError, "and the list can't be converted to that"),
    ],
)
def test_values_that_do_not_fit_a_column_are_refused_and_nothing_is_written(filled, values, error, said):
    cache, before = filled

    with pytest.raises(error, match=said):
        cache[[1, 2]] = values
    assert torch.equal(before, cache[:]["x"])


def test_rows_are_appended_whole(tmp_path):
    cache = cache_of(tmp_path, {"a": (torch.int64, ()), "b": "json"})

    with pytest.raises(ColumnError, match=r"append\(\) needs all columns .*: b missing"):
        cache.append({"a": [1]})
    with pytest.raises(ShapeMismatchError, match=r"columns of different lengths .*\{'a': 2, 'b': 1\}"):
        cache.append({"a": [1, 2], "b": ["x"]})
    with pytest.raises(ShapeMismatchError, match=r"column 'a' of .*: a single value, not rows"):
        cache.append({"a": torch.tensor(1), "b": ["x"]})
    assert 0 == len(cache)
    assert range(2) == cache.append({"a": [1, 2], "b": ["x", "y"]})
    assert range(2, 3) == cache.append({"a": [3], "b": ["z"]})
    assert ["x", "y", "z"] == cache[:]["b"]


@pytest.mark.parametrize("value", ["xy", {"user": "x", "bot": "y"}, 5], ids=lambda value: type(value).__name__)
def test_one_text_or_dict_is_not_taken_apart_into_rows(tmp_path, value):
    cache = cache_of(tmp_path, {"chat": "json"}, num_rows=2)
    said = rf"column 'chat' .*: a single (value, not|{type(value).__name__} for 2) rows: give a list"

    for write in (lambda: cache.append({"chat": value}), lambda: cache.__setitem__(slice(2), {"chat": value})):
        with pytest.raises(ShapeMismatchError, match=said):
            write()
    cache[0] = {"chat": value}

    assert value == cache[0]["chat"]
    assert 2 == len(cache)


RAGGED = [torch.arange(n, dtype=torch.int32) for n in (3, 0, 7, 1)]


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [3, 0, 0, 2], [1], []], ids=str)
def test_rows_of_different_lengths_come_as_a_list_or_padded(tmp_path, rows):
    cache = cache_of(tmp_path, {"t": (torch.int32, (None,)), "e": (torch.bfloat16, (None, 2))})
    e = [torch.randn(n, 2).bfloat16() for n in (0, 2, 5, 1)]
    cache.append({"t": RAGGED[:2], "e": e[:2]})
    cache.append({"t": RAGGED[2:], "e": e[2:]})

    as_list, padded = cache[rows], cache.get(rows, ragged="padded", padding=-1)

    for name, values in (("t", RAGGED), ("e", e)):
        expected = [values[row] for row in rows]
        assert_equal(expected, as_list[name])
        if rows:
            whole = torch.nn.utils.rnn.pad_sequence(expected, batch_first=True, padding_value=-1)
            assert torch.equal(whole, padded[name])


def test_a_row_may_be_written_again_with_another_length(tmp_path):
    cache = cache_of(tmp_path, {"t": (torch.int32, (None,)), "note": "json"}, 4)
    cache[:] = {"t": RAGGED, "note": ["a", "b", "c", "d"]}

    cache[2] = {"t": torch.arange(90, dtype=torch.int32), "note": "longer" * 40}
    cache[[0, -1]] = {"t": [torch.arange(0, dtype=torch.int32), torch.arange(2, dtype=torch.int32)]}

    assert [0, 0, 90, 2] == [len(row) for row in cache[:]["t"]]
    assert ["a", "b", "longer" * 40, "d"] == cache[:]["note"]
    assert torch.equal(torch.arange(90, dtype=torch.int32), cache[2]["t"])


def test_text_json_and_bytes_come_back_as_they_were(tmp_path):
    said = [{"role": "user", "turns": [1, 2.5, None, True]}, "gr\u00fc\u00df dich\n\u2028", None, [], "", 12, "🦄"]
    raw = [b"", b"\0\xff", b"\n", b"abc", bytearray(b"x"), memoryview(b"yz"), b"7"]
    cache = cache_of(tmp_path, {"chat": dict, "raw": (torch.uint8, (None,))}, 7)
    cache[:] = {"chat": said, "raw": raw}
    cache.close()

    found = TensorCache.open(cache.folder)

    assert said == found[:]["chat"]
    assert [bytes(part) for part in raw] == [bytes(part.tolist()) for part in found[:]["raw"]]
    assert (said[0], []) == (found[0]["chat"], found[0]["raw"].tolist())
    assert 7 == len((cache.folder / "chat.jsonl").read_text().split("\n")) - 1


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({1: 2}, "the key 1 is not text"),
        (float("nan"), "Out of range float"),
        ({1, 2}, "set is not JSON serializable"),
        (torch.ones(1), "Tensor"),
    ],
)
def test_values_that_json_cannot_express_are_refused(tmp_path, value, said):
    cache = cache_of(tmp_path, {"chat": "json"}, 1)

    with pytest.raises(DtypeMismatchError, match=f"column 'chat' .*{said}"):
        cache[0] = {"chat": value}
    assert [0] == cache.missing_rows().tolist()


def test_a_column_of_different_lengths_is_not_a_tensor(tmp_path):
    cache = cache_of(tmp_path, {"t": (torch.int32, (None,)), "x": (torch.int32, (2,))}, 1)

    with pytest.raises(UnsupportedOpError, match=r"column 't' of .* has rows of different lengths, or packed ones"):
        cache["t"]
    with pytest.raises(ShapeMismatchError, match=r"column 't' .* a row has the shape \(None,\), the value \(1, 2\)"):
        cache[0] = {"t": torch.zeros(1, 2, dtype=torch.int32)}


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({}, "a cache needs at least one column"),
        ({"x": torch.float32}, r"column 'x': torch.float32 is not a column. Give \(dtype, row_shape\)"),
        ({"x": (torch.float32, (2, None))}, "only the first size may be None"),
        ({"x": (torch.float32, (-1,))}, r"no row has the shape \(-1,\)"),
        ({"x": (torch.qint8, ())}, "means nothing without its scale"),
        ({"t": "json", "t/index": (torch.int64, (2,))}, "t/index can't be a column: column 't' keeps its index there"),
        ({"": "json"}, "a column can't be called ''"),
        ({5: "json"}, "a column can't be called 5"),
        ({"x": (torch.float32, (1 << 40, 1 << 40))}, "column 'x': a row of the shape .* is larger than any file"),
    ],
)
def test_invalid_columns_are_refused_before_anything_is_created(tmp_path, columns, said):
    with pytest.raises(CacheError, match=said):
        cache_of(tmp_path, columns, 3)
    assert not (tmp_path / "cache").exists()


def test_repr_shows_a_table(filled):
    assert filled[0].num_filled == 10
    assert repr(filled[0]).endswith("10 rows, 10 filled\n  x  tensor  (3,)  torch.float32")


def test_offloaded_tensors_and_other_modes_write_and_read_plain_values(filled):
    cache, values = filled
    cache[[1, 2]] = {"x": cache["x"][4:6]}

    with torch.device("meta"), torch.inference_mode():
        found = cache[[1, 2]]["x"]

    assert type(found) is torch.Tensor
    assert torch.equal(values[4:6], found)
