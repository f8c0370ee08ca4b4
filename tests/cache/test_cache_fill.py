"""Rows that are computed where they are missing: batch by batch, and on from where a job was stopped."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, StackDataset

from offload import TensorCache
from offload.errors import ArgumentError, ArgumentTypeError, ColumnError, ShapeMismatchError

ROWS = 10


@pytest.fixture
def cache(tmp_path):
    return TensorCache.create(tmp_path / "cache", {"x": (torch.int64, ())}, ROWS)


def doubled(batch):
    return {"x": batch * 2}


class Numbers(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        return torch.tensor(row)


@pytest.mark.parametrize(
    "inputs",
    [
        torch.arange(ROWS),
        np.arange(ROWS),
        list(range(ROWS)),
        range(ROWS),
        Numbers(),
    ],
    ids=["tensor", "array", "list", "range", "dataset"],
)
def test_rows_are_made_of_their_inputs(cache, inputs):
    def fn(batch):
        sizes.append(len(batch))
        return {"x": torch.as_tensor(batch) * 2}

    sizes = []
    cache.fill(fn, inputs, batch_size=4)

    assert [4, 4, 2] == sizes
    assert list(range(0, 2 * ROWS, 2)) == cache[:]["x"].tolist()


def test_items_of_several_parts_come_as_a_data_loader_gives_them(cache):
    pairs = StackDataset(a=torch.arange(ROWS), b=torch.ones(ROWS, dtype=torch.int64))

    cache.fill(lambda batch: {"x": batch["a"] + batch["b"]}, pairs)

    assert list(range(1, ROWS + 1)) == cache[:]["x"].tolist()


def test_rows_of_another_cache_are_read_together_and_may_be_of_any_length(cache):
    texts = TensorCache.from_records([{"tokens": torch.arange(row)} for row in range(ROWS)])

    cache.fill(lambda batch: {"x": torch.tensor([len(row) for row in batch["tokens"]])}, texts, batch_size=3)

    assert list(range(ROWS)) == cache[:]["x"].tolist()


def test_items_that_make_no_tensor_come_as_a_list(cache):
    texts = [torch.arange(row) for row in range(ROWS)]

    cache.fill(lambda batch: {"x": torch.tensor([len(row) for row in batch])}, texts, collate=list)

    assert list(range(ROWS)) == cache[:]["x"].tolist()


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_what_was_computed_before_an_error_is_kept_and_the_rest_is_computed_then(cache, error):
    def failing(batch):
        seen.append(batch.tolist())
        if len(seen) == 3:
            raise error
        return doubled(batch)

    seen = []
    with pytest.raises(type(error)):
        cache.fill(failing, torch.arange(ROWS), batch_size=3)
    assert list(range(6)) == TensorCache.open(cache.folder).get(range(6))["x"].div(2).tolist()  # it is on the disk
    cache.close()

    with TensorCache.open(cache.folder, "r+") as again:
        again.fill(failing, torch.arange(ROWS), batch_size=3)
        assert [[6, 7, 8], [9]] == seen[3:]
        again.fill(failing, torch.arange(ROWS))
        assert 5 == len(seen)  # nothing was missing
        assert list(range(0, 2 * ROWS, 2)) == again[:]["x"].tolist()


def test_rows_that_are_there_are_left_and_so_are_other_columns(tmp_path):
    cache = TensorCache.create(tmp_path, {"x": (torch.int64, ()), "y": (torch.int64, ())}, ROWS)
    cache[[2, 5]] = {"x": torch.tensor([-2, -5])}

    cache.fill(doubled, torch.arange(ROWS), columns="x")

    assert [0, 2, -2, 6, 8, -5, 12, 14, 16, 18] == cache.get(slice(None), "x")["x"].tolist()
    assert list(range(ROWS)) == cache.missing_rows("y").tolist()


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"fn": 3}, ArgumentTypeError, "fn is a function"),
        ({"inputs": torch.arange(3)}, ShapeMismatchError, "there are 3 inputs, and the cache in .* has 10 rows"),
        ({"inputs": iter([1])}, ArgumentTypeError, "inputs: a tensor, a list or a dataset with a length"),
        ({"batch_size": 0}, ArgumentError, "batch_size"),
        ({"columns": ["z"]}, ColumnError, "has no column 'z'"),
    ],
)
def test_what_can_not_be_filled_is_told_before_anything_is_computed(cache, options, kind, said):
    def fn(batch):
        raise AssertionError

    with pytest.raises(kind, match=said):
        cache.fill(**({"fn": fn, "inputs": torch.arange(ROWS)} | options))
    assert 0 == cache.num_filled


def test_rows_that_do_not_fit_are_an_error(cache):
    with pytest.raises(ShapeMismatchError, match="column 'x'"):
        cache.fill(lambda batch: {"x": batch[:1]}, torch.arange(ROWS))


def test_a_bar_is_shown_unless_it_is_not_wanted(cache, monkeypatch):
    shown = []
    monkeypatch.setattr("offload.cache.table.progress_of", lambda items, what: shown.append(what) or items)

    cache.fill(doubled, torch.arange(ROWS), progress=False)
    assert [] == shown
    cache[0] = {"x": torch.tensor(0)}
    cache.fill(doubled, torch.arange(ROWS))
    assert ["batches"] == shown
