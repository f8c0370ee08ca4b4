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
from offload.errors import CacheError
from tests.equal import assert_equal
from tests.processes import run_script


@dataclasses.dataclass
class Span:
    start: int
    weights: torch.Tensor


@dataclasses.dataclass
class Sample:
    id: int
    text: str
    hidden: torch.Tensor
    tokens: np.ndarray
    reward: float | None = None
    tags: list[str] | None = None
    raw: bytes = b""
    span: Span | None = None


SCHEMA = {
    "tokens": (torch.int16, (None,)),
    "tags": "json",
    "span.start": (torch.int64, ()),
    "span.weights": (torch.float32, (2,)),
}


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
            reward=None if number % 3 else number / 2,
            tags=["a", "b"] if number % 2 else None,
            raw=bytes(range(number)),
            span=None if number % 5 == 0 else Span(number, torch.full((2,), float(number))),
        )
        for number in range(count)
    ]


def cache_of(records: Iterable[Sample], folder: Path, **more: Any) -> TensorCache:
    return TensorCache.from_records(records, folder / "cache", schema=SCHEMA, optional=["reward"], **more)


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
    assert [record.span.start if record.span else 0 for record in records] == rows["span.start"].tolist()


def test_a_field_of_none_is_missing_and_not_nan(tmp_path: Path) -> None:
    records = samples(10)

    rows = cache_of(records, tmp_path)[:]

    assert [record.reward is not None for record in records] == rows["reward.present"].tolist()
    assert [record.reward or 0.0 for record in records] == rows["reward"].tolist()
    assert [record.span is not None for record in records] == rows["span.weights.present"].tolist()
    assert "id.present" not in rows
    assert "tags.present" not in rows  # JSON has null


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


def test_dicts_without_a_key_and_dicts_of_tensors() -> None:
    records = [{"at": {"x": torch.ones(2)}, "chat": {"role": "user"}, "n": 1}, {"chat": {}, "n": None}]

    rows = TensorCache.from_records(records, optional=["at.x", "n"])[:]

    assert [[1.0, 1.0], [0.0, 0.0]] == rows["at.x"].tolist()
    assert [True, False] == rows["at.x.present"].tolist()
    assert [True, False] == rows["n.present"].tolist()
    assert [{"role": "user"}, {}] == rows["chat"]


def test_tensorclasses_and_tensordicts() -> None:
    tensordict = pytest.importorskip("tensordict")

    @tensordict.tensorclass
    class Row:
        x: torch.Tensor
        text: str
        maybe: torch.Tensor | None = None

    rows = TensorCache.from_records(
        [
            Row(x=torch.ones(3), text="a", batch_size=[]),
            Row(x=torch.zeros(3), text="b", maybe=torch.ones(1), batch_size=[]),
        ],
        schema={"maybe": (torch.float32, (1,))},
    )[:]
    nested = tensordict.TensorDict({"a": torch.arange(4), "in": {"b": torch.rand(4, 2)}}, [4])

    assert [[1.0] * 3, [0.0] * 3] == rows["x"].tolist()
    assert ["a", "b"] == rows["text"]
    assert [False, True] == rows["maybe.present"].tolist()
    assert_equal({"a": nested["a"], "in.b": nested["in", "b"]}, TensorCache.from_records(nested)[:])


def test_the_caller_specifies_fields_that_the_first_record_leaves_open() -> None:
    first = {"tokens": torch.arange(3), "score": 1, "late": 1.5}
    later = {"tokens": torch.arange(5), "score": 2.5, "late": None}

    rows = TensorCache.from_records(
        [first, later],
        schema={"tokens": (torch.int64, (None,)), "score": (torch.float64, ()), "extra": "json"},
        optional=["late"],
    )[:]

    assert [[0, 1, 2], [0, 1, 2, 3, 4]] == [row.tolist() for row in rows["tokens"]]
    assert [1.0, 2.5] == rows["score"].tolist()
    assert torch.float64 == rows["score"].dtype
    assert [True, False] == rows["late.present"].tolist()
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
        ([{"x": None}], "'x' is None in the first record: describe it, as in schema={'x'"),
        ([FIRST, FIRST | {"x": None}], "'x' is None in record 1, but not in the first one: pass optional=['x']"),
        ([FIRST, FIRST | {"x": 1.5}], "'x' of record 1 is torch.float32 of shape (), but its column holds torch.int64"),
        ([FIRST, FIRST | {"x": 1 << 70}], "'x' of record 1 is a int, but its column holds"),
        ([FIRST, FIRST | {"t": torch.ones(3)}], "'t' of record 1 is torch.float32 of shape (3,), but its column holds"),
        ([FIRST, FIRST | {"t": torch.ones(2, 1)}], "'t' of record 1 is torch.float32 of shape (2, 1), but its column"),
        (
            [FIRST, FIRST | {"t": torch.ones(2).half()}],
            "'t' of record 1 is torch.float16 of shape (2,), but its column",
        ),
        ([FIRST, FIRST | {"t": "a"}], "'t' of record 1 is a str, but its column holds torch.float32"),
        ([FIRST, FIRST | {"new": 1}], "record 1 has a field 'new' that the first one does not have: pass schema="),
        ([{"raw": b"a"}, {"raw": 1}], "'raw' of record 1 is torch.uint8 of shape (), but its column holds torch.uint8"),
    ],
)
def test_a_record_that_does_not_fit_is_refused_and_leaves_nothing(
    tmp_path: Path, records: list[Any], words: str
) -> None:
    with pytest.raises(CacheError) as found:
        TensorCache.from_records(records, tmp_path / "cache")

    assert words in str(found.value)
    assert [] == os.listdir(tmp_path)


def test_an_unknown_name_in_optional_is_refused() -> None:
    with pytest.raises(CacheError, match="optional= has the unknown fields 'z': the records have 'x'"):
        TensorCache.from_records([{"x": 1}], optional=["z"])


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
