"""Reading rows: batches read ahead, and a torch dataset."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from offload import TensorCache
from offload.cache.batches import read_ahead
from offload.errors import CacheError, MissingRowsError, RowIndexError
from tests.equal import is_equal

N = 23


@pytest.fixture(params=["folder", "file", "memory"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TensorCache]:
    torch.manual_seed(0)
    tensors = {"x": torch.randn(N, 3), "id": torch.arange(N), "half": torch.randn(N, 2).to(torch.bfloat16)}
    if request.param == "memory":
        yield TensorCache(tensors=tensors)
    elif request.param == "file":
        TensorCache(tensors=tensors).to_disk(tmp_path / "cache.safetensors")
        yield TensorCache.from_disk(tmp_path / "cache.safetensors")
    else:
        columns = {name: (tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in tensors.items()}
        with TensorCache.create(tmp_path / "cache", columns, N) as made:
            made[:] = tensors
            yield made


@pytest.mark.parametrize("prefetch", [0, 2, 50])
@pytest.mark.parametrize("size", [1, 5, 100])
def test_a_number_gives_all_rows_in_order(cache: TensorCache, size: int, prefetch: int) -> None:
    batches = list(cache.batches(size, prefetch=prefetch))

    assert [min(size, N - start) for start in range(0, N, size)] == [len(batch["id"]) for batch in batches]
    assert is_equal(cache[:], {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]})


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_sampler_gives_its_rows_in_its_order(cache: TensorCache, prefetch: int) -> None:
    sampler = BatchSampler(RandomSampler(range(N), generator=torch.Generator().manual_seed(3)), 4, drop_last=True)
    expected = list(
        BatchSampler(RandomSampler(range(N), generator=torch.Generator().manual_seed(3)), 4, drop_last=True)
    )

    batches = list(cache.batches(sampler, prefetch=prefetch, columns=["id"]))

    assert expected == [batch["id"].tolist() for batch in batches]
    assert all(["id"] == list(batch) for batch in batches)


def test_every_form_of_rows_may_come_from_a_sampler(cache: TensorCache) -> None:
    forms = [3, [1, 1], slice(0, 2), torch.tensor([22, 0]), range(2)]

    found = list(cache.batches(forms))

    assert all(is_equal(cache[rows], batch) for rows, batch in zip(forms, found, strict=True))


def test_batches_land_on_the_device(cache: TensorCache) -> None:
    assert {"meta"} == {batch["x"].device.type for batch in cache.batches(5, device="meta")}


def test_batches_are_pinned_if_that_is_asked_for(cache: TensorCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: torch.full_like(self, 7))

    assert cache.get([0, 1], columns=["x"], pin_memory=True)["x"].eq(7).all()


def test_an_error_comes_where_its_batch_would_have_come(cache: TensorCache) -> None:
    batches = cache.batches([[0], [1], [99], [2]], columns="id")

    assert [0] == next(batches)["id"].tolist()
    assert [1] == next(batches)["id"].tolist()
    with pytest.raises(RowIndexError, match="row 99 is out of range for a cache of 23 rows"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize("rows", [torch.arange(2), np.arange(2), [0, 1]], ids=lambda rows: type(rows).__name__)
def test_a_sampler_may_use_what_it_gives_again(cache: TensorCache, rows: Any) -> None:
    def sampler() -> Iterator[Any]:
        for start in range(0, 8, 2):
            rows[0], rows[1] = start, start + 1
            yield rows

    assert [[0, 1], [2, 3], [4, 5], [6, 7]] == [batch["id"].tolist() for batch in cache.batches(sampler(), prefetch=3)]


def test_a_batch_without_rows_and_an_unknown_column_are_refused(cache: TensorCache) -> None:
    with pytest.raises(CacheError, match="a batch can't have 0 rows"):
        cache.batches(0)
    with pytest.raises(KeyError, match="has no column 'y'"):
        next(cache.batches(2, columns="y"))


def test_missing_rows_are_reported(tmp_path: Path) -> None:
    with TensorCache.create(tmp_path, {"x": (torch.float32, ())}, 4) as cache:
        cache[:2] = {"x": torch.ones(2)}
        batches = cache.batches(2)

        assert [1.0, 1.0] == next(batches)["x"].tolist()
        with pytest.raises(MissingRowsError, match="2 of the requested rows are not filled"):
            next(batches)


def test_rows_of_different_lengths_come_in_the_form_that_was_asked_for(tmp_path: Path) -> None:
    records = [{"t": torch.arange(number)} for number in range(4)]
    cache = TensorCache.from_records(records, tmp_path, schema={"t": (torch.int64, (None,))})

    padded = list(cache.batches(2, ragged="padded", padding=-1))

    assert [[-1], [0]] == padded[0]["t"].tolist()
    assert [[0, 1, -1], [0, 1, 2]] == padded[1]["t"].tolist()


def test_no_more_is_read_than_was_asked_to_be_read_ahead() -> None:
    asked: list[int] = []
    read = threading.Semaphore(0)

    def sampler() -> Iterator[int]:
        for item in range(100):
            asked.append(item)
            yield item

    def reading(item: int) -> int:
        read.release()
        return item

    batches = read_ahead(sampler(), reading, 3)
    assert [] == asked
    for at in range(5):
        assert at == next(batches)
        assert list(range(at + 4)) == asked  # this one, and three more
    for _ in range(8):
        read.acquire(timeout=10)

    assert not read.acquire(blocking=False)


def test_an_iterator_that_is_left_early_leaves_no_thread_and_no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has begun ends; the rest is given up before that is waited for."""
    may_go, began, done = threading.Event(), threading.Event(), []

    def slow(item: int) -> int:
        if item == 1:
            began.set()
            may_go.wait(10)
        done.append(item)
        return item

    before = threading.active_count()
    batches = read_ahead(range(100), slow, 5)
    assert 0 == next(batches)
    began.wait(10)
    shutdown = ThreadPoolExecutor.shutdown
    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", lambda self, **how: (may_go.set(), shutdown(self, **how)))
    batches.close()

    assert [0, 1] == done
    del batches
    gc.collect()
    may_go.wait(10)
    assert before >= threading.active_count()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("offload-batches")]


