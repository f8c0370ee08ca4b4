"""Columns of packed log-probabilities: ids exact, numbers within their bound, the same in C and in torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from offload import TensorCache, topk
from offload.cache.topk import TopLogps
from offload.errors import (
    ArgumentError,
    CacheError,
    CorruptFileError,
    DtypeMismatchError,
    ShapeMismatchError,
    UnsupportedOpError,
)
from offload.kernels import native
from offload.kernels.logps import pack, unpack
from tests.cache.stores import NUMBERS
from tests.equal import assert_equal

K, VOCAB, N = 5, 1000, 12


def pairs(*shape: int) -> TopLogps:
    logps = torch.randn(*shape, VOCAB).log_softmax(-1)
    found = logps.topk(K)
    return TopLogps(found.indices, found.values)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[TensorCache]:
    torch.manual_seed(0)
    with TensorCache.create(tmp_path / "rows", {"t": topk(K, VOCAB, 12), "x": (torch.int64, ())}, N) as made:
        yield made


def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)


def bound(logps: torch.Tensor, bits: int) -> torch.Tensor:
    """How far a number may be off: half a step, or the error of an end in float16."""
    finite = logps > -torch.inf
    high = logps.where(finite, -torch.inf).amax(-1, keepdim=True)
    low = logps.where(finite, torch.inf).amin(-1, keepdim=True)
    step = (high - low).nan_to_num(0, 0, 0) / (2**bits - 2)
    return torch.maximum(step / 2 * (1 + 2**-9), (logps.abs() * 2**-11).clamp(min=2**-25)) + 1e-6 * logps.abs()


@st.composite
def rows(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    vocab = draw(st.one_of(st.integers(1, 40), st.integers(1, 2**20)))
    k, bits = draw(st.integers(1, min(vocab, 70))), draw(st.integers(8, 12))
    count, seed = draw(st.integers(0, 4)), draw(st.integers(0, 2**30))
    spread, ties, absent = (
        draw(st.sampled_from([0.0, 1e-6, 0.1, 3.0, 100.0])),
        draw(st.booleans()),
        draw(st.integers(0, k)),
    )
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (count, k), generator=generator)
    logps = torch.randn(count, k, generator=generator) * spread - draw(st.sampled_from([0.0, 1.0, 30.0, 5000.0]))
    logps = logps.round() if ties else logps
    logps[:, k - absent :] = -torch.inf
    return ids, logps.sort(-1, descending=True).values, vocab, bits


@settings(max_examples=150, deadline=None)
@given(rows())
def test_ids_come_back_and_numbers_are_within_their_bound(drawn: tuple[torch.Tensor, torch.Tensor, int, int]) -> None:
    ids, logps, vocab, bits = drawn
    id_bits, patch = topk(1, vocab, bits).id_bits, pytest.MonkeyPatch()
    packed = pack(ids, logps, id_bits, bits)
    found = unpack(packed, ids.shape[1], id_bits, bits)
    with patch.context() as switched:
        in_torch(switched)
        other, unpacked = pack(ids, logps, id_bits, bits), unpack(packed, ids.shape[1], id_bits, bits)

    plain = native.unpack_logps(packed, ids.shape[1], packed.shape[1], id_bits, bits, level=0)

    assert torch.equal(packed, other)
    assert all(torch.equal(one, two) for one, two in zip(found, plain, strict=True))
    assert all(torch.equal(one, two) for one, two in zip(found, unpacked, strict=True))
    assert torch.equal(ids, found[0])
    assert torch.equal(logps > -torch.inf, found[1] > -torch.inf)
    assert bool((((found[1] - logps).abs() <= bound(logps, bits)) | (logps == -torch.inf)).all())
    assert bool((found[1][:, 1:] <= found[1][:, :-1]).all())  # still sorted; ties stay ties
    assert bool(((found[1][:, 1:] == found[1][:, :-1]) | (logps[:, 1:] != logps[:, :-1])).all())
    again = unpack(pack(*found, id_bits, bits), ids.shape[1], id_bits, bits)
    assert torch.allclose(found[1], again[1], rtol=1e-6, atol=1e-9)  # nothing more is lost by a copy


@pytest.mark.parametrize("bits", [8, 9, 10, 11, 12])
def test_every_code_comes_back(bits: int) -> None:
    count = 2**bits - 1
    codes = torch.cat([torch.zeros(1), torch.arange(count) / (count - 1)]).neg()[None]  # 0, and every number down to -1
    ids = torch.arange(count + 1)[None]

    packed = pack(ids, codes, bits + 1, bits)
    found = unpack(packed, count + 1, bits + 1, bits)

    assert torch.equal(ids, found[0])
    assert len(found[1].unique()) == count
    assert torch.equal(packed, pack(*found, bits + 1, bits))


def test_rows_are_written_from_pairs_in_any_order_and_from_logits(cache: TensorCache) -> None:
    logits = torch.randn(N, VOCAB, dtype=torch.bfloat16) * 5
    top = logits.float().log_softmax(-1).topk(K)
    forms = [
        logits,
        TopLogps(top.indices, top.values),
        top,  # values, indices
        (top.indices.flip(1).int(), top.values.flip(1).double()),
        (top.indices.numpy(), top.values.numpy()),
    ]
    for form in forms:
        cache[:] = {"t": form, "x": torch.arange(N)}
        found = cache[:]["t"]

        assert isinstance(found, TopLogps)
        assert torch.equal(top.values.sort(descending=True).values, top.values)
        assert bool(((found.logps - top.values).abs() <= bound(top.values, 12)).all())
        same = top.values[:, 1:] != top.values[:, :-1]  # ties may come in any order
        assert torch.equal(
            top.indices[:, 1:-1][same[:, 1:] & same[:, :-1]], found.ids[:, 1:-1][same[:, 1:] & same[:, :-1]]
        )


def test_rows_of_every_form_of_index_are_pairs(cache: TensorCache) -> None:
    cache[:] = {"t": pairs(N), "x": torch.arange(N)}
    for _ in range(3):  # the second and third time, from memory
        whole = cache[:]["t"]
        for index in (3, [4, 1], slice(2, 5), torch.tensor([5, 0, 5])):
            assert_equal(TopLogps(whole.ids[index], whole.logps[index]), cache[index]["t"])
    assert torch.equal(whole.ids[7], cache.get(7, ["t"], device="cpu")["t"].ids)
    assert (2, K) == cache.get([0, 1], ["t"], device="meta")["t"].logps.shape
    loaded = next(iter(DataLoader(cache.as_dataset(["t"]), batch_size=4)))["t"]
    assert torch.equal(whole.ids[:4], loaded.ids)
    assert torch.equal(whole.ids[:4], next(cache.batches(4))["t"].ids)
    cache[3] = {"t": TopLogps(*(part[9] for part in whole))}
    assert torch.equal(whole.ids[9], cache[3]["t"].ids)


def test_texts_of_different_lengths_have_a_row_per_token(tmp_path: Path) -> None:
    texts = [pairs(length) for length in (3, 0, 5)]
    cache = TensorCache.create(tmp_path, {"t": topk(K, VOCAB, shape=(None,))})
    cache.append({"t": texts})
    cache.close()
    cache = TensorCache.create(tmp_path, {"t": topk(K, VOCAB, shape=(None,))}, exist_ok=True)

    for text, found in zip(texts, cache[:]["t"], strict=True):
        assert torch.equal(text.ids, found.ids)
    padded = cache.get([0, 2], ragged="padded", padding=-1)["t"]
    assert torch.equal(torch.nn.functional.pad(texts[0].ids, (0, 0, 0, 2), value=-1), padded.ids[0])
    assert [-1.0] * K == padded.logps[0, -1].tolist()
    assert torch.equal(texts[2].ids, cache[2]["t"].ids)


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_ids_are_integers_of_any_dtype_and_numbers_floats(cache: TensorCache, dtype: torch.dtype) -> None:
    ids, logps = torch.arange(K)[None], -torch.arange(K)[None].float()
    if dtype.is_floating_point:
        with pytest.raises(DtypeMismatchError, match="integers and floats"):
            cache[[0]] = {"t": (ids.to(dtype), logps)}
        cache[[0]] = {"t": (ids, logps.to(dtype))}
    else:
        cache[[0]] = {"t": (ids.to(dtype), logps)}

    assert list(range(K)) == cache.get([0], ["t"])["t"].ids[0].tolist()
    assert [0.0, -K + 1.0] == cache.get([0], ["t"])["t"].logps[0, [0, -1]].tolist()


def test_a_batch_without_any_probability_is_taken(cache: TensorCache) -> None:
    ids = torch.arange(K)[None]

    cache[[0]] = {"t": (ids, torch.full((1, K), -torch.inf))}

    found = cache.get([0], ["t"])["t"]
    assert [-torch.inf] * K == found.logps[0].tolist()
    assert list(range(K)) == sorted(found.ids[0].tolist())


def test_other_values_are_refused_and_nothing_is_written(cache: TensorCache) -> None:
    ids, logps = pairs(1)
    for value, error, said in [
        ((ids, logps.where(ids != ids[0, 2], torch.nan)), CacheError, "there is nan"),
        ((ids, logps.where(ids != ids[0, 0], torch.inf)), CacheError, "there is inf"),
        (
            (ids, logps.where(ids != ids[0, 0], 2.5)),
            CacheError,
            r"go from -65504 to 0.* there is 2\.5: take log_softmax",
        ),
        ((ids, logps.where(ids != ids[0, 4], -1e5)), CacheError, "there is -100000"),
        (
            (ids, logps.where(ids != ids[0, 4], -1e5).where(ids != ids[0, 3], -torch.inf)),
            CacheError,
            "there is -100000",
        ),
        ((ids + VOCAB, logps), CacheError, "ids go from 0 to 999, and there is 1"),
        ((ids - VOCAB, logps), CacheError, "ids go from 0 to 999, and there is -"),
        (
            (ids[:, :2], logps),
            ShapeMismatchError,
            r"takes 5 ids and as many log-probabilities, not \(1, 2\) and \(1, 5\)",
        ),
        (logps, DtypeMismatchError, r"or logits of the shape \(\.\.\., 1000\); not a Tensor"),
        (torch.full((1, VOCAB), torch.nan), CacheError, "there is nan"),
        (torch.full((1, VOCAB), -torch.inf), CacheError, "there is nan"),
        ([1, 2], DtypeMismatchError, "not a list"),
        ((ids, logps, logps), DtypeMismatchError, "not a tuple"),
        ((ids > 3, logps), DtypeMismatchError, "integers and floats"),
        ((ids.expand(2, K), logps.expand(2, K)), ShapeMismatchError, "1 rows have the shape"),
    ]:
        with pytest.raises(error, match=said):
            cache[[0]] = {"t": value, "x": torch.zeros(1, dtype=torch.int64)}
    assert N == len(cache.missing_rows())


@pytest.mark.parametrize(
    "how", [{"k": 0}, {"vocab": 0}, {"k": 6, "vocab": 5}, {"bits": 7}, {"bits": 13}, {"vocab": 2**31 + 1}]
)
def test_columns_that_can_not_be_are_refused(how: dict[str, int]) -> None:
    with pytest.raises((CacheError, ArgumentError)):
        topk(**{"k": 2, "vocab": 10, "bits": 8, **how})


def test_the_manifest_describes_the_column(cache: TensorCache, tmp_path: Path) -> None:
    cache[:] = {"t": pairs(N), "x": torch.arange(N)}
    expected = cache[:]["t"]
    cache.close()
    again = TensorCache.open(tmp_path / "rows")

    assert torch.equal(expected.logps, again[:]["t"].logps)
    assert "topk(k=5, vocab=1000, bits=12)" in repr(again)
    assert again.schema == TensorCache.create(tmp_path / "like", again.schema).schema
    with pytest.raises(UnsupportedOpError, match=r"column 't' of .*, or packed ones, which do not form one tensor"):
        again["t"]
    with pytest.raises(CacheError, match="or packed ones: copy"):
        again.to_disk(tmp_path / "x.safetensors")
    with pytest.raises(CacheError, match="records don't hold"):
        TensorCache.from_records([{"t": 1}], schema={"t": topk(2, 5)})
    with pytest.raises(CacheError, match=r"column 't' is .*bits=12.*, expected .*bits=8"):
        TensorCache.create(tmp_path / "rows", {"t": topk(K, VOCAB, 8), "x": (torch.int64, ())}, exist_ok=True)
    manifest = tmp_path / "rows" / "manifest.json"
    for wrong in ('"k": 6', '"k": 0', '"k": "5"', '"k": null'):
        manifest.write_text(manifest.read_text().replace('"k": 5', wrong))
        with pytest.raises(CorruptFileError):
            TensorCache.open(tmp_path / "rows")
        manifest.write_text(manifest.read_text().replace(wrong, '"k": 5'))


def test_damaged_bytes_are_other_numbers_and_nothing_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (500, 4 + 3 * 4), dtype=np.uint8))
    found = unpack(packed, 3, 20, 12)
    in_torch(monkeypatch)

    assert torch.equal(found[0], unpack(packed, 3, 20, 12)[0])
    assert torch.equal(found[1].nan_to_num(1), unpack(packed, 3, 20, 12)[1].nan_to_num(1))
