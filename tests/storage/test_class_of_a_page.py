"""The class on the page about own classes: what it computes, and that it is stored like any other."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn

import offload
from offload import OffloadedTensor
from offload.errors import CorruptFileError
from offload.storage import subclasses
from offload.storage.header import MARK
from tests.equal import assert_equal
from tests.pages import fences
from tests.processes import ROOT, run_script
from tests.storage.test_subclasses import edited

CODE = next(fences((ROOT / "tutorials/how-to/own-class.md").read_text())).text
PAGE: dict[str, Any] = {"__name__": __name__}
exec(CODE, PAGE)
GroupedInt4Tensor, quantize_int4 = PAGE["GroupedInt4Tensor"], PAGE["quantize_int4"]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subclasses, "_REGISTERED", {})
    offload.register_subclass(GroupedInt4Tensor)


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", [1, 16, 33, 500])
def test_values_are_rounded_to_the_nearest_code(dtype: torch.dtype, group_size: int) -> None:
    """Bit-identical to a plain formula; even with odd groups, or ones that do not divide the columns."""
    tensor = values(6, 99, dtype=dtype)
    parts = []
    for group in tensor.to(torch.promote_types(dtype, torch.float32)).split(group_size, -1):
        scale = torch.maximum(group.amax(-1, True) / 7, group.amin(-1, True) / -8)
        parts.append((group / scale).round() * scale)

    found = quantize_int4(tensor, group_size)

    assert_equal(torch.cat(parts, -1).to(dtype) + 0, found.dequantize() + 0)  # not -0.0


def test_ops_run_on_the_dequantized_values_in_memory_and_on_disk() -> None:
    """Gradients flow past it, too."""
    quantized = quantize_int4(values(6, 40), 16)
    grads = []
    for weight in (quantized.dequantize(), quantized, OffloadedTensor.from_original_tensor(quantized, "w")):
        x = values(3, 40, seed=1).requires_grad_()
        F.linear(x, weight).square().sum().backward()
        grads.append(x.grad)
        assert_equal(quantized.dequantize()[1:3] + 1, weight[1:3] + 1)
        assert_equal(torch.cat([quantized.dequantize()] * 2), torch.cat([weight, weight]))

    assert_equal([grads[0], grads[0]], grads[1:])


def test_copies_keep_the_codes() -> None:
    weight = quantize_int4(values(6, 40), 16)

    for one in (weight.detach(), weight.clone(), copy.deepcopy(weight), nn.Parameter(weight, requires_grad=False)):
        assert isinstance(one, GroupedInt4Tensor)
        assert_equal(weight, one.detach())


def test_writing_ops_read_the_class_but_do_not_write_to_it() -> None:
    weight = quantize_int4(values(6, 40), 16)
    layer = nn.Linear(40, 6, bias=False)

    layer.load_state_dict({"weight": weight})

    assert_equal(weight.dequantize(), layer.weight)
    with pytest.raises(NotImplementedError, match=r"add_.*change its dequantize\(\)"):
        weight.add_(1)


def test_a_value_on_disk_is_quantized_and_stays_on_disk(tmp_path: Any) -> None:
    """The same codes as in memory; the file has its new size at once, and opens in another process."""
    tensor = values(6, 1000)
    stored = OffloadedTensor.from_original_tensor(tensor, "w", tmp_path)
    expected = quantize_int4(tensor, 100)

    stored.update_values(quantize_int4(stored, 100))

    assert_equal(expected, stored)
    assert_equal(expected.dequantize(), stored.dequantize())
    with safe_open(stored.offload_path, "pt") as file:
        assert {"w.codes", "w.scales"} == set(file.keys())
    script = """
        import sys, offload
        page = {"__name__": sys.argv[2]}
        exec(sys.argv[3], page)
        offload.register_subclass(page["GroupedInt4Tensor"])
        print(float(offload.load_file(sys.argv[1])["w"].dequantize().sum()))
    """
    assert f"{float(expected.dequantize().sum())}\n" == run_script(script, tmp_path, __name__, CODE)


def test_a_model_on_disk_is_quantized_weight_by_weight() -> None:
    """And computes the same as the dequantized one."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    plain = copy.deepcopy(model)
    for layer in (plain[0], plain[2]):
        layer.weight.data = quantize_int4(layer.weight.data, 16).dequantize()

    offload.map_values(lambda name, value: quantize_int4(value, 16), offload.disk_offload(model), select="*.weight")

    assert all(offload.is_offloaded(parameter) for parameter in model.parameters())
    assert_equal(plain(values(5, 64)), model(values(5, 64)))


@pytest.mark.parametrize("change", [{"shape": [6, 41]}, {"shape": [6, 43]}, {"shape": [12, 20]}, {"dtype": "int8"}])
def test_a_wrong_recipe_is_detected(tmp_path: Any, change: dict[str, Any]) -> None:
    """A shape that differs from the codes' is invalid, even with the same number of elements."""
    stored = OffloadedTensor.from_original_tensor(quantize_int4(values(6, 40), 16), "w", tmp_path)
    path = stored.offload_path
    edited(path, lambda header, notes: notes["subclass"].update(change, stride=[change.get("shape", [6, 40])[1], 1]))

    with pytest.raises(CorruptFileError, match=r"'w'.*recipe"):
        OffloadedTensor.from_file(path).materialize()
    with safe_open(path, "pt") as file:
        assert "w" == json.loads(file.metadata()[MARK])["name"]  # the error is about the recipe, not about the file


@pytest.mark.parametrize("group_size", [32.0, True, 0, -32, None, "32"])
def test_invalid_group_sizes_are_refused(group_size: Any) -> None:
    """As in a damaged file: ops would fail later."""
    made = quantize_int4(torch.randn(2, 64), 32)

    with pytest.raises(ValueError, match="are not those of a tensor"):
        type(made)(made.codes, made.scales, group_size, (2, 64), torch.float32)
