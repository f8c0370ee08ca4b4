"""Records become rows: inferred columns, missing values, and what does not fit."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from offload import TensorCache
from offload.errors import CacheError, DtypeMismatchError
from tests.processes import run_script


@dataclasses.dataclass
class Sample:
    id: int
    text: str
    hidden: torch.Tensor
    tokens: np.ndarray
    tags: list[str] | None = None
    raw: bytes = b""


SCHEMA = {"tokens": (torch.int16, (None,)), "tags": "json"}


class Pair(NamedTuple):
    chosen: float
    rejected: int
    good: bool


def samples(count: int) -> list[Sample]:
    torch.manual_seed(0)
    return [
        Sample(
            id=number,
            text=f"tëxt {number}\n",
            hidden=torch.randn(2, 3).to(torch.bfloat16),
            tokens=np.arange(number % 4, dtype=np.int16),
            tags=["a", "b"] if number % 2 else None,
            raw=bytes(range(number)),
        )
        for number in range(count)
    ]


def cache_of(records: Iterable[Sample], folder: Path, **more: Any) -> TensorCache:
    return TensorCache.from_records(records, folder / "cache", schema=SCHEMA, **more)


def test_a_row_a_record_with_every_field_as_it_was(tmp_path: Path) -> None:
    records = samples(10)

    cache = cache_of(iter(records), tmp_path, metadata={"of": "samples"})
    rows = cache[:]

    assert 10 == len(cache) == cache.num_filled
    assert {"of": "samples"} == cache.metadata
    assert torch.equal(torch.stack([record.hidden for record in records]), rows["hidden"])
    assert torch.equal(torch.arange(10), rows["id"])
    assert [record.text for record in records] == rows["text"]
    assert [record.tags for record in records] == rows["tags"]
    assert [record.raw for record in records] == [bytes(row.tolist()) for row in rows["raw"]]
    assert all(torch.equal(torch.from_numpy(r.tokens), got) for r, got in zip(records, rows["tokens"], strict=True))


def test_a_batch_of_empty_rows_behind_others_is_read_back(tmp_path: Path) -> None:
    with TensorCache.create(tmp_path, {"t": (torch.int64, (None,))}) as cache:
        cache.append({"t": [torch.arange(3)]})
        cache.append({"t": [torch.arange(0)]})

        assert [[0, 1, 2], []] == [row.tolist() for row in cache[:]["t"]]


@pytest.mark.parametrize(
    ("records", "columns"),
    [
        (
            [Pair(0.5, 1, True), Pair(1.5, 2, False)],
            {"chosen": torch.float32, "rejected": torch.int64, "good": torch.bool},
        ),
        ([{"n": 2.5}, {"n": 1}], {"n": torch.float32}),
        ([{"n": np.float16(1.5)}, {"n": np.float16(2)}], {"n": torch.float16}),
        ([{"n": 1j}], {"n": torch.complex64}),
        ([{"n": np.array([1, 2], dtype=">i4")}], {"n": torch.int32}),
        ([{"n": 3}, {"n": True}], {"n": torch.int64}),
    ],
)
def test_numbers_are_what_torch_takes_them_for(records: list[Any], columns: dict[str, torch.dtype]) -> None:
    cache = TensorCache.from_records(records)

    for name, dtype in columns.items():
        values = [record[name] if isinstance(record, dict) else getattr(record, name) for record in records]
        assert dtype == cache[:][name].dtype
        assert torch.equal(torch.tensor(np.array(values).tolist(), dtype=dtype), cache[:][name])


def test_tensorclasses_and_tensordicts() -> None:
    tensordict = pytest.importorskip("tensordict")

    @tensordict.tensorclass
    class Row:
        x: torch.Tensor
        text: str

    rows = TensorCache.from_records([Row(x=torch.ones(3), text="a", batch_size=[])])[:]
    flat = tensordict.TensorDict({"a": torch.arange(4)}, [4])

    assert [[1.0] * 3] == rows["x"].tolist()
    assert ["a"] == rows["text"]
    assert torch.equal(flat["a"], TensorCache.from_records(flat)[:]["a"])


def test_the_caller_specifies_fields_that_the_first_record_leaves_open() -> None:
    first = {"tokens": torch.arange(3), "score": 1, "chat": {"role": "user"}}
    later = {"tokens": torch.arange(5), "score": 2.5}

    rows = TensorCache.from_records(
        [first, later], schema={"tokens": (torch.int64, (None,)), "score": (torch.float64, ()), "extra": "json"}
    )[:]

    assert [[0, 1, 2], [0, 1, 2, 3, 4]] == [row.tolist() for row in rows["tokens"]]
    assert [1.0, 2.5] == rows["score"].tolist()
    assert torch.float64 == rows["score"].dtype
    assert [{"role": "user"}, None] == rows["chat"]
    assert [None, None] == rows["extra"]


def test_numbers_too_large_for_a_requested_column_are_refused_and_others_become_json() -> None:
    with pytest.raises(CacheError, match=r"'x' of record 0 is 300, too large for torch\.int8"):
        TensorCache.from_records([{"x": 300}], schema={"x": (torch.int8, ())})

    assert [1 << 70] == TensorCache.from_records([{"x": 1 << 70}])[:]["x"]


def test_no_records_need_a_schema() -> None:
    cache = TensorCache.from_records([], schema={"x": (torch.float32, (2,))})

    assert 0 == len(cache)
    assert (0, 2) == tuple(cache[:]["x"].shape)


FIRST = {"x": 1, "t": torch.ones(2), "s": "a"}


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([], "there are no records to infer columns from: pass schema="),
        ([3], "int is not a record: give dataclasses"),
        ([{"x": None}], "'x' is None in the first record: give all a value, or pass schema={'x': 'json'}"),
        ([FIRST, FIRST | {"x": None}], "'x' of record 1 is a NoneType, but its column holds torch.int64"),
        ([{"x": {"y": torch.ones(2)}}], "column 'x' ("),
        ([FIRST, FIRST | {"x": 1.5}], "'x' of record 1 is torch.float32 of shape (), but its column holds torch.int64"),
        ([FIRST, FIRST | {"x": 1 << 70}], "'x' of record 1 is a int, but its column holds"),
        ([FIRST, FIRST | {"t": torch.ones(3)}], "'t' of record 1 is torch.float32 of shape (3,), but its column holds"),
        ([FIRST, FIRST | {"t": torch.ones(2, 1)}], "'t' of record 1 is torch.float32 of shape (2, 1), but its column"),
        (
            [FIRST, FIRST | {"t": torch.ones(2).half()}],
            "'t' of record 1 is torch.float16 of shape (2,), but its column",
        ),
        ([FIRST, FIRST | {"t": "a"}], "'t' of record 1 is a str, but its column holds torch.float32"),
        ([FIRST, FIRST | {"new": 1}], "record 1 has a field 'new' that the first one does not have: give every"),
        ([{"raw": b"a"}, {"raw": 1}], "'raw' of record 1 is torch.uint8 of shape (), but its column holds torch.uint8"),
    ],
)
def test_a_record_that_does_not_fit_is_refused_and_leaves_nothing(
    tmp_path: Path, records: list[Any], words: str
) -> None:
    with pytest.raises((CacheError, DtypeMismatchError)) as found:
        TensorCache.from_records(records, tmp_path / "cache")

    assert words in str(found.value)
    assert [] == os.listdir(tmp_path)


def test_a_failure_leaves_a_folder_as_it_was_and_a_cache_that_is_there_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")

    def failing() -> Iterator[dict[str, int]]:
        yield from ({"x": number} for number in range(2000))
        raise KeyError("the source is gone")

    with pytest.raises(KeyError, match="the source is gone"):
        TensorCache.from_records(failing(), tmp_path)
    assert ["mine.txt"] == os.listdir(tmp_path)

    TensorCache.from_records([{"x": 7}], tmp_path).close()
    with pytest.raises(CacheError, match="already has a cache"):
        TensorCache.from_records([{"x": 8}], tmp_path)
    assert [7] == TensorCache.open(tmp_path)[:]["x"].tolist()


def test_records_are_streamed_in_little_memory(tmp_path: Path) -> None:
    script = """
        import sys, torch
        from offload import TensorCache
        from offload.memory import anonymous_bytes

        most = 0
        def records(count):
            global most
            for number in range(count):
                yield {"x": torch.full((1 << 14,), float(number)), "id": f"row {number}"}
                most = max(most, anonymous_bytes())

        TensorCache.from_records(records(100), sys.argv[1] + "/small").close()
        before = most
        cache = TensorCache.from_records(records(1100), sys.argv[1] + "/large")
        assert [1099.0, 7.0] == cache[[1099, 7]]["x"][:, 5].tolist()
        print(most - before, cache.nbytes)
    """

    grown, nbytes = map(int, run_script(script, tmp_path).split())

    assert 64 << 20 <= nbytes
    assert 32 << 20 > grown