def test_an_error_of_the_sampler_is_passed_on() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise KeyError("no more")

    with pytest.raises(KeyError, match="no more"):
        list(read_ahead(failing(), str, 2))


@pytest.mark.parametrize(("workers", "context"), [(0, None), (2, "fork"), (1, "spawn")])
def test_a_data_loader_gives_the_rows(cache: TensorCache, workers: int, context: str | None) -> None:
    if context == "spawn" and (cache.folder is None or cache.folder.is_file()):
        pytest.skip("one kind of cache will do: a new process takes seconds")
    data = cache.as_dataset(columns=["x", "id"])

    loader = DataLoader(
        data,
        batch_size=4,
        shuffle=True,
        generator=torch.Generator().manual_seed(5),
        num_workers=workers,
        multiprocessing_context=context,
    )
    found = list(loader)

    assert list(range(N)) == sorted(row for batch in found for row in batch["id"].tolist())
    for batch in found:
        assert is_equal(cache.get(batch["id"].tolist(), columns=["x", "id"]), batch)


def test_batches_come_as_they_are_read_without_being_collated(cache: TensorCache) -> None:
    data = cache.as_dataset()
    sampler = BatchSampler(SequentialSampler(data), 10, drop_last=False)

    found = list(DataLoader(data, batch_size=None, sampler=sampler))

    assert [10, 10, 3] == [len(batch["id"]) for batch in found]
    assert is_equal(cache[:10], found[0])


def test_rows_that_are_asked_for_together_are_read_together(
    cache: TensorCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, get = [], cache.get
    monkeypatch.setattr(cache, "get", lambda rows, **form: (asked.append(rows), get(rows, **form))[1])

    list(DataLoader(cache.as_dataset(), batch_size=10))

    assert [list(range(10)), list(range(10, 20)), [20, 21, 22]] == asked


def test_a_row_of_text_and_of_any_length_stays_what_it_is(tmp_path: Path) -> None:
    records = [{"text": f"t{number}", "t": torch.arange(number), "x": float(number)} for number in range(4)]
    data = TensorCache.from_records(records, tmp_path, schema={"t": (torch.int64, (None,))}).as_dataset()

    rows = data.__getitems__([3, 1])

    assert ["t3", "t1"] == [row["text"] for row in rows]
    assert [[0, 1, 2], [0]] == [row["t"].tolist() for row in rows]
    assert 4 == len(data)
    assert "t2" == data[2]["text"]


def test_a_data_loader_stacks_rows_that_are_padded_to_the_longest_of_their_batch(tmp_path: Path) -> None:
    records = [{"t": torch.arange(number) + 1} for number in range(5)]
    data = TensorCache.from_records(records, tmp_path, schema={"t": (torch.int64, (None,))}).as_dataset(
        ragged="padded", padding=-1
    )

    found = [batch["t"].tolist() for batch in DataLoader(data, batch_sampler=[[2, 0], [3, 4]])]

    assert [[[1, 2], [-1, -1]], [[1, 2, 3, -1], [1, 2, 3, 4]]] == found
    assert [1, 2, 3] == data[3]["t"].tolist()
