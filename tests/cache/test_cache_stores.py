"""What every cache does, wherever its rows are."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offload import OffloadedTensor, TensorCache
from offload.errors import CacheError, ColumnError, RowIndexError
from tests.cache.stores import NUMBERS, logps
from tests.equal import assert_equal
from tests.page_cache import made_hot
from tests.processes import in_fork

FORMS = [
    2,
    -1,
    slice(None),
    slice(4, 0, -2),
    slice(3, 3),
    [4, 0, 4],
    [],
    range(1, 4),
    range(4, 0, -2),
    slice(None, None, -1),
    torch.tensor([0, -1, 0]),
    torch.tensor([True, False, True, False, True]),
    torch.tensor(3),
    np.ma.array([1, 2]),
    np.frombuffer(bytes(16), np.int64),  # read-only
]
NO_ROWS = [
    torch.tensor([0.5]),
    torch.tensor([float("nan")]),
    torch.tensor([float("inf")]),
    torch.tensor([1e30]),
    torch.tensor([0.5, 1], dtype=torch.bfloat16),
    torch.tensor([0.0, 1], requires_grad=True),
    torch.tensor([1.0 + 0j]),
    torch.tensor([[0.5]]),
    torch.tensor([[0, 1]]),
    torch.tensor([[True]]),
    torch.empty(2, dtype=torch.long, device="meta"),
    torch.sparse_coo_tensor([[0]], [1], (3,), check_invariants=True),
    torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged),
    np.array([1.5]),
    np.array(["a"]),
    [[0], [1, 2]],
    [None],
    (0, 1),
    {1},
    ...,
    None,
    1.0,
]


def folder_of(folder: Path, tensors: dict[str, torch.Tensor]) -> TensorCache:
    schema = {name: (tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in tensors.items()}
    cache = TensorCache.create(folder / "cache", schema)
    cache.append(tensors)
    cache.flush()
    return cache


def closed_folder_of(folder: Path, tensors: dict[str, torch.Tensor]) -> TensorCache:
    folder_of(folder, tensors).close()
    return TensorCache.from_disk(folder / "cache")


def hot_folder_of(folder: Path, tensors: dict[str, torch.Tensor]) -> TensorCache:
    """All rows come out of mappings."""
    made_hot(cache := closed_folder_of(folder, tensors))
    return cache


def file_of(folder: Path, tensors: dict[str, torch.Tensor]) -> TensorCache:
    TensorCache(tensors=tensors).to_disk(folder / "rows")
    return TensorCache.from_disk(folder / "rows")


def pt_file_of(folder: Path, tensors: dict[str, torch.Tensor]) -> TensorCache:
    torch.save(tensors, folder / "rows.pt")
    return TensorCache.from_disk(folder / "rows.pt")


def offloaded(folder: Path, tensors: dict[str, torch.Tensor]) -> TensorCache:
    return TensorCache({n: OffloadedTensor.from_original_tensor(value, n, folder) for n, value in tensors.items()})


KINDS: dict[str, Callable[[Path, dict[str, torch.Tensor]], TensorCache]] = {
    "in memory": lambda _, tensors: TensorCache(tensors=tensors),
    "offloaded": offloaded,
    "pt": pt_file_of,
    "safetensors": file_of,
    "folder to write": folder_of,
    "folder to read": closed_folder_of,
    "folder in memory": hot_folder_of,
}


@pytest.fixture(params=KINDS)
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> TensorCache:
    return KINDS[request.param](tmp_path, logps())


def as_torch_takes_it(rows: Any) -> Any:
    """The same index for a tensor of five rows: torch does not support negative steps."""
    if isinstance(rows, slice):
        return list(range(5)[rows])
    return list(rows) if isinstance(rows, range | np.ndarray) else rows


@pytest.mark.parametrize("rows", FORMS, ids=str)
def test_every_form_of_index_writes_what_it_writes_to_tensors(tmp_path: Path, rows: object) -> None:
    cache, expected = folder_of(tmp_path, logps()), logps()["hidden"]
    new = expected[as_torch_takes_it(rows)] + 1
    expected[as_torch_takes_it(rows)] = new

    cache[rows] = {"hidden": new}

    assert torch.equal(expected, cache[:]["hidden"])


@pytest.mark.parametrize("rows", FORMS, ids=str)
def test_every_form_of_index_selects_what_it_selects_in_tensors(cache: TensorCache, rows: object) -> None:
    expected = {name: tensor[as_torch_takes_it(rows)] for name, tensor in logps().items()}

    for _ in range(3):  # the second and third time, rows may be read in another way
        batch = cache[rows]

        assert_equal(expected, batch)
        assert {torch.Tensor} == {*map(type, batch.values())}


@pytest.mark.parametrize("dtype", [dtype for dtype in NUMBERS if not dtype.is_floating_point], ids=str)
def test_numbers_of_any_dtype_select_what_they_select_in_tensors(cache: TensorCache, dtype: torch.dtype) -> None:
    """As `values[indices.long()]` does: a tensor, an array, or a list."""
    for shape in [(), (0,), (7,), (1,)]:
        indices = torch.randint(-5 if dtype.is_signed else 0, 5, shape).to(dtype)
        has_list = indices.dim() and indices.numel()
        backwards = indices.numpy()[::-1] if shape else indices
        for index in (indices, indices.numpy(), backwards, *([indices.tolist()] if has_list else [])):
            numbers = torch.as_tensor(index.copy() if isinstance(index, np.ndarray) else index)
            assert_equal({name: value[numbers.long()] for name, value in logps().items()}, cache[index], strides=False)


def test_booleans_are_a_mask_and_bytes_are_not(cache: TensorCache) -> None:
    mask, hidden = torch.arange(5) % 3 == 0, logps()["hidden"]

    assert torch.equal(hidden[mask], cache[mask]["hidden"])
    assert torch.equal(hidden[mask.long()], cache[mask.byte()]["hidden"])


@pytest.mark.parametrize("rows", NO_ROWS, ids=str)
def test_other_indices_are_refused_with_what_is_taken(cache: TensorCache, rows: object) -> None:
    said = "is not an index of rows: give an int, .* or a mask of bools|is out of range for"
    with pytest.raises(RowIndexError, match=said):
        cache[rows]


def test_a_mask_of_another_length_is_refused(cache: TensorCache) -> None:
    with pytest.raises(RowIndexError, match="the mask has 1 elements, and the cache 5 rows"):
        cache[torch.tensor([True])]


def test_the_length_the_columns_and_the_size_are_known(cache: TensorCache) -> None:
    assert 5 == len(cache) == cache.num_filled
    assert [] == cache.missing_rows().tolist() == cache.missing_rows(["good"]).tolist()
    assert set(logps()) == set(cache.schema)
    assert sum(tensor.nbytes for tensor in logps().values()) == cache.nbytes
    assert "5 rows" in repr(cache)


def test_a_column_is_a_tensor(cache: TensorCache) -> None:
    assert_equal(logps(), cache.tensors)
    assert_equal(logps(), {name: cache[name] for name in logps()})


def test_columns_are_read_alone(cache: TensorCache) -> None:
    assert_equal({"chosen_logps": logps()["chosen_logps"][[3, 1]]}, cache.get([3, 1], columns=["chosen_logps"]))


def test_a_copy_in_another_process_reads_the_same(cache: TensorCache) -> None:
    expected = cache[[4, 0]]
    again = pickle.loads(pickle.dumps(cache))

    assert_equal(expected, again[[4, 0]])
    assert in_fork(lambda: assert_equal(expected, cache[[4, 0]]))


def test_rows_out_of_range_and_unknown_columns_are_refused(cache: TensorCache) -> None:
    with pytest.raises(RowIndexError, match="row 5 is out of range for a cache of 5 rows"):
        cache[[0, 5]]
    with pytest.raises(ColumnError, match="has no column 'nothing': it has "):
        cache.get(0, columns=["nothing"])
    with pytest.raises(ColumnError, match="has no column 'nothing': it has "):
        cache.missing_rows(["nothing"])


def test_a_cache_that_was_not_opened_to_write_is_read_only(cache: TensorCache) -> None:
    if cache.mode == "r+":
        cache[0] = {"chosen_logps": torch.tensor(7.0)}
        assert 7 == cache[0]["chosen_logps"]
        return
    with pytest.raises(CacheError, match=r"only"):
        cache[0] = {"chosen_logps": torch.tensor(1.0)}
    with pytest.raises(CacheError, match=r"only"):
        cache.append({name: tensor[:1] for name, tensor in logps().items()})


def test_all_rows_go_to_one_file(cache: TensorCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.cache.incoming._BATCH", 100)  # bytes
    cache.to_disk(tmp_path / "out" / "x")

    assert_equal(logps(), TensorCache.from_disk(tmp_path / "out" / "x")[:])


def test_a_closed_cache_is_an_error(cache: TensorCache) -> None:
    cache.close()
    cache.close()

    acts = (lambda: cache[0], lambda: len(cache), lambda: cache["good"], cache.missing_rows, cache.flush)
    for act in acts:
        with pytest.raises(CacheError, match="is closed: open it again"):
            act()
    assert repr(cache).endswith("closed)")
