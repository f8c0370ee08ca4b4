"""The reference quantizer: 4-bit codes in groups, with min-max scales and with searched ones."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn

import offload
from offload import OffloadedTensor, quantize_int4, quantizer
from offload.errors import CorruptFileError, UnsupportedOpError
from offload.quantizer import GroupedInt4Tensor
from offload.storage.header import MARK
from tests.processes import run_script
from tests.quantized import identical
from tests.storage.test_subclasses import edited

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SHAPES = [(4, 128), (3, 100), (5, 7), (2, 3, 33), (9,), (1, 1), (0, 8), (8, 0), (0,)]


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_formula(tensor: torch.Tensor, group_size: int) -> torch.Tensor:
    """Rounding to nearest, number by number."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    parts = []
    for group in wide.split(group_size, -1):
        scale = torch.maximum(group.amax(-1, True) / 7, group.amin(-1, True) / -8)
        parts.append((group / scale).round() * scale)
    return torch.cat(parts, -1).to(tensor.dtype)


def errors_of(tensor: torch.Tensor, found: GroupedInt4Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """The squared error of each group."""
    error = (found.dequantize() - tensor).square() * (1 if weights is None else weights)
    return torch.stack([group.sum(-1) for group in error.split(found.group_size, -1)], -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", [1, 16, 33, 500])
def test_values_are_rounded_to_the_nearest_code(dtype: torch.dtype, group_size: int) -> None:
    """As a plain formula has it, bit for bit; also where groups are odd, or do not divide the columns."""
    tensor = values(6, 99, dtype=dtype)

    found = quantize_int4(tensor, group_size)

    assert torch.equal(by_formula(tensor, group_size), found.dequantize())
    assert (tensor.shape, tensor.dtype) == (found.shape, found.dtype)


@pytest.mark.parametrize("group_size", [1, 16, 33])
def test_no_value_moves_by_more_than_half_a_scale(group_size: int) -> None:
    """All 16 codes are used, and none is cut off."""
    tensor = values(50, 99, dtype=torch.float64).exp_()

    for signed in (tensor, -tensor, tensor - 1):
        found = quantize_int4(signed, group_size)
        half = found.scales.repeat_interleave(group_size, -1)[:, :99] / 2
        assert bool(((found.dequantize() - signed).abs() <= half * (1 + 1e-12)).all())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_takes_half_a_byte_a_value(shape: tuple[int, ...]) -> None:
    """An odd row ends in half a byte; what is empty stays so."""
    found = quantize_int4(values(*shape), 4)

    *rows, columns = shape
    assert (*rows, (columns + 1) // 2) == found.codes.shape
    assert (*rows, (columns + 3) // 4) == found.scales.shape
    assert shape == found.dequantize().shape


def test_zeros_stay_zeros() -> None:
    """A group of zeros has the scale zero, and does no harm to its neighbours."""
    tensor = values(4, 64)
    tensor[1:3, :32] = 0

    for candidates in (1, 5):
        found = quantize_int4(tensor, 32, candidates=candidates)

        assert torch.equal(torch.zeros(2, 32), found.dequantize()[1:3, :32])
        assert torch.equal(torch.zeros(2), found.scales[1:3, 0])
        assert bool((found.scales[0] > 0).all())


@pytest.mark.parametrize("weighted", [False, True])
def test_searched_scales_are_never_worse_and_mostly_better(weighted: bool) -> None:
    """In every group, by the measure that is searched for; and more candidates are no worse than some of them."""
    tensor = values(40, 96)
    weights = values(96, seed=1).exp() if weighted else None

    plain = errors_of(tensor, quantize_int4(tensor, 32), weights)
    searched = errors_of(tensor, quantize_int4(tensor, 32, candidates=11, importance=weights), weights)
    more = errors_of(tensor, quantize_int4(tensor, 32, candidates=21, importance=weights), weights)

    assert bool((searched <= plain).all())
    assert bool((more <= searched).all())
    assert float(searched.sum()) < 0.95 * float(plain.sum())


def test_the_best_of_the_candidates_is_taken() -> None:
    """As if each were tried alone."""
    tensor, weights = values(8, 32), values(32, seed=1).abs()
    least = quantize_int4(tensor, 32).scales
    tried = torch.stack([least * (1 - 0.5 * number / 4) for number in range(5)])
    codes = (tensor / tried).round().clamp(-8, 7)
    best = ((codes * tried - tensor).square() * weights).sum(-1).argmin(0)

    found = quantize_int4(tensor, 32, candidates=5, importance=weights)

    assert torch.equal(tried[best, torch.arange(8)], found.scales)
    assert {0} != set(best.tolist())


def test_a_column_that_counts_alone_comes_out_best() -> None:
    """Of a group, the one of which the error is weighed."""
    tensor = values(200, 32)
    weights = torch.zeros(32)
    weights[5] = 1

    error = [
        float((found.dequantize() - tensor)[:, 5].square().sum())
        for found in (
            quantize_int4(tensor, 32, candidates=20),
            quantize_int4(tensor, 32, candidates=20, importance=weights),
        )
    ]

    assert error[1] < 0.2 * error[0]


def test_rows_are_quantized_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same result, also where a block is less than a row."""
    tensor = values(3, 11, 50)
    expected = quantize_int4(tensor, 16, candidates=3)

    for block in (1, 130, 1000):
        monkeypatch.setattr(quantizer, "_BLOCK", block)
        assert identical(expected, quantize_int4(tensor, 16, candidates=3))


# As a tensor


def test_ops_run_on_the_dequantized_values() -> None:
    quantized, x = quantize_int4(values(6, 40), 16), values(3, 40, seed=1)
    plain = quantized.dequantize()

    assert torch.equal(F.linear(x, plain), F.linear(x, quantized))
    assert torch.equal(plain[1:3] + 1, quantized[1:3] + 1)
    assert torch.equal(torch.cat([plain, plain]), torch.cat([quantized, quantized]))
    assert torch.equal(plain.t(), quantized.t())


def test_gradients_flow_past_it() -> None:
    weight = quantize_int4(values(6, 40), 16)
    grads = []
    for one in (weight, weight.dequantize(), OffloadedTensor.from_original_tensor(weight, "w")):
        x = values(3, 40, seed=1).requires_grad_()
        F.linear(x, one).square().sum().backward()
        grads.append(x.grad)

    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


def test_copies_and_casts_keep_the_codes() -> None:
    weight = quantize_int4(values(6, 40), 16)

    cast = weight.to(torch.bfloat16)

    assert torch.equal(weight.codes, cast.codes)
    assert torch.equal(weight.dequantize().bfloat16(), cast.dequantize())
    for one in (weight.detach(), weight.clone(), copy.deepcopy(weight), nn.Parameter(weight, requires_grad=False)):
        assert isinstance(one, GroupedInt4Tensor)
        assert identical(weight, one.detach())
    assert weight.clone().codes.data_ptr() != weight.codes.data_ptr()
    assert torch.equal(weight.dequantize().to(torch.int32), weight.to(torch.int32))
    assert "GroupedInt4Tensor((6, 40), torch.float32, group_size=16)" == repr(weight)


def test_it_is_not_written_to_in_place() -> None:
    weight = quantize_int4(values(6, 40), 16)

    with pytest.raises(UnsupportedOpError, match=r"add_.*GroupedInt4Tensor \(6, 40\): change its dequantize\(\)"):
        weight.add_(1)


def test_it_may_be_written_from() -> None:
    """In place it can't be changed; what is plain can, by it."""
    weight = quantize_int4(values(6, 40), 16)
    plain = weight.dequantize()
    layer = nn.Linear(40, 6, bias=False)

    layer.load_state_dict({"weight": weight})

    assert torch.equal(plain, layer.weight)
    assert torch.equal(plain * 2, plain.clone().add_(weight))
    assert torch.equal(plain * 2, torch.add(weight, weight, out=torch.empty(6, 40)))
    with pytest.raises(UnsupportedOpError, match="change its dequantize"):
        torch.add(plain, plain, out=weight)


# On disk


def test_what_is_on_disk_is_quantized_and_stays_there(tmp_path: Path) -> None:
    """The same codes as in memory; the file is of the new size at once, and opens in another process."""
    tensor = values(6, 1000)
    stored = OffloadedTensor.from_original_tensor(tensor, "w", tmp_path)
    expected = quantize_int4(tensor, 100)

    stored.update_values(quantize_int4(stored, 100))

    assert identical(expected, stored.materialize())
    assert torch.equal(expected.dequantize(), stored.dequantize())
    assert torch.equal(F.linear(values(2, 1000), expected.dequantize()), F.linear(values(2, 1000), stored))
    with safe_open(stored.offload_path, "pt") as file:
        assert {"w.codes", "w.scales"} == set(file.keys())
    script = """
        import sys, offload
        print(float(offload.load_file(sys.argv[1])["w"].dequantize().sum()))
    """
    assert f"{float(expected.dequantize().sum())}\n" == run_script(script, tmp_path)


def test_a_model_on_disk_is_quantized_weight_by_weight() -> None:
    """And computes what the dequantized one does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    plain = copy.deepcopy(model)
    for layer in (plain[0], plain[2]):
        layer.weight.data = quantize_int4(layer.weight.data, 16, candidates=4).dequantize()
    offload.disk_offload(model)

    for layer in (model[0], model[2]):
        layer.weight.update_values(quantize_int4(layer.weight, 16, candidates=4))

    assert all(offload.is_offloaded(parameter) for parameter in model.parameters())
    assert torch.equal(plain(values(5, 64)), model(values(5, 64)))


@pytest.mark.parametrize("change", [{"shape": [6, 41]}, {"shape": [6, 43]}, {"shape": [12, 20]}, {"dtype": "int8"}])
def test_a_recipe_that_lies_is_found_out(tmp_path: Path, change: dict[str, Any]) -> None:
    """Another shape than that of the codes is no value, even if there are as many numbers."""
    stored = OffloadedTensor.from_original_tensor(quantize_int4(values(6, 40), 16), "w", tmp_path)
    path = stored.offload_path
    edited(path, lambda header, notes: notes["subclass"].update(change, stride=[change.get("shape", [6, 40])[1], 1]))

    with pytest.raises(CorruptFileError, match=r"'w'.*recipe"):
        OffloadedTensor.from_file(path).materialize()
    with safe_open(path, "pt") as file:
        assert "w" == json.loads(file.metadata()[MARK])["name"]  # it was found in the recipe, not in the file


# What is refused


@pytest.mark.parametrize(
    ("tensor", "options", "error", "words"),
    [
        (torch.ones(2, 2, dtype=torch.int8), {}, TypeError, "torch.int8 is not quantized"),
        (torch.ones(2, 2, dtype=torch.complex64), {}, TypeError, "complex64"),
        (torch.tensor(1.0), {}, ValueError, "no columns"),
        (torch.ones(2, 2), {"group_size": 0}, ValueError, "group_size should be 1 or more, not 0"),
        (torch.ones(2, 2), {"candidates": 0}, ValueError, "candidates should be 1 or more, not 0"),
        (torch.ones(2, 2), {"importance": torch.ones(3)}, ValueError, r"importance is \(3,\), and should be \(2,\)"),
        (torch.ones(2, 2), {"importance": torch.tensor([1.0, -1])}, ValueError, "negative"),
        (torch.ones(2, 2), {"importance": torch.tensor([1.0, torch.nan])}, ValueError, "negative"),
        (torch.tensor([[1.0], [torch.nan]]), {}, ValueError, "rows 0 to 1 hold values that are not finite"),
        (torch.tensor([[torch.inf, 1.0]]), {}, ValueError, "not finite"),
    ],
)
def test_what_can_not_be_quantized_says_why(
    tensor: torch.Tensor, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        quantize_int4(tensor, **options)


@pytest.mark.parametrize("group_size", [32.0, True, 0, -32, None, "32"])
def test_a_tensor_of_groups_that_are_no_whole_number_of_columns_is_refused(group_size):
    """As a damaged file may have it: ops would fail at it later."""
    made = quantize_int4(torch.randn(2, 64), 32)

    with pytest.raises(ValueError, match="are not those of a tensor"):
        type(made)(made.codes, made.scales, group_size, (2, 64), torch.float32)
